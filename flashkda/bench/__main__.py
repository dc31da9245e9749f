"""``flashkda bench``: speed, accuracy and memory beside what else is installed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from flashkda._backend import backend
from flashkda._command import integer, until_nobody_reads
from flashkda._validate import MAX_HEAD_DIM
from flashkda.bench import _cases, _memory, _plot, _report, _rivals, _session, _targets
from flashkda.bench._cases import Case
from flashkda.bench._devices import Device, open_device
from flashkda.bench._inputs import DIM
from flashkda.bench._measure import measure
from flashkda.bench._session import Data
from flashkda.bench._systems import FlashKDA, System

_DESCRIPTION = """\
Times prefill, decode and training beside other implementations that are installed, on the CUDA
device if there is one. Every result is compared with a token recurrence in float64; a wrong one
gets no time."""


def _say(text: str) -> None:
    print(f"flashkda bench: {text}", file=sys.stderr)


_positive = integer(1)


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
    how.add_argument(
        "--dim",
        type=integer(1, MAX_HEAD_DIM),
        default=DIM,
        help=f"K and V, up to {MAX_HEAD_DIM} (default: %(default)s)",
    )
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
    results.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="results of another run: say which times differ by over 5 %%, with status 1 if any",
    )
    results.add_argument("--commit", help="to be noted with the results; default: git's")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark.

    Status 0 is success; 1 a result of flashkda that is wrong or missing, a target missed, or a time
    that another run did not have; 2 arguments that cannot be used; 141 an output that nobody reads
    to its end.
    """
    return until_nobody_reads(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    parser = _parser()
    threads = torch.get_num_threads()
    try:
        args = parser.parse_args(argv)
        if args.threads:
            torch.set_num_threads(args.threads)
        # Folders are looked at before anything is measured, which may take hours.
        before = None if args.against is None else _some(parser, "--against", args.against)
        if args.plot is None:
            return _run(parser, args, before)
        return _render(parser, args, before)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    finally:
        torch.set_num_threads(threads)


def _run(
    parser: argparse.ArgumentParser, args: argparse.Namespace, before: list[Data] | None
) -> int:
    name = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = open_device(name)
        cases = _chosen(args, device.device.type)
    except (ValueError, RuntimeError, AssertionError) as error:
        parser.error(str(error).splitlines()[0])
    if not cases:
        parser.error("nothing to measure: no shape is of these groups")
    served = backend(device.device)
    _say(f"{device.device}, backend {served}")
    if args.targets:
        return _run_targets(args, device, served.name)
    if device.device.type == "cpu":
        _say(
            "without a CUDA device it measures the PyTorch path beside the token recurrence in "
            "float64: times, errors, and memory of a backward pass"
        )
    systems: list[System] = [FlashKDA()]
    missing: dict[str, str] = {}
    if not args.no_rivals:
        found, missing = _rivals.find(device.device.type)
        systems += found
    _prepare(parser, args)
    there = _load(parser, args.output)
    facts = _report.environment(device, args.commit)
    facts |= {"dim": args.dim, "systems": [x.name for x in systems], "missing": missing}
    problem = _session.conflict(there, facts)
    if problem is not None:
        parser.error(f"--output {args.output}: {problem}; take another folder")
    outcome = _session.run(
        cases,
        _measure_with(systems, device, args, facts["copy_bytes_per_second"]),
        facts,
        done=there,
        folder=args.output,
        budget=args.budget,
        wait=device.wait,
    )
    status = _publish(args, outcome.records, missing, before, left=len(outcome.left))
    if outcome.left:
        why = outcome.problem or f"the budget of {args.budget} s is used"
        there_is = "nothing was kept: give --output to be able to go on"
        if args.output is not None:
            there_is = "the same command goes on from there"
        _say(f"{why}; {len(outcome.left)} cases are left, {there_is}")
    return 1 if outcome.problem else status


def _chosen(args: argparse.Namespace, device_type: str) -> list[Case]:
    shapes = [y for x in args.shape for y in _cases.parse(x, args.heads or ())]
    if not args.shape:
        shapes = _cases.quick(device_type) if args.quick else _cases.defaults(device_type)
        if args.heads:
            shapes = _cases.with_heads(shapes, args.heads)
    shapes = [x for x in dict.fromkeys(shapes) if not args.group or x.group in args.group]
    gates = dict.fromkeys(args.gate or _cases.GATES)
    return [Case(shape, gate) for shape in shapes for gate in gates]


def _measure_with(
    systems: Sequence[System], device: Device, args: argparse.Namespace, bandwidth: float
) -> Callable[[Case], Data]:
    def one(case: Case) -> Data:
        record = measure(case, systems, device, repeats=args.repeats, dim=args.dim)
        ours = record.rows[0]
        if device.device.type == "cpu" and case.shape.group == "train" and not ours.note:
            try:
                threads = torch.get_num_threads()
                ours.peak_bytes = _memory.run(case.shape.name, case.gate, args.dim, threads)
            except RuntimeError as error:
                _say(f"memory not measured: {error}")
        return record.as_data() | {"floor_seconds": record.num_bytes / bandwidth}

    return one


def _load(parser: argparse.ArgumentParser, folder: Path | None) -> list[Data]:
    try:
        return [] if folder is None else _session.load(folder)
    except ValueError as error:
        parser.error(str(error))


def _some(parser: argparse.ArgumentParser, option: str, folder: Path) -> list[Data]:
    """As :func:`_load`; no records are an error of ``option``."""
    records = _load(parser, folder)
    if not records:
        parser.error(f"{option} {folder}: no records there")
    return records


def _prepare(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Makes the folders that results go to."""
    folders = {"--output": args.output, "--plot": args.plot, "--figures": args.figures}
    for option, folder in folders.items():
        try:
            if folder is not None:
                _session.prepare(folder)
        except OSError as error:
            parser.error(f"{option} {folder}: can't write there: {error.strerror}")


def _publish(
    args: argparse.Namespace,
    records: list[Data],
    missing: dict[str, str],
    before: list[Data] | None,
    *,
    left: int = 0,
) -> int:
    """Prints results, writes what was asked for, and gives the status."""
    text = _report.markdown(records, missing, left)
    if args.json:
        print(json.dumps({"records": records, "missing": missing}, indent=2))
    else:
        print(text, end="")
    folder = args.output or args.plot
    if folder is not None and records:
        (folder / "results.md").write_text(text, encoding="utf-8")
    figures = args.figures or folder
    if figures is not None:
        try:
            written = _plot.draw(records, figures)
            _say(f"{len(written)} figures in {figures}")
        except ImportError as error:
            _say(str(error))
    status = 0
    if before is not None:
        text, same = _report.repetition(records, before)
        print(text, file=sys.stderr)
        status = 0 if same else 1
    for record in records:
        if record["rows"][0]["seconds"] is None:
            _say(f"flashkda has no right result for {record['case']}")
            status = 1
    return status


def _render(
    parser: argparse.ArgumentParser, args: argparse.Namespace, before: list[Data] | None
) -> int:
    records = _some(parser, "--plot", args.plot)
    _prepare(parser, args)
    records.sort(key=lambda x: (x["heads"], x["tokens"], x["case"]))
    return _publish(args, records, records[-1]["environment"]["missing"], before)


def _run_targets(args: argparse.Namespace, device: Device, path: str) -> int:
    if path != "cuda":
        _say("targets are of the CUDA kernels")
        return 1
    facts = _report.environment(device, args.commit)
    found = _targets.figures(
        device,
        facts["copy_bytes_per_second"],
        quick=args.quick,
        repeats=args.repeats,
        dim=args.dim,
    )
    if args.json:
        figures = [asdict(x) | {"verdict": x.verdict} for x in found]
        print(json.dumps({"environment": facts, "figures": figures}, indent=2))
    else:
        print(f"{_report.heading(facts)}\n\n{_targets.table(found)}")
    failed = [x for x in found if x.fails]
    for x in failed:
        _say(f"{x.name}: {x.measured}, {x.target}: {x.verdict}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
