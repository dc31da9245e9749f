"""Fixtures that every test gets: a fixed seed, one thread, memory that starts as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device on which the PyTorch path is tested."""
    return str(request.param)


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    """One: the tensors here are so small that a second thread costs more than it gives."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nan_filled_empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """Uninitialised memory is NaN, so a row that is never written can't pass for a zero.

    PyTorch does that in deterministic mode, inside ATen too. Not for the tests that mark
    themselves `gpu`: there the mode forbids operations that the product may use.
    """
    if request.node.get_closest_marker("gpu") is not None:
        yield
        return
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(previous)
