"""Prefill on a GPU: on pools of states, with checkpoints, in a workspace of the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import unmodified
from cases import KdaCase
from errors import BF16
from pools import (
    CHECKPOINT_CASES,
    POOL_CASES,
    SENTINEL,
    CheckpointCase,
    PoolCase,
    check_checkpoints,
    check_in_pool,
    check_stopped_runs,
    checkpoint_ids,
    empty_pool,
    gather_run_scatter,
    pool_ids,
    pool_of,
    run_in_pool,
    run_with_checkpoints,
)
from support import BACKEND, CASE, DEVICE, GPU, IN_CHUNKS, Result, capture, run, same
from torch import Tensor

import flashkda

pytestmark = GPU

SERVED = {"K": 128, "V": 128, "dtype": torch.bfloat16}
LIMIT = (BF16["slow"][0], BF16["slow"][1])
CHUNKS = IN_CHUNKS | {"backend": BACKEND}

pools = pytest.mark.parametrize("x", [x.of(**SERVED) for x in POOL_CASES], ids=pool_ids)
checkpoints = pytest.mark.parametrize(
    "x", [x.of(**SERVED) for x in CHECKPOINT_CASES], ids=checkpoint_ids
)


@pools
@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_pool_against_the_recurrence(function: Any, x: PoolCase) -> None:
    check_in_pool(function, x, LIMIT, DEVICE, backend=BACKEND)


@pools
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_is_gather_run_scatter(x: PoolCase, dtype: torch.dtype) -> None:
    x = PoolCase(x.case, x.index, x.final, x.pad, x.slots, dtype, x.index_dtype)
    call, before, o, pool = run_in_pool(flashkda.chunk_kda, x, DEVICE, **CHUNKS)
    assert same((o, pool), gather_run_scatter(flashkda.chunk_kda, x, call, before, **CHUNKS))


@pytest.mark.parametrize("length", [1, 9, 16])
def test_short_sequences_on_a_pool(length: int) -> None:
    """Token by token, to other slots, with a request that has no prefix."""
    case = CASE.but(T=length, B=3, state_v_first=True)
    x = PoolCase(case, (-1, 7, 4), final=(8, 5, 4), pad=-1)
    check_in_pool(flashkda.chunk_kda, x, LIMIT, DEVICE, backend=BACKEND)
    plain = run_in_pool(flashkda.chunk_kda, x, DEVICE, backend=BACKEND)
    tokens = run_in_pool(flashkda.fused_recurrent_kda, x, DEVICE, backend=BACKEND)
    assert same(plain[2:], tokens[2:])


def test_a_pool_that_is_only_read() -> None:
    case = CASE.but(lengths=(40, 0, 33))
    call = case.but(state=False).make(DEVICE)
    pool = pool_of(case, 6, torch.float32, DEVICE)
    index = torch.tensor([4, 2, -1], device=DEVICE)
    with unmodified({"pool": pool}):
        o, final = run(
            call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False,
            pad_slot_id=-1,
        )  # fmt: skip
    want = run(call, initial_state=pool[[4, 2, 2]])
    assert same((o[:, :40], final[:2]), (want[0][:, :40], want[1][:2]))
    assert bool((o[:, 40:] == 0).all())
    assert bool((final[2] == 0).all())


def test_padding_may_hold_nan() -> None:
    call = CASE.but(lengths=(40, 33, 50), state=False).make(DEVICE)
    del call["output_final_state"]
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 40:73] = float("nan")
    pool = pool_of(CASE, 6, torch.float32, DEVICE)
    pool[3] = float("nan")
    index = torch.tensor([4, -1, 2], device=DEVICE)
    o, _ = run(call, initial_state=pool, ssm_state_indices=index, pad_slot_id=-1)
    assert bool(torch.isfinite(o).all())
    assert bool((o[:, 40:73] == 0).all())
    assert bool(torch.isfinite(pool[[0, 1, 2, 4, 5]]).all())


def test_slots_outside_the_pool_are_loud_and_harmless() -> None:
    call = CASE.but(lengths=(40, 33, 50), state=False).make(DEVICE)
    del call["output_final_state"]
    pool = pool_of(CASE, 6, torch.float32, DEVICE)
    before = pool.clone()
    index = torch.tensor([4, 6, 2**30], device=DEVICE)
    o, _ = run(call, initial_state=pool, ssm_state_indices=index)
    assert bool(torch.isfinite(o[:, :40]).all())
    assert bool(torch.isnan(o[:, 40:]).all())
    assert same(pool[[0, 1, 2, 3, 5]], before[[0, 1, 2, 3, 5]])


@pytest.mark.parametrize("pad", [None, -1])
@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_no_tokens_and_no_such_slot(function: Any, pad: int | None) -> None:
    """As on the PyTorch path: NaN for slots outside, zeros for pads, else the state there was."""
    call = CASE.but(lengths=(40, 0, 0, 0, 0), state=False).make(DEVICE)
    pool = pool_of(CASE, 6, torch.float32, DEVICE)
    index = torch.tensor([4, 6, 2**30, -1, 3], device=DEVICE)
    more: dict[str, Any] = {
        "initial_state": pool, "ssm_state_indices": index, "inplace_final_state": False,
        "pad_slot_id": pad,
    }  # fmt: skip
    _, final = function(**call, **more, backend=BACKEND)
    _, want = function(**call, **more, backend="torch")
    assert final is not None
    assert want is not None
    assert same(torch.isnan(final), torch.isnan(want))
    assert bool(torch.isnan(final[1:3]).all())
    assert same(final[3:].nan_to_num(1), want[3:].nan_to_num(1))


@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_debug_checks_find_the_words(function: Any) -> None:
    """What kernels make NaN is an error then, and nothing is written; a graph can't be captured."""
    call = CASE.but(lengths=(40, 33), state=False).make(DEVICE)
    del call["output_final_state"]
    pool = pool_of(CASE, 6, torch.float32, DEVICE)
    index = torch.tensor([4, 2], device=DEVICE)

    def step() -> Any:
        return function(**call, initial_state=pool, ssm_state_indices=index, backend=BACKEND)

    step()
    with flashkda.debug_checks():
        step()
        index[1] = 6
        with unmodified({"pool": pool}), pytest.raises(ValueError, match="got 6 for sequence 1"):
            step()
        index[1] = 2
        call["cu_seqlens"][1] = 74
        with unmodified({"pool": pool}), pytest.raises(ValueError, match="never decrease"):
            step()
        call["cu_seqlens"][1] = 40

        def in_graph() -> Any:
            index.add_(0)  # torch warns of a graph with nothing in it
            return step()

        with pytest.raises(RuntimeError, match="debug_checks"):
            capture(in_graph)


