"""What the benchmark measures: shapes, inputs, references, and one case."""

from __future__ import annotations

import pytest
import torch
from benching import FakeGpu, Rival, make_case

from flashkda import cli
from flashkda.bench import _cases, _devices, _measure
from flashkda.bench._cases import Case, Shape, parse
from flashkda.bench._inputs import Inputs, activated
from flashkda.bench._reference import Reference, Result, reference
from flashkda.bench._systems import Call, FlashKDA

# --- shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("1x8192xH32", Shape("prefill", (8192,), False, 32)),
        ("3x17xH1", Shape("prefill", (17,) * 3, False, 1)),
        ("3x16xH1", Shape("decode", (16,) * 3, False, 1)),
        ("1300+547xH8", Shape("prefill", (1300, 547), True, 8)),
        ("256x1xH16:bf16:kv", Shape("decode", (1,) * 256, False, 16, True, False)),
        ("2x1xH4:ready", Shape("decode", (1, 1), False, 4, is_ready=True)),
        ("5+6xH4:backward", Shape("train", (5, 6), True, 4)),
    ],
)
def test_shape_and_its_name(text: str, shape: Shape) -> None:
    assert parse(text) == [shape]
    assert shape.name == text


def test_shape_without_heads_takes_those_given() -> None:
    assert [x.name for x in parse("1x64", [2, 8])] == ["1x64xH2", "1x64xH8"]
    assert [x.name for x in parse("1x64xH4", [2, 8])] == ["1x64xH4"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8192", "is no shape"),
        ("1x8192xH", "is no shape"),
        ("1x64", "no number of heads"),
        ("0x64xH1", "at least 1"),
        ("1x64xH0", "at least 1"),
        ("1x64xH1:fast", "unknown option 'fast'"),
        ("1x64xH1:bf16", "options of decoding"),
    ],
)
def test_what_is_no_shape_is_said(
    text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)
    assert cli.main(["bench", "--device=cpu", f"--shape={text}"]) == 2
    assert reason in capsys.readouterr().err


def test_default_shapes() -> None:
    shapes = _cases.defaults("cuda")
    assert len(set(shapes)) == len(shapes)
    assert {x.group for x in shapes} == set(_cases.GROUPS)
    heads = [x.heads for x in shapes]
    assert heads == sorted(heads)  # those of one number come together
    assert {x.heads for x in _cases.quick("cuda")} == {32}
    assert {x.group for x in _cases.quick("cuda")} == {"prefill", "decode"}
    assert set(_cases.quick("cpu")) < set(_cases.defaults("cpu"))
    assert {x.heads for x in _cases.with_heads(shapes, [3, 5])} == {3, 5}


def test_names_of_cases_are_names_of_files() -> None:
    names = {Case(x, gate).name for x in _cases.defaults("cuda") for gate in _cases.GATES}
    assert len(names) == 3 * len(_cases.defaults("cuda"))
    assert not any(set(name) & set('/:*? "') for name in names)


# --- the reference -------------------------------------------------------------------------------


def test_gates_mean_what_they_say() -> None:

    means = {}
    for gate in _cases.GATES:
        inputs = Inputs.draw(
            make_case("1x400xH8", gate), torch.device("cpu"), torch.float32, 64, seed=0
        )
        means[gate] = float(activated(inputs)[3].mean())
    assert means["fast"] == pytest.approx(-3.2, abs=0.2)
    assert means["slow"] == pytest.approx(-0.13, abs=0.05)
    assert abs(means["none"]) < 1e-11


def drawn(text: str) -> tuple[Inputs, Reference, Result]:
    inputs = Inputs.draw(make_case(text), torch.device("cpu"), torch.float32, 16, seed=0)
    call = FlashKDA().bind(inputs)
    return inputs, reference(inputs), call.read(call.run())


@pytest.mark.parametrize("text", ["1x40xH5", "7+0+20xH3", "2x1xH4:kv", "2x17xH3:backward"])
def test_errors_of_right_results_are_small(text: str) -> None:
    if "+0+" in text:
        text = text.replace("+0+", "+1+")
    _, right, got = drawn(text)
    assert max(right.errors(got).values()) < 1e-5


