"""What the kernels are meant to reach on one H200, and whether they do; no rivals."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import flashkda
from flashkda._progress import Progress
from flashkda.bench._cases import Case, parse
from flashkda.bench._devices import Device
from flashkda.bench._inputs import DIM, Inputs
from flashkda.bench._measure import Row, measure
from flashkda.bench._report import markdown_table
from flashkda.bench._systems import IN_KERNEL, FlashKDA

_RAGGED = "1300+547+2048+963+271+3063xH96"
# Milliseconds of a call; prefill on both gates.
PREFILL = {
    "1x8192xH96": 0.80,
    _RAGGED: 0.80,
    "8x1024xH96": 0.80,
    "1x8192xH64": 0.60,
    "1x8192xH32": 0.45,
    "1x8192xH12": 0.40,
    "1x8192xH8": 0.40,
    "32x256xH16": 0.16,
    "1x512xH32": 0.05,
}
DECODE = {
    "256x1xH32": 0.290,
    "128x1xH32": 0.145,
    "32x1xH32": 0.038,
    "1x1xH32": 0.0060,
    "256x1xH16:bf16": 0.080,
    "1x1xH12": 0.0050,
    "128x1xH12": 0.060,
    "512x1xH12": 0.225,
    "128x4xH32": None,
    "128x16xH32": None,
    "128x1xH32:ready": None,
    "32x1xH32:ready": None,
    "1x1xH32:ready": None,
    "1x1xH12:ready": None,
    "256x1xH32:kv": None,
    "256x1xH16:bf16:kv": None,
}
QUICK = ("1x8192xH96", "1x8192xH8", "32x256xH16", "256x1xH32", "1x1xH32", "256x1xH16:bf16")
CHECKPOINTED = "8x2048xH16"
FOUR_TOKENS, STATE_TRAFFIC, CHECKPOINTS = 1.35, 88.0, 3.0
HOST_MICROSECONDS = {
    "chunk_kda 1x16": 20.0,
    "chunk_kda 1x64": None,
    "fused_recurrent_kda 1x1": 18.0,
}


@dataclass(frozen=True)
class Figure:
    """One measurement beside its target.

    Attributes:
        name: of what was measured.
        value: or None if there is none.
        unit: of both.
        target: or None.
        at_least: the target is a lower limit.
        errors: relative to float64.
        note: why there is no value.
    """

    name: str
    value: float | None
    unit: str
    target: float | None = None
    at_least: bool = False
    errors: str = ""
    note: str = ""

    @property
    def verdict(self) -> str:
        """In a word, or the reason that there is none."""
        if self.value is None:
            return self.note
        if self.target is None:
            return ""
        kept = self.value >= self.target if self.at_least else self.value <= self.target
        return "kept" if kept else "missed"


def _figure(row: Row, name: str, target: float | None) -> Figure:
    value = None if row.seconds is None else 1e3 * row.seconds
    errors = ", ".join(f"{key} {error:.1e}" for key, error in row.errors.items())
    return Figure(name, value, "ms", target, errors=errors, note=row.note)


def _checkpoints(device: Device) -> Figure:
    """What a checkpoint for each sequence costs."""
    case = Case(parse(CHECKPOINTED)[0], "slow")
    sequences, length = case.shape.batch
    middle = torch.full((sequences,), length // 2, dtype=torch.int32, device=device.device)
    x = Inputs.draw(case, device.device, device.dtype, DIM, seed=0)
    out = torch.empty_like(x.v)
    kept = {
        "checkpoint_states": torch.empty_like(x.state),
        "checkpoint_offsets": middle,
    }
    call = partial(
        flashkda.chunk_kda, *x.tokens, **IN_KERNEL, A_log=x.A_log, dt_bias=x.dt_bias,
        initial_state=x.state, inplace_final_state=True, state_v_first=True, out=out,
    )  # fmt: skip
    plain, more = (
        statistics.median(device.graph_times([run], 20)) for run in (call, partial(call, **kept))
    )
    name = f"a checkpoint per sequence, {CHECKPOINTED} ({1e3 * plain:.4f} to {1e3 * more:.4f} ms)"
    return Figure(name, 100 * (more / plain - 1), "%", CHECKPOINTS)


def _host(device: Device) -> list[Figure]:
    """Microseconds of an eager call of 4 heads."""
    found = []
    for name, target in HOST_MICROSECONDS.items():
        function_name, layout = name.split()
        x = Inputs.draw(
            Case(parse(f"{layout}xH4")[0], "slow"), device.device, device.dtype, DIM, seed=0
        )
        options: dict[str, Any] = IN_KERNEL | {
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            "initial_state": x.state,
            "state_v_first": True,
        }
        function: Callable[..., Any] = getattr(flashkda, function_name)
        if function_name == "chunk_kda":
            options["output_final_state"] = True
        else:
            options["ssm_state_indices"] = torch.arange(1, device=device.device)
        run = partial(function, *x.tokens, **options)
        times = device.host_times(run, 300, 11)[1:]
        found.append(Figure(f"host, {name} H4", 1e6 * statistics.median(times), "us", target))
    return found


def figures(device: Device, bandwidth: float, *, quick: bool, repeats: int) -> list[Figure]:
    """All measurements; times of calls by graphs, whatever they take."""
    cases: list[tuple[Case, float | None]] = [
        (Case(parse(name)[0], gate), target)
        for name, target in PREFILL.items()
        for gate in ("fast", "slow")
    ]
    cases += [(Case(parse(name)[0], "fast"), target) for name, target in DECODE.items()]
    if quick:
        cases = [(case, target) for case, target in cases if case.shape.name in QUICK]
    found: list[Figure] = []
    with Progress("targets", len(cases) + 1) as bar:
        for case, target in cases:
            record = measure(case, [FlashKDA()], device, repeats=repeats, graph_below=float("inf"))
            found.append(_figure(record.rows[0], f"{case.shape.name}, {case.gate} gate", target))
            if case.shape.name == "256x1xH32":
                found.append(_traffic(case, record.rows[0], bandwidth))
            bar.advance()
        found += _four_tokens(found)
        with torch.inference_mode():
            found += [_checkpoints(device), *_host(device)]
    return found


def _traffic(case: Case, row: Row, bandwidth: float) -> Figure:
    shape = case.shape
    num_bytes = 2 * len(shape.lengths) * shape.heads * DIM * DIM * (2 if shape.bf16_state else 4)
    value = None if row.seconds is None else 100 * num_bytes / row.seconds / bandwidth
    name = f"state traffic of {shape.name}, share of a copy at {bandwidth / 1e12:.2f} TB/s"
    return Figure(name, value, "%", STATE_TRAFFIC, at_least=True, note=row.note)


def _four_tokens(found: list[Figure]) -> list[Figure]:
    values = {x.name.split(",")[0]: x.value for x in found if x.unit == "ms"}
    one, four = values.get("128x1xH32"), values.get("128x4xH32")
    if one is None or four is None:
        return []
    return [Figure("128x4xH32 over 128x1xH32", four / one, "x", FOUR_TOKENS)]


def table(found: list[Figure]) -> str:
    """The figures in Markdown."""
    header = ["", "measured", "target", "", "errors"]
    cells = [
        [
            x.name,
            "-" if x.value is None else f"{x.value:.4g} {x.unit}",
            "" if x.target is None else f"{'at least' if x.at_least else 'at most'} {x.target:g}",
            x.verdict,
            x.errors,
        ]
        for x in found
    ]
    return markdown_table(header, cells)
