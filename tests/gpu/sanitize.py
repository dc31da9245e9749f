"""Small calls that touch every branch of the kernels, for compute-sanitizer: python sanitize.py

Inputs are drawn on the host, so that next to the kernels little else runs on the device.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

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


def check(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.cpu().float() - want.float()).norm() / want.float().norm()
    assert error < 2e-2, (name, error)


def served(name: str, function: Any, case: KdaCase, **more: Any) -> None:
    """A call on a pool, whose memory starts as zeros, against the PyTorch path."""
    call = case.but(state=False).make("cpu")
    del call["output_final_state"]
    pool = torch.randn(8, case.heads, 128, 128, dtype=torch.float32)
    call |= {"initial_state": pool.to(case.state_dtype or torch.float32), **more}
    moved = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in call.items()}
    o, _ = function(**moved, out=torch.zeros_like(moved["v"]), backend="cuda")
    torch.cuda.synchronize()
    wanted, _ = function(**call, backend="torch")
    check(name, o, wanted)
    for written in ("initial_state", "checkpoint_states"):
        if written in call:
            check(name, moved[written], call[written])
    print(f"{name}: ok", flush=True)


def serving() -> None:
    index = torch.tensor([5, -1, 2])
    table = torch.tensor([[5, 1], [-1, -1], [2, 7]])
    kept = {
        "checkpoint_states": torch.zeros(4, 1, 128, 128),
        "checkpoint_offsets": torch.tensor([[16, 32], [16, 0], [48, 64]]),
        "checkpoint_indices": torch.tensor([[0, 1], [3, 3], [2, 9]]),
    }
    pool = {"ssm_state_indices": index, "pad_slot_id": -1}
    packed = BF16.but(lengths=(40, 17, 50), tail=3)
    # One sequence starts from a pad, one ends there.
    elsewhere = pool | {"final_state_indices": torch.tensor([6, 3, -1])}
    decode = flashkda.fused_recurrent_kda
    three = BF16.but(B=3)
    served("decode", decode, three.but(T=1), **pool)
    served("decode, early", decode, three.but(T=1), state_is_ready=True, **pool)
    served("decode to other slots", decode, three.but(T=2), **elsewhere)
    for v_first in (False, True):
        case, layout = three.but(state_v_first=v_first), "V" if v_first else "K"
        half = case.but(T=3, state_dtype=torch.bfloat16)
        # More tokens than are staged at once: the state is parked in between.
        served(f"decode {layout} first", decode, case.but(T=9), **pool)
        served(f"decode {layout} first, bfloat16", decode, half, **pool)
        served(f"decode {layout} first, bfloat16, parked", decode, half.but(T=9), **pool)
        served(f"decode {layout} first, early", decode, half, state_is_ready=True, **pool)
    # Enough heads for both tiles of each in one CTA; most of them padding.
    many = torch.full((330,), -1)
    many[[0, 5, 329]] = torch.tensor([5, 2, 7])
    for length in (3, 9):
        case = BF16.but(B=330, T=length, state_dtype=torch.bfloat16, state_v_first=True)
        name = f"decode V first, bfloat16, {length} tokens of many heads"
        served(name, decode, case, ssm_state_indices=many, pad_slot_id=-1)
    served("speculative", decode, three.but(T=2), ssm_state_indices=table, pad_slot_id=-1)
    served("pool", flashkda.chunk_kda, packed, **pool)
    served("pool to other slots", flashkda.chunk_kda, packed, **elsewhere)
    served("checkpoints", flashkda.chunk_kda, packed, **pool, **kept)
    served("checkpoints softplus", flashkda.chunk_kda, packed.but(gate="softplus"), **pool, **kept)


def main() -> int:
    serving()
    for name, case in CASES.items():
        call = case.make("cpu")
        moved = {k: x.cuda() if isinstance(x, torch.Tensor) else x for k, x in call.items()}
        # initcheck does not see what bulk copies (TMA) write: outputs start as zeros.
        out = torch.zeros_like(moved["v"])
        o, state = flashkda.chunk_kda(**moved, out=out, backend="cuda")
        torch.cuda.synchronize()
        wanted_o, wanted_state = flashkda.chunk_kda(**call, backend="torch")
        check(name, o, wanted_o)
        if state is not None and wanted_state is not None:
            check(name, state, wanted_state)
        print(f"{name}: ok", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