def test_debug_checks_of_promises() -> None:
    call = CASE.but(lengths=(40, 33), gate="log").make(DEVICE)
    host = call["cu_seqlens"].cpu()
    with flashkda.debug_checks():
        run(call, cu_seqlens_cpu=host)
        with pytest.raises(ValueError, match="max_seqlen: expected at least the 40"):
            flashkda.chunk_kda(**call, max_seqlen=39)
        with pytest.raises(ValueError, match="cu_seqlens_cpu: expected the values"):
            run(call, cu_seqlens_cpu=host - 1)
        call["g"][0, 72, 0, 0] = -6
        with pytest.raises(ValueError, match="g: expected log decays of at least -5"):
            run(call, safe_gate=True)


# --- checkpoints ----------------------------------------------------------------------------------


@checkpoints
def test_checkpoints_against_the_recurrence(x: CheckpointCase) -> None:
    check_checkpoints(flashkda.chunk_kda, x, LIMIT[1], DEVICE, **CHUNKS)


@checkpoints
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_are_stopped_runs(x: CheckpointCase, dtype: torch.dtype) -> None:
    x = CheckpointCase(x.case, x.offsets, dtype)
    check_stopped_runs(flashkda.chunk_kda, x, DEVICE, **CHUNKS)


@pytest.mark.parametrize("heads", [2, 64])
def test_checkpoints_of_both_forms_of_scan(heads: int) -> None:
    """Few heads take half of V in a CTA, many take all of it."""
    case = CASE.but(lengths=(100, 16, 70), H=heads, state_v_first=True)
    x = CheckpointCase(case, ((16, 48, 96), (16, 0, 0), (32, 64, 48)))
    check_stopped_runs(flashkda.chunk_kda, x, DEVICE, **CHUNKS)


def test_every_64_tokens() -> None:
    """SGLang's form; and vLLM's, one offset for each sequence."""
    case = CASE.but(lengths=(200, 63, 64, 130))
    call = case.make(DEVICE)
    indices = torch.tensor(
        [[5, -1, 2], [-1, -1, -1], [8, -1, -1], [0, 7, -1]], dtype=torch.int32, device=DEVICE
    )
    results = []
    offsets: tuple[Any, ...] = (64, torch.tensor([64, 128, 192], device=DEVICE).expand(4, 3))
    for offset in offsets:
        states = empty_pool(case, 9, torch.float32, DEVICE)
        run(call, checkpoint_states=states, checkpoint_offsets=offset, checkpoint_indices=indices)
        assert bool((states[[1, 3, 4, 6]] == SENTINEL).all())
        results.append(states)
    assert same(*results)
    vllm = empty_pool(case, 4, torch.float32, DEVICE)
    single = torch.tensor([64, 0, 64, 128], dtype=torch.int32, device=DEVICE)
    run(call, checkpoint_states=vllm, checkpoint_offsets=single)
    assert same(vllm[[0, 2, 3]], results[0][[5, 8, 7]])
    assert bool((vllm[1] == SENTINEL).all())


