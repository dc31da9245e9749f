"""Gradients of `chunk_kda`: numerically, and against autograd through the token recurrence."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from calls import differentiable, double, gradients
from cases import VARLEN, KdaCase, ids
from errors import BF16_GRADIENTS, FLOAT32, FLOAT64, check
from torch import Tensor

import flashkda

GRADCHECK = [
    KdaCase(T=40, H=1, HV=2, K=2, V=1, gate="fast"),
    KdaCase(T=40, H=1, HV=2, K=2, V=1, gate="softplus"),
    KdaCase(lengths=(17, 0, 23), H=1, HV=2, K=2, V=1, gate="fast", state_v_first=True),
    KdaCase(lengths=(17, 0, 23), H=1, HV=2, K=2, V=1, gate="softplus"),
]
GRADCHECK_LARGE = [
    KdaCase(T=150, B=2, H=2, HV=4, K=16, V=24, gate="fast"),
    KdaCase(T=150, B=2, H=2, HV=4, K=16, V=24, gate="softplus"),
    KdaCase(lengths=(70, 0, 1, 65), H=2, HV=4, K=16, V=24, gate="slow"),
    KdaCase(lengths=(70, 0, 1, 65), H=2, HV=4, K=16, V=24, gate="log", l2norm=False),
    KdaCase(T=100, gate="bare", beta="neg"),
    KdaCase(T=100, gate="saturated"),
]


def _gradcheck(case: KdaCase, *, fast_mode: bool) -> bool:
    call = case.make()
    names = differentiable(call)

    def function(*values: Tensor) -> Any:
        return flashkda.chunk_kda(**(call | dict(zip(names, values, strict=True))))

    leaves = [call[name].requires_grad_() for name in names]
    return torch.autograd.gradcheck(function, leaves, fast_mode=fast_mode)


@pytest.mark.parametrize("case", GRADCHECK, ids=ids)
def test_gradcheck(case: KdaCase) -> None:
    assert len(differentiable(case.make())) == 8
    assert _gradcheck(case, fast_mode=False)


@pytest.mark.parametrize("case", GRADCHECK_LARGE, ids=ids)
def test_gradcheck_fast_mode(case: KdaCase) -> None:
    assert _gradcheck(case, fast_mode=True)


LONG = [  # more than is worked on at once
    KdaCase(T=5000, H=1, K=8, V=8),
    KdaCase(T=1500, H=2, HV=4, K=8, V=8, gate="slow"),
    KdaCase(lengths=(2500, 0, 7, 1800), H=2, K=8, V=8, gate="slow", tail=5),
    KdaCase(lengths=(3, 40, 0, 70) * 25, H=2, K=8, V=8),
]
AGAINST_ORACLE = [
    *LONG,
    *(
        KdaCase(T=T, gate=gate)
        for gate in ("fast", "slow", "none", "softplus", "log")
        for T in (1, 15, 16, 17, 33, 64, 65, 200)
    ),
    *(KdaCase(T=100, gate=x) for x in ("saturated", "softplus500", "logdeep", "mixed", "mild")),
    KdaCase(T=100, gate="none", keys="repeated4", beta_logit=9.0),
    KdaCase(T=100, gate="slow", beta="neg"),
    KdaCase(T=100, beta="activated", l2norm=False, gate="log"),
    KdaCase(T=100, H=2, HV=6, K=8, V=24, B=2),
    KdaCase(T=100, K=8, V=24, state_v_first=True),
    KdaCase(T=100, state=False),
    KdaCase(T=100, scale=0.7),
    KdaCase(T=70, K=128, V=128, H=1),
    VARLEN,
    VARLEN.but(gate="softplus", tail=9),
    VARLEN.but(gate="none", state_v_first=True, K=8, V=24),
]


@pytest.mark.parametrize("case", AGAINST_ORACLE, ids=ids)
def test_float64_gradients(case: KdaCase) -> None:
    call = case.make()
    check(gradients(flashkda.chunk_kda, call), gradients(oracle.kda, call), FLOAT64)


FLOAT32_CASES = [
    KdaCase(T=200, gate=gate, dtype=torch.float32)
    for gate in ("fast", "slow", "none", "saturated", "softplus", "log", "mixed")
] + [VARLEN.but(dtype=torch.float32), KdaCase(T=100, H=2, HV=4, dtype=torch.float32)]


@pytest.mark.parametrize("case", FLOAT32_CASES, ids=ids)
def test_float32_gradients(case: KdaCase) -> None:
    call = case.make()
    got = gradients(flashkda.chunk_kda, call)
    check(got, gradients(oracle.kda, double(call)), FLOAT32)


@pytest.mark.parametrize("gate", ["fast", "slow", "none", "saturated", "softplus"])
def test_bfloat16_gradients(gate: str) -> None:
    case = KdaCase(T=256, H=2, HV=4, K=64, V=64, gate=gate, dtype=torch.bfloat16)
    call = case.make()
    got = gradients(flashkda.chunk_kda, call)
    check(got, gradients(oracle.kda, double(call)), BF16_GRADIENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("T", range(1, 64))
def test_gradients_finite_under_the_strongest_decay(T: int, dtype: torch.dtype) -> None:
    call = KdaCase(T=T, gate="saturated", H=1, HV=2, dtype=dtype).make()
    for name, gradient in gradients(flashkda.chunk_kda, call).items():
        assert bool(torch.isfinite(gradient).all()), name


@pytest.mark.parametrize("scale", [0.0, 1e-46])
def test_gradients_at_a_scale_of_nothing(scale: float) -> None:
    call = KdaCase(T=40, dtype=torch.float32, scale=scale).make()
    got = gradients(flashkda.chunk_kda, call)
    assert bool((got["q"] == 0).all())
    for name, gradient in got.items():
        assert bool(torch.isfinite(gradient).all()), name


@pytest.mark.parametrize("gate", ["softplus500", "logdeep"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_finite_without_a_bound(gate: str, dtype: torch.dtype) -> None:
    call = KdaCase(T=130, gate=gate, dtype=dtype).make()
    for name, gradient in gradients(flashkda.chunk_kda, call).items():
        assert bool(torch.isfinite(gradient).all()), name


ALL_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


@pytest.mark.parametrize(
    "names",
    [
        *((name,) for name in ALL_NAMES),
        ("q", "k", "v"),
        ("g", "A_log"),
        ("beta", "initial_state"),
        ("A_log", "dt_bias"),
    ],
    ids="_".join,
)
def test_gradients_of_a_subset(names: tuple[str, ...]) -> None:
    """Each gradient is what it is when all are asked for, and no other input gets one."""
    call = KdaCase(T=40, H=1, HV=2).make()
    everything = gradients(flashkda.chunk_kda, call)
    got = gradients(flashkda.chunk_kda, call, names)
    check(got, {name: everything[name] for name in names}, FLOAT64)
    assert all(call[name].grad is None for name in ALL_NAMES)


@pytest.mark.parametrize(
    ("through_o", "through_state"), [(True, False), (False, True)], ids=["o", "final_state"]
)
@pytest.mark.parametrize("case", [KdaCase(T=40), VARLEN], ids=ids)
def test_gradient_through_one_output(case: KdaCase, through_o: bool, through_state: bool) -> None:
    call = case.make()
    names = [x for x in ALL_NAMES if through_o or x != "q"]  # the state does not depend on q
    options: dict[str, Any] = {"through_o": through_o, "through_state": through_state}
    got = gradients(flashkda.chunk_kda, call, names, **options)
    check(got, gradients(oracle.kda, call, names, **options), FLOAT64)


def test_gradient_without_final_state() -> None:
    call = KdaCase(T=40).make() | {"output_final_state": False}
    got = gradients(flashkda.chunk_kda, call, through_state=False)
    check(got, gradients(oracle.kda, call, through_state=False), FLOAT64)


@pytest.mark.parametrize("case", [KdaCase(T=40), VARLEN], ids=ids)
def test_result_is_the_same_with_and_without_grad(case: KdaCase) -> None:
    call = case.make()
    with torch.no_grad():
        plain = flashkda.chunk_kda(**call)
    tracked = flashkda.chunk_kda(**(call | {"q": call["q"].clone().requires_grad_()}))
    assert tracked[0].requires_grad
    assert not plain[0].requires_grad
    for a, b in zip(plain, tracked, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


def test_no_grad_mode_is_respected() -> None:
    call = KdaCase(T=20).make()
    call["q"].requires_grad_()
    with torch.no_grad():
        o, state = flashkda.chunk_kda(**call)
    assert not o.requires_grad
    assert state is not None
    assert not state.requires_grad
    with torch.inference_mode():
        o, _ = flashkda.chunk_kda(**call)
    assert o.is_inference()


def test_gradient_flows_across_a_handed_on_state() -> None:
    """Two calls in a row give the gradients of one long call."""
    call = KdaCase(T=70).make()

    def in_two(**arguments: Any) -> tuple[Tensor, Tensor | None]:
        rows = ("q", "k", "v", "g", "beta")
        first = arguments | {x: arguments[x][:, :37] for x in rows}
        second = arguments | {x: arguments[x][:, 37:] for x in rows}
        o1, state = flashkda.chunk_kda(**first)
        o2, state = flashkda.chunk_kda(**(second | {"initial_state": state}))
        return torch.cat([o1, o2], dim=1), state

    check(gradients(in_two, call), gradients(oracle.kda, call), FLOAT64)


def test_gradient_of_strided_inputs() -> None:
    call = KdaCase(T=40).make()
    packed = torch.cat([call[x] for x in ("q", "k", "v")], dim=-1).requires_grad_()
    views = dict(zip(("q", "k", "v"), packed.split(16, dim=-1), strict=True))
    o, _ = flashkda.chunk_kda(**(call | views))
    (got,) = torch.autograd.grad(o.square().sum(), packed)
    reference = packed.detach().clone().requires_grad_()
    views = dict(zip(("q", "k", "v"), reference.split(16, dim=-1), strict=True))
    o, _ = oracle.kda(**(call | views))
    (want,) = torch.autograd.grad(o.square().sum(), reference)
    check({"qkv": got}, {"qkv": want}, FLOAT64)


def test_rows_past_the_end_get_zero_gradient() -> None:
    call = KdaCase(lengths=(20, 13), tail=7).make()
    got = gradients(flashkda.chunk_kda, call)
    for name in ("q", "k", "v", "g", "beta"):
        assert bool((got[name][:, 33:] == 0).all()), name


def test_backward_twice_needs_retain_graph_and_repeats() -> None:
    call = KdaCase(T=40).make()
    q = call["q"].requires_grad_()
    o, _ = flashkda.chunk_kda(**call)
    weight = torch.randn_like(o)
    (first,) = torch.autograd.grad(o, q, weight, retain_graph=True)
    (second,) = torch.autograd.grad(o, q, weight)
    assert torch.equal(first, second)


def test_inputs_are_not_changed_by_backward() -> None:
    call = KdaCase(T=40).make()
    before = {x: call[x].clone() for x in ALL_NAMES}
    leaves = {x: call[x].requires_grad_() for x in ALL_NAMES}
    o, state = flashkda.chunk_kda(**(call | leaves))
    assert state is not None
    (o.sum() + state.sum()).backward()
    for name, value in before.items():
        assert torch.equal(leaves[name], value), name


def test_memory_saved_for_backward_does_not_grow_with_the_state() -> None:
    """Recompute: what is kept between the passes is a few times the inputs, not T x K x V."""
    call = KdaCase(T=2048, H=1, K=64, V=64, dtype=torch.float32, state=False).make()
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return x

    rows = ("q", "k", "v", "g", "beta")
    leaves = {x: call[x].requires_grad_() for x in rows}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        flashkda.chunk_kda(**(call | leaves))
    inputs = sum(call[x].untyped_storage().nbytes() for x in rows)
    assert 0 < sum(kept.values()) <= 3 * inputs
