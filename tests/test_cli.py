"""The command line: what it prints, and its exit status (0 good, 1 a failed check, 2 bad input)."""

from __future__ import annotations

import json
import os
import platform
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flashkda
from flashkda import _command, _demo, _doctor, _selftest, cli
from flashkda.bench import __main__ as bench

TINY = 300

Call = Callable[..., tuple[Tensor, Tensor]]


def off_by_a_thousandth(function: Call) -> Call:
    """The same call with an output that is a little wrong, as a broken kernel's would be."""

    def wrong(*args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        o, state = function(*args, **kwargs)
        return o * 1.001, state

    return wrong


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 20)
    return path


@pytest.fixture
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo on few tokens; the command itself refuses fewer than 8192."""
    monkeypatch.setattr(cli, "_DEMO_TOKENS", TINY)
    monkeypatch.setattr(_demo, "PIECE", 130)


def test_doctor_names_versions_and_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    chosen = flashkda.backend("cpu")
    for fact in (flashkda.__version__, torch.__version__, platform.python_version()):
        assert fact in printed
    assert f"backend {chosen.name}: {chosen.reason}" in printed


def test_doctor_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["flashkda"] == flashkda.__version__
    assert facts["torch"] == torch.__version__
    cpu = facts["devices"][0]
    assert cpu["device"] == "cpu"
    assert (cpu["backend"], cpu["reason"]) == flashkda.backend("cpu")


def test_doctor_is_content_with_a_gpu_that_falls_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "Some GPU, capability 9.0" in printed
    assert flashkda.backend("cuda").reason in printed


def test_selftest_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["selftest", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "MISMATCH" not in printed
    for gate in ("fast", "slow", "none"):
        assert f"chunk-{gate}-varlen-float32" in printed
        assert f"recurrent-{gate}-dense-float32" in printed


@pytest.mark.parametrize("operator", ["chunk_kda", "fused_recurrent_kda"])
def test_selftest_fails_on_a_wrong_result(
    operator: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [case for case in _selftest.cases() if case.gate == "slow"]
    monkeypatch.setattr(_selftest, "cases", lambda float64: few)
    monkeypatch.setattr(_selftest, operator, off_by_a_thousandth(getattr(_selftest, operator)))
    assert cli.main(["selftest", "--device", "cpu"]) == 1
    printed = capsys.readouterr().out
    assert "MISMATCH" in printed
    assert "FAILED" in printed


def test_selftest_fails_on_nan() -> None:
    broken = torch.tensor([1.0, float("nan")])
    assert _selftest.relative_error(broken, torch.ones(2)) == float("inf")


@pytest.mark.usefixtures("small_demo")
@pytest.mark.parametrize(
    "options",
    [[], ["--dtype", "bfloat16"], ["--dtype", "float64", "--gate", "softplus"]],
    ids=["float32", "bfloat16", "float64-softplus"],
)
def test_demo_agrees(options: list[str], text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", str(text), "--tokens", str(TINY), *options]) == 0
    printed = capsys.readouterr().out
    assert f"the first {TINY} bytes" in printed
    assert f"backend  {flashkda.backend('cpu').name}" in printed
    assert "tokens/s" in printed
    assert "DISAGREES" not in printed


def test_demo_runs_as_it_is_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def record(*arguments: object) -> int:
        calls.append(arguments)
        return len(calls) - 1

    monkeypatch.setattr(cli, "_device", lambda parser, name: torch.device(name))
    monkeypatch.setattr(_demo, "main", record)
    assert cli.main(["demo", "--device", "cuda", "--dtype", "bfloat16"]) == 0
    assert cli.main(["demo", "a.txt", "--tokens", "9000", "--gate", "softplus"]) == 1
    assert calls == [
        (None, 8192, torch.device("cuda"), torch.bfloat16, -5.0),
        (Path("a.txt"), 9000, torch.device("cpu"), torch.float32, None),
    ]


@pytest.mark.usefixtures("small_demo")
def test_demo_fails_when_decode_is_wrong(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flashkda import nn

    monkeypatch.setattr(nn, "fused_recurrent_kda", off_by_a_thousandth(nn.fused_recurrent_kda))
    assert cli.main(["demo", str(text)]) == 1
    printed = capsys.readouterr().out
    assert "DISAGREES" in printed
    assert "FAILED" in printed


@pytest.mark.usefixtures("small_demo")
def test_demo_repeats_a_short_text_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_bytes(b"abc\xff")
    assert cli.main(["demo", str(short)]) == 0
    assert f"4 bytes, repeated to fill {TINY} tokens" in capsys.readouterr().out


def test_demo_has_a_text_on_this_machine() -> None:
    tokens, note = _demo.load_tokens(_demo.default_text(), 8192)
    assert tokens.shape == (8192,)
    assert note


@pytest.mark.parametrize("kind", ["missing", "folder", "empty"])
def test_demo_says_in_one_line_why_a_file_cannot_be_read(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input"
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    assert cli.main(["demo", str(path)]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert len(streams.err.splitlines()) == 1
    assert str(path) in streams.err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["unknown"],
        ["doctor", "--unknown"],
        ["demo", "--tokens", "8191"],
        ["demo", "--tokens", "many"],
        ["demo", "--dtype", "int8"],
        ["demo", "--device", "nowhere"],
        ["demo", "--device", "meta"],
        ["selftest", "--device", "nowhere"],
        ["selftest", "--device", "meta"],
        ["bench", "--shape", "many"],
    ],
    ids=" ".join,
)
def test_bad_arguments_end_with_status_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "usage: flashkda" in streams.err
    assert argv[-1:] == [] or argv[-1] in streams.err


@pytest.mark.parametrize("text", ["many", "1e4", "9000.5", ""])
def test_a_number_that_is_none_is_said(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", f"--tokens={text}"]) == 2
    assert f"--tokens: expected an integer, got {text!r}" in capsys.readouterr().err


# Output that waits in a buffer until the end, and more than the buffer holds.
PRINTS = ["print('x')", "print('x' * 100_000)", "import sys; print('x', file=sys.stderr)"]


@pytest.mark.parametrize("body", PRINTS, ids=["little", "much", "stderr"])
def test_a_reader_that_goes_away_ends_the_command_quietly(body: str, tmp_path: Path) -> None:
    script = tmp_path / "command.py"
    script.write_text(
        "import flashkda._command as command, sys\n"
        "sys.stdin.read()\n"
        f"def run():\n    {body}\n    return 0\n"
        "sys.exit(command.until_nobody_reads(run))\n"
    )
    reading, writing = os.pipe()
    streams = {"stdout": writing, "stderr": subprocess.PIPE}
    if "stderr" in body:
        streams = {"stdout": subprocess.PIPE, "stderr": writing}
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, **streams) as process:
        os.close(reading)
        os.close(writing)
        out, err = process.communicate(timeout=120)
    assert process.returncode == _command.BROKEN_PIPE
    assert not out
    assert not err


@pytest.mark.parametrize("command", ["doctor", "selftest", "demo", "bench"])
def test_no_command_takes_a_lost_reader_for_an_error(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*args: object, **more: object) -> int:
        raise BrokenPipeError

    for module in (_doctor, _selftest, _demo, bench):
        monkeypatch.setattr(module, "main", lose)
    assert cli.main([command]) == _command.BROKEN_PIPE


@pytest.mark.parametrize("command", ["doctor", "selftest", "demo", "bench"])
def test_help_names_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert command in capsys.readouterr().out
    assert cli.main([command, "--help"]) == 0
    assert f"flashkda {command}" in capsys.readouterr().out


def test_module_is_the_same_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashkda", "doctor"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("flashkda", run_name="__main__")
    assert stop.value.code == 0
    assert flashkda.__version__ in capsys.readouterr().out


def test_installed_script_runs(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("flashkda")
    done = subprocess.run(
        [script, "doctor", "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flashkda"] == flashkda.__version__
