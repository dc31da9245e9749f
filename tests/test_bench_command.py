"""The benchmark command: on a CPU, refusing what is wrong, stopping and going on, figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import ENVIRONMENT, SHAPES, TINY, Rival, make_case, with_rivals

from flashkda import cli
from flashkda.bench import __main__ as command
from flashkda.bench import _measure, _memory, _report, _session
from flashkda.bench._cases import Case

# --- the command on a CPU ------------------------------------------------------------------------


def test_the_command_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    argv = ["bench", *TINY, *SHAPES, "--gate=fast", f"--output={tmp_path}", "--commit=abc"]
    assert cli.main(argv) == 0
    assert torch.get_num_threads() == threads
    streams = capsys.readouterr()
    assert "the PyTorch path beside the token recurrence" in streams.err
    assert "commit abc" in streams.out
    for title in _report.TITLES.values():
        assert f"## {title}" in streams.out
    assert "token recurrence, float64" in streams.out
    assert "MiB on top of the inputs" in streams.out
    assert len(list(tmp_path.glob("*.json"))) == 4
    assert (tmp_path / "results.md").is_file()


# What is read from files that were written before: a change here is another format.
RECORD = {
    "case", "group", "shape", "layout", "heads", "tokens", "sequences", "gate", "num_bytes",
    "floor_seconds", "checked_heads", "rows", "format", "environment",
}  # fmt: skip
ROW = {
    "system", "path", "note", "errors", "allowed", "seconds", "quartiles", "method", "repeats",
    "host_seconds", "first_call_seconds", "peak_bytes",
}  # fmt: skip
ENVIRONMENT_KEYS = {
    "device", "driver", "flashkda", "commit", "torch", "cuda", "python", "threads", "dtype", "date",
    "copy_bytes_per_second", "dim", "systems", "missing",
}  # fmt: skip


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_rivals(monkeypatch, Rival(), peer="not installed")
    assert cli.main(["bench", *TINY, "--shape=1x20", "--heads=1,2", "--gate=none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [x["heads"] for x in result["records"]] == [1, 2]
    assert result["missing"] == {"peer": "not installed"}
    for record in result["records"]:
        assert set(record) == RECORD
        assert set(record["environment"]) == ENVIRONMENT_KEYS
        assert all(set(row) == ROW for row in record["rows"])
    ours, rival = result["records"][0]["rows"]
    assert ours["path"] == "torch"
    assert ours["quartiles"][0] <= ours["seconds"] <= ours["quartiles"][1]
    assert rival["system"] == "rival"


def test_a_wrong_rival_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_rivals(monkeypatch, Rival("liar", 1.001), peer="not installed")
    assert cli.main(["bench", *TINY, "--shape=1x20xH1", "--gate=slow"]) == 0
    printed = capsys.readouterr().out
    (line,) = [x for x in printed.splitlines() if "liar" in x and x.startswith("|")]
    cells = [x.strip() for x in line.split("|")[1:-1]]
    assert cells[3:6] == ["wrong: out above 1.0e-05", "-", "-"]
    assert cells[7:9] == ["-", "1.0e-03"]
    assert "Not measured: peer (not installed)." in printed


def test_our_own_wrong_result_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "FlashKDA", lambda: Rival("flashkda", 2.0))
    assert cli.main(["bench", *TINY, "--no-rivals", "--shape=1x20xH1", "--gate=slow"]) == 1
    streams = capsys.readouterr()
    assert "wrong: out above" in streams.out
    assert "no right result for prefill-1x20xH1-slow" in streams.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--device=nowhere"],
        ["--device=meta"],
        ["--repeats=0"],
        ["--repeats=few"],
        ["--dim=257"],
        ["--heads=2,x"],
        ["--gate=soft"],
        ["--shape=1x64xH1", "--group=train"],
        ["--plot=missing"],
        ["--against=missing"],
    ],
    ids=" ".join,
)
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 2
    assert "usage: flashkda bench" in capsys.readouterr().err


def test_largest_head_dimension_is_measured() -> None:
    assert cli.main(["bench", *TINY, "--dim=256", "--shape=1x2xH1", "--gate=none"]) == 0


@pytest.mark.parametrize("option", ["--output", "--figures", "--against"])
def test_a_folder_that_is_none_is_refused_before_anything_is_measured(
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def never(*args: object, **more: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(command, "measure", never)
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        assert cli.main(["bench", *TINY, "--shape=1x20xH1", f"{option}={path}"]) == 2
        assert f"{option} {path}: " in capsys.readouterr().err


def test_times_against_those_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_report, "REPRODUCIBLE_SECONDS", 0.0)
    argv = ["bench", *TINY, "--no-rivals", "--shape=1x2xH1", "--gate=none", f"--output={tmp_path}"]
    assert cli.main(argv) == 0
    for more in ([f"--plot={tmp_path}"], argv[1:]):  # nothing is left to measure
        assert cli.main(["bench", *more, f"--against={tmp_path}"]) == 0
        assert "1 times above 0 us were measured before; 0 differ" in capsys.readouterr().err


def test_plot_of_a_folder_that_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *TINY, "--no-rivals", "--shape=1x2xH1", "--gate=none", f"--output={tmp_path}"]
    assert cli.main(argv) == 0

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(_session.tempfile, "TemporaryFile", refuse)
    assert cli.main(["bench", f"--plot={tmp_path}"]) == 2
    assert f"--plot {tmp_path}: can't write there: Permission denied" in capsys.readouterr().err


def test_it_is_a_module_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    assert command.main() == 0
    assert "usage: flashkda bench" in capsys.readouterr().out


# --- stopping and going on -----------------------------------------------------------------------


def test_budget_stops_before_a_case_that_would_end_too_late(tmp_path: Path) -> None:
    now = [0.0]
    asked: list[str] = []

    def measure(case: Case) -> dict[str, Any]:
        asked.append(case.name)
        now[0] += 10.0
        return {"case": case.name}

    cases = [make_case(f"1x{n}xH1") for n in (20, 30, 40, 50)]

    def run(budget: float | None) -> _session.Outcome:
        return _session.run(
            cases, measure, ENVIRONMENT,
            done=_session.load(tmp_path), folder=tmp_path, budget=budget, clock=lambda: now[0],
        )  # fmt: skip

    first = run(29.0)
    assert len(first.records) == 2
    assert first.left == cases[2:]
    assert first.problem == ""
    assert len(list(tmp_path.glob("*.json"))) == 2
    asked.clear()
    second = run(None)
    assert asked == [x.name for x in cases[2:]]
    assert [x["case"] for x in second.records] == [x.name for x in cases]
    assert second.left == []
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_run_ends_when_the_device_is_beyond_use() -> None:
    def wait() -> None:
        raise RuntimeError("illegal memory access")

    cases = [make_case("1x20xH1"), make_case("1x30xH1")]
    outcome = _session.run(cases, lambda x: {"case": x.name}, ENVIRONMENT, wait=wait)
    assert len(outcome.records) == 1
    assert outcome.left == cases[1:]
    assert "can't be used any more after prefill-1x20xH1-slow" in outcome.problem


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *TINY, "--no-rivals", *SHAPES[:2], "--gate=slow", f"--output={tmp_path}"]
    ticks = iter(range(0, 10_000, 60))
    run = _session.run
    monkeypatch.setattr(
        _session, "run", lambda *args, **more: run(*args, **more, clock=lambda: next(ticks))
    )
    assert cli.main([*argv, "--budget=100"]) == 0
    streams = capsys.readouterr()
    assert "1 cases are left, the same command goes on from there" in streams.err
    assert "1 cases are not measured yet." in streams.out
    monkeypatch.setattr(_session, "run", run)
    asked = []
    measure = _measure.measure
    monkeypatch.setattr(
        command, "measure", lambda case, *a, **k: asked.append(case) or measure(case, *a, **k)
    )
    assert cli.main(argv) == 0
    assert [case.shape.name for case in asked] == ["2x1xH2"]
    assert cli.main([*argv, "--commit=another"]) == 2
    assert "was measured with commit" in capsys.readouterr().err


def test_a_file_that_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text("[]")
    assert cli.main(["bench", f"--plot={tmp_path}"]) == 2
    assert "is no record of this benchmark" in capsys.readouterr().err
    (tmp_path / "a.json").write_text('{"format": 0}')
    assert cli.main(["bench", *TINY, f"--output={tmp_path}"]) == 2
    assert "another version of this benchmark" in capsys.readouterr().err


# --- memory --------------------------------------------------------------------------------------


def test_memory_is_measured_in_a_fresh_process() -> None:
    inputs = 2048 * (4 * 64 + 1) * 4
    # The gradients alone are as large as the inputs.
    assert 0.9 * inputs < _memory.run("1x2048xH1:backward", "slow", 64, 1) < 20 * inputs


def test_memory_that_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        RuntimeError, match="ended with status 1: ValueError: 'nothing' is no shape"
    ):
        _memory.run("nothing", "slow", 16, 1)
    with pytest.raises(OSError, match="has no VmNothing"):
        _memory._resident("VmNothing")
    monkeypatch.setattr(_memory.sys, "executable", "/bin/false")
    argv = ["bench", *TINY, "--no-rivals", "--shape=1x18xH1:backward", "--gate=slow"]
    assert cli.main(argv) == 0
    assert "memory not measured: the measuring process ended" in capsys.readouterr().err


def test_memory_of_this_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the fresh process runs, where its lines are counted."""
    monkeypatch.setattr(sys, "argv", ["memory", "1x256xH1:backward", "slow", "16", "1"])
    _memory.main()
    int(capsys.readouterr().out)
