"""The benchmark command: shapes, checks, rivals, resuming, tables and figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import flashkda
from flashkda import cli
from flashkda.bench import __main__ as command
from flashkda.bench import _cases, _devices, _measure, _memory, _plot, _report, _rivals, _session
from flashkda.bench._cases import Case, Shape, parse
from flashkda.bench._inputs import Inputs
from flashkda.bench._reference import Reference, Result, reference
from flashkda.bench._systems import Call, FlashKDA

TINY = ["--dim=16", "--repeats=3", "--device=cpu", "--threads=1"]
SHAPES = ["--shape=1x20xH2", "--shape=2x1xH2", "--shape=5+12xH1", "--shape=1x18xH2:backward"]


def make_case(text: str, gate: str = "slow") -> Case:
    return Case(parse(text)[0], gate)


class FakeGpu(_devices.Cpu):
    """The way through the benchmark that a GPU takes: 30 us by events, 3 us in a graph."""

    cache_bytes = 2**20
    has_graphs = True

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[int] = []
        self.broken = False

    def wait(self) -> None:
        if self.broken:
            raise RuntimeError("illegal memory access\nand more")

    def times(self, run: _devices.Run, repeats: int) -> list[float]:
        run()
        return [30e-6] * repeats

    def graph_times(self, runs: Sequence[_devices.Run], repeats: int) -> list[float]:
        self.graphs.append(len(runs))
        for run in runs:
            run()
        return [3e-6, 4e-6, 2e-6] * repeats

    def peak_bytes(self, run: _devices.Run) -> int:
        run()
        return 2**21


class Rival:
    """A rival that is right but for ``factor``, or raises."""

    def __init__(self, name: str = "rival", factor: float = 1.0, error: Exception | None = None):
        self.name = name
        self.factor = factor
        self.error = error

    def refusal(self, case: Case) -> str | None:
        return "packed is too hard" if case.shape.packed else None

    def bind(self, inputs: Inputs) -> Call:
        call = FlashKDA().bind(inputs)

        def read(got: Any) -> Result:
            if self.error is not None:
                raise self.error
            result = call.read(got)
            return Result(self.factor * result.out, result.state, result.gradients)

        return Call(call.run, read)


def with_rivals(monkeypatch: pytest.MonkeyPatch, *rivals: Rival, **missing: str) -> None:
    monkeypatch.setattr(_rivals, "find", lambda device_type: (list(rivals), missing))


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
    from flashkda.bench._inputs import activated

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
    names = {path.name for path in tmp_path.glob("*.png")}
    assert {"roofline-prefill.png", "accuracy-decode-state.png"} <= names


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with_rivals(monkeypatch, Rival(), peer="not installed")
    assert cli.main(["bench", *TINY, "--shape=1x20", "--heads=1,2", "--gate=none", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [x["heads"] for x in result["records"]] == [1, 2]
    assert result["missing"] == {"peer": "not installed"}
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
    assert cells[3:7] == ["wrong: out above 1.0e-05", "-", "-", "-"]
    assert cells[7] == "1.0e-03"
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
        ["--repeats=0"],
        ["--heads=2,x"],
        ["--gate=soft"],
        ["--shape=1x64xH1", "--group=train"],
        ["--plot=missing"],
    ],
    ids=" ".join,
)
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(argv) == 2
    assert "usage: flashkda bench" in capsys.readouterr().err


def test_it_is_a_module_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--help"])
    assert command.main() == 0
    assert "usage: flashkda bench" in capsys.readouterr().out


# --- stopping and going on -----------------------------------------------------------------------

ENVIRONMENT = {"device": "a card", "flashkda": "1", "commit": None, "torch": "2", "dtype": "x"}


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
            cases, measure, ENVIRONMENT, folder=tmp_path, budget=budget, clock=lambda: now[0]
        )

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


# --- rivals --------------------------------------------------------------------------------------


def test_rivals_that_are_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    def broken(name: str) -> Any:
        raise OSError("libcuda is missing\nat all")

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(_rivals, "import_module", broken)
    found, reasons = _rivals.find("cuda")
    assert found == []
    assert reasons == {
        "fla-core": "not installed",
        "flash_kda": "does not import: OSError: libcuda is missing",
        "nvidia-cudnn-frontend": "not installed",
    }
    monkeypatch.setattr(
        _rivals, "import_module", lambda name: (_ for _ in ()).throw(ModuleNotFoundError(name))
    )
    assert _rivals.find("cuda")[1]["flash_kda"] == "not installed"


# Stand-ins with the signatures of the real functions: each computes what the real one would.


def chunk_kda(q, k, v, g, beta, *, safe_gate, disable_recompute=False, **options):
    assert safe_gate
    return flashkda.chunk_kda(q, k, v, g, beta, **options)


def fused_recurrent_kda_fwd(q, k, v, g, beta, *, inplace_final_state, **options):
    assert inplace_final_state
    return flashkda.fused_recurrent_kda(q, k, v, g, beta, **options)


def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, *, gate_lower_bound, a_log, **options):
    assert options.pop("safe_gate")
    options["use_gate_in_kernel"] = True
    o, state = flashkda.chunk_kda(
        *(x[None] for x in (q, k, v, g, beta)),
        **options,
        A_log=a_log,
        lower_bound=gate_lower_bound,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )
    return o[0], state


def naive(q, k, v, g, beta, scale, initial_state, output_final_state):
    return flashkda.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state=output_final_state
    )


MODULES = {
    "fla.ops.kda": SimpleNamespace(
        chunk_kda=chunk_kda, fused_recurrent_kda=flashkda.fused_recurrent_kda
    ),
    "fla.ops.kda.fused_recurrent": SimpleNamespace(fused_recurrent_kda_fwd=fused_recurrent_kda_fwd),
    "fla.ops.kda.naive": SimpleNamespace(naive_recurrent_kda=naive, naive_chunk_kda=naive),
    "flash_kda": SimpleNamespace(fwd=flashkda.fwd),
    "cudnn.linear_attention": SimpleNamespace(kimi_delta_attention=kimi_delta_attention),
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_every_rival_is_called_right(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.setattr(_rivals, "import_module", MODULES.__getitem__)
    rivals, missing = _rivals.find(device_type)
    assert missing == {}
    timed: dict[str, set[str]] = {}
    shapes = ["1x20xH2", "5+12xH2", "2x1xH2", "2x1xH2:kv", "2x3xH2", "2x1xH2:ready",
              "1x18xH2:backward", "5+12xH1:backward"]  # fmt: skip
    for text in shapes:
        record = _measure.measure(
            make_case(text, "fast"), [FlashKDA(), *rivals], _devices.Cpu(), repeats=1, dim=16
        )
        for row in record.rows:
            if row.seconds is None:
                assert row.note, row
                assert not row.note.startswith(("wrong", "failed")), row
            else:
                timed.setdefault(row.system, set()).add(text)
    for system in rivals:
        assert timed[system.name]
    if device_type == "cuda":
        assert timed["fla-core 1"] == set(shapes) - {"2x1xH2:ready"}
        assert timed["fla-core 1 [K, V]"] == {"2x1xH2", "2x3xH2"}
        assert timed["fla-core 1 disable_recompute"] == {x for x in shapes if "back" in x}
        assert timed["nvidia-cudnn-frontend 1"] == {"1x20xH2", "5+12xH2"}


# --- figures, memory, environment ----------------------------------------------------------------


def recorded(
    text: str, *seconds: float | None, gate: str = "fast", error: float = 1e-3
) -> dict[str, Any]:
    case = make_case(text, gate)
    shape = case.shape
    rows = [
        _measure.Row(
            f"system {i}",
            note="" if s else "wrong: out above 1.0e-02",
            errors={"out": error, "gradients" if shape.group == "train" else "state": error},
            seconds=s,
            quartiles=(s, s) if s else None,
            method="events",
            host_seconds=2e-5,
        )
        for i, s in enumerate(seconds)
    ]
    record = _measure.Record(
        case.name, shape.group, shape.name, shape.layout, shape.heads, shape.tokens,
        len(shape.lengths), gate, 10**8, [0], rows,
    )  # fmt: skip
    facts = {"driver": "580.1", "cuda": "13.0", "python": "3.12", "threads": 8, "missing": {},
             "date": "2026-12-01", "copy_bytes_per_second": 4e12}  # fmt: skip
    return record.as_data() | {"format": _session.FORMAT, "environment": ENVIRONMENT | facts}


def test_tables_and_figures_from_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert cells[3:7] == ["0.2000", "0.2000 to 0.2000", "2.00x", "12 %"]
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


def test_memory_is_measured_in_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = _memory.run("1x2048xH1:backward", "slow", 64, 1)
    assert peak.inputs == 2048 * (4 * 64 + 1) * 4
    # The gradients alone are as large as the inputs.
    assert peak.with_inputs > peak.above_inputs > peak.inputs
    monkeypatch.setattr(sys, "argv", ["memory", "1x256xH1", "slow", "16", "2"])
    assert _memory.main() == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == 256 * (4 * 16 + 1) * 4


def test_memory_that_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="the measuring process ended with status"):
        _memory.run("nothing", "slow", 16, 1)
    with pytest.raises(OSError, match="has no VmNothing"):
        _memory._resident("VmNothing")
    monkeypatch.setattr(_memory, "_CLEAR_REFS", _memory._STATUS / "missing")
    assert _memory._reset_peak() == "VmHWM since the start of the process"

    def fail(*args: object) -> _memory.Peak:
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(_memory, "run", fail)
    argv = ["bench", *TINY, "--no-rivals", "--shape=1x18xH1:backward", "--gate=slow"]
    assert cli.main(argv) == 0
    assert "memory not measured: no /proc here" in capsys.readouterr().err
