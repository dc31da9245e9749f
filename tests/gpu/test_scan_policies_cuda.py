"""Both forms of scan, by wgmma and by mma.sync (Blackwell's), on the device that has both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import KdaCase
from errors import BF16, check_pair
from pools import CheckpointCase, empty_pool, run_with_checkpoints
from support import (
    BACKEND,
    CASE,
    DEVICE,
    GPU,
    IN_CHUNKS,
    Call,
    finite,
    forced_mma_sync,
    run,
    same,
    token_reference,
)

import flashkda

pytestmark = GPU

gates = pytest.mark.parametrize("gate", ["fast", "slow", "none", "softplus", "log"])
LIMITS = {"fast": BF16["fast"], "none": BF16["none"]}

# Sequences of every remainder, few enough that halves of V have an SM each, and too many for that.
FEW = (1, 100, 0, 32, 49)
MANY = tuple((7 * n) % 70 for n in range(70))
PACKS = [
    CASE.but(lengths=FEW, H=2, tail=9),
    CASE.but(lengths=FEW, H=1, HV=3, state_v_first=True),
    CASE.but(lengths=MANY, H=2, tail=9),
    CASE.but(lengths=MANY, H=1, HV=2, state_v_first=True),
    CASE.but(T=300, H=3, state=False),  # more chunks than there are stages
    CASE.but(T=300, H=80),
]
packs = pytest.mark.parametrize(
    "case", PACKS, ids=["few", "few_gva", "many", "many_gva", "stages", "stages_many"]
)


def kernels(function: Any) -> list[str]:
    """Names of the CUDA kernels that a call runs."""
    function()  # what is loaded at the first call is not of interest
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [x.name for x in profile.events() if "flashkda" in x.name]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # it is used once at a time
@pytest.mark.parametrize("gate", ["fast", "log"])
def test_each_form_is_what_runs(gate: str) -> None:
    call = CASE.but(gate=gate).make(DEVICE)
    names = kernels(lambda: run(call))
    with forced_mma_sync():
        forced = kernels(lambda: run(call))
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert [("warpgroup_scan" in x) for x in names] == [False, hopper]
    assert [("warpgroup_scan" in x) for x in forced] == [False, False]
    assert all("scan_kernel" in x[-1] for x in (names, forced))


@packs
@gates
def test_forms_agree_to_the_bit(gate: str, case: KdaCase) -> None:
    call = case.but(gate=gate).make(DEVICE)
    got = run(call)
    with forced_mma_sync():
        assert same(run(call), got)


@packs
@gates
def test_both_forms_against_the_recurrence(gate: str, case: KdaCase) -> None:
    call = case.but(gate=gate).make(DEVICE)
    want, limits = token_reference(call), LIMITS.get(gate, BF16["slow"])
    check_pair(run(call), want, limits)
    with forced_mma_sync():
        check_pair(run(call), want, limits)


@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", ["fast", "log"])
def test_forms_keep_the_same_states(gate: str, dtype: torch.dtype, heads: int) -> None:
    """In the middle of a chunk, at its end, at the end of a sequence that ends inside."""
    case = CASE.but(gate=gate, lengths=(100, 0, 16, 80), H=heads, state_v_first=True)
    x = CheckpointCase(case, ((16, 48, 96), (0, 16, 32), (16, 0, 32), (64, 80, 32)), dtype)

    def kept() -> tuple[Any, ...]:
        _, states, results = run_with_checkpoints(
            flashkda.chunk_kda, x, DEVICE, **IN_CHUNKS, backend=BACKEND
        )
        return (*states.values(), *results)

    got = kept()
    with forced_mma_sync():
        assert same(kept(), got)


@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("name", ["k", "v", "beta"])
@pytest.mark.parametrize("nan_from", [20, 52])
def test_a_kept_state_has_nothing_of_later_tokens(nan_from: int, name: str, heads: int) -> None:
    """Not even their NaN, in the other half of the chunk that it is kept in the middle of."""
    case = CASE.but(H=heads, state_v_first=True)
    offsets = torch.tensor([[16, 48]], device=DEVICE)
    slots = torch.tensor([[0, 1]], device=DEVICE)

    def kept(call: Call) -> torch.Tensor:
        states = empty_pool(case, 2, torch.float32, DEVICE)
        run(call, checkpoint_states=states, checkpoint_offsets=offsets, checkpoint_indices=slots)
        return states[: 1 if nan_from < 48 else 2]

    call = case.make(DEVICE)
    want = kept(call)
    call[name][:, nan_from:] = float("nan")
    assert finite(want)
    assert same(kept(call), want)
    with forced_mma_sync():
        assert same(kept(call), want)
