"""Measuring on a device: how long calls take there, and what its memory can do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], Any]

CALLS = 20  # in one graph, at least: short calls are timed together
_WARM_UP_SECONDS = 0.1
COPY_BYTES = 2**30


class Device(Protocol):
    """Where calls run and are timed. Times are in seconds."""

    device: torch.device
    dtype: torch.dtype  # of inputs
    cache_bytes: int  # data of calls in turn should be larger than this
    has_graphs: bool

    def wait(self) -> None:
        """Until all work is done; raises what went wrong."""

    def times(self, run: Run, repeats: int) -> list[float]:
        """Of one call after the other, each from a cold cache, once clocks are up."""

    def graph_times(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """Of a call, on average over a graph of calls in turn."""

    def host_times(self, run: Run, calls: int, repeats: int) -> list[float]:
        """That the host takes for a call, whether or not the device is done."""

    def peak_bytes(self, run: Run) -> int | None:
        """Memory that a call takes on top of what is there, or None if it can't be told."""

    def copy_bandwidth(self) -> float:
        """Bytes a second that a copy reads and writes."""

    def release(self) -> None:
        """Gives memory of dead tensors back."""


def warm_up(run: Run, wait: Callable[[], None]) -> None:
    stop = time.perf_counter() + _WARM_UP_SECONDS
    while time.perf_counter() < stop:
        run()
        wait()


class Cpu:
    """The PyTorch path: wall-clock times; nothing is flushed."""

    dtype = torch.float32
    cache_bytes = 0
    has_graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def wait(self) -> None:
        """Work is done when a call returns."""

    def times(self, run: Run, repeats: int) -> list[float]:
        """Of one call after the other."""
        warm_up(run, self.wait)
        return self.host_times(run, 1, repeats)

    def graph_times(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """There are no graphs."""
        raise NotImplementedError

    def host_times(self, run: Run, calls: int, repeats: int) -> list[float]:
        """The same as any time."""
        found = []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - start) / calls)
        return found

    def peak_bytes(self, run: Run) -> int | None:
        """Not by PyTorch: a fresh process has to be watched from outside."""
        return None

    def copy_bandwidth(self) -> float:
        """Of 256 MiB."""
        source = torch.zeros(COPY_BYTES // 16)
        target = torch.empty_like(source)
        times = self.times(lambda: torch.neg(source, out=target), 5)
        return 2 * source.nbytes / statistics.median(times)

    def release(self) -> None:
        """The interpreter does that."""


def open_device(name: str) -> Device:
    """The device called ``name``.

    Raises:
        RuntimeError: there is none.
        ValueError: it is neither a CPU nor a CUDA device.
    """
    device = torch.device(name)
    if device.type == "cpu":
        return Cpu()
    if device.type != "cuda":
        raise ValueError(f"--device {name}: expected cpu, cuda or cuda:N")
    from flashkda.bench._cuda import Cuda

    return Cuda(device)
