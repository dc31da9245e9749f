"""Decode on a GPU: device time of a step over state pools, beside the card's copy bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkda._progress import Progress
from flashkda._selftest import relative_error
from flashkda.bench._timing import CALLS, graph_times
from flashkda.ops import fused_recurrent_kda

DIM = 128
ALLOWED_ERROR = 3e-3  # of outputs, which are rounded to bfloat16


@dataclass(frozen=True)
class Shape:
    """Sequences that take a few tokens each, in slots of a pool."""

    rows: int
    heads: int
    tokens: int = 1
    state_dtype: torch.dtype = torch.float32
    v_first: bool = True
    is_ready: bool = False  # the promise that states may be read early

    @property
    def name(self) -> str:
        dtype = str(self.state_dtype).removeprefix("torch.")
        layout = "V, K" if self.v_first else "K, V"
        promise = ", state_is_ready" if self.is_ready else ""
        return f"{self.rows} rows, H{self.heads}, T={self.tokens}, {dtype} [{layout}]{promise}"

    def state_bytes(self) -> int:
        """Read and written by a step."""
        return 2 * self.rows * self.heads * DIM * DIM * self.state_dtype.itemsize


_BF16 = torch.bfloat16
SHAPES = (
    Shape(256, 32),
    Shape(128, 32),
    Shape(32, 32),
    Shape(1, 32),
    Shape(256, 16, state_dtype=_BF16),
    Shape(1, 12),
    Shape(128, 12),
    Shape(512, 12),
    Shape(128, 32, tokens=4),
    Shape(128, 32, tokens=16),
    Shape(128, 32, is_ready=True),
    Shape(32, 32, is_ready=True),
    Shape(1, 32, is_ready=True),
    Shape(1, 12, is_ready=True),
    Shape(256, 32, v_first=False),
    Shape(256, 16, state_dtype=_BF16, v_first=False),
)
QUICK = (SHAPES[0], SHAPES[3], SHAPES[4])


@dataclass(frozen=True)
class Row:
    """Milliseconds of a step, and its state traffic in bytes a second."""

    shape: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    bytes_per_s: float


class Step:
    """A decode step on a slot for each sequence."""

    def __init__(self, shape: Shape, pool: Tensor, slots: Tensor) -> None:
        size = (shape.rows, shape.tokens, shape.heads)
        like: dict[str, Any] = {"device": "cuda", "dtype": _BF16}
        self.inputs = [torch.randn(*size, DIM, **like) for _ in range(4)]
        self.inputs.append(torch.randn(*size, **like))
        self.options: dict[str, Any] = {
            "A_log": torch.rand(shape.heads, device="cuda"),
            "dt_bias": torch.rand(shape.heads, DIM, device="cuda"),
            "lower_bound": -5.0,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "state_v_first": shape.v_first,
            "state_is_ready": shape.is_ready,
        }
        self.pool = pool
        self.slots = slots

    def run(self) -> Tensor:
        """One step, in place."""
        q, k, v, g, beta = self.inputs
        out, _ = fused_recurrent_kda(
            q, k, v, g, beta, **self.options,
            initial_state=self.pool, ssm_state_indices=self.slots,
        )  # fmt: skip
        return out

    def error(self) -> float:
        """Relative error of outputs against the PyTorch path in float64."""
        start = self.pool[self.slots].double()
        q, k, v, g, beta = (x.double() for x in self.inputs)
        want, _ = fused_recurrent_kda(
            q,
            k,
            v,
            g,
            beta,
            **self.options,
            initial_state=start,
            backend="torch",
        )
        return relative_error(self.run(), want)


def _steps(shape: Shape) -> list[Step]:
    """Steps on different slots of one pool, together larger than the L2 cache."""
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    # Two at least: the promise of early reads forbids the same slots twice in a row.
    count = min(CALLS, max(2, 1 + cache // (shape.state_bytes() // 2)))
    slots = torch.randperm(count * shape.rows, device="cuda", dtype=torch.int32)
    pool_shape = (count * shape.rows, shape.heads, DIM, DIM)
    pool = torch.zeros(pool_shape, dtype=shape.state_dtype, device="cuda")
    return [Step(shape, pool, part) for part in slots.split(shape.rows)]


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second that a copy of 1 GiB reads and writes."""
    source = torch.empty(2**28, device="cuda").fill_(1.0)
    target = torch.empty_like(source)
    # By a kernel: a graph's copy node is slower.
    copies: list[Callable[[], Any]] = [lambda: torch.neg(source, out=target)]
    return 2 * source.nbytes / (1e-3 * statistics.median(graph_times(copies, repeats)))


def run(shapes: tuple[Shape, ...], repeats: int) -> tuple[list[Row], float]:
    """A row for each shape, and the copy bandwidth.

    Raises:
        RuntimeError: a result is wrong; there are no times then.
    """
    rows = []
    with torch.inference_mode(), Progress("decode", len(shapes) + 1) as bar:
        bandwidth = copy_bandwidth(repeats)
        bar.advance()
        for shape in shapes:
            steps = _steps(shape)
            error = steps[0].error()
            if not error <= ALLOWED_ERROR:
                raise RuntimeError(f"{shape.name}: wrong outputs, relative error {error:.1e}")
            times = graph_times([step.run for step in steps], repeats)
            median = statistics.median(times)
            speed = shape.state_bytes() / (1e-3 * median)
            rows.append(Row(shape.name, median, min(times), max(times), speed))
            del steps
            torch.cuda.empty_cache()
            bar.advance()
    return rows, bandwidth


def as_cells(rows: list[Row], bandwidth: float) -> list[list[str]]:
    """For a table: shape, median, range, state traffic, share of the copy bandwidth."""
    return [
        [
            x.shape,
            f"{x.median_ms:.4f}",
            f"{x.fastest_ms:.4f} to {x.slowest_ms:.4f}",
            f"{x.bytes_per_s / 1e12:.2f}",
            f"{100 * x.bytes_per_s / bandwidth:.0f} %",
        ]
        for x in rows
    ]
