"""Figures of recorded results; matplotlib is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Data = dict[str, Any]

HINT = "figures need matplotlib: pip install 'flashkda[bench]'"
_GATES = {"fast": "-", "slow": "--", "none": ":"}  # styles of lines


def draw(records: Sequence[Data], folder: Path) -> list[Path]:
    """Writes the figures that the records have data for.

    Raises:
        ImportError: there is no matplotlib; the message says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(HINT) from error
    figures: dict[str, Figure | None] = {}
    single = [x for x in records if x["group"] == "prefill" and x["sequences"] == 1]
    for heads in _values(single, "heads"):
        title = f"Prefill of one sequence, {heads} heads: time against its length"
        some = [x for x in single if x["heads"] == heads]
        figures[f"time-against-tokens-H{heads}"] = _curves(some, "tokens", title)
    for tokens in _values(single, "tokens"):
        title = f"Prefill of one sequence of {tokens} tokens: time against heads"
        some = [x for x in single if x["tokens"] == tokens]
        figures[f"time-against-heads-T{tokens}"] = _curves(some, "heads", title)
    steps = [x for x in records if x["shape"] == f"{x['sequences']}x1xH{x['heads']}"]
    for heads in _values(steps, "heads"):
        title = f"A decode step, {heads} heads, float32 [V, K] states: time against sequences"
        some = [x for x in steps if x["heads"] == heads]
        figures[f"decode-H{heads}"] = _curves(some, "sequences", title)
    for group in dict.fromkeys(x["group"] for x in records):
        some = [x for x in records if x["group"] == group]
        title = f"{group}: what a copy of its bytes takes, as a share of the time of a call"
        figures[f"roofline-{group}"] = _dots(some, _share, "%", title)
        for key in ("out", "gradients" if group == "train" else "state"):
            title = f"{group}: relative error of {key} against a float64 token recurrence"
            figures[f"accuracy-{group}-{key}"] = _dots(some, _error(key), "error", title, log=True)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1])
    return written


def _values(records: Sequence[Data], key: str) -> list[int]:
    return sorted({x[key] for x in records})


def _systems(records: Sequence[Data]) -> list[str]:
    return list(dict.fromkeys(row["system"] for x in records for row in x["rows"]))


def _figure(title: str, facts: Data, height: float) -> Figure:
    # Without pyplot: no window system is asked for, and nothing global is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained", dpi=120)
    words = [facts["device"], facts["driver"] and f"driver {facts['driver']}",
             f"flashkda {facts['flashkda']}", facts["commit"], f"torch {facts['torch']}",
             facts["date"]]  # fmt: skip
    figure.suptitle("\n".join([title, ", ".join(x for x in words if x)]), fontsize=8)
    return figure


def _curves(records: Sequence[Data], key: str, title: str) -> Figure | None:
    """Times against ``key``: a color for each system, a style for each gate."""
    timed = [(x, row) for x in records for row in x["rows"] if row["seconds"] is not None]
    ticks = _values([x for x, _ in timed], key)
    if len(ticks) < 2:
        return None  # one point makes no curve
    figure = _figure(title, records[0]["environment"], height=5)
    axes = figure.add_subplot()
    for i, system in enumerate(_systems(records)):
        for gate, style in _GATES.items():
            points = sorted(
                (x[key], 1e3 * row["seconds"])
                for x, row in timed
                if (x["gate"], row["system"]) == (gate, system)
            )
            if points:
                label = f"{system}, {gate} gate"
                axes.plot(*zip(*points, strict=True), f"C{i}o{style}", markersize=3, label=label)
    floor = sorted({x[key]: 1e3 * x["floor_seconds"] for x in records}.items())
    axes.plot(*zip(*floor, strict=True), color="grey", linewidth=1, label="a copy of the bytes")
    axes.set_xscale("log")
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set_yscale("log")
    axes.set_xlabel(key)
    axes.set_ylabel("milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def _dots(records: Sequence[Data], value: Callable[[Data, Data], float | None], label: str,
          title: str, *, log: bool = False) -> Figure | None:  # fmt: skip
    """A row for each shape, a panel for each gate, a dot for each system that has a value."""
    names = [_short_name(x) for x in records]
    shapes, systems = list(dict.fromkeys(names)), _systems(records)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for name, record in zip(names, records, strict=True):
        for row in record["rows"]:
            x = value(record, row)
            if x is not None:
                shift = 0.5 * (systems.index(row["system"]) / len(systems) - 0.5)
                point = (x, shapes.index(name) + shift)
                found.setdefault((record["gate"], row["system"]), []).append(point)
    if not found:
        return None
    gates = [gate for gate in _GATES if any(gate == x for x, _ in found)]
    figure = _figure(title, records[0]["environment"], height=1.5 + 0.25 * len(shapes))
    panels = figure.subplots(1, len(gates), sharex=True, sharey=True, squeeze=False)[0]
    for gate, panel in zip(gates, panels, strict=True):
        for i, system in enumerate(systems):
            points = found.get((gate, system), [])
            panel.plot(
                [x for x, _ in points], [y for _, y in points], f"C{i}o", markersize=4, label=system
            )
        panel.set_title(f"{gate} gate", fontsize=8)
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_yticks(range(len(shapes)), shapes, fontsize=7)
    panels[0].set_ylim(len(shapes) - 0.5, -0.5)
    if log:
        panels[0].set_xscale("log")
    else:
        panels[0].set_xlim(left=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def _short_name(record: Data) -> str:
    if "+" not in record["layout"]:
        return str(record["shape"])
    rest = record["shape"].removeprefix(record["layout"])
    return f"{record['sequences']} packed, {record['tokens']}{rest}"


def _share(record: Data, row: Data) -> float | None:
    return None if row["seconds"] is None else 100 * record["floor_seconds"] / row["seconds"]


def _error(key: str) -> Callable[[Data, Data], float | None]:
    def value(_: Data, row: Data) -> float | None:
        error = row["errors"].get(key)
        # What is not finite has no dot; the table says so.
        return error if error is not None and error < float("inf") else None

    return value
