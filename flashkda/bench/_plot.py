"""Figures of recorded results; matplotlib is an optional dependency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = dict[str, Any]
Value = Callable[[Data, Data], float | None]  # of a record and one of its rows

HINT = "figures need matplotlib: pip install 'flashkda[bench]'"
_GATES = {"fast": "fast gate", "slow": "slow gate, that of a fresh layer", "none": "no decay"}
# Okabe and Ito's colours, which most eyes tell apart; markers for print in grey. flashkda is first.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")
_MARKERS = "os^DvP"
_GROUPS = {"prefill": "Prefill", "decode": "Decode", "train": "Forward and backward"}
_KEYS = {"out": "outputs", "state": "states", "gradients": "gradients, the worst of them"}
_COPY = "a copy of the bytes"
_AXES = {"tokens": "tokens T", "heads": "heads H", "sequences": "sequences N"}


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
    for name, make in plan(records).items():
        written.append(folder / f"{name}.png")
        make().savefig(written[-1])
    return written


def plan(records: Sequence[Data]) -> dict[str, Callable[[], Figure]]:
    """What makes each figure, by its name."""
    made: dict[str, Callable[[], Figure]] = {}

    def curves(name: str, some: Sequence[Data], key: str, title: str) -> None:
        if _has_curve(some, key):
            made[name] = partial(_curves, some, key, title)

    single = [x for x in records if x["group"] == "prefill" and x["sequences"] == 1]
    for heads in _values(single, "heads"):
        title = f"Prefill of one sequence against its length, {heads} heads"
        curves(f"time-against-tokens-H{heads}", _where(single, heads=heads), "tokens", title)
    for tokens in _values(single, "tokens"):
        title = f"Prefill of one sequence of {tokens} tokens against heads"
        curves(f"time-against-heads-T{tokens}", _where(single, tokens=tokens), "heads", title)
    steps = [x for x in records if x["shape"] == f"{x['sequences']}x1xH{x['heads']}"]
    for heads in _values(steps, "heads"):
        title = f"A decode step against sequences, {heads} heads, float32 [V, K] states"
        curves(f"decode-H{heads}", _where(steps, heads=heads), "sequences", title)

    def bars(name: str, some: Sequence[Data], value: Value, *words: str, floor: bool) -> None:
        if any(value(x, row) is not None for x in some for row in x["rows"]):
            made[name] = partial(_bars, some, value, *words, floor=floor)

    for group in dict.fromkeys(x["group"] for x in records):
        some = _where(records, group=group)
        title = f"{_GROUPS[group]}: how near a call comes to a copy of the bytes that it must move"
        bars(
            f"roofline-{group}",
            some,
            _share,
            "time of the copy over that of the call (%)",
            title,
            floor=True,
        )
        for key in ("out", "gradients" if group == "train" else "state"):
            title = (
                f"{_GROUPS[group]}: error of {_KEYS[key]} against a float64 recurrence over tokens"
            )
            words = ("relative error in norm (1e-3)", title)
            bars(f"accuracy-{group}-{key}", some, _error(key), *words, floor=False)
    return made


def _values(records: Sequence[Data], key: str) -> list[int]:
    return sorted({x[key] for x in records})


def _where(records: Sequence[Data], **wanted: object) -> list[Data]:
    return [x for x in records if all(x[key] == value for key, value in wanted.items())]


def _systems(records: Sequence[Data]) -> list[str]:
    return list(dict.fromkeys(row["system"] for x in records for row in x["rows"]))


def _timed(records: Sequence[Data], system: str) -> list[tuple[Data, float]]:
    rows = [(x, row["seconds"]) for x in records for row in x["rows"] if row["system"] == system]
    return [(x, 1e3 * seconds) for x, seconds in rows if seconds is not None]


def _has_curve(records: Sequence[Data], key: str) -> bool:
    """One point makes none."""
    timed = [x for x in records if any(row["seconds"] is not None for row in x["rows"])]
    return len(_values(timed, key)) > 1


def _figure(title: str, records: Sequence[Data], width: float, height: float) -> Figure:
    # Without pyplot: no window system is asked for, and nothing global is left behind.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    facts = records[0]["environment"]
    words = [facts["device"], facts["driver"] and f"driver {facts['driver']}",
             f"flashkda {facts['flashkda']}", facts["commit"], f"torch {facts['torch']}",
             facts["date"]]  # fmt: skip
    figure.suptitle("\n".join([title, ", ".join(x for x in words if x)]), fontsize=9)
    return figure


def _legend(figure: Figure, handles: Sequence[Artist]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _color(i: int) -> str:
    return _COLORS[i % len(_COLORS)]


def _marker(i: int) -> str:
    return _MARKERS[i % len(_MARKERS)]


def _count(number: int) -> str:
    return f"{number // 1024}K" if number % 1024 == 0 else str(number)


def _curves(records: Sequence[Data], key: str, title: str) -> Figure:
    """Times against ``key``, a panel for each gate."""
    from matplotlib.lines import Line2D

    gates = [gate for gate in _GATES if _where(records, gate=gate)]
    systems = _systems(records)
    figure = _figure(title, records, 1.2 + 2.8 * len(gates), 4.2)
    panels = figure.subplots(1, len(gates), sharey=True, squeeze=False)[0]
    for gate, panel in zip(gates, panels, strict=True):
        _curves_panel(panel, _where(records, gate=gate), key, systems)
        panel.set_title(_GATES[gate], fontsize=8)
        panel.set_xlabel(_AXES[key], fontsize=8)
    panels[0].set_ylabel("time of a call (ms)", fontsize=8)
    handles = [
        Line2D([], [], color=_color(i), marker=_marker(i), markersize=4, label=system)
        for i, system in enumerate(systems)
    ]
    _legend(figure, [*handles, Line2D([], [], color="grey", linestyle=":", label=_COPY)])
    return figure


def _curves_panel(panel: Axes, records: Sequence[Data], key: str, systems: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for i, system in enumerate(systems):
        points = sorted((x[key], time) for x, time in _timed(records, system))
        if points:
            panel.plot(*zip(*points, strict=True), color=_color(i), marker=_marker(i), markersize=4)
    floor = sorted({x[key]: 1e3 * x["floor_seconds"] for x in records}.items())
    panel.plot(*zip(*floor, strict=True), color="grey", linestyle=":")
    ticks = _values(records, key)
    panel.set_xscale("log")
    panel.set_xticks(ticks, map(_count, ticks))
    panel.set_xticks([], minor=True)
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.3)


def _bars(records: Sequence[Data], value: Value, label: str, title: str, *, floor: bool) -> Figure:
    """A group of bars for each shape, a panel for each gate; a cross where there is no value."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    gates = [gate for gate in _GATES if _where(records, gate=gate)]
    shapes, systems = list(dict.fromkeys(map(_short_name, records))), _systems(records)
    step = 0.8 / len(systems)
    height = 1.6 + len(shapes) * (0.08 + 0.09 * len(systems))
    figure = _figure(title, records, 2 + 2.6 * len(gates), height)
    panels = figure.subplots(1, len(gates), sharex=True, sharey=True, squeeze=False)[0]
    has_cross = False
    for gate, panel in zip(gates, panels, strict=True):
        for record in _where(records, gate=gate):
            for row in record["rows"]:
                i = systems.index(row["system"])
                y = shapes.index(_short_name(record)) + step * (i - (len(systems) - 1) / 2)
                x = value(record, row)
                if x is None:
                    has_cross = True
                    panel.plot(0, y, color=_color(i), marker="x", markersize=4, clip_on=False)
                else:
                    panel.barh(y, x, 0.9 * step, color=_color(i))
        panel.set_title(_GATES[gate], fontsize=8)
        panel.set_xlabel(label, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.grid(axis="x", alpha=0.3)
        panel.set_axisbelow(True)
        for y in range(1, len(shapes)):
            panel.axhline(y - 0.5, color="lightgrey", linewidth=0.5)
    panels[0].set_yticks(range(len(shapes)), shapes)
    panels[0].set_ylim(len(shapes) - 0.5, -0.5)
    panels[0].set_xlim(0, max(100, panels[0].get_xlim()[1]) if floor else None)
    handles: list[Artist] = [Patch(color=_color(i), label=x) for i, x in enumerate(systems)]
    if has_cross:
        none = "wrong, or not served"
        handles.append(Line2D([], [], color="grey", marker="x", linestyle="", label=none))
    _legend(figure, handles)
    return figure


def _short_name(record: Data) -> str:
    if "+" not in record["layout"]:
        return str(record["shape"])
    rest = record["shape"].removeprefix(record["layout"])
    return f"{record['sequences']} packed, {record['tokens']}{rest}"


def _share(record: Data, row: Data) -> float | None:
    return None if row["seconds"] is None else 100 * record["floor_seconds"] / row["seconds"]


def _error(key: str) -> Value:
    def value(_: Data, row: Data) -> float | None:
        error = row["errors"].get(key)
        # A wrong result may be off by any factor: the table has its error.
        is_shown = row["seconds"] is not None and error is not None and error < float("inf")
        return 1e3 * error if is_shown else None

    return value
