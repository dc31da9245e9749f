"""States inside sequences, written straight to slots of a pool while the sequences run."""

from __future__ import annotations

import re
from typing import Any

import oracle
import pytest
import torch
from cases import KdaCase
from errors import BF16, FLOAT64, check, check_pair
from pools import (
    CHECKPOINT_CASES,
    SENTINEL,
    CheckpointCase,
    check_checkpoints,
    check_stopped_runs,
    checkpoint_ids,
    empty_pool,
    padded_pool,
    pool_of,
    run_with_checkpoints,
)
from torch import Tensor

import flashkda

cases = pytest.mark.parametrize("x", CHECKPOINT_CASES, ids=checkpoint_ids)


@cases
def test_checkpoints_against_the_recurrence(x: CheckpointCase) -> None:
    check_checkpoints(flashkda.chunk_kda, x, FLOAT64)


def test_checkpoints_on_every_device(device: str) -> None:
    offsets = ((16, 64, 160), (16, 0, 0), (32, 48, 64), (32, 48, 64))
    x = CheckpointCase(KdaCase(lengths=(160, 0, 33, 64)), offsets)
    check_checkpoints(flashkda.chunk_kda, x, FLOAT64, device, backend="torch")


@cases
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_checkpoints_are_stopped_runs(x: CheckpointCase, dtype: torch.dtype) -> None:
    """To the bit: a request that starts from one can't tell."""
    check_stopped_runs(flashkda.chunk_kda, x.of(dtype=dtype))


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtype_of_its_own(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """Checkpoints are rounded once, whatever dtype the states of the call have."""
    case = KdaCase(
        lengths=(100, 33), K=32, V=48, dtype=torch.bfloat16, state_dtype=state_dtype, gate="slow"
    )
    x = CheckpointCase(case, ((16, 64, 96), (32, 0, 16)), dtype=dtype)
    check_checkpoints(flashkda.chunk_kda, x, BF16["slow"][1])
    _, rounded, _ = run_with_checkpoints(flashkda.chunk_kda, x)
    exact = CheckpointCase(case, x.offsets, dtype=torch.float32)
    _, full, _ = run_with_checkpoints(flashkda.chunk_kda, exact)
    for at, state in rounded.items():
        assert state.dtype == dtype
        assert torch.equal(state, full[at].to(dtype))


def test_checkpoint_at_the_end_is_the_final_state() -> None:
    x = CheckpointCase(KdaCase(lengths=(96, 16, 160, 32)), ((96,), (16,), (160,), (32,)))
    _, taken, (_, final) = run_with_checkpoints(flashkda.chunk_kda, x)
    assert final is not None
    for (n, _), state in taken.items():
        assert torch.equal(state, final[n])


def test_one_offset_per_sequence() -> None:
    """vLLM's form: `checkpoint_state [N,H,128,128]`, `checkpoint_offsets [N]` int32, 0 = none."""
    case = KdaCase(lengths=(100, 0, 16, 40), H=1, K=128, V=128, state_v_first=True)
    call = case.make()
    checkpoint_state = empty_pool(case, 4)
    offsets = torch.tensor([64, 0, 16, 0], dtype=torch.int32)
    flashkda.chunk_kda(**call, checkpoint_states=checkpoint_state, checkpoint_offsets=offsets)
    want = oracle.states_inside(**call, after=[(0, 64), (2, 16)])
    check(
        {"0": checkpoint_state[0], "2": checkpoint_state[2]}, {"0": want[0], "2": want[1]}, FLOAT64
    )
    assert bool((checkpoint_state[[1, 3]] == SENTINEL).all())


@pytest.mark.parametrize("spelling", ["int", "tensor", "expanded"])
def test_every_64_tokens(spelling: str) -> None:
    """SGLang's form: a state after every 64 tokens, to slots of which -1 is skipped."""
    case = KdaCase(lengths=(200, 63, 64, 130))
    call = case.make()
    states = empty_pool(case, 9)
    indices = torch.tensor([[5, -1, 2], [-1, -1, -1], [8, -1, -1], [0, 7, -1]], dtype=torch.int32)
    offsets: Any = {
        "int": 64,
        "tensor": torch.tensor([[64, 128, 192]] * 4),
        "expanded": torch.tensor([64, 128, 192]).expand(4, 3),
    }[spelling]
    flashkda.chunk_kda(
        **call, checkpoint_states=states, checkpoint_offsets=offsets, checkpoint_indices=indices
    )
    after = {5: (0, 64), 2: (0, 192), 8: (2, 64), 0: (3, 64), 7: (3, 128)}
    want = oracle.states_inside(**call, after=list(after.values()))
    check(
        {str(slot): states[slot] for slot in after},
        {str(slot): state for slot, state in zip(after, want, strict=True)},
        FLOAT64,
    )
    assert bool((states[[1, 3, 4, 6]] == SENTINEL).all())


def test_strided_tables() -> None:
    case = KdaCase(lengths=(64, 40))
    call = case.make()
    states = empty_pool(case, 4)
    wide = torch.full((2, 6), 24)
    wide[:, ::3] = torch.tensor([[16, 64], [32, 16]])
    slots = torch.full((2, 2, 2), 99)
    slots[..., 1] = torch.tensor([[0, 3], [2, 1]])
    flashkda.chunk_kda(
        **call,
        checkpoint_states=states,
        checkpoint_offsets=wide[:, ::3],
        checkpoint_indices=slots[..., 1],
    )
    want = oracle.states_inside(**call, after=[(0, 16), (1, 16), (1, 32), (0, 64)])
    check_pair((call["q"], states), (call["q"], torch.stack(want)), FLOAT64)


def test_checkpoints_in_the_pool_itself() -> None:
    """A server with one pool for running states and cached prefixes; padding writes nothing."""
    case = KdaCase(lengths=(70, 33, 20), state=False)
    call = case.make()
    del call["output_final_state"]
    pool = pool_of(case, 8)
    before = pool.clone()
    index = torch.tensor([3, -1, 6])
    o, _ = flashkda.chunk_kda(
        **call,
        initial_state=pool,
        ssm_state_indices=index,
        pad_slot_id=-1,
        checkpoint_states=pool,
        checkpoint_offsets=torch.tensor([64, 32, 16]),
        checkpoint_indices=torch.tensor([0, 1, 2]),
    )
    want_o, want = oracle.kda_pool(**call, pool=before, ssm_state_indices=index, pad_slot_id=-1)
    first = torch.stack([before[3], before[1], before[6]])
    want[0], want[2] = oracle.states_inside(**call, initial_state=first, after=[(0, 64), (2, 16)])
    check_pair((o, pool), (want_o, want), FLOAT64)
    assert torch.equal(pool[[1, 4, 5, 7]], before[[1, 4, 5, 7]])


TAKEN: dict[str, dict[str, Any]] = {
    "own_slot": {"keep": [1, -1, -1]},
    "slot_of_another": {"keep": [-1, -1, 1]},
    "own_start": {"final": [4, 2, 5], "keep": [1, -1, -1]},
    "start_of_another": {"final": [4, 2, 5], "keep": [-1, -1, 1]},
    "own_end": {"final": [4, 2, 5], "keep": [4, -1, -1]},
    "start_that_is_read": {"inplace_final_state": False, "keep": [1, -1, -1]},
    "of_an_empty_one_that_is_returned": {
        "inplace_final_state": False, "output_final_state": True, "keep": [2, -1, -1],
    },
    "rows_of_the_pool": {"keep": [0, -1, -1], "first": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_checkpoint_in_a_slot_of_a_sequence_is_refused(name: str) -> None:
    """The pool itself, or rows of it; slots with gaps."""
    case = KdaCase(lengths=(40, 0, 20), state=False)
    pool, memory = padded_pool(pool_of(case, 6))
    before = memory.clone()
    more = dict(TAKEN[name])
    slot, first = max(more["keep"]), more.pop("first", 0)
    final = more.pop("final", None)
    if final is not None:
        more["final_state_indices"] = torch.tensor(final)
    call = case.make()
    del call["output_final_state"]
    more = {"output_final_state": False} | more
    with pytest.raises(ValueError, match=rf"^checkpoint_indices: expected .*, got {slot} for seq"):
        flashkda.chunk_kda(
            **call, initial_state=pool, ssm_state_indices=torch.tensor([1, 2, 3]),
            checkpoint_states=pool[first:], checkpoint_offsets=torch.tensor([16, 16, 16]),
            checkpoint_indices=torch.tensor(more.pop("keep")), **more,
        )  # fmt: skip
    assert torch.equal(memory, before)


def test_a_checkpoint_among_the_states_of_a_call_without_slots_is_refused() -> None:
    case = KdaCase(lengths=(40, 20), state_v_first=True, dtype=torch.float32)
    call = case.make()
    kept = {
        "checkpoint_states": call["initial_state"],
        "checkpoint_offsets": torch.tensor([0, 16]),
        "checkpoint_indices": torch.tensor([0, 0]),
    }
    with pytest.raises(ValueError, match=r"^checkpoint_indices: .* got 0 for sequence 1, which"):
        flashkda.chunk_kda(**call, **kept)
    final = torch.zeros_like(call["initial_state"])
    with pytest.raises(ValueError, match=r"^checkpoint_indices: .* got 0 for sequence 1, which"):
        flashkda.fwd(
            *(call[x] for x in ("q", "k", "v", "g", "beta")), 0.1, torch.empty_like(call["v"]),
            call["A_log"], call["dt_bias"], call["lower_bound"], call["initial_state"], final,
            call["cu_seqlens"], **kept | {"checkpoint_states": final},
        )  # fmt: skip


def test_checkpoints_in_slots_that_tables_name_without_using_them() -> None:
    """Those of padding, of a sequence without tokens, and a pad that one starts from."""
    case = KdaCase(lengths=(40, 0, 20, 70), state=False)
    call = case.make()
    del call["output_final_state"]
    pool = pool_of(case, 8)
    before = pool.clone()
    where = {
        "ssm_state_indices": torch.tensor([0, 3, 5, 4]),
        "final_state_indices": torch.tensor([1, 3, 0, 4]),
    }
    flashkda.chunk_kda(
        **call, **where, initial_state=pool, pad_slot_id=0, checkpoint_states=pool,
        checkpoint_offsets=torch.tensor([[16, 32], [0, 0], [0, 0], [64, 0]]),
        checkpoint_indices=torch.tensor([[3, 0], [4, 4], [1, 1], [5, 1]]),
    )  # fmt: skip
    _, want = oracle.kda_pool(**call, pool=before, **where, pad_slot_id=0)
    start = before[[0, 0, 0, 4]]
    start[:3] = 0
    inside = oracle.states_inside(**call, initial_state=start, after=[(0, 16), (0, 32), (3, 64)])
    want[3], want[0], want[5] = inside
    check({"pool": pool}, {"pool": want}, FLOAT64)


def test_a_request_that_starts_from_a_checkpoint_is_the_long_request() -> None:
    """Bit for bit: a prefix hit changes nothing."""
    call = KdaCase(T=150, dtype=torch.bfloat16, state=False).make()
    whole, final = flashkda.chunk_kda(**call)
    pool = torch.full((4, 2, 16, 16), float("nan"))
    prefix = call | {x: call[x][:, :90] for x in ("q", "k", "v", "g", "beta")}
    flashkda.chunk_kda(
        **prefix,
        checkpoint_states=pool,
        checkpoint_offsets=torch.tensor([64]),
        checkpoint_indices=torch.tensor([2]),
    )
    rest = call | {x: call[x][:, 64:] for x in ("q", "k", "v", "g", "beta")}
    o, _ = flashkda.chunk_kda(
        **rest,
        initial_state=pool,
        ssm_state_indices=torch.tensor([2]),
        final_state_indices=torch.tensor([0]),
    )
    assert final is not None
    assert torch.equal(o, whole[:, 64:])
    assert torch.equal(pool[:1], final)


ERRORS = {
    "offset_24": ("checkpoint_offsets", [[24, 0], [0, 0], [0, 0]], [[0, 1], [2, 3], [4, 5]]),
    "offset_past_the_end": ("checkpoint_offsets", [[0, 0], [88, 0], [0, 0]], [[0, 1]] * 3),
    "offset_negative": ("checkpoint_offsets", [[0, 0], [0, 0], [0, -16]], [[0, 1], [2, 3], [4, 5]]),
    "slot_past_the_pool": ("checkpoint_indices", [[16, 32]] * 3, [[0, 1], [2, 6], [3, 4]]),
    "slot_twice": ("checkpoint_indices", [[16, 32]] * 3, [[0, 1], [2, 3], [4, 1]]),
    "slot_twice_in_one": ("checkpoint_indices", [[16, 32]] * 3, [[0, 1], [2, 2], [4, 5]]),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_tables_are_checked_before_anything_is_written(name: str) -> None:
    argument, offsets, slots = ERRORS[name]
    case = KdaCase(lengths=(40, 50, 60))
    call = case.make()
    states, out = empty_pool(case, 6), torch.full_like(call["v"], SENTINEL)
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got ") as caught:
        flashkda.chunk_kda(
            **call,
            checkpoint_states=states,
            checkpoint_offsets=torch.tensor(offsets),
            checkpoint_indices=torch.tensor(slots),
            out=out,
        )
    assert re.search(r"sequences? ", str(caught.value))
    assert bool((states == SENTINEL).all())
    assert bool((out == SENTINEL).all())


def test_tables_of_empty_padded_and_skipped_rows_may_hold_anything() -> None:
    case = KdaCase(lengths=(20, 0, 40), state=False)
    call = case.make()
    pool, states = pool_of(case, 4), empty_pool(case, 1)
    flashkda.chunk_kda(
        **call,
        initial_state=pool,
        ssm_state_indices=torch.tensor([-1, 99, 2]),
        pad_slot_id=-1,
        checkpoint_states=states,
        checkpoint_offsets=torch.tensor([[24, 7], [5, -3], [32, 9]]),
        checkpoint_indices=torch.tensor([[99, 0], [0, 99], [0, -1]]),
    )
    start = pool_of(case, 4)[[1, 1, 2]]
    want: list[Tensor] = oracle.states_inside(**call, initial_state=start, after=[(2, 32)])
    check({"state": states[0]}, {"state": want[0]}, FLOAT64)


def test_fwd_keeps_the_same_states() -> None:
    """In the form of Moonshot's fwd: checkpoints, a workspace, final states of the caller."""
    case = KdaCase(lengths=(70, 0, 40), H=2, K=8, V=12, dtype=torch.float32, state_v_first=True)
    call = case.make()
    kept = {"checkpoint_offsets": torch.tensor([64, 0, 16])}
    size = flashkda.get_workspace_size(110, 2, 3)
    kept["workspace"] = torch.empty(size, dtype=torch.uint8)
    states = torch.full((3, 2, 12, 8), SENTINEL)
    want = flashkda.chunk_kda(**call, checkpoint_states=states, **kept)
    out, final, got = torch.empty_like(call["v"]), torch.empty(3, 2, 12, 8), states.clone()
    got.fill_(SENTINEL)
    flashkda.fwd(
        *(call[x] for x in ("q", "k", "v", "g", "beta")), 8**-0.5, out,
        call["A_log"], call["dt_bias"], call["lower_bound"], call["initial_state"], final,
        call["cu_seqlens"], checkpoint_states=got, **kept,
    )  # fmt: skip
    assert torch.equal(out, want[0])
    assert torch.equal(final, want[1])
    assert torch.equal(got, states)
    assert bool((got[1] == SENTINEL).all())
