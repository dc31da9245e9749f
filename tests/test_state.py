"""States: layout, dtype, and handing one on between calls."""

from __future__ import annotations

import oracle
import pytest
import torch
from calls import tokens, unmodified
from cases import KdaCase
from errors import BF16, FLOAT32, FLOAT64, check_pair
from torch import Tensor

import flashkda

FUNCTIONS = [flashkda.chunk_kda, flashkda.fused_recurrent_kda]
both = pytest.mark.parametrize("function", FUNCTIONS, ids=["chunk", "recurrent"])


@both
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)], ids=str)
def test_layouts_are_transposes_of_each_other(function, shape: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    call = KdaCase(T=20, K=shape[0], V=shape[1]).make()
    o, state = function(**call)
    assert state.shape == (1, 2, *shape)
    flipped = call["initial_state"].transpose(-1, -2)
    for initial in (flipped, flipped.contiguous()):
        o_v, state_v = function(**(call | {"initial_state": initial, "state_v_first": True}))
        assert state_v.shape == (1, 2, *shape[::-1])
        check_pair((o_v, state_v.transpose(-1, -2)), (o, state), FLOAT64)


@both
@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
def test_one_entry_of_a_square_state_lands_where_documented(function, v_first: bool) -> None:  # type: ignore[no-untyped-def]
    """S[k=1, v=3] = 1, no decay, beta 0: the output at v=3 is q[1], and nothing moves."""
    q = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    state = torch.zeros(1, 1, 8, 8, dtype=torch.float64)
    state[(0, 0, 3, 1) if v_first else (0, 0, 1, 3)] = 1.0
    o, final = function(
        q,
        torch.randn_like(q),
        torch.randn_like(q),
        torch.zeros_like(q),
        torch.zeros(1, 1, 1, dtype=torch.float64),
        scale=1.0,
        initial_state=state,
        output_final_state=True,
        state_v_first=v_first,
    )
    want = torch.zeros(8, dtype=torch.float64)
    want[3] = q[0, 0, 0, 1]
    assert torch.equal(o[0, 0, 0], want)
    assert torch.equal(final, state)


@both
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "want"),
    [
        (torch.float64, None, torch.float64),
        (torch.float32, None, torch.float32),
        (torch.bfloat16, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_final_state_dtype(function, dtype, state_dtype, want) -> None:  # type: ignore[no-untyped-def]
    case = KdaCase(T=20, dtype=dtype, state=state_dtype is not None, state_dtype=state_dtype)
    call = case.make()
    o, state = function(**call)
    assert o.dtype == dtype
    assert state.dtype == want
    limit = {torch.float64: FLOAT64, torch.float32: FLOAT32}.get(want, BF16["fast"][1])
    out_limit = {torch.float64: FLOAT64, torch.float32: FLOAT32}.get(dtype, BF16["fast"][0])
    check_pair((o, state), oracle.kda(**call), (out_limit, limit))


def test_bfloat16_state_is_the_rounded_float32_state() -> None:
    call = KdaCase(T=70, dtype=torch.bfloat16, state_dtype=torch.bfloat16).make()
    _, half = flashkda.chunk_kda(**call)
    _, full = flashkda.chunk_kda(**(call | {"initial_state": call["initial_state"].float()}))
    assert full is not None
    assert half is not None
    assert torch.equal(half, full.bfloat16())


@both
def test_no_state_is_a_zero_state(function) -> None:  # type: ignore[no-untyped-def]
    call = KdaCase(T=40, dtype=torch.float32).make()
    zero = function(**(call | {"initial_state": torch.zeros_like(call["initial_state"])}))
    absent = function(**(call | {"initial_state": None}))
    for a, b in zip(zero, absent, strict=True):
        assert torch.equal(a, b)


@both
def test_final_state_is_a_fresh_tensor(function) -> None:  # type: ignore[no-untyped-def]
    """Also when nothing happened to it: writing to the result must not reach the input."""
    for case in (KdaCase(T=3), KdaCase(T=0), KdaCase(lengths=(0, 2))):
        call = case.make()
        with unmodified(call):
            _, state = function(**call)
            state.fill_(123.0)


HANDOFF = 150
CUTS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 149]


def in_pieces(call: dict[str, object], cuts: list[int]) -> tuple[Tensor, Tensor]:
    state = call["initial_state"]
    pieces = []
    for lo, hi in zip([0, *cuts], [*cuts, HANDOFF], strict=True):
        o, state = flashkda.chunk_kda(**(tokens(call, lo, hi) | {"initial_state": state}))
        pieces.append(o)
    assert isinstance(state, Tensor)
    return torch.cat(pieces, dim=1), state


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("gate", ["fast", "slow", "softplus"])
def test_cut_anywhere(gate: str, cut: int) -> None:
    call = KdaCase(T=HANDOFF, H=1, gate=gate).make()
    check_pair(in_pieces(call, [cut]), oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("cut", [1, 16, 33, 64, 100])
@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
def test_cut_anywhere_in_float32(v_first: bool, cut: int) -> None:
    case = KdaCase(T=HANDOFF, K=8, V=24, dtype=torch.float32, state_v_first=v_first)
    call = case.make()
    check_pair(in_pieces(call, [cut]), oracle.kda(**call), FLOAT32)


def test_cut_into_many_pieces() -> None:
    call = KdaCase(T=HANDOFF, gate="slow", beta="neg").make()
    check_pair(in_pieces(call, CUTS), oracle.kda(**call), FLOAT64)


def test_cut_in_bfloat16_stays_within_budget() -> None:
    call = KdaCase(T=HANDOFF, K=64, V=64, dtype=torch.bfloat16).make()
    check_pair(in_pieces(call, [64]), oracle.kda(**call), BF16["fast"])


@both
def test_strided_initial_state(function) -> None:  # type: ignore[no-untyped-def]
    """Rows of a pool with a padded slot stride, passed as they are."""
    call = KdaCase(T=20, B=2).make()
    want = oracle.kda(**call)
    memory = torch.full((2, 1000), float("nan"), dtype=torch.float64)
    memory[:, :512] = call["initial_state"].flatten(1)
    view = memory.as_strided((2, 2, 16, 16), (1000, 256, 16, 1))
    check_pair(function(**(call | {"initial_state": view})), want, FLOAT64)
