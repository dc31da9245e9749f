"""What the benchmark makes of its records: tables, figures, comparisons; and progress."""

from __future__ import annotations

import io
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benching import recorded
from documents import FIGURES

import flashkda
from flashkda import cli
from flashkda._progress import Progress
from flashkda.bench import _plot, _report
from flashkda.bench._report import markdown_table


def test_tables_and_figures_from_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    records = [
        recorded("1x512xH32", 1e-4, 2e-4),
        recorded("1x8192xH32", 5e-4, None, error=float("inf")),
        recorded("1x8192xH8", 2e-4, 4e-4, gate="slow"),
        recorded("1x1xH32", 4e-6, 8e-6),
        recorded("256x1xH32", 3e-4, 4e-4),
        recorded("1x8192xH32:backward", 3e-3, 4e-3),
    ]
    for record in records:
        (tmp_path / f"{record['case']}.json").write_text(json.dumps(record))
    figures = tmp_path / "figures"
    assert cli.main(["bench", f"--plot={tmp_path}", f"--figures={figures}"]) == 0
    printed = capsys.readouterr().out
    assert "a card, driver 580.1, flashkda 1, torch 2, Python 3.12; 2026-12-01." in printed
    (line,) = [x for x in printed.splitlines() if x.startswith("| 1x512xH32") and "m 1" in x]
    cells = [x.strip() for x in line.split("|")[1:-1]]
    assert cells[3:8] == ["0.2000", "0.2000 to 0.2000", "2.00x", "0.0250", "12 %"]
    assert "inf" in printed
    assert printed == (tmp_path / "results.md").read_text()
    names = {path.name for path in figures.iterdir()}
    assert names == {
        "time-against-tokens-H32.png", "time-against-heads-T8192.png", "decode-H32.png",
        "roofline-prefill.png", "accuracy-prefill-out.png", "accuracy-prefill-state.png",
        "roofline-decode.png", "accuracy-decode-out.png", "accuracy-decode-state.png",
        "roofline-train.png", "accuracy-train-out.png", "accuracy-train-gradients.png",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in figures.iterdir())


def drawn(records: list[dict[str, Any]], name: str) -> tuple[list[Any], list[str]]:
    """The panels of a figure, and what its legend says."""
    pytest.importorskip("matplotlib")
    figure = _plot.plan(records)[name]()
    (legend,) = figure.legends
    return figure.axes, [x.get_text() for x in legend.get_texts()]


def test_curves_have_a_panel_for_each_gate_and_a_line_for_each_system() -> None:
    records = [
        recorded("1x512xH32", 1e-4, 2e-4),
        recorded("1x8192xH32", 5e-4, None),
        recorded("1x512xH32", 1e-4, 3e-4, gate="slow"),
        recorded("1x8192xH32", 5e-4, 7e-4, gate="slow"),
    ]
    panels, legend = drawn(records, "time-against-tokens-H32")
    assert [x.get_title() for x in panels] == ["fast gate", "slow gate, that of a fresh layer"]
    assert legend == ["system 0", "system 1", "a copy of the bytes"]
    fast, slow = [[line.get_xydata().tolist() for line in x.lines] for x in panels]
    floor = [[512.0, 0.025], [8192.0, 0.025]]
    assert fast == [[[512, 0.1], [8192, 0.5]], [[512, 0.2]], floor]
    assert slow[1] == [[512, pytest.approx(0.3)], [8192, pytest.approx(0.7)]]
    for panel in panels:
        assert [x.get_text() for x in panel.get_xticklabels()] == ["512", "8K"]
        assert (panel.get_xlabel(), panel.get_xscale(), panel.get_yscale()) == (
            "tokens T", "log", "log",
        )  # fmt: skip
    assert panels[0].get_ylabel() == "time of a call (ms)"


def test_bars_have_a_group_for_each_shape_and_a_cross_for_what_is_wrong() -> None:
    records = [
        recorded("1x512xH32", 1e-4, 2e-4),
        recorded("300+212xH32", 5e-4, None, error=9.0),
    ]
    for name, widths in (
        ("roofline-prefill", [25.0, 12.5, 5.0]),
        ("accuracy-prefill-out", [1.0, 1.0, 9000.0]),
    ):
        (panel,), legend = drawn(records, name)
        assert [x.get_width() for x in panel.patches] == pytest.approx(widths)
        assert [x.get_text() for x in panel.get_yticklabels()] == ["1x512xH32", "2 packed, 512xH32"]
        crosses = [x for x in panel.lines if x.get_marker() == "x"]
        assert len(crosses) == 1
        assert legend == ["system 0", "system 1", "wrong, or not served"]
        assert panel.get_xlim()[0] == 0
    _, legend = drawn(records[:1], "roofline-prefill")
    assert legend == ["system 0", "system 1"]


