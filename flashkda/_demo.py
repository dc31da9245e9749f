"""The layer on a real text: one-shot prefill, chunked prefill and decode must agree."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkda
from flashkda._backend import backend
from flashkda._progress import Progress
from flashkda.nn import KDACache, KimiDeltaAttention

MIN_TOKENS = 8192
HIDDEN_SIZE, NUM_HEADS, HEAD_DIM = 256, 2, 128
LOWER_BOUND = -5.0
SEED = 0
# Not a multiple of any chunk length, so the cuts fall inside chunks.
PIECE = 1000


@dataclass(frozen=True)
class Allowed:
    """Limits on how far two runs may differ, relative in norm."""

    output: float  # over all tokens
    worst_token: float  # of the one token that differs most
    state: float


ALLOWED = {
    torch.float32: Allowed(output=1e-5, worst_token=1e-4, state=1e-5),
    torch.bfloat16: Allowed(output=1e-2, worst_token=5e-2, state=1e-2),
    torch.float64: Allowed(output=1e-12, worst_token=1e-11, state=1e-12),
}


@dataclass(frozen=True)
class Run:
    """Outputs [T, D], final state [HV, V, K] and time of one way through the text."""

    name: str
    output: Tensor
    state: Tensor
    seconds: float


def default_text() -> Path:
    """A text that is on this machine already: Python's licence, else a module of its library."""
    roots = [Path(sysconfig.get_path("stdlib")), Path(sys.base_prefix)]
    for root in roots:
        for name in ("LICENSE.txt", "LICENSE"):
            if (root / name).is_file():
                return root / name
    return Path(argparse.__file__)