def test_a_pool_and_checkpoints_in_it() -> None:
    """Checkpoints may go to other slots of the very pool that the states live in."""
    case = CASE.but(lengths=(100, 70), state=False)
    call = case.make(DEVICE)
    del call["output_final_state"]
    pool = pool_of(case, 8, torch.float32, DEVICE)
    other = pool.clone()
    index = torch.tensor([1, 4], device=DEVICE)
    offsets, slots = (torch.tensor(x, device=DEVICE) for x in ([[64], [32]], [[6], [7]]))
    o, _ = run(
        call, initial_state=pool, ssm_state_indices=index, checkpoint_states=pool,
        checkpoint_offsets=offsets, checkpoint_indices=slots,
    )  # fmt: skip
    plain, _ = run(call, initial_state=other, ssm_state_indices=index)
    assert same(o, plain)
    assert same(pool[:6], other[:6])
    assert not same(pool[6:], other[6:])


def test_checkpoints_are_stored_once_rounded() -> None:
    case = CASE.but(lengths=(100, 33))
    offsets = ((16, 64, 96), (32, 0, 16))
    found = [
        run_with_checkpoints(
            flashkda.chunk_kda, CheckpointCase(case, offsets, dtype), DEVICE, **CHUNKS
        )[1]
        for dtype in (torch.float32, torch.bfloat16)
    ]
    for at, state in found[1].items():
        assert same(state, found[0][at].bfloat16())


# --- workspaces and graphs ------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["fast", "softplus"])
def test_workspace_of_the_caller(gate: str) -> None:
    """Exactly as large as asked for; what follows it is left alone."""
    call = CASE.but(lengths=(40, 0, 33), tail=7, gate=gate).make(DEVICE)
    size = flashkda.get_workspace_size(80, 2, 3)
    memory = torch.full((size + 256,), 119, dtype=torch.uint8, device=DEVICE)
    assert same(run(call, workspace=memory[:size]), run(call))
    assert bool((memory[size:] == 119).all())


def test_workspace_at_an_odd_address() -> None:
    call = CASE.but(T=40).make(DEVICE)
    memory = torch.empty(1 << 20, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match=r"^workspace: expected an address .* 64 past it"):
        run(call, workspace=memory[64:])


@pytest.mark.parametrize("capacity", [2, 4, 9])
def test_graph_at_a_fixed_capacity(capacity: int) -> None:
    """Boundaries, slots and contents change between replays; sequences and rows may be padding."""
    tokens = 40 * capacity
    case = KdaCase(lengths=(40,) * capacity, state=False, H=1, **SERVED)
    call = case.make(DEVICE)
    del call["output_final_state"]
    pool = pool_of(case, 12, torch.float32, DEVICE)
    index = torch.arange(capacity, dtype=torch.int32, device=DEVICE)
    size = flashkda.get_workspace_size(tokens, 1, capacity)
    workspace = torch.empty(size, dtype=torch.uint8, device=DEVICE)

    def step() -> Result:
        return run(
            call, initial_state=pool, ssm_state_indices=index, pad_slot_id=-1, workspace=workspace
        )

    replay, results = capture(step)
    generator = torch.Generator().manual_seed(capacity)
    for used in (capacity, 1, capacity - 1):
        lengths = torch.zeros(capacity, dtype=torch.int64)
        lengths[:used] = torch.randint(0, 40, (used,), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        call["cu_seqlens"].copy_(ends)
        slots = torch.randperm(12, generator=generator)[:capacity]
        slots[used:] = -1
        index.copy_(slots)
        for name in ("q", "k", "v", "g"):
            call[name].normal_()
        before = pool.clone()
        replay()
        replayed = results[0].clone(), pool.clone()
        pool.copy_(before)
        expected, _ = step()
        assert same(replayed, (expected, pool))


def test_two_live_graphs() -> None:
    """Of prefill and of decode, replayed in turns on one pool."""
    prefill = CASE.but(lengths=(40, 33), state=False).make(DEVICE)
    decode = CASE.but(T=1, B=2, state=False).make(DEVICE)
    for call in (prefill, decode):
        del call["output_final_state"]
    pool = pool_of(CASE, 4, torch.float32, DEVICE)
    index = torch.tensor([3, 1], device=DEVICE)
    on_pool: dict[str, Any] = {"initial_state": pool, "ssm_state_indices": index}
    steps = (
        lambda: run(prefill, **on_pool),
        lambda: flashkda.fused_recurrent_kda(**decode, **on_pool, backend=BACKEND),
    )
    start = pool.clone()
    graphs = [capture(step) for step in steps]
    pool.copy_(start)
    outputs: list[Tensor] = []
    for i in (0, 1, 1, 0, 1):
        graphs[i][0]()
        outputs.append(graphs[i][1][0].clone())
    ended = pool.clone()
    pool.copy_(start)
    assert same(outputs, [steps[i]()[0] for i in (0, 1, 1, 0, 1)])
    assert same(pool, ended)