def test_nothing_of_a_figure_lies_over_its_other_parts() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    names = ("flashkda", "fla-core 0.6.0", "flash_kda 0.0.1", "nvidia-cudnn-frontend 1.32.0")
    records = [
        recorded(shape, 1e-4, 2e-4, 3e-4, None, gate=gate)
        for shape in ("1x512xH32", "1x8192xH32", "1x1xH32", "256x1xH32")
        for gate in ("fast", "slow", "none")
    ]
    for record in records:
        for row, name in zip(record["rows"], names, strict=True):
            row["system"] = name
    for name in FIGURES:
        figure = _plot.plan(records)[name]()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        panels = [x.get_tightbbox(renderer) for x in figure.axes]
        others = [figure.legends[0].get_window_extent(renderer)]
        others.append(figure._suptitle.get_window_extent(renderer))
        boxes = [*panels, *others]
        assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)], name
        for box in boxes:
            assert box.x0 >= 0, name
            assert box.y0 >= 0, name
            assert box.x1 <= figure.bbox.x1, name
            assert box.y1 <= figure.bbox.y1, name


def test_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [recorded("1x512xH32", None, error=float("inf"))]
    assert _plot.draw(records, tmp_path) == []
    assert _report.markdown([], {}) == "Nothing was measured.\n"


def test_figures_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    record = recorded("1x512xH32", 1e-4)
    (tmp_path / "a.json").write_text(json.dumps(record))
    assert cli.main(["bench", f"--plot={tmp_path}"]) == 0
    assert "pip install 'flashkda[bench]'" in capsys.readouterr().err
    assert (tmp_path / "results.md").is_file()


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def against(seconds: float) -> tuple[int, str]:
        for folder, x in (("now", 1e-3), ("before", seconds)):
            (tmp_path / folder).mkdir(exist_ok=True)
            records = [recorded("1x512xH32", x, x), recorded("1x64xH32", 0.04 * x)]
            for record in records:
                path = tmp_path / folder / f"{record['case']}.json"
                path.write_text(json.dumps(record))
        argv = ["bench", f"--plot={tmp_path / 'now'}", f"--against={tmp_path / 'before'}"]
        return cli.main(argv), capsys.readouterr().err

    status, printed = against(0.97e-3)
    assert status == 0
    assert "2 times above 50 us were measured before; 0 differ by more than 5%." in printed
    status, printed = against(1.1e-3)
    assert status == 1
    assert "- prefill-1x512xH32-fast, system 1: -9.1%" in printed


def test_processor_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_report, "Path", lambda name: tmp_path / "missing")
    assert _report._cpu_model() == (platform.processor() or platform.machine())


def test_driver_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    )
    monkeypatch.setattr(_report, "Path", lambda name: version)
    assert _report._driver() == "580.159.04"
    monkeypatch.setattr(_report, "Path", lambda name: tmp_path / "missing")
    monkeypatch.setattr(_report.shutil, "which", lambda name: None)
    assert _report._driver() is None


def test_commit_of_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "flashkda"
    package.mkdir()
    monkeypatch.setattr(flashkda, "__file__", str(package / "__init__.py"))
    assert _report._commit() is None
    (tmp_path / ".git").mkdir()
    done = SimpleNamespace(returncode=0, stdout="abc123\n")
    monkeypatch.setattr(_report.shutil, "which", lambda name: name)
    monkeypatch.setattr(_report.subprocess, "run", lambda *args, **more: done)
    assert _report._commit() == "abc123"
    done.returncode = 1
    assert _report._commit() is None


def test_markdown_table() -> None:
    assert markdown_table(["a", "b"], [["long", "1"]]).splitlines() == [
        "| a    | b |",
        "|------|---|",
        "| long | 1 |",
    ]


# --- progress ------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_a_bar_on_a_terminal_and_clears_it() -> None:
    stream = Terminal()
    with Progress("work", 4, delay=0, stream=stream) as progress:
        progress.advance(2)
    assert "[###############...............] work 2/4" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    assert "\n" not in stream.getvalue()


def test_progress_writes_a_line_now_and_then_elsewhere() -> None:
    stream = io.StringIO()
    with Progress("work", 4, delay=0, stream=stream) as progress:
        for _ in range(4):
            progress.advance()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("work 1/4")


def test_progress_of_short_work_is_silent() -> None:
    stream = Terminal()
    with Progress("work", 4, stream=stream) as progress:
        progress.advance(2)
    assert stream.getvalue() == ""
