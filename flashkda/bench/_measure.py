"""One case: every system is checked against float64, and timed if it is right."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from flashkda.bench._cases import Case
from flashkda.bench._devices import CALLS, Device, Run
from flashkda.bench._inputs import DIM, Inputs
from flashkda.bench._reference import Reference, reference
from flashkda.bench._systems import Call, System

SHORT_SECONDS = 50e-6  # calls below this are timed together, in a graph
_ENOUGH_SECONDS = 1.0  # of repeating one call
_FEWEST = 7  # times of each
# What rivals may be off: twice the worst of those that were right when we measured them. Theirs are
# other roundings than ours, so this only tells a wrong result from a right one.
_RIVALS = {"out": 1e-2, "state": 1e-2, "gradients": 5e-2}


@dataclass
class Row:
    """One system with one case.

    Attributes:
        system: its name.
        path: which implementation of it.
        note: why there is no time, or "".
        errors: relative to float64, by "out" and "state" or "gradients".
        allowed: what they may be.
        seconds: median device time of a call.
        quartiles: of those times, in seconds.
        method: "events", "graph" or "clock".
        repeats: how many times there are.
        host_seconds: median time that the host takes for a call.
        first_call_seconds: of the first call of this case, compilation and tuning included.
        peak_bytes: memory that a call takes (backward passes).
    """

    system: str
    path: str = ""
    note: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    allowed: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None
    quartiles: tuple[float, float] | None = None
    method: str = ""
    repeats: int = 0
    host_seconds: float | None = None
    first_call_seconds: float | None = None
    peak_bytes: int | None = None


@dataclass
class Record:
    """One case with all systems; flashkda's row is the first.

    Attributes:
        case: its name.
        group: of its shape.
        shape: its name, by which it can be asked for.
        layout: of the sequences, without heads.
        heads: their number.
        tokens: of all sequences.
        sequences: their number.
        gate: its name.
        num_bytes: that a call has to move.
        checked_heads: whose outputs, states and gradients were compared, over all tokens.
        rows: of the systems.
    """

    case: str
    group: str
    shape: str
    layout: str
    heads: int
    tokens: int
    sequences: int
    gate: str
    num_bytes: int
    checked_heads: list[int]
    rows: list[Row]

    def as_data(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


def allowed_errors(case: Case, dtype: torch.dtype, *, is_ours: bool) -> dict[str, float]:
    """Errors above which there is no time, by "out" and "state" or "gradients".

    Of ours in bfloat16: what the kernels are held to. A float32 result is right to 1e-5.
    """
    shape = case.shape
    second = "gradients" if shape.group == "train" else "state"
    if dtype != torch.bfloat16:
        return {"out": 1e-5, second: 1e-4 if shape.group == "train" else 1e-5}
    if not is_ours:
        return {"out": _RIVALS["out"], second: _RIVALS[second]}
    if shape.group == "decode":  # rounding of outputs, and of bfloat16 states
        return {"out": 3e-3, "state": 3e-3}
    if shape.group == "train":
        return {"out": 5e-3, "gradients": 2e-2}
    is_long = max(shape.lengths) >= 8192
    out = 5e-3 if case.gate == "none" and is_long else 4.5e-3
    return {"out": out, "state": 2.5e-3 if case.gate == "fast" else 4e-3}


def measure(
    case: Case,
    systems: Sequence[System],
    device: Device,
    *,
    repeats: int,
    dim: int = DIM,
    graph_below: float = SHORT_SECONDS,
) -> Record:
    """Measures a case; ``systems`` begin with flashkda.

    A system that can't do it, fails, or is wrong has a note instead of a time. What leaves the
    device unusable ends the record there: :meth:`Device.wait` then raises for the caller too.
    """
    inputs = Inputs.draw(case, device.device, device.dtype, dim, seed=0)
    right = reference(inputs)
    shape = case.shape
    record = Record(
        case.name, shape.group, shape.name, shape.layout, shape.heads, shape.tokens,
        len(shape.lengths), case.gate, inputs.num_bytes(), right.heads, [],
    )  # fmt: skip
    for i, system in enumerate(systems):
        refusal = system.refusal(case)
        if refusal == "":
            continue
        row = Row(system.name, note=refusal or "")
        record.rows.append(row)
        if refusal is None:
            row.allowed = allowed_errors(case, device.dtype, is_ours=i == 0)
            try:
                with torch.inference_mode(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of rivals, and of a path that is noted anyway
                    _measure_row(row, system, inputs, right, device, repeats, graph_below)
            except Exception as error:  # whatever a rival does, the others are measured
                row.seconds = row.quartiles = None
                row.note = f"failed: {_first_line(error)}"
                if not _is_usable(device):
                    row.note += " (and left the device unusable)"
                    break
        device.release()
    return record


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:200]


def _is_usable(device: Device) -> bool:
    try:
        device.wait()
    except RuntimeError:
        return False
    return True


def _bind(system: System, inputs: Inputs) -> Call:
    # Tensors that autograd may save must not be born in inference mode.
    with torch.inference_mode(False):
        return system.bind(inputs)


def _measure_row(
    row: Row,
    system: System,
    inputs: Inputs,
    right: Reference,
    device: Device,
    repeats: int,
    graph_below: float,
) -> None:
    call = _bind(system, inputs)
    row.path = call.path
    device.wait()
    start = time.perf_counter()
    got = call.run()
    device.wait()
    row.first_call_seconds = time.perf_counter() - start
    row.errors = right.errors(call.read(got))
    del got
    wrong = [k for k, limit in row.allowed.items() if not row.errors.get(k, limit + 1) <= limit]
    if wrong:
        row.note = "wrong: " + ", ".join(f"{k} above {row.allowed[k]:.1e}" for k in wrong)
        return

    # The first call may have been slow for its own reasons: the second says how long one takes.
    start = time.perf_counter()
    call.run()
    device.wait()
    about = max(time.perf_counter() - start, 1e-7)
    count = max(_FEWEST, min(repeats, int(_ENOUGH_SECONDS / about)))
    times = device.times(call.run, count)
    row.method = "events" if device.has_graphs else "clock"
    if device.has_graphs:
        host = device.host_times(call.run, CALLS, max(1, min(10, count // 3)))
        row.host_seconds = statistics.median(host)
    if inputs.case.shape.group == "train":
        row.peak_bytes = device.peak_bytes(call.run)
    elif device.has_graphs and statistics.median(times) < graph_below:
        try:
            times = device.graph_times(_calls_in_turn(system, inputs, call, device), count)
            row.method = "graph"
        except RuntimeError:  # rivals that can't be captured keep their times by events
            device.wait()
    low, row.seconds, high = statistics.quantiles(times, n=4, method="inclusive")
    row.quartiles = (low, high)
    row.repeats = len(times)


def _calls_in_turn(system: System, inputs: Inputs, call: Call, device: Device) -> list[Run]:
    """Calls on data that is together larger than the cache."""
    needed = 1 + device.cache_bytes // inputs.num_bytes()
    # Two at least in decode: the promise of early reads forbids the same slots twice in a row.
    fewest = 2 if inputs.case.shape.group == "decode" else 1
    count = max(fewest, min(CALLS, needed))
    calls = [call]
    for seed in range(1, count):
        dim = inputs.q.shape[-1]
        more = Inputs.draw(inputs.case, device.device, device.dtype, dim, seed)
        calls.append(_bind(system, more))
    return [x.run for x in calls]
