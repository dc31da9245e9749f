"""``python -m flashkda.bench cpu`` or ``gpu``: speed and memory, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from flashkda._backend import backend
from flashkda.bench import _decode, _forward, _gpu, _memory
from flashkda.bench._report import environment, markdown_table


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flashkda bench", description="Benchmarks that check every result before timing it."
    )
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    cpu = commands.add_parser(
        "cpu",
        help="forward beside fla-core's PyTorch references, and memory of forward and backward",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    cpu.add_argument("--tokens", type=_positive, default=4096, help="for speed")
    cpu.add_argument("--memory-tokens", type=_positive, default=8192, help="for memory")
    cpu.add_argument("--heads", type=_positive, default=4, help="heads")
    cpu.add_argument("--dim", type=_positive, default=128, help="K and V")
    cpu.add_argument("--threads", type=_positive, default=2, help="PyTorch threads")
    cpu.add_argument("--repeats", type=_positive, default=5, help="times of each")
    cpu.add_argument("--gate", choices=("slow", "fast"), default="slow", help="kind of log decay")
    cpu.add_argument("--json", action="store_true", help="print JSON")
    gpu = commands.add_parser(
        "gpu",
        help="CUDA kernels: device times of prefill and decode, host time of a call",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    gpu.add_argument("--quick", action="store_true", help="a few shapes")
    gpu.add_argument("--repeats", type=_positive, default=20, help="times of each")
    gpu.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a benchmark; 0, or 1 when flashkda's own result is wrong, or 2 for bad arguments."""
    try:
        args = _parser().parse_args(sys.argv[1:] if argv is None else argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    if args.benchmark == "gpu":
        return _gpu_main(args)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        return _cpu(args)
    finally:
        torch.set_num_threads(threads)


def _cpu(args: argparse.Namespace) -> int:
    rows = _forward.run(args.tokens, args.heads, args.dim, args.gate, args.repeats)
    peak: _memory.Peak | None = None
    memory_note = ""
    try:
        peak = _memory.run(args.memory_tokens, args.heads, args.dim, args.gate, args.threads)
    except RuntimeError as error:
        memory_note = f"not measured: {error}"
    status = 1 if rows[0].median_s is None else 0

    if args.json:
        result: dict[str, Any] = {
            "environment": environment(),
            "arguments": {key: value for key, value in vars(args).items() if key != "json"},
            "forward": _forward.as_data(rows),
            "memory": vars(peak) if peak else {"note": memory_note},
        }
        print(json.dumps(result, indent=2))
        return status

    shape = f"H={args.heads} K=V={args.dim} float32, {args.gate} gate"
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    print(f"\nForward, T={args.tokens} {shape}; {args.repeats} runs of each, in turns\n")
    header = ["implementation", "median ms", "range", "time / flashkda", "error against float64"]
    print(markdown_table(header, _forward.as_cells(rows)))
    print(f"\nForward and backward, peak memory, T={args.memory_tokens} {shape}\n")
    if peak is None:
        print(memory_note)
        return status
    header = ["counted", "MiB", "multiple of the inputs"]
    counted = {
        "the inputs themselves": peak.inputs,
        "peak above inputs and output gradient": peak.above_inputs,
        "peak with inputs and output gradient": peak.with_inputs,
    }
    cells = [[k, f"{v / 2**20:.1f}", f"{v / peak.inputs:.2f}x"] for k, v in counted.items()]
    print(markdown_table(header, cells))
    print(f"\nRead from {peak.method}. The gradients of the inputs are part of the peak.")
    return status


def _gpu_main(args: argparse.Namespace) -> int:
    served = backend("cuda")
    if served.name != "cuda":
        print(f"flashkda bench gpu: {served.reason}", file=sys.stderr)
        return 1
    device = {"device": torch.cuda.get_device_name(), "torch CUDA": torch.version.cuda}
    facts = environment() | device
    errors = _gpu.errors()
    wrong = {gate: x for gate, x in errors.items() if not x <= _gpu.ALLOWED_ERROR}
    if wrong:
        print(f"flashkda bench gpu: wrong results, no times: {wrong}", file=sys.stderr)
        return 1
    rows, host, checkpoints = _gpu.run(_gpu.QUICK if args.quick else _gpu.SHAPES, args.repeats)
    try:
        decode, copy = _decode.run(_decode.QUICK if args.quick else _decode.SHAPES, args.repeats)
    except RuntimeError as error:
        print(f"flashkda bench gpu: no times of decode: {error}", file=sys.stderr)
        return 1
    if args.json:
        result = {
            "environment": facts,
            "errors": errors,
            "forward": [vars(row) for row in rows],
            "decode": [vars(row) for row in decode],
            "copy_bytes_per_s": copy,
            "checkpoints_ms": {"without": checkpoints[0], "with": checkpoints[1]},
            "host_us": host,
        }
        print(json.dumps(result, indent=2))
        return 0
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print("\nForward, K=V=128 bfloat16, float32 state in and out; device time of a call\n")
    header = ["shape", "gate", "median ms", "range"]
    cells = [
        [x.shape, x.gate, f"{x.median_ms:.4f}", f"{x.fastest_ms:.4f} to {x.slowest_ms:.4f}"]
        for x in rows
    ]
    print(markdown_table(header, cells))
    print(
        f"\nDecode, K=V=128 bfloat16, in a pool; a copy of 1 GiB runs at {copy / 1e12:.2f} TB/s\n"
    )
    header = ["shape", "median ms", "range", "state TB/s", "share of a copy"]
    print(markdown_table(header, _decode.as_cells(decode, copy)))
    without, kept = checkpoints
    print(
        f"\nA checkpoint for each sequence of 8x2048 H16: {kept:.4f} ms instead of {without:.4f} "
        f"({100 * (kept / without - 1):+.1f} %)"
    )
    print("\nHost time of an eager call, H4:")
    for name, microseconds in host.items():
        print(f"  {name}: {microseconds:.1f} us")
    print("Error against float64: " + ", ".join(f"{k} gate {v:.1e}" for k, v in errors.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
