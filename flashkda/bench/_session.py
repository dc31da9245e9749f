"""A run over many cases, which may be stopped and taken up again: a file for each case."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashkda._progress import Progress
from flashkda.bench._cases import Case

Data = dict[str, Any]

FORMAT = 1
# Cases of one folder must agree in these: their times stand beside each other.
_SAME = ("device", "flashkda", "commit", "torch", "dtype", "dim", "systems")


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        records: of all cases that have one, in order.
        left: cases without one.
        problem: why it stopped early, or "".
    """

    records: list[Data] = field(default_factory=list)
    left: list[Case] = field(default_factory=list)
    problem: str = ""


def load(folder: Path) -> list[Data]:
    """The records of a folder, in the order of their names.

    Raises:
        ValueError: a file is none of ours.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            known = record["format"] == FORMAT
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no record of this benchmark") from error
        if not known:
            raise ValueError(f"{path} was written by another version of this benchmark")
        records.append(record)
    return records


def conflict(records: Sequence[Data], environment: Data) -> str | None:
    """Why new records must not join those that are there, or None."""
    for record in records:
        for key in _SAME:
            then, now = record["environment"].get(key), environment.get(key)
            if then != now:
                return f"{record['case']} was measured with {key} {then}, now it is {now}"
    return None


def prepare(folder: Path) -> None:
    """Makes a folder for results.

    Raises:
        OSError: it can't be made, or takes no files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _save(folder: Path, record: Data) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['case']}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)  # a run that is killed leaves no half of a file


def run(
    cases: Sequence[Case],
    measure: Callable[[Case], Data],
    environment: Data,
    *,
    done: Sequence[Data] = (),
    folder: Path | None = None,
    budget: float | None = None,
    wait: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measures what is not ``done``.

    Args:
        cases: to measure.
        measure: gives the record of a case.
        environment: what all records share; it is kept with each.
        done: records that are there already.
        folder: to keep new records in, if any.
        budget: seconds; no case begins that would end later if it took as long as the longest yet.
        wait: raises once the device is beyond use.
        clock: seconds.
    """
    known = {x["case"]: x for x in done}
    outcome = Outcome()
    todo = [case for case in cases if case.name not in known]
    start, longest, stopped = clock(), 0.0, False
    with Progress("benchmark", len(todo)) as bar:
        for case in todo:
            before = clock()
            if budget is not None and before - start + longest > budget:
                stopped = True
            if stopped:
                outcome.left.append(case)
                continue
            record = measure(case) | {"format": FORMAT, "environment": environment}
            known[case.name] = record
            if folder is not None:
                _save(folder, record)
            bar.advance()
            longest = max(longest, clock() - before)
            try:
                wait()
            except RuntimeError as error:
                stopped = True
                reason = (str(error).splitlines() or [""])[0]
                outcome.problem = f"the device can't be used any more after {case.name}: {reason}"
    outcome.records = [known[case.name] for case in cases if case.name in known]
    return outcome
