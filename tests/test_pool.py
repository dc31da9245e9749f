"""`chunk_kda` on a pool of states: read where they lie, written where they belong."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from calls import unmodified
from cases import KdaCase
from errors import BF16, FLOAT64, check, check_pair
from pools import (
    ORDER,
    POOL_CASES,
    PoolCase,
    check_in_pool,
    gather_run_scatter,
    pool_ids,
    pool_of,
    run_in_pool,
)
from torch import Tensor

import flashkda

pools = pytest.mark.parametrize("x", POOL_CASES, ids=pool_ids)


@pools
@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_pool_against_the_recurrence(function: Any, x: PoolCase) -> None:
    """Both functions mean the same by a pool."""
    check_in_pool(function, x, FLOAT64)


@pytest.mark.parametrize("x", [POOL_CASES[6], POOL_CASES[-4]], ids=pool_ids)
def test_pool_on_every_device(x: PoolCase, device: str) -> None:
    check_in_pool(flashkda.chunk_kda, x, FLOAT64, device, backend="torch")
    check_in_pool(flashkda.fused_recurrent_kda, x, FLOAT64, device, backend="torch")


@pools
def test_pool_is_gather_run_scatter(x: PoolCase) -> None:
    """To the bit, in the dtypes that servers have."""
    x = x.of(dtype=torch.bfloat16)
    call, before, o, pool = run_in_pool(flashkda.chunk_kda, x)
    want_o, want_pool = gather_run_scatter(flashkda.chunk_kda, x, call, before)
    assert torch.equal(o, want_o)
    assert torch.equal(pool, want_pool)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
def test_pool_in_half_precision(state_dtype: torch.dtype, v_first: bool) -> None:
    case = KdaCase(lengths=(33, 17, 5, 70), K=32, V=48, dtype=torch.bfloat16, state_v_first=v_first)
    x = PoolCase(case, (-1, 7, 7, 11), final=(8, 5, 2, 11), pad=-1, dtype=state_dtype)
    check_in_pool(flashkda.chunk_kda, x, BF16["slow"])


def test_padding_may_hold_nan() -> None:
    case = KdaCase(lengths=(20, 33, 5), state=False)
    call = case.make()
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 20:53] = float("nan")
    pool = pool_of(case, 6)
    pool[3] = float("nan")
    before = pool.clone()
    o, _ = flashkda.chunk_kda(
        **call, initial_state=pool, ssm_state_indices=torch.tensor([4, -1, 2]), pad_slot_id=-1
    )
    assert bool(torch.isfinite(o).all())
    assert bool((o[:, 20:53] == 0).all())
    assert bool(torch.isfinite(pool[[2, 4]]).all())
    assert torch.equal(pool[[0, 1, 5]], before[[0, 1, 5]])


def test_a_fresh_request_may_name_a_slot_of_garbage() -> None:
    """Its pad is neither read nor multiplied by zero: slot 0 is NaN here."""
    case = KdaCase(lengths=(20, 33), state=False)
    call = case.make()
    pool = torch.full_like(pool_of(case, 4), float("nan"))
    o, _ = flashkda.chunk_kda(
        **call,
        initial_state=pool,
        ssm_state_indices=torch.tensor([0, 0]),
        final_state_indices=torch.tensor([3, 1]),
        pad_slot_id=0,
    )
    check_pair((o, pool[[3, 1]]), oracle.kda(**call), FLOAT64)


def test_pool_that_is_only_read() -> None:
    """States come back dense: zeros for padding, and for no tokens what there was."""
    case = KdaCase(lengths=(20, 33, 0, 5), state_v_first=True, K=8, V=24)
    call = case.but(state=False).make()
    pool = pool_of(case, 6)
    more: dict[str, Any] = {
        "ssm_state_indices": torch.tensor([4, 0, 3, 2]),
        "inplace_final_state": False,
        "pad_slot_id": 0,
    }
    with unmodified({"pool": pool}):
        o, final = flashkda.chunk_kda(**call, initial_state=pool, **more)
    del call["output_final_state"]
    want_o, after = oracle.kda_pool(
        **call, pool=pool, ssm_state_indices=more["ssm_state_indices"], pad_slot_id=0
    )
    assert final is not None
    want = torch.stack([after[4], torch.zeros_like(after[4]), pool[3], after[2]])
    check_pair((o, final), (want_o, want), FLOAT64)
    with unmodified({"pool": pool}):
        o, nothing = flashkda.chunk_kda(**call, initial_state=pool, **more)
    assert nothing is None
    check({"o": o}, {"o": want_o}, FLOAT64)


@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_no_tokens_and_no_such_slot(function: Any, v_first: bool) -> None:
    """The state of an empty sequence is not made up: NaN, as the kernels have it."""
    case = KdaCase(lengths=(5, 0, 0, 0, 0, 2), state_v_first=v_first, K=8, V=24)
    call = case.but(state=False).make()
    pool, index = pool_of(case, 6), torch.tensor([4, 6, 3, -2, -1, 1])
    for pad, padded in ((None, []), (-2, [3]), (-1, [3, 4])):
        with unmodified({"pool": pool}):
            o, final = function(
                **call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False,
                pad_slot_id=pad,
            )  # fmt: skip
        names = [n for n in range(6) if bool(torch.isnan(final[n]).all())]
        assert names == [n for n in (1, 3, 4) if n not in padded]
        assert bool((final[padded] == 0).all())
        want = oracle.kda(**call, initial_state=pool[[4, 0, 3, 0, 0, 1]])
        check_pair((o, final[[0, 2, 5]]), (want[0], want[1][[0, 2, 5]]), FLOAT64)


@pytest.mark.parametrize("pad", [None, -1])
def test_no_tokens_and_no_such_count(pad: int | None) -> None:
    """A count outside its range names no slot, whatever the slots are."""
    case = KdaCase(lengths=(2, 0, 0, 0))
    call = case.but(state=False).make()
    pool = pool_of(case, 6)
    _, final = flashkda.fused_recurrent_kda(
        **call, initial_state=pool, inplace_final_state=False, pad_slot_id=pad,
        ssm_state_indices=torch.tensor([[4, 2], [3, -1], [-1, -1], [5, 1]]),
        num_accepted_tokens=torch.tensor([1, 0, 3, 2]),
    )  # fmt: skip
    assert final is not None
    assert bool(torch.isfinite(final[0]).all())
    assert bool(torch.isnan(final[1:3]).all())
    assert torch.equal(final[3], pool[1])


@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_requests_may_share_a_slot_that_is_only_read(function: Any) -> None:
    case = KdaCase(lengths=(20, 5, 9))
    call = case.but(state=False).make()
    pool, index = pool_of(case, 3), torch.tensor([1, 2, 1])
    with unmodified({"pool": pool}):
        got = function(
            **call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False
        )
    check_pair(got, oracle.kda(**call, initial_state=pool[index]), FLOAT64)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)], ids=str)
def test_a_pool_without_work(lengths: tuple[int, ...]) -> None:
    """A server with nothing to do, and tables that say nothing."""
    case = KdaCase(lengths=lengths, state=False)
    call = case.make()
    pool, states = pool_of(case, 3), pool_of(case, 2)
    with unmodified({"pool": pool, "states": states}):
        o, final = flashkda.chunk_kda(
            **call,
            initial_state=pool,
            ssm_state_indices=torch.full((len(lengths),), 99),
            checkpoint_states=states,
            checkpoint_offsets=torch.full((len(lengths),), 7),
        )
    assert final is pool
    assert o.shape == call["v"].shape


def test_dense_state_in_place() -> None:
    call = KdaCase(lengths=(20, 0, 5)).make()
    want = oracle.kda(**call)
    state = call["initial_state"].clone()
    o, final = flashkda.chunk_kda(**(call | {"initial_state": state}), inplace_final_state=True)
    assert final is state
    check_pair((o, state), want, FLOAT64)


def test_pool_with_out() -> None:
    x = PoolCase(KdaCase(lengths=(20, 5), tail=4), (3, -1), pad=-1, slots=4)
    out = torch.full((1, 29, 2, 16), 7.0, dtype=torch.float64)
    call, before, o, pool = run_in_pool(flashkda.chunk_kda, x, out=out)
    assert o is out
    assert bool((out[:, 25:] == 7).all())
    want_o, want_pool = oracle.kda_pool(**call, pool=before, **x.tables())
    check_pair((out[:, :25], pool), (want_o[:, :25], want_pool), FLOAT64)
    assert bool((out[:, 20:25] == 0).all())


def test_host_copy_of_the_boundaries() -> None:
    x = PoolCase(KdaCase(lengths=(20, 5, 0, 40)), ORDER)
    cpu = torch.tensor([0, 20, 25, 25, 65])
    check_in_pool(flashkda.chunk_kda, x, FLOAT64, cu_seqlens_cpu=cpu, max_seqlen=40)


def test_workspace_changes_nothing() -> None:
    call = KdaCase(lengths=(20, 5)).make()
    size = flashkda.get_workspace_size(25, 2, 2)
    workspace = torch.zeros(size + 64, dtype=torch.uint8)
    with unmodified(call):
        got = flashkda.chunk_kda(**call, workspace=workspace)
    want = flashkda.chunk_kda(**call)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        assert torch.equal(a, b)


@pytest.mark.parametrize("max_seqlen", [20, 1000])
def test_promise_on_lengths_changes_nothing(max_seqlen: int) -> None:
    call = KdaCase(lengths=(20, 5)).make()
    check_pair(flashkda.chunk_kda(**call, max_seqlen=max_seqlen), oracle.kda(**call), FLOAT64)


def test_prefill_in_pieces_on_a_pool_is_one_prefill() -> None:
    """Chunked prefill of three requests that advance by different counts, then decode."""
    case = KdaCase(T=100, B=3, gate="slow")
    call = case.make()
    want_o, want_state = oracle.kda(**call)
    index, pool = torch.tensor([4, 0, 2]), pool_of(case, 6)
    pool[index] = call["initial_state"]
    sentinels = pool[[1, 3, 5]].clone()
    plain = {x: y for x, y in call.items() if x not in ("output_final_state", "initial_state")}
    done = [0, 0, 0]
    outputs: list[list[Tensor]] = [[], [], []]
    for counts in ((17, 0, 64), (0, 31, 20), (80, 60, 16), (3, 9, 0)):
        bounds = torch.tensor([0, *counts]).cumsum(0)
        packed = {
            name: torch.cat(
                [call[name][n : n + 1, at : at + count] for n, (at, count) in pairs(done, counts)],
                dim=1,
            )
            for name in ("q", "k", "v", "g", "beta")
        }
        function = flashkda.chunk_kda if max(counts) > 16 else flashkda.fused_recurrent_kda
        o, _ = function(
            **(plain | packed), cu_seqlens=bounds, initial_state=pool, ssm_state_indices=index
        )
        for n, (at, count) in pairs(done, counts):
            outputs[n].append(o[0, int(bounds[n]) : int(bounds[n + 1])])
            done[n] = at + count
    assert done == [100, 100, 100]
    got = torch.stack([torch.cat(pieces) for pieces in outputs])
    check_pair((got, pool[index]), (want_o, want_state), FLOAT64)
    assert torch.equal(pool[[1, 3, 5]], sentinels)


def pairs(done: list[int], counts: tuple[int, ...]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(zip(done, counts, strict=True)))
