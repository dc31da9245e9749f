"""The machine a benchmark ran on, and tables of its results in Markdown."""

from __future__ import annotations

import datetime
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import flashkda
from flashkda.bench._devices import Device

Data = dict[str, Any]

TITLES = {
    "prefill": "Prefill: forward, states read and written",
    "decode": "Decode: a step in a pool of states",
    "train": "Training: forward and backward",
}
GATES = {
    "fast": "mean log decay about -3.2 a token, the recipe of other benchmarks",
    "slow": "a freshly initialised layer, about -0.13",
    "none": "no decay",
}
REPRODUCIBLE_SECONDS, REPRODUCIBLE_WITHIN = 50e-6, 0.05
METHODS = {
    "events": "events around one call with cold L2, the host running ahead",
    "graph": "a CUDA graph of at least 20 calls on data larger than L2",
    "clock": "wall clock",
}


def environment(device: Device, commit: str | None) -> Data:
    """What the figures depend on."""
    is_cuda = device.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device.device) if is_cuda else _cpu_model(),
        "driver": _driver() if is_cuda else None,
        "flashkda": flashkda.__version__,
        "commit": _commit() if commit is None else commit,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "dtype": str(device.dtype).removeprefix("torch."),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "copy_bytes_per_second": device.copy_bandwidth(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text)
    if match is not None:
        return match[1]
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _commit() -> str | None:
    """Of the checkout that the package lies in, if it does."""
    root = Path(flashkda.__file__).parent.parent
    if not (root / ".git").exists():
        return None
    return _output("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=9")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])


def heading(facts: Data) -> str:
    """The environment in words."""
    known = {
        "driver": facts["driver"],
        "flashkda": facts["flashkda"],
        "commit": facts["commit"],
        "torch": facts["torch"],
        "Python": facts["python"],
        "threads": None if facts["driver"] else facts["threads"],
    }
    parts = [facts["device"], *(f"{key} {value}" for key, value in known.items() if value)]
    copy = facts["copy_bytes_per_second"] / 1e12
    return f"{', '.join(parts)}; {facts['date']}. A copy runs at {copy:.3g} TB/s."


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4f}" if seconds < 1e-3 else f"{1e3 * seconds:.3f}"


def _cells(record: Data, second: str) -> Iterator[list[str]]:
    ours = record["rows"][0]["seconds"] if record["rows"] else None
    for row in record["rows"]:
        name = row["system"] + (f" ({row['path']})" if row["path"] else "")
        times = [row["note"] or "-", "-", "-", "-"]
        floor = record["floor_seconds"]
        if row["seconds"] is not None:
            low, high = row["quartiles"]
            times = [
                _milliseconds(row["seconds"]),
                f"{_milliseconds(low)} to {_milliseconds(high)}",
                "-" if ours is None else f"{row['seconds'] / ours:.2f}x",
                f"{100 * floor / row['seconds']:.0f} %",
            ]
        errors = [f"{row['errors'][k]:.1e}" if k in row["errors"] else "-" for k in ("out", second)]
        host = row["host_seconds"]
        first = row["first_call_seconds"]
        yield [
            record["shape"],
            record["gate"],
            name,
            *times[:3],
            _milliseconds(floor),
            times[3],
            *errors,
            "-" if host is None else f"{1e6 * host:.0f}",
            "-" if first is None else f"{first:.3g}",
        ]


def _table(group: str, records: Sequence[Data]) -> str:
    second = "gradients" if group == "train" else "state"
    header = [
        "shape", "gate", "system", "median ms", "quartiles", "/ flashkda", "floor ms", "of it",
        "error out", f"error {second}", "host us", "first call s",
    ]  # fmt: skip
    return markdown_table(header, [cells for x in records for cells in _cells(x, second)])


def _memory(records: Sequence[Data]) -> list[str]:
    lines = []
    for record in records:
        for row in record["rows"]:
            if row["peak_bytes"] is not None:
                mebibytes = row["peak_bytes"] / 2**20
                lines.append(
                    f"- {record['shape']}, {record['gate']} gate, {row['system']}: "
                    f"{mebibytes:.1f} MiB on top of the inputs"
                )
    return ["Memory:", "", *lines, ""] if lines else []


def repetition(records: Sequence[Data], before: Sequence[Data]) -> tuple[str, bool]:
    """How far times are from those taken the same way in another run; all as near as they should?

    Short calls may be timed by events in one run and by a graph in the other: that's no difference.
    """

    def times(some: Sequence[Data]) -> dict[tuple[str, str, str], float]:
        rows = ((x["case"], row) for x in some for row in x["rows"] if row["seconds"])
        return {(case, row["system"], row["method"]): row["seconds"] for case, row in rows}

    then, now = times(before), times(records)
    apart = {x: now[x] / then[x] - 1 for x in now if then.get(x, 0.0) > REPRODUCIBLE_SECONDS}
    far = {x: y for x, y in apart.items() if abs(y) > REPRODUCIBLE_WITHIN}
    lines = [
        f"{len(apart)} times above {1e6 * REPRODUCIBLE_SECONDS:.0f} us were measured before; "
        f"{len(far)} differ by more than {REPRODUCIBLE_WITHIN:.0%}.",
        *(f"- {case}, {system}: {y:+.1%}" for (case, system, _), y in far.items()),
    ]
    return "\n".join(lines), not far


def markdown(records: Sequence[Data], missing: dict[str, str], left: int = 0) -> str:
    """Everything as text; the environment is that of the latest record."""
    if not records:
        return "Nothing was measured.\n"
    facts = max((x["environment"] for x in records), key=lambda x: str(x["date"]))
    gates = dict.fromkeys(x["gate"] for x in records)
    methods = dict.fromkeys(r["method"] for x in records for r in x["rows"] if r["method"])
    lines = [
        heading(facts),
        "",
        f"K = V = {facts['dim']}, {facts['dtype']}; times are medians. "
        + " ".join(f'"{x}": {METHODS[x]}.' for x in methods),
        "Gates: " + "; ".join(f"{x}: {GATES[x]}" for x in gates) + ".",
        "Errors are relative in norm to a float64 token recurrence over all tokens of the first, "
        "middle and last head (backward passes: the last).",
        "The floor is what a copy of the bytes that a call must move takes on this device; "
        '"of it": floor over time.',
        "",
    ]
    for name, reason in missing.items():
        lines += [f"Not measured: {name} ({reason}).", ""]
    for group, title in TITLES.items():
        of_group = [x for x in records if x["group"] == group]
        if of_group:
            lines += [f"## {title}", "", _table(group, of_group), "", *_memory(of_group)]
    first: dict[str, float] = {}
    for record in records:
        for row in record["rows"]:
            system, seconds = row["system"], row["first_call_seconds"] or 0.0
            first[system] = first.get(system, 0.0) + seconds
    spent = ", ".join(f"{system} {seconds:.1f} s" for system, seconds in first.items())
    lines.append(f"First calls (loading, compilation and tuning), together: {spent}.")
    if left:
        lines.append(f"{left} cases are not measured yet.")
    return "\n".join(lines) + "\n"
