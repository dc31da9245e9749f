"""What the kernels must reach on one H200, and what they are meant to reach next; no rivals."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import flashkda
from flashkda._progress import Progress
from flashkda.bench._cases import RAGGED, Case, parse
from flashkda.bench._devices import Device
from flashkda.bench._inputs import DIM, Inputs
from flashkda.bench._measure import measure
from flashkda.bench._report import markdown_table
from flashkda.bench._systems import IN_KERNEL, FlashKDA


@dataclass(frozen=True)
class Target:
    """Two bounds of a figure, both in its unit.

    Attributes:
        limit: it is kept today; missing it is an error.
        goal: where the work goes; nothing fails for it.
        at_least: they are lower bounds.
    """

    limit: float | None = None
    goal: float | None = None
    at_least: bool = False

    def __str__(self) -> str:
        word = "at least" if self.at_least else "at most"
        parts = [] if self.limit is None else [f"{word} {self.limit:g}"]
        return ", ".join(parts if self.goal is None else [*parts, f"goal {self.goal:g}"])

    def holds(self, value: float, bound: float) -> bool:
        """``value`` is on the right side of ``bound``."""
        return value >= bound if self.at_least else value <= bound


# Milliseconds of a call.
PREFILL = {  # with the fast and with the slow gate
    "1x8192xH96": Target(0.80, goal=0.36),
    f"{RAGGED}xH96": Target(0.80, goal=0.36),
    "8x1024xH96": Target(0.80, goal=0.36),
    "8x1024xH64": Target(goal=0.25),
    "1x8192xH64": Target(0.60, goal=0.30),
    "1x8192xH32": Target(0.45, goal=0.30),
    "1x8192xH16": Target(goal=0.30),
    "1x8192xH12": Target(0.40, goal=0.30),
    "1x8192xH8": Target(0.40, goal=0.30),
    "32x256xH16": Target(0.16, goal=0.090),
    "128x64xH32": Target(goal=0.30),
    "1x2048xH12": Target(goal=0.080),
    "1x512xH32": Target(0.05, goal=0.030),
}
DECODE = {
    "256x1xH32": Target(0.290),
    "128x1xH32": Target(0.145),
    "32x1xH32": Target(0.038),
    "1x1xH32": Target(0.0060),
    "256x1xH16:bf16": Target(0.080),
    "1x1xH12": Target(0.0050),
    "128x1xH12": Target(0.060),
    "512x1xH12": Target(0.225),
    "128x4xH32": Target(),
    "128x16xH32": Target(),
    "128x1xH32:ready": Target(),
    "32x1xH32:ready": Target(),
    "1x1xH32:ready": Target(),
    "1x1xH12:ready": Target(),
    "256x1xH32:kv": Target(),
    "256x1xH16:bf16:kv": Target(),
}
QUICK = ("1x8192xH96", "1x8192xH8", "32x256xH16", "256x1xH32", "1x1xH32", "256x1xH16:bf16")
GATES_APART = Target(goal=5.0)  # percent
STREAMED, STATE_TRAFFIC = "256x1xH32", Target(88.0, at_least=True)  # percent of a copy's bandwidth
DRAFTS, FOUR_TOKENS = ("128x1xH32", "128x4xH32"), Target(1.35)  # times one token
CHECKPOINTED, CHECKPOINTS = "8x2048xH16", Target(goal=3.0)  # percent
HOST_CALLS = 300
HOST = {  # microseconds; they depend on the processor too
    "chunk_kda 1x16": Target(goal=20.0),
    "chunk_kda 1x64": Target(),
    "fused_recurrent_kda 1x1": Target(goal=18.0),
}


@dataclass(frozen=True)
class Figure:
    """One measurement beside its target.

    Attributes:
        name: of what was measured.
        value: or None if there is none.
        unit: of value and target.
        target: its bounds.
        errors: relative to float64.
        note: why there is no value.
    """

    name: str
    value: float | None
    unit: str
    target: Target = Target()
    errors: str = ""
    note: str = ""

    @property
    def fails(self) -> bool:
        """There is no right result, or the limit is missed."""
        target = self.target
        if self.value is None:
            return True
        return target.limit is not None and not target.holds(self.value, target.limit)

    @property
    def measured(self) -> str:
        """The value with its unit."""
        return "-" if self.value is None else f"{self.value:.4g} {self.unit}"

    @property
    def verdict(self) -> str:
        """In a word or two, or the reason that there is none."""
        target = self.target
        if self.value is None:
            return self.note
        if self.fails:
            return "MISSED"
        if target.goal is not None and target.holds(self.value, target.goal):
            return "goal reached"
        if target.limit is not None:
            return "kept"
        return "" if target.goal is None else "goal open"


def figures(
    device: Device, bandwidth: float, *, quick: bool, repeats: int, dim: int = DIM
) -> list[Figure]:
    """All measurements; times of calls by graphs, whatever they take."""
    targets = PREFILL | DECODE
    cases = [Case(parse(name)[0], gate) for name in PREFILL for gate in ("fast", "slow")]
    cases += [Case(parse(name)[0], "fast") for name in DECODE]
    if quick:
        cases = [case for case in cases if case.shape.name in QUICK]
    found: list[Figure] = []
    milliseconds: dict[tuple[str, str], float] = {}
    with Progress("targets", len(cases) + 1) as bar:
        for case in cases:
            name = case.shape.name
            record = measure(
                case, [FlashKDA()], device, repeats=repeats, dim=dim, graph_below=float("inf")
            )
            (row,) = record.rows
            value = None
            if row.seconds is not None:
                value = milliseconds[name, case.gate] = 1e3 * row.seconds
            errors = ", ".join(f"{key} {error:.1e}" for key, error in row.errors.items())
            found.append(
                Figure(f"{name}, {case.gate} gate", value, "ms", targets[name], errors, row.note)
            )
            bar.advance()
        found += _relations(milliseconds, bandwidth, dim)
        with torch.inference_mode():
            found += [_checkpoints(device, repeats, dim), *_host(device, dim)]
    return found


def _relations(times: dict[tuple[str, str], float], bandwidth: float, dim: int) -> list[Figure]:
    """What follows from the times of calls, as far as those were measured."""
    found = []
    apart = {
        name: 100 * abs(slow / times[name, "fast"] - 1)
        for (name, gate), slow in times.items()
        if gate == "slow" and (name, "fast") in times
    }
    if apart:
        name = max(apart, key=apart.__getitem__)
        found.append(
            Figure(f"fast and slow gates apart, at most ({name})", apart[name], "%", GATES_APART)
        )
    one, four = (times.get((name, "fast")) for name in DRAFTS)
    if one is not None and four is not None:
        found.append(Figure(f"{DRAFTS[1]} over {DRAFTS[0]}", four / one, "x", FOUR_TOKENS))
    step = times.get((STREAMED, "fast"))
    if step is not None:
        (shape,) = parse(STREAMED)
        states = len(shape.lengths) * shape.heads * dim * dim * torch.float32.itemsize
        share = 100 * 2 * states / (1e-3 * step) / bandwidth
        name = f"state traffic of {STREAMED}, share of a copy at {bandwidth / 1e12:.2f} TB/s"
        found.append(Figure(name, share, "%", STATE_TRAFFIC))
    return found


def _draw(name: str, device: Device, dim: int) -> Inputs:
    return Inputs.draw(Case(parse(name)[0], "slow"), device.device, device.dtype, dim, seed=0)


def _checkpoints(device: Device, repeats: int, dim: int) -> Figure:
    """What a checkpoint in the middle of each sequence costs."""
    x = _draw(CHECKPOINTED, device, dim)
    sequences, length = x.case.shape.batch
    middle = torch.full((sequences,), length // 2, dtype=torch.int32, device=device.device)
    kept = {"checkpoint_states": torch.empty_like(x.state), "checkpoint_offsets": middle}
    call = partial(
        flashkda.chunk_kda, *x.tokens, **IN_KERNEL, A_log=x.A_log, dt_bias=x.dt_bias,
        initial_state=x.state, inplace_final_state=True, state_v_first=True,
        out=torch.empty_like(x.v),
    )  # fmt: skip
    plain, more = (
        1e3 * statistics.median(device.graph_times([run], repeats))
        for run in (call, partial(call, **kept))
    )
    name = f"a checkpoint per sequence, {CHECKPOINTED} ({plain:.4f} to {more:.4f} ms)"
    return Figure(name, 100 * (more / plain - 1), "%", CHECKPOINTS)


def _host(device: Device, dim: int) -> list[Figure]:
    """Time that the host takes for an eager call of 4 heads."""
    found = []
    for name, target in HOST.items():
        function_name, layout = name.split()
        x = _draw(f"{layout}xH4", device, dim)
        options: dict[str, Any] = IN_KERNEL | {
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            "initial_state": x.state,
            "state_v_first": True,
        }
        if function_name == "chunk_kda":
            options["output_final_state"] = True
        else:
            options["ssm_state_indices"] = torch.arange(1, device=device.device)
        function: Callable[..., Any] = getattr(flashkda, function_name)
        run = partial(function, *x.tokens, **options)
        times = device.host_times(run, HOST_CALLS, 11)[1:]
        found.append(Figure(f"host, {name} H4", 1e6 * statistics.median(times), "us", target))
    return found


def table(found: list[Figure]) -> str:
    """The figures in Markdown."""
    header = ["", "measured", "target", "", "errors"]
    return markdown_table(
        header, [[x.name, x.measured, str(x.target), x.verdict, x.errors] for x in found]
    )