def load_tokens(path: Path, num_tokens: int) -> tuple[Tensor, str]:
    """Reads ``num_tokens`` bytes [T] and says in words where they come from.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty.
    """
    with path.open("rb") as file:
        data = file.read(num_tokens)
    if not data:
        raise ValueError("the file is empty")
    note = f"the first {len(data)} bytes"
    if len(data) < num_tokens:
        note = f"{len(data)} bytes, repeated to fill {num_tokens} tokens"
        data = (data * (num_tokens // len(data) + 1))[:num_tokens]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long(), note


def build(
    device: torch.device, dtype: torch.dtype, *, lower_bound: float | None
) -> tuple[Tensor, KimiDeltaAttention]:
    """A byte embedding [256, D] and a layer, the same on every machine with the same PyTorch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        table = torch.randn(256, HIDDEN_SIZE)
        layer = KimiDeltaAttention(
            hidden_size=HIDDEN_SIZE,
            head_dim=HEAD_DIM,
            num_heads=NUM_HEADS,
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound,
            layer_idx=0,
        )
    return table.to(device, dtype), layer.eval().to(device, dtype)


def _timed(name: str, device: torch.device, work: Callable[[], tuple[Tensor, KDACache]]) -> Run:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    start = time.perf_counter()
    output, cache = work()
    wait()
    seconds = time.perf_counter() - start
    state = cache.get(0)
    assert state is not None
    return Run(name, output[0], state.recurrent[0], seconds)


def in_pieces(
    layer: KimiDeltaAttention, x: Tensor, piece: int, label: str
) -> tuple[Tensor, KDACache]:
    """Runs the layer over ``x`` [1, T, D], ``piece`` tokens at a time, handing the state on."""
    cache = KDACache()
    output = torch.empty_like(x)
    num_tokens = x.shape[1]
    with Progress(label, num_tokens) as progress:
        for start in range(0, num_tokens, piece):
            part = x[:, start : start + piece]
            output[:, start : start + piece] = layer(part, past_key_values=cache, use_cache=True)[0]
            progress.advance(part.shape[1])
    return output, cache


def _differences(a: Run, b: Run) -> Allowed:
    out_a, out_b = a.output.double().cpu(), b.output.double().cpu()
    state_a, state_b = a.state.double().cpu(), b.state.double().cpu()
    per_token = (out_a - out_b).norm(dim=-1) / out_b.norm(dim=-1).clamp_min(1e-300)
    return Allowed(
        output=float((out_a - out_b).norm() / out_b.norm()),
        worst_token=float(per_token.max()),
        state=float((state_a - state_b).norm() / state_b.norm()),
    )


def compare(runs: list[Run], allowed: Allowed) -> bool:
    """Prints how far every pair of runs differs; True when all are within the limits."""
    print(f"\n{'relative difference':52} {'output':>9} {'worst token':>12} {'state':>9}")
    agreed = True
    for i, b in enumerate(runs):
        for a in runs[i + 1 :]:
            d = _differences(a, b)
            # Written so that a NaN fails.
            ok = (
                d.output <= allowed.output
                and d.worst_token <= allowed.worst_token
                and d.state <= allowed.state
            )
            agreed = agreed and ok
            print(
                f"{a.name + ' / ' + b.name:52} {d.output:9.1e} {d.worst_token:12.1e} "
                f"{d.state:9.1e}  {'ok' if ok else 'DISAGREES'}"
            )
    limits = f"{allowed.output:9.1e} {allowed.worst_token:12.1e} {allowed.state:9.1e}"
    print(f"{'allowed':52} {limits}")
    return agreed


def main(
    path: Path | None = None,
    num_tokens: int = MIN_TOKENS,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    lower_bound: float | None = LOWER_BOUND,
) -> int:
    """Runs the demonstration; 0 when all three ways agree, 1 when not, 2 without a text."""
    device = torch.device("cpu") if device is None else device
    path = default_text() if path is None else path
    try:
        tokens, note = load_tokens(path, num_tokens)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        print(f"flashkda demo: cannot read {path}: {reason}", file=sys.stderr)
        return 2

    table, layer = build(device, dtype, lower_bound=lower_bound)
    x = F.embedding(tokens.to(device), table)[None]
    chosen = backend(device)
    dtype_name = str(dtype).removeprefix("torch.")
    gate = "softplus gate" if lower_bound is None else f"gate bounded by {lower_bound:g}"
    print(f"flashkda {flashkda.__version__}, torch {torch.__version__}")
    print(f"text     {path}: {note}")
    print(f"device   {device}, {dtype_name}, {torch.get_num_threads()} threads")
    print(f"backend  {chosen.name}: {chosen.reason}")
    print(f"layer    {HIDDEN_SIZE} wide, {NUM_HEADS} heads, K = V = {HEAD_DIM}, {gate}")
    print(
        f"shapes   hidden {list(x.shape)}, q k v {[1, num_tokens, NUM_HEADS, HEAD_DIM]}, "
        f"state {[1, NUM_HEADS, HEAD_DIM, HEAD_DIM]}"
    )

    with torch.inference_mode():
        in_pieces(layer, x[:, :65], 64, "warming up")
        runs = [
            _timed("one shot", device, lambda: in_pieces(layer, x, num_tokens, "one-shot prefill")),
            _timed("chunked", device, lambda: in_pieces(layer, x, PIECE, "chunked prefill")),
        ]
        # One token is too little work to share: handing it round costs more than it saves.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            runs.append(_timed("decode", device, lambda: in_pieces(layer, x, 1, "decode")))
        finally:
            torch.set_num_threads(threads)
    details = [
        "all tokens in one call",
        f"{PIECE} tokens per call, state handed on",
        "one token per call, 1 thread",
    ]
    print(f"\n{'run':10} {'seconds':>9} {'tokens/s':>10}")
    for run, detail in zip(runs, details, strict=True):
        print(f"{run.name:10} {run.seconds:9.3f} {num_tokens / run.seconds:10.0f}  {detail}")

    if not compare(runs, ALLOWED[dtype]):
        print(f"\nFAILED: the runs differ by more than {dtype_name} allows")
        return 1
    print(f"\nOK: one-shot prefill, chunked prefill and decode agree over {num_tokens} tokens")
    return 0
