"""Figures of recorded results; matplotlib is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Data = dict[str, Any]
Points = dict[str, list[tuple[float, float]]]

HINT = "figures need matplotlib: pip install 'flashkda[bench]'"


def _figure(title: str) -> tuple[Any, Any]:
    # Without pyplot: no window system is asked for, and nothing global is left behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    return figure, axes


def _finish(figure: Any, axes: Any, facts: Data, path: Path) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    words = [facts["device"], facts["driver"] and f"driver {facts['driver']}",
             f"flashkda {facts['flashkda']}", facts["commit"], f"torch {facts['torch']}",
             facts["date"]]  # fmt: skip
    figure.supxlabel(", ".join(x for x in words if x), fontsize=6, color="grey")
    figure.savefig(path)


def _times(
    records: Sequence[Data], chosen: Callable[[Data], bool], key: str
) -> tuple[Points, Points]:
    """(x, milliseconds) of every system and gate, and of the floor."""
    lines: Points = {}
    floor: Points = {}
    for record in filter(chosen, records):
        x = float(record[key])
        floor.setdefault("a copy of its bytes", []).append((x, 1e3 * record["floor_seconds"]))
        for row in record["rows"]:
            if row["seconds"] is not None:
                name = f"{row['system']}, {record['gate']} gate"
                lines.setdefault(name, []).append((x, 1e3 * row["seconds"]))
    return lines, floor


def _lines(records: Sequence[Data], chosen: Callable[[Data], bool], key: str, label: str,
           title: str, path: Path) -> bool:  # fmt: skip
    lines, floor = _times(records, chosen, key)
    if len({x for points in lines.values() for x, _ in points}) < 2:
        return False  # one point makes no curve
    figure, axes = _figure(title)
    for name, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        style = {"fast": "-", "slow": "--", "none": ":"}[name.split(", ")[-1].split()[0]]
        axes.plot(xs, ys, style, marker="o", markersize=3, label=name)
    for name, points in floor.items():
        xs, ys = zip(*sorted(set(points)), strict=True)
        axes.plot(xs, ys, color="grey", linewidth=1, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("milliseconds")
    _finish(figure, axes, records[0]["environment"], path)
    return True


def _bars(records: Sequence[Data], value: Callable[[Data, Data], float | None], label: str,
          title: str, path: Path, *, log: bool = False) -> bool:  # fmt: skip
    """A bar, or on a logarithmic axis a dot, for each case and system."""
    names = list(dict.fromkeys(row["system"] for x in records for row in x["rows"]))
    found: dict[str, list[float]] = {name: [0.0] * len(records) for name in names}
    for i, record in enumerate(records):
        for row in record["rows"]:
            found[row["system"]][i] = value(record, row) or 0.0
    if not any(map(any, found.values())):
        return False
    figure, axes = _figure(title)
    figure.set_size_inches(max(9.0, 0.35 * len(records)), 5.5)
    width = 0.8 / len(names)
    for n, (name, heights) in enumerate(found.items()):
        places = [i + (n - (len(names) - 1) / 2) * width for i in range(len(records))]
        if log:  # a bar would have no foot to stand on
            shown = [y or None for y in heights]
            axes.plot(places, shown, "o", markersize=4, label=name)
        elif any(heights):
            axes.bar(places, heights, width, label=name)
    if log:
        axes.set_yscale("log")
    labels = [f"{x['shape']}, {x['gate']}" for x in records]
    axes.set_xticks(range(len(records)), labels, rotation=90, fontsize=6)
    axes.set_ylabel(label)
    _finish(figure, axes, records[0]["environment"], path)
    return True


def _share(record: Data, row: Data) -> float | None:
    return None if row["seconds"] is None else 100 * record["floor_seconds"] / row["seconds"]


def _error(key: str) -> Callable[[Data, Data], float | None]:
    def value(_: Data, row: Data) -> float | None:
        error = row["errors"].get(key)
        # What is not finite has no bar; the table says so.
        return error if error is not None and error < float("inf") else None

    return value


def draw(records: Sequence[Data], folder: Path) -> list[Path]:
    """Writes the figures that the records have data for.

    Raises:
        ImportError: there is no matplotlib; the message says how to get it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(HINT) from error
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def keep(drawn: bool, path: Path) -> None:
        if drawn:
            written.append(path)

    prefill = [x for x in records if x["group"] == "prefill"]
    for heads in sorted({x["heads"] for x in prefill}):
        path = folder / f"time-against-tokens-H{heads}.png"
        title = f"Prefill of one sequence, {heads} heads: time against its length"
        one = _of_one_sequence("heads", heads)
        keep(_lines(prefill, one, "tokens", "tokens", title, path), path)
    for tokens in sorted({x["tokens"] for x in prefill}):
        path = folder / f"time-against-heads-T{tokens}.png"
        title = f"Prefill of one sequence of {tokens} tokens: time against heads"
        keep(
            _lines(prefill, _of_one_sequence("tokens", tokens), "heads", "heads", title, path), path
        )
    for heads in sorted({x["heads"] for x in records if x["group"] == "decode"}):
        path = folder / f"decode-H{heads}.png"
        title = f"A decode step, {heads} heads, float32 [V, K] states: time against sequences"
        chosen = _of_decode(heads)
        keep(_lines(records, chosen, "sequences", "sequences", title, path), path)
    for group in dict.fromkeys(x["group"] for x in records):
        some = [x for x in records if x["group"] == group]
        path = folder / f"roofline-{group}.png"
        title = f"{group}: how much of the time a copy of the same bytes would take"
        keep(_bars(some, _share, "%", title, path), path)
        for key in ("out", "gradients" if group == "train" else "state"):
            path = folder / f"accuracy-{group}-{key}.png"
            title = f"{group}: relative error of {key} against a float64 token recurrence"
            keep(_bars(some, _error(key), "relative error", title, path, log=True), path)
    return written


def _of_one_sequence(key: str, value: int) -> Callable[[Data], bool]:
    return lambda x: x["sequences"] == 1 and x[key] == value


def _of_decode(heads: int) -> Callable[[Data], bool]:
    def chosen(x: Data) -> bool:
        plain = x["shape"] == f"{x['sequences']}x1xH{heads}"
        return bool(x["group"] == "decode" and plain)

    return chosen
