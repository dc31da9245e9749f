"""Limits and goals of the kernels, on shapes that a CPU can do."""

from __future__ import annotations

import json

import pytest
import torch
from benching import FakeGpu

import flashkda
from flashkda import cli
from flashkda.bench import __main__ as command
from flashkda.bench import _targets
from flashkda.bench._cases import parse
from flashkda.bench._targets import Figure, Target

ARGV = ["bench", "--targets", "--repeats=3", "--dim=2", "--threads=1"]


@pytest.fixture
def small_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with kernels, which takes 3 us for every call."""
    served = flashkda.Backend("cuda", "a test")
    monkeypatch.setattr(command, "backend", lambda device: served)
    monkeypatch.setattr(command, "open_device", lambda name: FakeGpu())
    small = {
        "PREFILL": {"1x20xH1": Target(1.0, goal=0.002), "1x30xH1": Target(1.0, goal=0.004)},
        "DECODE": {"2x1xH1": Target(), "2x4xH1": Target()},
        "DRAFTS": ("2x1xH1", "2x4xH1"),
        "STREAMED": "2x1xH1",
        "STATE_TRAFFIC": Target(0.0, at_least=True),
        "CHECKPOINTED": "2x64xH1",
        "QUICK": ("1x30xH1",),
        "HOST_CALLS": 2,
    }
    for name, value in small.items():
        monkeypatch.setattr(_targets, name, value)


def test_the_tables_name_shapes() -> None:
    names = [*_targets.PREFILL, *_targets.DECODE, _targets.CHECKPOINTED]
    assert all(shape.name == name for name in names for shape in parse(name))
    assert set(_targets.QUICK) < set(names)
    assert {*_targets.DRAFTS, _targets.STREAMED} < set(_targets.DECODE)


@pytest.mark.parametrize(
    ("value", "target", "verdict", "fails"),
    [
        (0.81, Target(0.8, goal=0.4), "MISSED", True),
        (0.8, Target(0.8, goal=0.4), "kept", False),
        (0.4, Target(0.8, goal=0.4), "goal reached", False),
        (0.5, Target(goal=0.4), "goal open", False),
        (0.5, Target(), "", False),
        (87.0, Target(88.0, at_least=True), "MISSED", True),
        (89.0, Target(88.0, at_least=True), "kept", False),
        (float("nan"), Target(0.8), "MISSED", True),
        (None, Target(), "why", True),
    ],
)
def test_verdicts(value: float | None, target: Target, verdict: str, fails: bool) -> None:
    figure = Figure("x", value, "ms", target, note="why")
    assert (figure.verdict, figure.fails) == (verdict, fails)


@pytest.mark.usefixtures("small_targets")
def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(ARGV) == 0
    streams = capsys.readouterr()
    rows = [x.split("|")[1:-1] for x in streams.out.splitlines() if "|" in x]
    cells = {row[0].strip(): [x.strip() for x in row[1:]] for row in rows}
    assert cells["1x20xH1, fast gate"][:3] == ["0.003 ms", "at most 1, goal 0.002", "kept"]
    assert cells["1x30xH1, slow gate"][2] == "goal reached"
    assert "out" in cells["1x30xH1, slow gate"][3]
    assert cells["2x4xH1 over 2x1xH1"][0] == "1 x"
    assert cells["fast and slow gates apart, at most (1x20xH1)"][0] == "0 %"
    assert any(name.startswith("state traffic of 2x1xH1") for name in cells)
    assert any(name.startswith("a checkpoint per sequence, 2x64xH1") for name in cells)
    assert cells["host, fused_recurrent_kda 1x1 H4"][1] == "goal 18"


@pytest.mark.usefixtures("small_targets")
def test_a_missed_limit_fails_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_targets, "DECODE", {"2x1xH1": Target(0.001)})
    assert cli.main(ARGV) == 1
    said = capsys.readouterr().err
    assert "flashkda bench: 2x1xH1, fast gate: 0.003 ms, at most 0.001: MISSED" in said
    assert said.count("MISSED") == 1


@pytest.mark.usefixtures("small_targets")
def test_quick_targets_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ARGV, "--quick", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    times = [x for x in figures if x["unit"] == "ms"]
    assert {x["name"] for x in times} == {"1x30xH1, fast gate", "1x30xH1, slow gate"}
    assert all(x["verdict"] == "goal reached" for x in times)
    assert times[0]["target"] == {"limit": 1.0, "goal": 0.004, "at_least": False}


@pytest.mark.usefixtures("small_targets")
def test_wrong_results_have_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "flashkda.bench._measure.allowed_errors", lambda *a, **k: {"out": 0.0, "state": 0.0}
    )
    assert cli.main(ARGV) == 1
    assert "wrong: out above" in capsys.readouterr().err


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
