"""Small calls that touch every branch of the kernels, for compute-sanitizer: python sanitize.py

Inputs are drawn on the host, so that next to the kernels little else runs on the device.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import KdaCase

import flashkda

BF16 = KdaCase(T=40, H=1, K=128, V=128, dtype=torch.bfloat16)
CASES = {
    "bounded": BF16,
    "softplus": BF16.but(gate="softplus", state_v_first=True),
    "given": BF16.but(gate="log", l2norm=False, beta="activated", state=False),
    "float32 gates": BF16.but(T=33, gate_dtype=torch.float32),
    "batch, more value heads": BF16.but(T=17, B=2, HV=2),
    "bfloat16 state": BF16.but(T=16, state_dtype=torch.bfloat16, beta="neg"),
    "packed": BF16.but(lengths=(5, 0, 1, 37), tail=3),
    "packed softplus": BF16.but(lengths=(17, 16), gate="softplus", cu_dtype=torch.int32),
    "one token": BF16.but(T=1),
}


def main() -> int:
    for name, case in CASES.items():
        call = case.make("cpu")
        moved = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in call.items()}
        # initcheck does not see what bulk copies (TMA) write: outputs start as zeros.
        out = torch.zeros_like(moved["v"])
        o, state = flashkda.chunk_kda(**moved, out=out, backend="cuda")
        torch.cuda.synchronize()
        wanted_o, wanted_state = flashkda.chunk_kda(**call, backend="torch")
        error = (o.cpu().float() - wanted_o.float()).norm() / wanted_o.float().norm()
        assert error < 2e-2, (name, error)
        if state is not None and wanted_state is not None:
            error = (
                state.cpu().float() - wanted_state.float()
            ).norm() / wanted_state.float().norm()
            assert error < 2e-2, (name, error)
        print(f"{name}: ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
