"""Peak memory of forward and backward, measured from outside PyTorch.

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
from torch import Tensor

from flashkda.bench._forward import Inputs
from flashkda.ops import chunk_kda

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


def measure(num_tokens: int, num_heads: int, dim: int, gate: str) -> Peak:
    """Measures this process: call it in a fresh one."""

    def prepare(tokens: int) -> tuple[Inputs, Tensor]:
        drawn = Inputs.draw(tokens, num_heads, dim, gate)
        for leaf in drawn.tensors():
            leaf.requires_grad_()
        return drawn, torch.ones_like(drawn.v)

    def step(x: Inputs, grad: Tensor) -> None:
        o, _ = chunk_kda(x.q, x.k, x.v, x.g, x.beta)
        o.backward(grad)

    step(*prepare(128))  # libraries, threads and allocator arenas are there from here on
    before = _resident("VmRSS")
    inputs, grad = prepare(num_tokens)
    input_bytes = sum(x.nbytes for x in inputs.tensors())
    # What drawing the inputs left behind in the allocator belongs to nobody: count the bytes.
    holding = before + input_bytes + grad.nbytes
    method = _reset_peak()
    step(inputs, grad)
    peak = _resident("VmHWM")
    return Peak(input_bytes, peak - holding, peak - before, method)


def run(num_tokens: int, num_heads: int, dim: int, gate: str, threads: int) -> Peak:
    """Measures a fresh process.

    Raises:
        RuntimeError: it failed, for instance where there is no /proc.
    """
    arguments = [num_tokens, num_heads, dim, gate, threads]
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
    for name in ("num_tokens", "num_heads", "dim"):
        parser.add_argument(name, type=int)
    parser.add_argument("gate")
    parser.add_argument("threads", type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(vars(measure(args.num_tokens, args.num_heads, args.dim, args.gate))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
