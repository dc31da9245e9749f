"""The same call gives the same bits, and no result shares memory with another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calls import gradients
from cases import VARLEN, KdaCase, ids

import flashkda

CASES = [
    KdaCase(T=200, dtype=torch.float32),
    KdaCase(T=200, dtype=torch.bfloat16, gate="softplus"),
    VARLEN.but(dtype=torch.float32),
]
FUNCTIONS = [flashkda.chunk_kda, flashkda.fused_recurrent_kda]


@pytest.mark.parametrize("function", FUNCTIONS, ids=["chunk", "recurrent"])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_forward_repeats_to_the_bit(function: Any, case: KdaCase) -> None:
    call = case.make()
    first = [x.clone() for x in function(**call)]
    for _ in range(3):
        for a, b in zip(first, function(**call), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_backward_repeats_to_the_bit(case: KdaCase) -> None:
    call = case.make()
    first = gradients(flashkda.chunk_kda, call)
    second = gradients(flashkda.chunk_kda, call)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("function", FUNCTIONS, ids=["chunk", "recurrent"])
def test_results_are_fresh(function: Any) -> None:
    """Two results alive at once: the second call must not write into the first one's memory."""
    case = KdaCase(T=40, dtype=torch.float32)
    first = function(**case.make())
    kept = [x.clone() for x in first]
    second = function(**case.but(seed=1).make())
    for a, b, c in zip(first, kept, second, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_an_earlier_call_of_other_shape_leaves_no_trace() -> None:
    call = KdaCase(T=40, dtype=torch.float32).make()
    want, _ = flashkda.chunk_kda(**call)
    for other in (KdaCase(T=500, H=4), KdaCase(T=3, K=60, V=100), VARLEN):
        flashkda.chunk_kda(**other.but(dtype=torch.bfloat16).make())
    got, _ = flashkda.chunk_kda(**call)
    assert torch.equal(got, want)


def test_the_random_state_is_not_touched() -> None:
    call = KdaCase(T=40).make()
    before = torch.get_rng_state()
    flashkda.chunk_kda(**call)
    flashkda.fused_recurrent_kda(**call)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_thread_agrees_with_two() -> None:
    """Thread count may change the order of sums, never more than rounding."""
    call = KdaCase(T=200).make()
    one, _ = flashkda.chunk_kda(**call)
    torch.set_num_threads(2)
    try:
        two, _ = flashkda.chunk_kda(**call)
    finally:
        torch.set_num_threads(1)
    assert float((one - two).norm() / two.norm()) <= 1e-14
