"""Peak memory of forward and backward on the CPU, measured from outside PyTorch.

Resident memory of a fresh process: its peak during the call, above inputs and output gradient. Run
as a module, it measures and prints bytes; :func:`run` starts that process.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch

from flashkda.bench._cases import Case, parse
from flashkda.bench._inputs import Inputs
from flashkda.bench._systems import FlashKDA

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _resident(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")


def measure(shape: str, gate: str, dim: int) -> int:
    """Measures this process: call it in a fresh one."""

    def draw(name: str) -> Inputs:
        case = Case(parse(name)[0], gate)
        return Inputs.draw(case, torch.device("cpu"), torch.float32, dim, seed=0)

    # Libraries, threads and allocator arenas are there from here on.
    FlashKDA().bind(draw("1x128xH1:backward")).run()
    before = _resident("VmRSS")
    inputs = draw(shape)
    assert inputs.out_grad is not None
    # What drawing the inputs left behind in the allocator belongs to nobody: count the bytes.
    holding = before + sum(x.nbytes for x in (*inputs.tokens, inputs.out_grad))
    with suppress(OSError):  # else VmHWM is the peak since the start, which is rarely another
        _CLEAR_REFS.write_text("5", encoding="ascii")
    FlashKDA().bind(inputs).run()
    return _resident("VmHWM") - holding


def run(shape: str, gate: str, dim: int, threads: int) -> int:
    """Measures a fresh process.

    Raises:
        RuntimeError: it failed, for instance where there is no /proc.
    """
    arguments = map(str, (shape, gate, dim, threads))
    done = subprocess.run(
        [sys.executable, "-m", __name__, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the measuring process ended with status {done.returncode}: {last}")
    return int(done.stdout)


def main() -> None:
    """Entry of the measured process."""
    shape, gate, dim, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    print(measure(shape, gate, int(dim)))


if __name__ == "__main__":
    main()
