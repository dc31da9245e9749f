"""Peak memory of forward and backward on the CPU, measured from outside PyTorch.

Resident memory of a fresh process: its peak during the call, above what it held before. Run as a
module, it measures and prints JSON; :func:`run` starts that process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from flashkda.bench._cases import Case, parse
from flashkda.bench._inputs import Inputs
from flashkda.bench._systems import FlashKDA

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Bytes.

    Attributes:
        inputs: of q, k, v, g and beta together.
        above_inputs: peak above the process that already holds the inputs and the output gradient.
        with_inputs: peak above the process before it had them.
        method: how the peak was read.
    """

    inputs: int
    above_inputs: int
    with_inputs: int
    method: str


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def _reset_peak() -> str:
    """Makes VmHWM start again from the current size where the kernel allows it."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")
    except OSError:
        return "VmHWM since the start of the process"
    return "VmHWM, reset before the call"


def measure(shape: str, gate: str, dim: int) -> Peak:
    """Measures this process: call it in a fresh one."""

    def draw(name: str) -> Inputs:
        case = Case(parse(f"{name}:backward")[0], gate)
        return Inputs.draw(case, torch.device("cpu"), torch.float32, dim, seed=0)

    # Libraries, threads and allocator arenas are there from here on.
    FlashKDA().bind(draw("1x128xH1")).run()
    before = _resident("VmRSS")
    inputs = draw(shape)
    assert inputs.out_grad is not None
    input_bytes = sum(x.nbytes for x in inputs.tokens)
    # What drawing the inputs left behind in the allocator belongs to nobody: count the bytes.
    holding = before + input_bytes + inputs.out_grad.nbytes
    method = _reset_peak()
    FlashKDA().bind(inputs).run()
    peak = _resident("VmHWM")
    return Peak(input_bytes, peak - holding, peak - before, method)


def run(shape: str, gate: str, dim: int, threads: int) -> Peak:
    """Measures a fresh process.

    Raises:
        RuntimeError: it failed, for instance where there is no /proc.
    """
    arguments = [shape.removesuffix(":backward"), gate, dim, threads]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the measuring process ended with status {done.returncode}: {last}")
    return Peak(**json.loads(done.stdout))


def main() -> int:
    """Entry of the measured process."""
    parser = argparse.ArgumentParser(prog=__name__)
    for name in ("shape", "gate"):
        parser.add_argument(name)
    for name in ("dim", "threads"):
        parser.add_argument(name, type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(vars(measure(args.shape, args.gate, args.dim))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
