"""Device times of calls by CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

CALLS = 20  # in one graph, at least: short calls are timed together


def graph_times(calls: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Milliseconds of one call: a graph goes through all calls in turn, and is replayed.

    The data of all calls together should be larger than the L2 cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    count = max(CALLS, len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / count)
    return times
