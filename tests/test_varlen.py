"""Packed sequences: each one is what it would be alone, wherever it lies."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from calls import sequence, unmodified
from cases import EMPTIES, VARLEN, KdaCase, ids
from errors import FLOAT32, FLOAT64, check, check_pair

import flashkda

PACKS = [
    VARLEN,
    VARLEN.but(gate="softplus"),
    VARLEN.but(gate="none", state=False),
    VARLEN.but(tail=9),
    VARLEN.but(H=2, HV=4, K=8, V=24, state_v_first=True),
    KdaCase(lengths=(1,) * 40),
    KdaCase(lengths=(1, 2, 7, 15, 17, 63, 64, 65), gate="slow"),
    KdaCase(lengths=(16, 32, 64, 128)),
    KdaCase(lengths=(0, 3) * 32),
    *EMPTIES,
]


@pytest.mark.parametrize("case", PACKS, ids=ids)
def test_each_sequence_is_what_it_is_alone(case: KdaCase) -> None:
    call = case.make()
    with unmodified(call):
        o, state = flashkda.chunk_kda(**call)
    assert state is not None
    ends = call["cu_seqlens"].tolist()
    assert bool((o[:, ends[-1] :] == 0).all())
    for n, (lo, hi) in enumerate(pairwise(ends)):
        alone = flashkda.chunk_kda(**sequence(call, n))
        assert alone[1] is not None
        check_pair((o[:, lo:hi], state[n : n + 1]), (alone[0], alone[1]), FLOAT64)


@pytest.mark.parametrize("case", PACKS, ids=ids)
def test_against_the_recurrence(case: KdaCase) -> None:
    call = case.make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("seed", range(12))
def test_random_partitions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=generator))
    lengths = torch.randint(0, 90, (count,), generator=generator)
    lengths[torch.rand(count, generator=generator) < 0.3] = 0
    case = KdaCase(
        lengths=tuple(lengths.tolist()), tail=seed % 3, gate=("fast", "slow", "softplus")[seed % 3]
    )
    call = case.make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


def test_empty_sequences_keep_their_state_to_the_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = KdaCase(lengths=(0, 5, 0, 40, 0), dtype=torch.bfloat16, state_dtype=dtype)
        call = case.make()
        _, state = flashkda.chunk_kda(**call)
        assert state is not None
        assert torch.equal(state[[0, 2, 4]], call["initial_state"][[0, 2, 4]])


def test_empty_sequences_without_state_end_at_zero() -> None:
    call = KdaCase(lengths=(0, 5, 0), state=False).make()
    _, state = flashkda.chunk_kda(**call)
    assert state is not None
    assert bool((state[[0, 2]] == 0).all())
    assert bool((state[1] != 0).any())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
def test_no_tokens_at_all(batch: int, state: bool) -> None:
    call = KdaCase(T=0, B=batch, state=state).make()
    o, final = flashkda.chunk_kda(**call)
    assert o.shape == call["v"].shape
    assert final is not None
    assert torch.equal(final, call["initial_state"] if state else torch.zeros_like(final))


def test_no_sequences_at_all() -> None:
    """cu_seqlens = [0]: N = 0; every row is past the end."""
    call = KdaCase(lengths=(), tail=4).make()
    o, final = flashkda.chunk_kda(**call)
    assert bool((o == 0).all())
    assert final is not None
    assert final.shape == (0, 2, 16, 16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("layout", ["plain", "every_other", "column", "reversed_twice"])
def test_cu_seqlens_dtype_and_stride(dtype: torch.dtype, layout: str) -> None:
    call = VARLEN.but(cu_dtype=dtype).make()
    want = oracle.kda(**call)
    cu = call["cu_seqlens"]
    if layout == "every_other":
        big = torch.full((2 * len(cu),), 999, dtype=dtype)
        big[::2] = cu
        cu = big[::2]
    elif layout == "column":
        big = torch.full((len(cu), 3), 999, dtype=dtype)
        big[:, 1] = cu
        cu = big[:, 1]
    elif layout == "reversed_twice":
        cu = cu.flip(0).flip(0)
    check_pair(flashkda.chunk_kda(**(call | {"cu_seqlens": cu})), want, FLOAT64)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_a_host_copy_of_cu_seqlens_changes_nothing(dtype: torch.dtype) -> None:
    call = VARLEN.make()
    want = oracle.kda(**call)
    call["cu_seqlens_cpu"] = call["cu_seqlens"].to(dtype, copy=True)
    check_pair(flashkda.chunk_kda(**call), want, FLOAT64)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
def test_rows_past_the_end_are_never_read(poison: float) -> None:
    case = VARLEN.but(tail=11, dtype=torch.float32)
    call = case.make()
    want = oracle.kda(**call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, -11:] = poison
    check_pair(flashkda.chunk_kda(**call), want, FLOAT32)


def test_rows_past_the_end_keep_what_out_held() -> None:
    call = VARLEN.but(tail=11).make()
    out = torch.full_like(call["v"], 7.0)
    flashkda.chunk_kda(**call, out=out)
    want, _ = oracle.kda(**call)
    assert bool((out[:, -11:] == 7).all())
    check({"o": out[:, :-11]}, {"o": want[:, :-11]}, FLOAT64)


def test_one_packed_sequence_is_the_dense_call() -> None:
    call = KdaCase(T=100).make()
    packed = call | {"cu_seqlens": torch.tensor([0, 100])}
    dense = flashkda.chunk_kda(**call)
    assert dense[1] is not None
    check_pair(flashkda.chunk_kda(**packed), (dense[0], dense[1]), FLOAT64)


def test_equal_lengths_are_the_batched_call() -> None:
    call = KdaCase(T=50, B=3).make()
    packed: dict[str, Any] = dict(call)
    for name in ("q", "k", "v", "g", "beta"):
        packed[name] = call[name].flatten(0, 1)[None]
    packed["cu_seqlens"] = torch.tensor([0, 50, 100, 150])
    o, state = flashkda.chunk_kda(**packed)
    dense = flashkda.chunk_kda(**call)
    assert dense[1] is not None
    check_pair((o.reshape(dense[0].shape), state), (dense[0], dense[1]), FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_results_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """To the bit: chunks are those that a sequence has when it is alone."""
    call = KdaCase(lengths=(130, 16, 0, 1, 32, 17, 65, 33), dtype=dtype).make()
    o, state = flashkda.chunk_kda(**call)
    assert state is not None
    bounds = call["cu_seqlens"].tolist()
    for n in range(len(bounds) - 1):
        alone, final = flashkda.chunk_kda(**sequence(call, n))
        assert final is not None
        assert torch.equal(o[:, bounds[n] : bounds[n + 1]], alone)
        assert torch.equal(state[n : n + 1], final)
