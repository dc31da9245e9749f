"""The benchmark command on small sizes, and the progress report."""

from __future__ import annotations

import io
import json
import platform
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkda
from flashkda import cli
from flashkda._progress import Progress
from flashkda._selftest import recurrence
from flashkda.bench import _decode, _forward, _gpu, _memory, _report
from flashkda.bench._report import markdown_table

SMALL = [
    "--tokens=128", "--memory-tokens=256", "--heads=1", "--dim=16", "--repeats=2", "--threads=1",
]  # fmt: skip


def right(*args: Tensor, output_final_state: bool) -> tuple[Tensor, Tensor]:
    return recurrence(*args, scale=args[0].shape[-1] ** -0.5)


def wrong(*args: Tensor, output_final_state: bool) -> tuple[Tensor, Tensor]:
    o, state = right(*args, output_final_state=output_final_state)
    return o * 1.001, state


def pretend_installed(monkeypatch: pytest.MonkeyPatch, version: str, module: Any) -> None:
    monkeypatch.setattr(_forward.metadata, "version", lambda name: version)
    monkeypatch.setattr(_forward, "import_module", lambda name: module)


def test_table_beside_a_rival(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = SimpleNamespace(naive_recurrent_kda=right, naive_chunk_kda=wrong)
    pretend_installed(monkeypatch, "0.6.0", module)
    threads = torch.get_num_threads()
    assert cli.main(["bench", "cpu", *SMALL]) == 0
    assert torch.get_num_threads() == threads
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if "|" in line]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["flashkda chunk_kda"][2] == "1.00x"
    assert cells["fla-core 0.6.0 naive_recurrent_kda"][2].endswith("x")
    # No time for a wrong result.
    assert cells["fla-core 0.6.0 naive_chunk_kda"][:2] == ["-", "-"]
    assert cells["fla-core 0.6.0 naive_chunk_kda"][2].startswith("wrong: error above")
    assert cells["the inputs themselves"][1] == "1.00x"
    assert float(cells["peak with inputs and output gradient"][1].removesuffix("x")) > 0


def test_json_and_a_missing_rival(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise _forward.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_forward.metadata, "version", missing)
    assert cli.main(["bench", "cpu", "--json", "--gate=fast", *SMALL]) == 0
    result = json.loads(capsys.readouterr().out)
    ours, rival = result["forward"]
    assert ours["error"] < _forward.ALLOWED_ERROR
    assert ours["fastest_s"] <= ours["median_s"] <= ours["slowest_s"]
    assert rival["median_s"] is None
    assert "pip install fla-core==0.6.0" in rival["note"]
    assert result["memory"]["inputs"] == 256 * (4 * 16 + 1) * 4
    assert result["environment"]["threads"] == 1


def test_our_own_wrong_result_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = SimpleNamespace(naive_recurrent_kda=right, naive_chunk_kda=right)
    pretend_installed(monkeypatch, "0.6.0", module)
    monkeypatch.setattr(_forward, "chunk_kda", wrong)
    assert cli.main(["bench", "cpu", *SMALL]) == 1
    assert "wrong: error above" in capsys.readouterr().out


def test_memory_is_measured_in_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peak = _memory.run(2048, 1, 64, "slow", 1)
    assert peak.inputs == 2048 * (4 * 64 + 1) * 4
    # The gradients alone are as large as the inputs.
    assert peak.with_inputs > peak.above_inputs > peak.inputs
    monkeypatch.setattr(sys, "argv", ["memory", "256", "1", "16", "slow", "2"])
    assert _memory.main() == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == 256 * (4 * 16 + 1) * 4


def test_memory_that_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RuntimeError, match="the measuring process ended with status"):
        _memory.run(-1, 1, 16, "slow", 1)
    with pytest.raises(OSError, match="has no VmNothing"):
        _memory._resident("VmNothing")

    def fail(*args: object) -> _memory.Peak:
        raise RuntimeError("no /proc here")

    monkeypatch.setattr(_memory, "run", fail)
    assert cli.main(["bench", "cpu", *SMALL]) == 0
    assert "not measured: no /proc here" in capsys.readouterr().out


def test_peak_that_cannot_be_reset_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_CLEAR_REFS", _memory._STATUS / "missing")
    assert _memory._reset_peak() == "VmHWM since the start of the process"


def test_processor_name_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_report, "Path", lambda name: tmp_path / "missing")
    assert _report.environment()["cpu"] == (platform.processor() or platform.machine())


def test_markdown_table() -> None:
    assert markdown_table(["a", "b"], [["long", "1"]]).splitlines() == [
        "| a    | b |",
        "|------|---|",
        "| long | 1 |",
    ]


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


def gpu_command(monkeypatch: pytest.MonkeyPatch, errors: dict[str, float]) -> None:
    """``bench gpu`` as on a machine with kernels, its measurements replaced."""
    main = "flashkda.bench.__main__"
    monkeypatch.setattr(f"{main}.backend", lambda device: flashkda.Backend("cuda", "a test"))
    monkeypatch.setattr(f"{main}.torch.cuda.get_device_name", lambda: "a card")
    rows = [_gpu.Row("1x8192 H96", gate, 0.5, 0.4, 0.6) for gate in ("fast", "slow")]
    monkeypatch.setattr(_gpu, "errors", lambda: errors)
    monkeypatch.setattr(
        _gpu, "run", lambda shapes, repeats: (rows, {"chunk_kda": 12.5}, (0.5, 0.51))
    )
    decode = [_decode.Row("256 rows", 0.25, 0.2, 0.3, 2e12)]
    monkeypatch.setattr(_decode, "run", lambda shapes, repeats: (decode, 4e12))


def test_gpu_times_are_printed_beside_their_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_command(monkeypatch, {"fast": 3e-3, "slow": 4e-3})
    assert cli.main(["bench", "gpu", "--quick"]) == 0
    printed = capsys.readouterr().out
    for text in ("a card", "0.5000", "0.4000 to 0.6000", "12.5 us", "fast gate 3.0e-03"):
        assert text in printed
    for text in ("256 rows", "0.2500", "0.2000 to 0.3000", "2.00", "50 %", "4.00 TB/s", "(+2.0 %)"):
        assert text in printed
    assert cli.main(["bench", "gpu", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["host_us"] == {"chunk_kda": 12.5}
    assert result["decode"][0]["bytes_per_s"] == 2e12
    assert result["copy_bytes_per_s"] == 4e12
    assert [row["gate"] for row in result["forward"]] == ["fast", "slow"]


def test_no_time_of_decode_is_printed_for_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_command(monkeypatch, {"fast": 3e-3, "slow": 4e-3})

    def fails(shapes: object, repeats: int) -> None:
        raise RuntimeError("256 rows: wrong outputs")

    monkeypatch.setattr(_decode, "run", fails)
    assert cli.main(["bench", "gpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "256 rows: wrong outputs" in captured.err


@pytest.mark.parametrize("error", [0.1, float("nan")])
def test_no_gpu_time_is_printed_for_a_wrong_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: float
) -> None:
    gpu_command(monkeypatch, {"fast": 3e-3, "slow": error})
    assert cli.main(["bench", "gpu"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "wrong results, no times" in captured.err
