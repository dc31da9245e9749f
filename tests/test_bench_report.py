"""What the benchmark says of its machine and of the kernels' targets, and the progress report."""

from __future__ import annotations

import io
import json
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench import FakeGpu

import flashkda
from flashkda import cli
from flashkda._progress import Progress
from flashkda.bench import __main__ as command
from flashkda.bench import _report, _targets
from flashkda.bench._report import markdown_table


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


# --- targets -------------------------------------------------------------------------------------


@pytest.fixture
def small_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with kernels, on shapes that a CPU can do."""
    served = flashkda.Backend("cuda", "a test")
    monkeypatch.setattr(command, "backend", lambda device: served)
    monkeypatch.setattr(command, "open_device", lambda name: FakeGpu())
    monkeypatch.setattr(_targets, "PREFILL", {"1x20xH1": 0.001, "1x30xH1": 1.0})
    decode = {"256x1xH32": 1.0, "128x1xH32": None, "128x4xH32": None}
    monkeypatch.setattr(_targets, "DECODE", decode)
    monkeypatch.setattr(_targets, "DIM", 2)
    monkeypatch.setattr(_targets, "CHECKPOINTED", "2x64xH1")
    monkeypatch.setattr(_targets, "QUICK", ("1x30xH1",))
    measure = _targets.measure
    monkeypatch.setattr(_targets, "measure", lambda *a, **k: measure(*a, **k, dim=2))


@pytest.mark.usefixtures("small_targets")
def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--targets", "--repeats=3"]) == 0
    rows = [x.split("|")[1:-1] for x in capsys.readouterr().out.splitlines() if "|" in x]
    cells = {row[0].strip(): [x.strip() for x in row[1:]] for row in rows}
    assert cells["1x20xH1, fast gate"][:3] == ["0.003 ms", "at most 0.001", "missed"]
    assert cells["1x30xH1, slow gate"][2] == "kept"
    assert "out" in cells["1x30xH1, slow gate"][3]
    assert cells["128x4xH32 over 128x1xH32"][0] == "1 x"
    assert any(name.startswith("state traffic of 256x1xH32") for name in cells)
    assert any(name.startswith("a checkpoint per sequence, 2x64xH1") for name in cells)
    assert cells["host, fused_recurrent_kda 1x1 H4"][1] == "at most 18"


@pytest.mark.usefixtures("small_targets")
def test_quick_targets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--targets", "--quick", "--repeats=3", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    times = [x for x in figures if x["unit"] == "ms"]
    assert {x["name"] for x in times} == {"1x30xH1, fast gate", "1x30xH1, slow gate"}
    assert all(x["verdict"] == "kept" for x in times)


@pytest.mark.usefixtures("small_targets")
def test_wrong_results_have_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "flashkda.bench._measure.allowed_errors", lambda *a, **k: {"out": 0.0, "state": 0.0}
    )
    assert cli.main(["bench", "--targets", "--repeats=3"]) == 1
    assert "wrong: out above" in capsys.readouterr().out


def test_targets_need_kernels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = flashkda.Backend("torch", "the reason of this test")
    monkeypatch.setattr(command, "backend", lambda device: refused)
    assert cli.main(["bench", "--targets", "--device=cpu"]) == 1
    assert "the reason of this test" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--device=cuda"]) == 2
    assert "usage: flashkda bench" in capsys.readouterr().err


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
