"""What tests of the CUDA kernels share: the call, its float64 references, equality to the bit."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import oracle
import pytest
import torch
from calls import double
from cases import KdaCase
from torch import Tensor

import flashkda
from flashkda import _native

DEVICE = "cuda"
BACKEND = "cuda"

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CASE = KdaCase(T=100, K=128, V=128, dtype=torch.bfloat16)
"""The smallest change to it makes a call that the kernels serve."""

# Chunks of the kernels: states at multiples of these are those of a call that ends there.
BOUNDED_CHUNK = 32  # the gate is known to be at least -5
UNBOUNDED_CHUNK = 16

Call = dict[str, Any]
Result = tuple[Tensor, Tensor]


def bounded(call: Call) -> bool:
    return call.get("lower_bound") is not None or call.get("safe_gate", False)


def chunk_of(call: Call) -> int:
    return BOUNDED_CHUNK if bounded(call) else UNBOUNDED_CHUNK


IN_CHUNKS = {"max_seqlen": 2**20}
"""Short sequences too: equal bits are promised between calls that are taken in the same way."""


def run(call: Call, **more: Any) -> Result:
    """The call on the kernels, in chunks: whatever they can't serve is an error."""
    o, state = flashkda.chunk_kda(**call, **(IN_CHUNKS | more), backend=BACKEND)
    if state is None:
        state = o.new_empty(0)
    return o, state


def reference(call: Call) -> Result:
    """The PyTorch path in float64; `test_the_references_agree` holds it against the recurrence."""
    o, state = flashkda.chunk_kda(**double(call), backend="torch")
    assert state is not None
    return o, state


def token_reference(call: Call) -> Result:
    """The float64 recurrence itself."""
    return oracle.kda(**{name: x for name, x in call.items() if name != "safe_gate"})


def same(got: Any, want: Any) -> bool:
    """Equal to the bit, except that -0.0 is 0.0; NaN is never equal."""
    if isinstance(got, Tensor):
        return torch.equal(got, want)
    return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))


def finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def without_state(call: Call) -> Call:
    return {name: x for name, x in call.items() if name != "initial_state"}


def more_heads(call: Call, times: int) -> Call:
    """The call with its heads repeated: head h and head h + H are the same."""
    result = dict(call)
    for name in ("q", "k", "v", "g", "beta"):
        result[name] = call[name].repeat(1, 1, times, *(1,) * (call[name].dim() - 3))
    for name in ("A_log", "dt_bias"):
        if call.get(name) is not None:
            result[name] = call[name].repeat(times, *(1,) * (call[name].dim() - 1))
    if call.get("initial_state") is not None:
        result["initial_state"] = call["initial_state"].repeat(1, times, 1, 1)
    return result


def capture(function: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
    """(replay, results) of a CUDA graph; the function ran once before, as capture asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph.replay, results


@contextmanager
def forced_mma_sync() -> Iterator[None]:
    """scan in the form that Blackwell has, on devices with one of their own too."""
    library = _native._library
    assert library is not None, "no kernels are loaded"
    library.flashkda_force_mma_sync(1)
    try:
        yield
    finally:
        library.flashkda_force_mma_sync(0)


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """A kernel that hangs can't be interrupted, so the process ends; its stacks are shown."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    finally:
        faulthandler.cancel_dump_traceback_later()
