"""``flashkda bench``: speed, accuracy and memory beside what else is installed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashkda._backend import backend
from flashkda.bench import _cases, _memory, _plot, _report, _rivals, _session, _targets
from flashkda.bench._cases import Case
from flashkda.bench._devices import Device, open_device
from flashkda.bench._inputs import DIM
from flashkda.bench._measure import measure
from flashkda.bench._systems import FlashKDA, System

_DESCRIPTION = """\
Times prefill, decode and training beside other implementations that are installed, on the CUDA
device if there is one. Every result is compared with a token recurrence in float64; a wrong one
gets no time."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _heads(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="flashkda bench", description=_DESCRIPTION)
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--shape", action="append", default=[], help=f"may be repeated: {_cases.SYNTAX}"
    )
    what.add_argument("--heads", type=_heads, metavar="N,N...", help="numbers of heads instead")
    what.add_argument(
        "--group", action="append", choices=_cases.GROUPS, help="these only; may be repeated"
    )
    what.add_argument(
        "--gate", action="append", choices=_cases.GATES, help="may be repeated; default: all"
    )
    what.add_argument(
        "--quick", action="store_true", help=f"prefill and decode of {_cases.QUICK_HEADS} heads"
    )
    what.add_argument("--no-rivals", action="store_true", help="flashkda alone")
    what.add_argument(
        "--targets",
        action="store_true",
        help="instead: what the kernels are meant to reach on an H200, and whether they do",
    )
    how = parser.add_argument_group("how")
    how.add_argument("--device", help="cpu, cuda or cuda:1; default: cuda if there is one")
    how.add_argument(
        "--repeats", type=_positive, default=30, help="times of each (default: %(default)s)"
    )
    how.add_argument("--dim", type=_positive, default=DIM, help="K and V (default: %(default)s)")
    how.add_argument("--threads", type=_positive, help="of PyTorch")
    how.add_argument(
        "--budget",
        type=_positive,
        metavar="SECONDS",
        help="begin no case that would end later; with --output the same command goes on there",
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--output", type=Path, metavar="DIR", help="keep a file for each case; skip what is there"
    )
    results.add_argument("--json", action="store_true", help="print JSON, not Markdown")
    results.add_argument(
        "--plot", type=Path, metavar="DIR", help="measure nothing: tables and figures of a DIR"
    )
    results.add_argument(
        "--figures", type=Path, metavar="DIR", help="where figures go (default: with the results)"
    )
    results.add_argument("--commit", help="to be noted with the results; default: git's")
    return parser


