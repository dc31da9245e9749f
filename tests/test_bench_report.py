"""What the benchmark makes of its records: tables, figures, comparisons; and progress."""

from __future__ import annotations

import io
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benching import recorded

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
