"""Forward on the CPU beside fla-core's two reference implementations in PyTorch."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module, metadata

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkda._progress import Progress
from flashkda._selftest import recurrence, relative_error
from flashkda.ops import chunk_kda

RIVAL_VERSION = "0.6.0"
# A result further than this from the float64 recurrence gets no time.
ALLOWED_ERROR = 1e-5

Forward = Callable[[], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Inputs:
    """Activated inputs, as all three implementations take them: [1, T, H, 128], float32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor  # log decay
    beta: Tensor  # [1, T, H]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g, self.beta

    @staticmethod
    def draw(num_tokens: int, num_heads: int, dim: int, gate: str, seed: int = 0) -> Inputs:
        """Random inputs with the gate of a fresh layer ("slow") or a fast random one."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, num_tokens, num_heads, *shape, generator=generator)

        q, k, v, x, b = normal(dim), normal(dim), normal(dim), normal(dim), normal()
        uniform = torch.rand(num_heads, dim, generator=generator)
        if gate == "slow":
            dt = 1e-3 * 100**uniform
            g = -5 * torch.sigmoid(x + dt + torch.log(-torch.expm1(-dt)))
        else:
            rate = torch.rand(num_heads, 1, generator=generator).exp()
            g = -5 * torch.sigmoid(rate * (x + uniform))
        return Inputs(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, b.sigmoid())


@dataclass(frozen=True)
class Row:
    """One implementation: its error, and its times if the error is small enough.

    Attributes:
        name: of the function.
        error: relative in norm against float64; None if it could not run.
        median_s: median of the times in seconds, or None.
        fastest_s: the fastest, or None.
        slowest_s: the slowest, or None.
        note: why there is no time.
    """

    name: str
    error: float | None = None
    median_s: float | None = None
    fastest_s: float | None = None
    slowest_s: float | None = None
    note: str = ""


def rivals() -> tuple[dict[str, Callable[..., tuple[Tensor, Tensor | None]]], str]:
    """fla-core's functions by name, or none and the reason."""
    try:
        version = metadata.version("fla-core")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns on machines without a GPU
            module = import_module("fla.ops.kda.naive")
    except (ImportError, RuntimeError) as error:
        return {}, (
            f"fla-core is missing or does not import ({error}); "
            f"pip install fla-core=={RIVAL_VERSION} triton einops packaging"
        )
    names = ("naive_recurrent_kda", "naive_chunk_kda")
    return {f"fla-core {version} {name}": getattr(module, name) for name in names}, ""


def run(num_tokens: int, num_heads: int, dim: int, gate: str, repeats: int) -> list[Row]:
    """Checks every implementation against float64, then times those that are right, in turns."""
    inputs = Inputs.draw(num_tokens, num_heads, dim, gate)
    args = inputs.tensors()
    functions: dict[str, Forward] = {
        "flashkda chunk_kda": lambda: chunk_kda(*args, output_final_state=True)
    }
    found, missing = rivals()
    for name, function in found.items():
        functions[name] = lambda f=function: f(*args, output_final_state=True)  # type: ignore[misc]

    errors: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in functions}
    with torch.inference_mode(), Progress("benchmark", 1 + len(functions) * (1 + repeats)) as bar:
        want_o, want_state = recurrence(*args, scale=dim**-0.5)
        bar.advance()
        for name, function in functions.items():  # also the warm-up
            o, state = function()
            assert state is not None
            errors[name] = max(relative_error(o, want_o), relative_error(state, want_state))
            bar.advance()
        for _ in range(repeats):
            for name, function in functions.items():
                if errors[name] <= ALLOWED_ERROR:
                    start = time.perf_counter()
                    function()
                    times[name].append(time.perf_counter() - start)
                bar.advance()

    rows = []
    for name, error in errors.items():
        if times[name]:
            median = statistics.median(times[name])
            rows.append(Row(name, error, median, min(times[name]), max(times[name])))
        else:
            rows.append(Row(name, error, note=f"wrong: error above {ALLOWED_ERROR:.0e}, no time"))
    if missing:
        rows.append(Row("fla-core", note=missing))
    return rows


def as_cells(rows: list[Row]) -> list[list[str]]:
    """The rows as text: name, median and range of the times, ratio to ours, error."""
    ours = rows[0].median_s
    cells = []
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.1e}"
        if row.median_s is None or row.fastest_s is None or row.slowest_s is None:
            cells.append([row.name, "-", "-", row.note, error])
            continue
        ratio = "-" if ours is None else f"{row.median_s / ours:.2f}x"
        between = f"{row.fastest_s * 1e3:.1f} to {row.slowest_s * 1e3:.1f}"
        cells.append([row.name, f"{row.median_s * 1e3:.1f}", between, ratio, error])
    return cells


def as_data(rows: list[Row]) -> list[dict[str, object]]:
    """The rows as plain data."""
    return [asdict(row) for row in rows]