def test_errors_see_what_is_wrong() -> None:
    _, right, got = drawn("1x40xH5")
    assert right.heads == [0, 2, 4]
    assert got.state is not None
    assert right.errors(Result(got.out, None))["state"] == float("inf")
    assert right.errors(Result(1.1 * got.out, got.state))["out"] == pytest.approx(0.1, rel=1e-3)
    got.out[0, 3, 1, 2] = float("nan")  # of a head that isn't compared
    assert right.errors(got)["out"] == float("inf")
    _, right, got = drawn("1x20xH3:backward")
    assert right.errors(Result(got.out))["gradients"] == float("inf")
    assert got.gradients is not None
    got.gradients["A_log"] *= 1.5
    assert right.errors(got)["gradients"] == pytest.approx(0.5, rel=1e-3)


# --- one case ------------------------------------------------------------------------------------


def measured(text: str, *rivals: Rival, device: _devices.Cpu | None = None) -> _measure.Record:
    systems = [FlashKDA(), *rivals]
    device = FakeGpu() if device is None else device
    return _measure.measure(make_case(text), systems, device, repeats=3, dim=16)


def test_a_short_call_is_timed_in_a_graph_on_rotating_data() -> None:
    device = FakeGpu()
    row = measured("1x20xH2", device=device).rows[0]
    assert row.method == "graph"
    assert row.seconds == 3e-6
    assert row.quartiles == (2e-6, 4e-6)
    assert row.host_seconds is not None
    assert row.first_call_seconds is not None
    assert device.graphs == [_devices.CALLS]
    device.cache_bytes = 0
    measured("1x20xH2", device=device)
    measured("2x1xH2:ready", device=device)  # never the same slots twice in a row
    assert device.graphs[1:] == [1, 2]
    assert measured("1x18xH2:backward").rows[0].peak_bytes == 2**21


def test_a_call_that_cannot_be_captured_keeps_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: FakeGpu, runs: object, repeats: int) -> list[float]:
        raise RuntimeError("not capturable")

    monkeypatch.setattr(FakeGpu, "graph_times", fail)
    row = measured("1x20xH2").rows[0]
    assert (row.method, row.seconds, row.note) == ("events", 30e-6, "")


def test_no_time_for_a_wrong_result() -> None:
    rows = measured("1x20xH2", Rival("good"), Rival("bad", 1.1), Rival("nan", float("nan"))).rows
    assert [row.seconds is None for row in rows] == [False, False, True, True]
    assert rows[2].note == "wrong: out above 1.0e-05"
    assert rows[2].errors["out"] == pytest.approx(0.1, rel=1e-3)
    assert rows[3].errors["out"] == float("inf")


def test_a_rival_that_fails_is_a_row_with_the_reason() -> None:
    rows = measured("1x20xH2", Rival("bad", error=ValueError("no such\nkernel")), Rival()).rows
    assert rows[1].note == "failed: ValueError: no such"
    assert rows[2].seconds is not None
    assert measured("5+6xH2", Rival()).rows[1].note == "packed is too hard"


def test_a_device_beyond_use_ends_the_record() -> None:
    device = FakeGpu()

    class Breaks(Rival):
        def bind(self, inputs: Inputs) -> Call:
            device.broken = True
            return super().bind(inputs)

    record = measured("1x20xH2", Breaks(), Rival("later"), device=device)
    assert [row.system.split()[0] for row in record.rows] == ["flashkda", "rival"]
    assert record.rows[0].seconds is not None
    assert "unusable" in record.rows[1].note


def test_allowed_errors() -> None:
    def ours(text: str, gate: str) -> dict[str, float]:
        case = make_case(text, gate)
        return _measure.allowed_errors(case, torch.bfloat16, is_ours=True)

    assert ours("1x1024xH1", "fast") == {"out": 4.5e-3, "state": 2.5e-3}
    assert ours("1x8192xH1", "none") == {"out": 5e-3, "state": 4e-3}
    assert ours("1x1xH1", "none") == {"out": 3e-3, "state": 3e-3}
    assert set(ours("1x64xH1:backward", "slow")) == {"out", "gradients"}
    theirs = _measure.allowed_errors(make_case("1x64xH1"), torch.bfloat16, is_ours=False)
    assert theirs == {"out": 1e-2, "state": 1e-2}
