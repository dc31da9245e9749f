"""What tests of the benchmark share: a GPU that is none, a rival, and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flashkda.bench import _devices, _measure, _rivals, _session
from flashkda.bench._cases import Case, parse
from flashkda.bench._inputs import Inputs
from flashkda.bench._reference import Result
from flashkda.bench._systems import Call, FlashKDA

TINY = ["--dim=16", "--repeats=3", "--device=cpu", "--threads=1"]
SHAPES = ["--shape=1x20xH2", "--shape=2x1xH2", "--shape=5+12xH1", "--shape=1x18xH2:backward"]


def make_case(text: str, gate: str = "slow") -> Case:
    return Case(parse(text)[0], gate)


class FakeGpu(_devices.Cpu):
    """The way through the benchmark that a GPU takes: 30 us by events, 3 us in a graph."""

    cache_bytes = 2**20
    has_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.broken = False

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError("illegal memory access\nand more")

    def times(self, run: _devices.Run, repeats: int) -> list[float]:
        run()
        return [30e-6] * repeats

    def graph_times(self, runs: Sequence[_devices.Run], repeats: int) -> list[float]:
        self.graphs.append(len(runs))
        for run in runs:
            run()
        return [3e-6, 4e-6, 2e-6] * repeats

    def peak_bytes(self, run: _devices.Run) -> int:
        run()
        return 2**21


class Rival:
    """A rival that is right but for ``factor``, or raises."""

    def __init__(self, name: str = "rival", factor: float = 1.0, error: Exception | None = None):
        self.name = name
        self.factor = factor
        self.error = error

    def refusal(self, case: Case) -> str | None:
        return "packed is too hard" if case.shape.packed else None

    def bind(self, inputs: Inputs) -> Call:
        call = FlashKDA().bind(inputs)

        def read(got: Any) -> Result:
            if self.error is not None:
                raise self.error
            result = call.read(got)
            return Result(self.factor * result.out, result.state, result.gradients)

        return Call(call.run, read)


def with_rivals(monkeypatch: pytest.MonkeyPatch, *rivals: Rival, **missing: str) -> None:
    monkeypatch.setattr(_rivals, "find", lambda device_type: (list(rivals), missing))


ENVIRONMENT = {"device": "a card", "flashkda": "1", "commit": None, "torch": "2", "dtype": "x",
               "dim": 128, "systems": []}  # fmt: skip


def recorded(
    text: str, *seconds: float | None, gate: str = "fast", error: float = 1e-3
) -> dict[str, Any]:
    case = make_case(text, gate)
    shape = case.shape
    rows = [
        _measure.Row(
            f"system {i}",
            note="" if s else "wrong: out above 1.0e-02",
            errors={"out": error, "gradients" if shape.group == "train" else "state": error},
            seconds=s,
            quartiles=(s, s) if s else None,
            method="events",
            host_seconds=2e-5,
        )
        for i, s in enumerate(seconds)
    ]
    record = _measure.Record(
        case.name, shape.group, shape.name, shape.layout, shape.heads, shape.tokens,
        len(shape.lengths), gate, 10**8, [0], rows,
    )  # fmt: skip
    facts = {"driver": "580.1", "cuda": "13.0", "python": "3.12", "threads": 8, "missing": {},
             "date": "2026-12-01", "copy_bytes_per_second": 4e12}  # fmt: skip
    return record.as_data() | {
        "format": _session.FORMAT,
        "floor_seconds": 25e-6,
        "environment": ENVIRONMENT | facts,
    }
