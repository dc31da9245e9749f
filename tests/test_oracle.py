"""The oracle itself: a result worked by hand, and a second derivation that shares no formula."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import torch
from calls import tokens
from cases import KdaCase, ids
from errors import FLOAT64, check_pair
from torch import Tensor


def test_two_tokens_by_hand() -> None:
    """K=2, V=1, everything chosen so that each step is a short fraction."""
    q = torch.tensor([[1.0, 1.0], [1.0, -1.0]]).reshape(1, 2, 1, 2)
    k = torch.tensor([[1.0, 0.0], [0.5, 1.0]]).reshape(1, 2, 1, 2)
    v = torch.tensor([4.0, 2.0]).reshape(1, 2, 1, 1)
    g = torch.tensor([[0.5, 0.25], [0.5, 1.0]], dtype=torch.float64).log().reshape(1, 2, 1, 2)
    beta = torch.tensor([0.5, 0.25]).reshape(1, 2, 1)
    state = torch.tensor([2.0, 8.0]).reshape(1, 1, 2, 1)
    o, final = oracle.kda(q, k, v, g, beta, scale=2.0, initial_state=state)
    # token 1: S' = (1, 2); k.S' = 1; u = (4 - 1) / 2 = 3/2; S = (5/2, 2); o = 2 (5/2 + 2) = 9
    # token 2: S' = (5/4, 2); k.S' = 21/8; u = (2 - 21/8) / 4 = -5/32;
    #          S = (5/4 - 5/64, 2 - 5/32) = (75/64, 59/32); o = 2 (75/64 - 118/64) = -43/32
    want_o = torch.tensor([9.0, -43 / 32], dtype=torch.float64).reshape(1, 2, 1, 1)
    want_s = torch.tensor([75 / 64, 59 / 32], dtype=torch.float64).reshape(1, 1, 2, 1)
    check_pair((o, final), (want_o, want_s), 1e-15)


def test_activations_by_hand() -> None:
    raw = torch.tensor([0.0, 1.0]).reshape(1, 1, 1, 2)
    A_log, dt_bias = torch.tensor([math.log(2.0)]), torch.tensor([1.0, -1.0])
    soft = oracle.log_decay(raw, A_log, dt_bias)
    want = [-2 * math.log1p(math.exp(1.0)), -2 * math.log1p(math.exp(0.0))]
    assert soft.flatten().tolist() == pytest.approx(want, rel=1e-7)
    bound = oracle.log_decay(raw, A_log, dt_bias, lower_bound=-5.0)
    want = [-5 / (1 + math.exp(-2.0)), -2.5]
    assert bound.flatten().tolist() == pytest.approx(want, rel=1e-7)
    bare = oracle.log_decay(raw, None, None, lower_bound=-3.0)
    assert bare.flatten().tolist() == pytest.approx([-1.5, -3 / (1 + math.exp(-1.0))], rel=1e-7)
    unit = oracle.l2_normalise(torch.tensor([3.0, 4.0], dtype=torch.float64))
    assert unit.tolist() == pytest.approx([0.6, 0.8], rel=1e-7)


@pytest.mark.parametrize("x", [-700.0, -30.0, -1.0, 0.0, 1.0, 30.0, 700.0])
def test_activations_and_their_derivatives(x: float) -> None:
    small = math.exp(-abs(x))
    value = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = oracle.sigmoid(value)
    (slope,) = torch.autograd.grad(y, value)
    rising = (1 if x >= 0 else small) / (1 + small)
    assert y.item() == pytest.approx(rising, rel=1e-13)
    assert slope.item() == pytest.approx(small / (1 + small) ** 2, rel=1e-13)
    y = oracle.softplus(value)
    (slope,) = torch.autograd.grad(y, value)
    assert y.item() == pytest.approx(max(x, 0) + math.log1p(small), rel=1e-13)
    assert slope.item() == pytest.approx(rising, rel=1e-13)


@pytest.mark.parametrize("raw", [-1e4, 1e4])
def test_extreme_raw_gates_stay_finite(raw: float) -> None:
    gate = torch.full((1, 1, 1, 1), raw)
    assert torch.isfinite(oracle.log_decay(gate, None, None, -5.0)).all()
    assert torch.isfinite(oracle.log_decay(gate)).all()


def dense_solution(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, state: Tensor
) -> tuple[Tensor, Tensor]:
    """All deltas at once from one T x T linear system per head, decays as explicit ratios."""
    length = q.shape[1]
    total = g.cumsum(1)
    ratio = (total[:, :, None] - total[:, None]).exp()  # [B,i,j,H,K], read for j <= i only
    lower = torch.ones(length, length, dtype=torch.bool).tril()
    strict = lower.tril(-1)
    ratio = ratio.masked_fill(~lower[None, :, :, None, None], 0.0)
    kk = torch.einsum("bihk,bjhk,bijhk->bhij", k, k, ratio) * strict
    qk = torch.einsum("bihk,bjhk,bijhk->bhij", q, k, ratio)
    from_start = total.exp()
    beta_h = beta.transpose(1, 2)
    system = torch.eye(length, dtype=torch.float64) + beta_h[..., None] * kk
    recalled = torch.einsum("bihk,bihk,bhkv->bhiv", k, from_start, state)
    deltas = torch.linalg.solve(system, beta_h[..., None] * (v.transpose(1, 2) - recalled))
    o = torch.einsum("bihk,bihk,bhkv->bihv", q, from_start, state)
    o = scale * (o + torch.einsum("bhij,bhjv->bihv", qk, deltas))
    to_end = (total[:, -1:] - total).exp()
    final = from_start[:, -1].unsqueeze(-1) * state
    return o, final + torch.einsum("bjhk,bjhk,bhjv->bhkv", k, to_end, deltas)


@pytest.mark.parametrize("gate", ["log", "none", "mixed"])
def test_matches_one_linear_system(gate: str) -> None:
    case = KdaCase(T=24, B=2, H=2, K=6, V=5, gate=gate, l2norm=False, beta="activated", scale=0.3)
    call = case.make()
    rows = {x: call[x] for x in ("q", "k", "v", "g", "beta")}
    want = dense_solution(**rows, scale=0.3, state=call["initial_state"])
    check_pair(oracle.kda(**call), want, FLOAT64)


def test_grouped_heads_repeat_q_and_k() -> None:
    call = KdaCase(T=9, H=2, HV=6).make()
    wide = call | {x: call[x][:, :, [0, 0, 0, 1, 1, 1]] for x in ("q", "k")}
    check_pair(oracle.kda(**call), oracle.kda(**wide), 1e-15)


def test_varlen_is_each_sequence_alone() -> None:
    case = KdaCase(lengths=(3, 0, 8), tail=2)
    call = case.make()
    o, final = oracle.kda(**call)
    assert torch.equal(o[:, 11:], torch.zeros_like(o[:, 11:]))
    assert torch.equal(final[1], call["initial_state"][1])
    for n, (lo, hi) in enumerate([(0, 3), (3, 3), (3, 11)]):
        alone = tokens(call, lo, hi)
        del alone["cu_seqlens"]
        alone["initial_state"] = call["initial_state"][n : n + 1]
        check_pair((o[:, lo:hi], final[n : n + 1]), oracle.kda(**alone), 1e-15)


@pytest.mark.parametrize("case", [KdaCase(T=7, K=3, V=5), KdaCase(T=7, K=4, V=4)], ids=ids)
def test_state_layouts_are_transposes(case: KdaCase) -> None:
    call = case.make()
    o, final = oracle.kda(**call)
    flipped = call | {
        "initial_state": call["initial_state"].transpose(-1, -2),
        "state_v_first": True,
    }
    o_v, final_v = oracle.kda(**flipped)
    check_pair((o_v, final_v.transpose(-1, -2)), (o, final), 1e-15)


def test_every_input_is_cast_to_float64() -> None:
    """float32 inputs give exactly what their float64 images give, gates and parameters too."""
    call = KdaCase(T=9, dtype=torch.float32).make()
    image: dict[str, Any] = {
        x: y.double() if isinstance(y, Tensor) and y.is_floating_point() else y
        for x, y in call.items()
    }
    for got, want in zip(oracle.kda(**call), oracle.kda(**image), strict=True):
        assert got.dtype == torch.float64
        assert torch.equal(got, want)


def test_pool_reads_and_writes_the_named_slots_only() -> None:
    call = KdaCase(T=1, B=3, H=1, K=2, V=2, state=False).make()
    del call["output_final_state"]
    pool = torch.arange(20, dtype=torch.float64).reshape(5, 1, 2, 2)
    index = torch.tensor([4, -1, 2])
    o, after = oracle.kda_pool(**call, pool=pool, ssm_state_indices=index, pad_slot_id=-1)
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert torch.equal(after[[0, 1, 3]], pool[[0, 1, 3]])
    want_o, want_s = oracle.kda(**call, initial_state=pool[[4, 1, 2]])
    check_pair((o[[0, 2]], after[[4, 2]]), (want_o[[0, 2]], want_s[[0, 2]]), 1e-15)
