"""Decoding with flags that passed before, with a CPU that plays a served device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import KdaCase
from torch import Tensor

import flashkda
from flashkda import _backend, _known, _native

CASE = KdaCase(T=2, B=3, K=128, V=128, dtype=torch.bfloat16)
SLOTS = {"ssm_state_indices": torch.tensor([1, 4, 2])}
ROOM = torch.zeros(6, 2, 128, 128)


class Kernels:
    """What reaches the decode kernel, by the checked way and by the short one."""

    def __init__(self) -> None:
        self.checked: list[tuple[Any, ...]] = []
        self.known: list[tuple[Any, ...]] = []
        self.error: type[Exception] | None = None
        self.declines = False

    def into(self, *args: Any) -> bool:
        self.checked.append(args)
        return True

    def default(self, *args: Any) -> tuple[Tensor | None, Tensor | None]:
        if self.error is not None:
            raise self.error("no")
        if self.declines:
            return None, None
        self.known.append(args)
        return torch.full_like(args[2], 7.0), torch.full((1,), 8.0)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels()
    served = _backend.Backend("cuda", "the kernels of this test serve every device")
    monkeypatch.setattr(_backend, "_served", {torch.device("cpu"): served})
    monkeypatch.setattr(_native, "recurrent_operator", kernels.into)
    monkeypatch.setattr(torch.ops.flashkda, "recurrent_native", kernels)
    monkeypatch.setattr(_known, "_options", {})
    monkeypatch.setattr(_known, "_is_on_gpu", lambda q: type(q) is Tensor)
    return kernels


def pool_call(**more: Any) -> dict[str, Any]:
    call = CASE.but(state=False).make() | {"initial_state": ROOM.clone()} | SLOTS | more
    del call["output_final_state"]
    return call


CALLS: dict[str, dict[str, Any]] = {
    "dense": CASE.make(),
    "no final state": CASE.make() | {"output_final_state": False},
    "no initial state": CASE.but(state=False).make(),
    "softplus": CASE.but(gate="softplus").make(),
    "log": CASE.but(gate="log", l2norm=False, beta="activated").make(),
    "negative eigenvalues": CASE.but(beta="neg", scale=0.3).make(),
    "V first": CASE.but(state_v_first=True).make(),
    "varlen": CASE.but(B=1, lengths=(2, 0, 3)).make(),
    "in place": CASE.make() | {"inplace_final_state": True},
    "a pool": pool_call(),
    "a pool, only read": pool_call(inplace_final_state=False, output_final_state=True),
    "pads": pool_call(pad_slot_id=0),
    "other slots": pool_call(final_state_indices=torch.tensor([0, 3, 5]), pad_slot_id=-1),
    "accepted": pool_call(
        ssm_state_indices=torch.arange(6).view(3, 2), num_accepted_tokens=torch.tensor([1, 2, 1])
    ),
    "a promise": pool_call(state_is_ready=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_short_way_gives_the_kernel_the_same(kernels: Kernels, name: str) -> None:
    call = CALLS[name]
    first = flashkda.fused_recurrent_kda(**call)
    second = flashkda.fused_recurrent_kda(**call)
    (slow,), (fast,) = kernels.checked, kernels.known
    assert all(x is y for x, y in zip(slow[:7], fast[:7], strict=True))
    assert fast[7] is call.get("initial_state")
    assert all(x is y for x, y in zip(slow[8:12], fast[8:12], strict=True))

    pad_slot_id, in_place, _, _, final_state = slow[12:17]
    scale, lower_bound, *switches = slow[17:]
    flags = _native.CallFlag(fast[12])
    on = [flag in flags for flag in _native.CallFlag]
    *options, has_bound, outputs, is_bounded, has_pads, is_in_place, is_ready = on
    assert not is_bounded  # of the chunked form
    assert [*options, is_ready] == switches
    assert (fast[14] if has_bound else None) == lower_bound
    assert (fast[15] if has_pads else None) == pad_slot_id
    assert (fast[13], is_in_place) == (scale, in_place)
    assert list(map(type, fast[12:])) == [int, float, float, int]
    assert (outputs or in_place) == (final_state is not None)

    assert bool((second[0] == 7).all())
    if in_place:
        assert first[1] is second[1] is call["initial_state"]
    else:
        assert second[1] is not None  # of the kernel, which makes one if it is asked to


def test_flags_are_those_of_the_binding() -> None:
    header = Path(__file__).parents[1] / "csrc/torch/call.h"
    body = re.search(r"enum CallFlag.*?{(.*?)}", header.read_text(), re.DOTALL)
    assert body is not None
    bits = {name: 1 << int(bit) for name, bit in re.findall(r"k(\w+) = 1 << (\d+)", body[1])}
    names = {x.name.replace("_", "").lower(): x.value for x in _native.CallFlag if x.name}
    assert {name.lower(): bit for name, bit in bits.items()} == names


@pytest.mark.parametrize("error", [None, RuntimeError, TypeError])
def test_what_the_kernel_declines_is_checked(
    kernels: Kernels, error: type[Exception] | None
) -> None:
    flashkda.fused_recurrent_kda(**pool_call())
    kernels.error, kernels.declines = error, error is None
    flashkda.fused_recurrent_kda(**pool_call())
    assert len(kernels.checked) == 2
    for slots in (torch.tensor([1, 2]), [1, 4, 2]):
        with pytest.raises((ValueError, TypeError), match=r"^ssm_state_indices: expected"):
            flashkda.fused_recurrent_kda(**pool_call(ssm_state_indices=slots))


@pytest.mark.parametrize("more", [{}, {"inplace_final_state": True}], ids=["pool", "dense"])
def test_a_state_that_requires_grad_is_not_overwritten(
    kernels: Kernels, more: dict[str, Any]
) -> None:
    call = CASE.make() | more if more else pool_call()
    with torch.no_grad():
        flashkda.fused_recurrent_kda(**call)
        call["initial_state"] = call["initial_state"].clone().requires_grad_()
        with pytest.raises(ValueError, match="does not require grad"):
            flashkda.fused_recurrent_kda(**call)
    assert kernels.known == []


DIFFERENT: dict[str, dict[str, Any]] = {
    "a bool that is an int": {"state_is_ready": 1},
    "a pad that is a bool": {"pad_slot_id": True},
    "a bound out of range": {"lower_bound": -6.0},
    "counts without columns": {"num_accepted_tokens": torch.tensor([1, 1, 1])},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_flags_are_checked(kernels: Kernels, name: str) -> None:
    flashkda.fused_recurrent_kda(**pool_call())
    with pytest.raises((TypeError, ValueError)):
        flashkda.fused_recurrent_kda(**pool_call(**DIFFERENT[name]))
    assert kernels.known == []
