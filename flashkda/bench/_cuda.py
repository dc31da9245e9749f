"""Measuring on a GPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence

import torch

from flashkda.bench._devices import CALLS, COPY_BYTES, Run, warm_up

_CYCLES_PER_SECOND = 2e9  # at most


class Cuda:
    """A GPU: events on its stream behind a flushed L2, and graphs for what is short."""

    dtype = torch.bfloat16
    has_graphs = True

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        device = self.device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        self.cache_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(self.cache_bytes, 2**28), dtype=torch.int8, device=device)

    def wait(self) -> None:
        """Raises what kernels left behind."""
        torch.cuda.synchronize()

    def _events(self, work: Run, before: Run) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before()
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e-3 * float(start.elapsed_time(end))

    def times(self, run: Run, repeats: int) -> list[float]:
        """While a wait on the device lets the host run ahead, so that its time doesn't count."""
        warm_up(run, self.wait)
        host = statistics.median(self.host_times(run, 1, 5))
        cycles = int(_CYCLES_PER_SECOND * min(1.5 * host, 0.01))

        def prepare() -> None:
            self._flush.zero_()
            torch.cuda._sleep(cycles)

        return [self._events(run, prepare) for _ in range(repeats)]

    def graph_times(self, runs: Sequence[Run], repeats: int) -> list[float]:
        """A graph goes through all calls in turn, at least :data:`CALLS` times."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(stream)
        count = max(CALLS, len(runs))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                runs[i % len(runs)]()
        warm_up(graph.replay, self.wait)
        return [self._events(graph.replay, lambda: None) / count for _ in range(repeats)]

    def host_times(self, run: Run, calls: int, repeats: int) -> list[float]:
        """From an idle device, so that its queue never fills."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return found

    def peak_bytes(self, run: Run) -> int | None:
        """As PyTorch's allocator counts it."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated()) - before

    def copy_bandwidth(self) -> float:
        """Of 1 GiB, by a kernel: a graph's copy node is slower."""
        source = torch.zeros(COPY_BYTES // 4, device=self.device)
        target = torch.empty_like(source)
        times = self.graph_times([lambda: torch.neg(source, out=target)], 20)
        return 2 * source.nbytes / statistics.median(times)

    def release(self) -> None:
        """Of graphs too."""
        gc.collect()
        torch.cuda.empty_cache()
