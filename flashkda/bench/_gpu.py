"""The forward pass on a GPU: device time of each shape, and host time of an eager call."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashkda._progress import Progress
from flashkda._selftest import relative_error
from flashkda.bench._timing import CALLS, graph_times
from flashkda.ops import chunk_kda, fused_recurrent_kda, fwd

DIM = 128
LOWER_BOUND = -5.0
# Relative error against the PyTorch path in float64, above which there are no times.
ALLOWED_ERROR = 1e-2
_RAGGED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Shape:
    """Sequences of equal length, or packed ones."""

    name: str
    batch: int
    tokens: int
    heads: int
    lengths: tuple[int, ...] | None = None


SHAPES = (
    Shape("1x8192 H96", 1, 8192, 96),
    Shape("ragged six H96", 1, sum(_RAGGED), 96, _RAGGED),
    Shape("8x1024 H96", 8, 1024, 96),
    Shape("1x8192 H64", 1, 8192, 64),
    Shape("1x8192 H32", 1, 8192, 32),
    Shape("1x8192 H12", 1, 8192, 12),
    Shape("1x8192 H8", 1, 8192, 8),
    Shape("32x256 H16", 32, 256, 16),
    Shape("1x512 H32", 1, 512, 32),
)
QUICK = tuple(x for x in SHAPES if x.name in ("1x8192 H96", "1x8192 H8", "32x256 H16"))


@dataclass(frozen=True)
class Call:
    """Tensors of one call of :func:`flashkda.fwd`."""

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, g (logits), beta (logits)
    A_log: Tensor  # [H]
    dt_bias: Tensor  # [H, 128]
    state: Tensor  # [N, H, 128, 128], read and written
    cu_seqlens: Tensor | None
    out: Tensor

    @staticmethod
    def draw(shape: Shape, gate: str) -> Call:
        """Random inputs with the gate of a fresh layer ("slow") or a fast random one."""
        size = (shape.batch, shape.tokens, shape.heads)
        like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v, g = (torch.randn(*size, DIM, **like) for _ in range(4))
        uniform = torch.rand(shape.heads, DIM, device="cuda")
        if gate == "slow":
            dt = 1e-3 * 100**uniform
            A_log, bias = torch.zeros(shape.heads, device="cuda"), dt + (-torch.expm1(-dt)).log()
        else:
            A_log, bias = torch.rand(shape.heads, device="cuda"), uniform
        boundaries = None
        if shape.lengths is not None:
            ends = torch.tensor((0, *shape.lengths)).cumsum(0)
            boundaries = ends.to("cuda", torch.int32)
        sequences = shape.batch if shape.lengths is None else len(shape.lengths)
        return Call(
            (q, k, v, g, torch.randn(*size, **like)),
            A_log,
            bias,
            torch.zeros(sequences, shape.heads, DIM, DIM, device="cuda"),
            boundaries,
            torch.empty_like(v),
        )

    def num_bytes(self) -> int:
        """Of all tensors that a call moves."""
        return sum(x.nbytes for x in (*self.inputs, self.out)) + 2 * self.state.nbytes

    def run(self) -> None:
        """The call, into its own tensors."""
        fwd(
            *self.inputs, DIM**-0.5, self.out, self.A_log, self.dt_bias, LOWER_BOUND,
            self.state, self.state, self.cu_seqlens,
        )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Device times of one shape in milliseconds."""

    shape: str
    gate: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float


def errors() -> dict[str, float]:
    """Relative error of outputs and states for each gate, against the PyTorch path in float64."""
    found = {}
    for gate in ("fast", "slow"):
        call = Call.draw(Shape("", 1, 700, 2), gate)
        options: dict[str, Any] = {
            "A_log": call.A_log,
            "dt_bias": call.dt_bias,
            "lower_bound": LOWER_BOUND,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
        }
        got = chunk_kda(*call.inputs, **options, backend="cuda")
        q, k, v, g, beta = (x.double() for x in call.inputs)
        want = chunk_kda(q, k, v, g, beta, **options, backend="torch")
        found[gate] = max(
            relative_error(x, y)
            for x, y in zip(got, want, strict=True)
            if x is not None and y is not None
        )
    return found


def device_times(shape: Shape, gate: str, repeats: int) -> Row:
    """A graph of calls on rotating data, replayed; the time of one call."""
    calls = [Call.draw(shape, gate)]
    cache = 2 * torch.cuda.get_device_properties(0).L2_cache_size
    while len(calls) < min(CALLS, 1 + cache // calls[0].num_bytes()):
        calls.append(Call.draw(shape, gate))
    times = graph_times([call.run for call in calls], repeats)
    return Row(shape.name, gate, statistics.median(times), min(times), max(times))


def checkpoint_times(repeats: int) -> tuple[float, float]:
    """Milliseconds of 8x2048 H16 without and with a checkpoint for each sequence."""
    shape = Shape("8x2048 H16", 8, 2048, 16)
    call = Call.draw(shape, "slow")
    kept = {
        "checkpoint_states": torch.empty_like(call.state),
        "checkpoint_offsets": torch.full((8,), 1024, dtype=torch.int32, device="cuda"),
    }
    q, k, v, g, beta = call.inputs

    def run(**more: Any) -> None:
        chunk_kda(
            q, k, v, g, beta,
            A_log=call.A_log, dt_bias=call.dt_bias, lower_bound=LOWER_BOUND,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            initial_state=call.state, inplace_final_state=True, state_v_first=True, out=call.out,
            **more,
        )  # fmt: skip

    plain = graph_times([run], repeats)
    with_checkpoints = graph_times([partial(run, **kept)], repeats)
    return statistics.median(plain), statistics.median(with_checkpoints)


def host_times(calls: int = 300, repeats: int = 10) -> dict[str, float]:
    """Microseconds that the host spends on one eager call of 4 heads, for each function."""
    options: dict[str, Any] = {
        "lower_bound": LOWER_BOUND,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }
    found = {}
    slots = torch.arange(1, device="cuda")
    functions: tuple[tuple[str, int, Any, dict[str, Any]], ...] = (
        ("chunk_kda 1x16", 16, chunk_kda, {"output_final_state": True}),
        ("chunk_kda 1x64", 64, chunk_kda, {"output_final_state": True}),
        ("fused_recurrent_kda 1x1", 1, fused_recurrent_kda, {"ssm_state_indices": slots}),
    )
    for name, tokens, function, more in functions:
        call = Call.draw(Shape("", 1, tokens, 4), "slow")
        options |= {"A_log": call.A_log, "dt_bias": call.dt_bias, "initial_state": call.state}
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function(*call.inputs, **options, **more)
            times.append((time.perf_counter() - start) / calls)
        found[name] = 1e6 * statistics.median(times)
    return found


def run(
    shapes: tuple[Shape, ...], repeats: int
) -> tuple[list[Row], dict[str, float], tuple[float, float]]:
    """Rows of all shapes for both gates, host times of calls in microseconds, checkpoint times."""
    rows = []
    with torch.inference_mode(), Progress("benchmark", 2 * len(shapes) + 1) as bar:
        for shape in shapes:
            for gate in ("fast", "slow"):
                rows.append(device_times(shape, gate, repeats))
                torch.cuda.empty_cache()
                bar.advance()
        microseconds = host_times()
        checkpoints = checkpoint_times(repeats)
        bar.advance()
    return rows, microseconds, checkpoints