def _chosen(args: argparse.Namespace, device_type: str) -> list[Case]:
    shapes = [y for x in args.shape for y in _cases.parse(x, args.heads or ())]
    if not args.shape:
        shapes = _cases.quick(device_type) if args.quick else _cases.defaults(device_type)
        if args.heads:
            shapes = _cases.with_heads(shapes, args.heads)
    shapes = [x for x in dict.fromkeys(shapes) if not args.group or x.group in args.group]
    gates = dict.fromkeys(args.gate or _cases.GATES)
    return [Case(shape, gate) for shape in shapes for gate in gates]


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark.

    Status 0 is success, 1 a result of flashkda that is wrong or missing, 2 arguments that cannot
    be used.
    """
    parser = _parser()
    threads = torch.get_num_threads()
    try:
        args = parser.parse_args(sys.argv[1:] if argv is None else argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        return _run(parser, args)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    finally:
        torch.set_num_threads(threads)


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.plot is not None:
        return _render(parser, args)
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = open_device(name)
        cases = _chosen(args, device.device.type)
    except (ValueError, RuntimeError, AssertionError) as error:
        parser.error(str(error).splitlines()[0])
    if not cases:
        parser.error("nothing to measure: no shape is of these groups")
    served = backend(device.device)
    print(f"flashkda bench: {device.device}, backend {served}", file=sys.stderr)
    if args.targets:
        return _targets_main(args, device, served.name)
    if device.device.type == "cpu":
        print(
            "flashkda bench: without a CUDA device it measures the PyTorch path beside the token "
            "recurrence in float64: times, errors, and memory of a backward pass",
            file=sys.stderr,
        )
    facts = _report.environment(device, args.commit)
    systems: list[System] = [FlashKDA()]
    missing: dict[str, str] = {}
    if not args.no_rivals:
        found, missing = _rivals.find(device.device.type)
        systems += found
    try:
        there = _session.load(args.output) if args.output is not None else []
    except ValueError as error:
        parser.error(str(error))
    problem = _session.conflict(there, facts)
    if problem is not None:
        parser.error(f"--output {args.output}: {problem}; take another folder")
    outcome = _session.run(
        cases,
        _measure_with(systems, device, args),
        facts | {"missing": missing},
        folder=args.output,
        budget=args.budget,
        wait=device.wait,
    )
    return _finish(args, outcome, missing)


def _measure_with(
    systems: Sequence[System], device: Device, args: argparse.Namespace
) -> Callable[[Case], dict[str, Any]]:
    def one(case: Case) -> dict[str, Any]:
        record = measure(case, systems, device, repeats=args.repeats, dim=args.dim)
        ours = record.rows[0]
        if device.device.type == "cpu" and case.shape.group == "train" and not ours.note:
            try:
                peak = _memory.run(case.shape.name, case.gate, args.dim, torch.get_num_threads())
                ours.peak_bytes = peak.above_inputs
            except RuntimeError as error:
                print(f"flashkda bench: memory not measured: {error}", file=sys.stderr)
        return record.as_data()

    return one


def _finish(args: argparse.Namespace, outcome: _session.Outcome, missing: dict[str, str]) -> int:
    if args.json:
        print(json.dumps({"records": outcome.records, "missing": missing}, indent=2))
    else:
        print(_report.markdown(outcome.records, missing, len(outcome.left)), end="")
    if args.output is not None or args.figures is not None:
        _write(args.output, args.figures or args.output, outcome.records, missing)
    if outcome.left:
        why = outcome.problem or f"the budget of {args.budget} s is used"
        there = (
            "the same command goes on from there"
            if args.output is not None
            else "nothing was kept: give --output to be able to go on"
        )
        print(
            f"flashkda bench: {why}; {len(outcome.left)} cases are left, {there}", file=sys.stderr
        )
    bad = [x["case"] for x in outcome.records if x["rows"][0]["seconds"] is None]
    for case in bad:
        print(f"flashkda bench: flashkda has no right result for {case}", file=sys.stderr)
    return 1 if bad or outcome.problem else 0


def _write(
    folder: Path | None,
    figures: Path,
    records: Sequence[dict[str, Any]],
    missing: dict[str, str],
) -> None:
    if folder is not None and records:
        (folder / "results.md").write_text(_report.markdown(records, missing), encoding="utf-8")
    try:
        written = _plot.draw(records, figures)
    except ImportError as error:
        print(f"flashkda bench: {error}", file=sys.stderr)
        return
    print(f"flashkda bench: {len(written)} figures in {figures}", file=sys.stderr)


def _render(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        records = _session.load(args.plot)
    except ValueError as error:
        parser.error(str(error))
    if not records:
        parser.error(f"--plot {args.plot}: no records there")
    missing = records[-1]["environment"]["missing"]
    records.sort(key=lambda x: (x["heads"], x["tokens"], x["case"]))
    print(_report.markdown(records, missing), end="")
    _write(args.plot, args.figures or args.plot, records, missing)
    return 0


def _targets_main(args: argparse.Namespace, device: Device, path: str) -> int:
    if path != "cuda":
        print("flashkda bench: targets are of the CUDA kernels", file=sys.stderr)
        return 1
    facts = _report.environment(device, args.commit)
    bandwidth = facts["copy_bytes_per_second"]
    found = _targets.figures(device, bandwidth, quick=args.quick, repeats=args.repeats)
    if args.json:
        figures = [vars(x) | {"verdict": x.verdict} for x in found]
        print(json.dumps({"environment": facts, "figures": figures}, indent=2))
    else:
        print(_report.heading(facts) + "\n")
        print(_targets.table(found))
    return 1 if any(x.value is None for x in found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
