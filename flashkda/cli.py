"""The ``flashkda`` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flashkda._command import integer, until_nobody_reads

if TYPE_CHECKING:
    import torch

_DEMO_TOKENS = 8192
_DTYPES = ("float32", "bfloat16", "float64")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashkda", description="Kimi Delta Attention: check this installation and try it."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor", help="versions, devices, and which backend serves each device and why"
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")

    selftest = commands.add_parser(
        "selftest", help="small cases against a float64 recurrence; status 1 on a mismatch"
    )
    selftest.add_argument(
        "--device", help="one device, such as cpu or cuda:1; default: all of them"
    )

    demo = commands.add_parser(
        "demo", help="the layer over a text: prefill, chunked prefill and decode must agree"
    )
    demo.add_argument("file", nargs="?", type=Path, help="a text; default: Python's licence")
    demo.add_argument(
        "--tokens",
        type=integer(_DEMO_TOKENS),
        default=_DEMO_TOKENS,
        metavar="N",
        help="number of bytes to take, at least %(default)s (default: %(default)s)",
    )
    demo.add_argument("--device", default="cpu", help="default: %(default)s")
    demo.add_argument("--dtype", choices=_DTYPES, default="float32", help="default: %(default)s")
    demo.add_argument(
        "--gate",
        choices=("bounded", "softplus"),
        default="bounded",
        help="log decay in [-5, 0), or unbounded (default: %(default)s)",
    )

    commands.add_parser("bench", help="benchmarks: see `flashkda bench --help`", add_help=False)
    return parser


def _device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    """The torch device called ``name``; ends with status 2 if it can't compute here."""
    import torch

    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add(1).item()  # "meta" has no value to give
    except (RuntimeError, AssertionError, ImportError) as error:
        parser.error(f"--device {name}: can't compute there: {str(error).splitlines()[0]}")
    return device


def main(argv: list[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    Status 0 is success, 1 a failed check, 2 arguments or files that cannot be used, 141 an output
    that nobody reads to its end.
    """
    argv = sys.argv[1:] if argv is None else argv
    return until_nobody_reads(lambda: _main(argv))


def _main(argv: list[str]) -> int:
    parser = _parser()
    try:
        args, rest = parser.parse_known_args(argv)
        if rest and args.command != "bench":
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return _run(parser, args, rest)
    except SystemExit as stop:  # argparse: --help, or bad arguments
        return stop.code if isinstance(stop.code, int) else 2


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace, rest: list[str]) -> int:
    # PyTorch is imported only by the commands that need it: --help stays quick.
    if args.command == "doctor":
        from flashkda import _doctor

        return _doctor.main(as_json=args.json)
    if args.command == "bench":
        from flashkda.bench.__main__ import main as bench

        return bench(rest)

    import torch

    device = _device(parser, args.device) if args.device else None
    if args.command == "selftest":
        from flashkda import _doctor, _selftest

        return _selftest.main(_doctor.devices() if device is None else [device])

    from flashkda import _demo

    return _demo.main(
        args.file,
        args.tokens,
        device,
        getattr(torch, args.dtype),
        _demo.LOWER_BOUND if args.gate == "bounded" else None,
    )
