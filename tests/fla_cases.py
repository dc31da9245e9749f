"""fla's own tests of chunk_kda and fused_recurrent_kda, restated as data.

Facts of fla-core 0.6.0's tests/ops/test_kda.py: shapes, gates, flags, lengths, tolerances (root
mean square of the error over that of the reference), and how inputs are drawn. Their reference is
computed in the dtype of the inputs; here it is the float64 recurrence of `oracle.py`.
Left out: tests of the stages inside fla (gates, its chunked reference, Ascend routing).
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from calls import double
from errors import norm_error
from torch import Tensor

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

MISSING = [name for name in ("fla", "einops", "packaging", "triton") if find_spec(name) is None]
NEEDS_FLA = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install 'flashkda[bench]')"
)


@cache
def fla_kda() -> ModuleType:
    """fla.ops.kda; without a GPU importing it warns that there is none."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.ops.kda
    return fla.ops.kda  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FlaCase:
    """One parametrisation of one of their tests, by the names that they have there."""

    test: str
    B: int = 1
    T: int = 64
    H: int = 1
    HV: int | None = None
    D: int = 64
    scale: float | None = None
    norm: float = 1.0  # gate_logit_normalizer
    mask_p: float = 0.0
    l2norm: bool = False
    gate: bool = False  # use_gate_in_kernel
    dtype: torch.dtype = FP16
    safe_gate: bool = False
    chunk_size: int | None = None
    disable_recompute: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    state_v_first: bool = False
    sigmoid: bool = False
    neg: bool = False  # allow_neg_eigval
    A_log: bool = True
    dt_bias: bool = True
    trains: bool = False
    limits: tuple[float, float] = (0.005, 0.005)  # outputs, final states
    declined: str = ""  # on an H200: why, where only Triton serves it

    @property
    def heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def id(self) -> str:
        words = [self.test, f"B{self.B}", f"T{self.T}", f"H{self.H}_{self.heads}", f"D{self.D}"]
        words.append(str(self.dtype).removeprefix("torch."))
        flags = ("l2norm", "gate", "safe_gate", "disable_recompute", "sigmoid", "neg", "trains")
        words += [name for name in flags if getattr(self, name)]
        words += [f"no{name}" for name in ("A_log", "dt_bias") if not getattr(self, name)]
        if self.norm != 1:
            words.append(f"norm{self.norm:g}")
        if self.mask_p:
            words.append(f"mask{self.mask_p:g}")
        if self.cu_seqlens is not None:
            words.append("_".join(map(str, self.cu_seqlens)))
        if self.chunk_size is not None:
            words.append(f"chunk{self.chunk_size}")
        return "-".join(words)

    def forward_only(self, dtype: torch.dtype) -> FlaCase:
        """Without gradients, in a dtype that the kernels serve."""
        limits = self.limits if dtype == self.dtype else (0.006, 0.006)  # theirs for bfloat16
        return replace(self, trains=False, dtype=dtype, declined="", limits=limits)

    def small(self) -> FlaCase:
        """The same flags at a size for the CPU."""
        change: dict[str, Any] = {"B": min(self.B, 2), "T": min(self.T, 70), "H": min(self.H, 2)}
        change["D"] = min(self.D, 20) + self.D % 8
        if self.HV is not None:
            change["HV"] = change["H"] * (self.HV // self.H)
        if self.cu_seqlens is not None:
            ends = tuple(sorted({x * 70 // self.cu_seqlens[-1] for x in self.cu_seqlens}))
            change |= {"cu_seqlens": ends, "T": ends[-1]}
        return replace(self, **change)


# Reasons of the verifier on a Hopper card.
DTYPE = "bfloat16"
WIDTH = "128"
GRAD = "backward"


def _named(names: str, test: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(names.split(), test, strict=True))


def _chunk(*test: Any) -> FlaCase:
    names = "B T H HV D scale norm mask_p l2norm gate dtype safe_gate disable_recompute chunk_size"
    return FlaCase("chunk", **_named(names, test), trains=True, declined=GRAD)


def _varlen(*test: Any) -> FlaCase:
    names = "H D mask_p cu_seqlens dtype gate safe_gate disable_recompute chunk_size"
    values = _named(names, test)
    return FlaCase("varlen", T=values["cu_seqlens"][-1], **values, trains=True, declined=GRAD)


def _prefill(*test: Any) -> FlaCase:
    values = _named("H D mask_p cu_seqlens dtype gate safe_gate disable_recompute", test)
    return FlaCase("prefill", T=values["cu_seqlens"][-1], **values, declined=DTYPE)


CHUNK = tuple(
    _chunk(*test)
    for test in (
        (1, 63, 1, 1, 64, 1, 1, 0, False, False, FP16, True, False, 64),
        (2, 500, 3, 3, 60, 1, 1, 0, False, False, FP16, True, True, 64),
        (2, 1000, 3, 3, 64, 0.1, 1, 0.5, False, False, FP16, False, True, 64),
        (3, 1024, 4, 4, 100, 1, 0.1, 0, False, False, FP16, False, False, 64),
        (4, 1024, 4, 4, 128, 0.1, 1, 0, False, False, FP16, True, True, 64),
        (4, 1024, 4, 4, 128, 0.1, 1, 0, True, False, FP16, True, False, 64),
        (2, 1500, 4, 4, 128, 0.1, 10, 0, False, True, FP16, False, True, 64),
        (4, 2048, 8, 8, 64, 0.1, 1, 0, False, True, FP16, True, True, 64),
        (2, 1024, 2, 4, 64, 0.1, 1, 0, False, False, FP16, False, False, 64),
        (2, 1024, 2, 8, 64, 0.1, 1, 0, False, True, FP16, False, False, 64),
        (2, 1024, 4, 8, 128, 0.1, 1, 0, True, True, FP16, False, False, 64),
        (2, 160, 2, 4, 64, 0.1, 1, 0, False, True, FP16, True, True, 32),
        (2, 1024, 2, 4, 64, 0.1, 1, 0, True, True, BF16, True, False, 64),
        (2, 1024, 2, 4, 64, 0.1, 1, 0, False, True, BF16, False, False, 64),
        (2, 160, 2, 4, 64, 0.1, 1, 0, False, True, BF16, True, True, 32),
        (2, 1024, 2, 8, 128, 0.1, 1, 0, True, True, BF16, False, False, 64),
    )
)

V_FIRST = tuple(
    FlaCase(
        "v_first",
        B,
        T,
        H,
        None,
        D,
        scale,
        norm,
        dtype=FP16,
        state_v_first=True,
        trains=True,
        declined=GRAD,
    )
    for B, T, H, D, scale, norm in (
        (1, 63, 1, 64, 1, 1),
        (2, 500, 3, 60, 1, 1),
        (3, 1024, 4, 128, 0.1, 1),
        (4, 2048, 8, 64, 0.1, 1),
    )
)

SIGMOID = tuple(
    FlaCase(
        "sigmoid", B, T, H, None, D, sigmoid=True, neg=neg, dtype=dtype, trains=True, declined=GRAD
    )
    for B, T, H, D, neg, dtype in (
        (1, 8192, 96, 128, False, BF16),
        (1, 8192, 96, 128, True, BF16),
        (2, 96, 2, 64, True, FP16),
    )
)

VARLEN = tuple(
    _varlen(*test)
    for test in (
        (4, 60, 0.1, (0, 15), FP16, True, False, False, 64),
        (4, 64, 0.9, (0, 256, 500, 1000), FP16, True, False, False, 64),
        (4, 128, 0.5, (0, 256, 500, 1000), FP16, False, False, False, 64),
        (4, 100, 0, (0, 15, 100, 300, 1200, 2000), FP16, True, False, False, 64),
        (4, 256, 0, (0, 100, 300, 1200, 3000, 4096), FP16, False, True, True, 64),
        (4, 60, 0.1, (0, 31, 96, 160), FP16, True, False, True, 32),
    )
)

PREFILL = tuple(
    _prefill(*test)
    for test in (
        (4, 60, 0.1, (0, 8192), FP16, True, False, False),
        (4, 64, 0.9, (0, 256, 500, 1000), FP16, True, False, False),
        (4, 128, 0.5, (0, 256, 500, 1000), FP16, False, False, False),
        (4, 100, 0, (0, 15, 100, 300, 1200, 2000), FP16, True, False, False),
        (4, 256, 0, (0, 100, 300, 1200, 3000, 4096), FP16, False, True, True),
    )
)


def _inference(test: str, *, neg: bool, A_log: bool, dt_bias: bool, **shape: Any) -> FlaCase:
    return FlaCase(
        test, D=128, l2norm=True, gate=True, sigmoid=True, safe_gate=True, state_v_first=True,
        dtype=BF16, scale=128**-0.5, neg=neg, A_log=A_log, dt_bias=dt_bias, limits=(0.006, 0.006),
        **shape,
    )  # fmt: skip


FLASH_KDA = tuple(
    _inference("flash_kda", B=B, T=T, H=H, neg=neg, A_log=A_log, dt_bias=dt_bias)
    for B, T, H, neg, A_log, dt_bias in (
        (1, 1024, 4, False, True, True),
        (2, 2048, 8, False, True, True),
        (1, 4096, 16, False, True, True),
        (1, 1024, 4, True, True, True),
        (1, 1024, 4, False, False, True),
        (1, 1024, 4, False, True, False),
    )
)
FLASH_KDA_VARLEN = tuple(
    _inference(
        "flash_kda_varlen", T=ends[-1], cu_seqlens=ends, H=H, neg=neg, A_log=A_log, dt_bias=dt_bias
    )
    for H, ends, neg, A_log, dt_bias in (
        (4, (0, 256, 500, 1000), False, True, True),
        (8, (0, 100, 300, 1200, 2000), False, True, True),
        (16, (0, 101, 303, 1205, 3007, 4096), False, True, True),
        (4, (0, 256, 500, 1000), True, True, True),
        (4, (0, 256, 500, 1000), False, False, True),
        (4, (0, 256, 500, 1000), False, True, False),
    )
)

RECURRENT = (
    *(
        FlaCase(
            "recurrent", B, T, H, HV, D, scale, l2norm=l2norm, dtype=FP32, declined=DTYPE
        )
        for B, T, H, HV, D, scale, l2norm in (
            (1, 64, 1, 1, 64, 1, False),
            (2, 512, 3, 3, 60, 1, False),
            (3, 1000, 4, 4, 100, 0.1, True),
            (4, 1024, 4, 4, 128, 0.1, False),
            (2, 512, 2, 4, 60, 1, False),
            (2, 1024, 2, 8, 128, 0.1, True),
        )
    ),
    *(
        FlaCase("recurrent_sigmoid", B, T, H, None, D, sigmoid=True, neg=neg, dtype=FP32,
                declined=DTYPE)
        for B, T, H, D, neg in (
            (2, 256, 4, 64, False), (2, 256, 4, 64, True), (1, 512, 3, 60, True),
        )
    ),
    *(
        FlaCase("recurrent_v_first", B, T, H, None, D, scale, state_v_first=True, dtype=FP32,
                limits=(1e-4, 1e-4), declined=DTYPE)
        for B, T, H, D, scale in (
            (1, 64, 1, 64, 1), (2, 512, 3, 60, 1), (3, 1000, 4, 100, 0.1), (4, 1024, 4, 128, 0.1),
        )
    ),
    *(
        FlaCase("recurrent_gate", B, T, H, HV, D, scale, l2norm=True, gate=True, A_log=A_log,
                dt_bias=dt_bias, safe_gate=safe_gate, dtype=dtype, limits=(0.002, 0.002),
                declined=DTYPE)
        for B, T, H, HV, D, scale, A_log, dt_bias, safe_gate, dtype in (
            (1, 64, 1, 1, 64, 1, True, False, False, FP32),
            (2, 256, 2, 2, 64, 1, True, True, False, FP32),
            (2, 512, 2, 4, 64, 0.1, True, True, True, FP16),
            (3, 1000, 2, 8, 128, 1, True, False, False, FP16),
            (4, 1024, 4, 4, 128, 0.1, True, True, True, FP16),
            (1, 64, 1, 1, 64, 1, False, False, True, FP32),
            (2, 256, 2, 4, 64, 1, False, True, True, FP32),
        )
    ),
)  # fmt: skip

DECODE = tuple(
    FlaCase("decode", B, 1, H, None, D, scale, norm, l2norm=l2norm, gate=gate,
            safe_gate=safe_gate, dtype=dtype, declined="" if dtype == BF16 else DTYPE)
    for B, H, D, scale, norm, l2norm, gate, safe_gate, dtype in (
        (16, 16, 128, 0.1, 1.0, True, False, False, BF16),
        (32, 8, 64, 1.0, 1.0, False, False, False, FP16),
        (7, 32, 128, 0.5, 0.5, True, False, False, BF16),
        (16, 16, 128, 0.1, 1.0, True, True, False, BF16),
        (32, 8, 64, 1.0, 1.0, False, True, False, FP16),
        (7, 32, 128, 0.5, 0.5, True, True, True, BF16),
    )
)  # fmt: skip

CHUNKED = (*CHUNK, *V_FIRST, *SIGMOID, *VARLEN, *PREFILL, *FLASH_KDA, *FLASH_KDA_VARLEN)

# Their tolerances of gradients, by test.
GRADIENTS = {"q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02, "initial_state": 0.008}
GRADIENTS_VARLEN = {
    "q": 0.007, "k": 0.008, "v": 0.007, "g": 0.015, "beta": 0.015, "initial_state": 0.007,
}  # fmt: skip
# Of A_log and dt_bias; that of A_log only warns there.
PARAMETERS = {"A_log": 0.003, "dt_bias": 0.008}
PARAMETERS_VARLEN = {"A_log": 0.008, "dt_bias": 0.005}


def ids(x: FlaCase) -> str:
    return x.id


def _normalised(x: Tensor) -> Tensor:
    return F.normalize(x.float(), p=2, dim=-1).to(x.dtype)


def make(x: FlaCase, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Keyword arguments of fla's function; drawn on the CPU, so the same on every device."""
    torch.manual_seed(42)
    uniform = x.cu_seqlens is None
    draw: Callable[..., Tensor] = torch.rand if uniform else torch.randn
    shape = (x.B, x.T, x.H, x.D)
    values = (x.B, x.T, x.heads, x.D)
    q, k = draw(*shape).to(x.dtype), draw(*shape).to(x.dtype)
    if not x.l2norm:
        q, k = _normalised(q), _normalised(k)
    v = draw(*values).to(x.dtype)
    call: dict[str, Any] = {"q": q, "k": k, "v": v}
    g = torch.randn(values)
    if x.gate:
        call["g"] = g.to(torch.float32 if x.test == "recurrent_gate" else x.dtype)
        if x.A_log:
            call["A_log"] = (1 + 15 * torch.rand(x.heads)).log()
            if x.test == "chunk":
                call["A_log"] = torch.randn(x.heads)
            if x.test in ("varlen", "prefill"):  # as the layer's parameter was once
                call["A_log"] = call["A_log"].reshape(1, 1, -1, 1)
        if x.dt_bias:
            call["dt_bias"] = torch.randn(x.heads * x.D)
    else:
        g = F.logsigmoid(g) / x.norm
        call["g"] = g * (torch.rand(values) > x.mask_p)
    if x.test in ("varlen", "prefill"):
        kept = torch.rand(values) > x.mask_p
        call["g"] = torch.where(kept, call["g"], torch.full_like(call["g"], -1000))
    if x.safe_gate:
        if x.gate:
            call["lower_bound"] = -5.0
        else:
            call["g"] = call["g"].clamp(-5, 0)
    beta = torch.randn(x.B, x.T, x.heads).to(x.dtype)
    call["beta"] = beta if x.sigmoid else beta.sigmoid()
    sequences = x.B if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    call["initial_state"] = torch.randn(sequences, x.heads, x.D, x.D)
    if x.cu_seqlens is not None:
        call["cu_seqlens"] = torch.tensor(x.cu_seqlens)
    call = {name: y.to(device) if isinstance(y, Tensor) else y for name, y in call.items()}
    recurrent = x.test.startswith(("recurrent", "decode"))
    if x.cu_seqlens is not None and not recurrent:
        call["cu_seqlens_cpu"] = torch.tensor(x.cu_seqlens)
    call |= {
        "scale": x.scale,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": x.l2norm,
        "use_gate_in_kernel": x.gate,
        "use_beta_sigmoid_in_kernel": x.sigmoid,
        "allow_neg_eigval": x.neg,
        "state_v_first": x.state_v_first,
    }
    if not recurrent:
        call |= {"safe_gate": x.safe_gate, "disable_recompute": x.disable_recompute}
        if x.chunk_size is not None:
            call["chunk_size"] = x.chunk_size
    return call


ORACLE = {
    name
    for function in (oracle.kda, oracle.activate)
    for name in inspect.signature(function).parameters
}
"""Arguments that the recurrence knows."""


_HEADS_AT_ONCE = 8  # the recurrence keeps all states: 1 MB per token here


def want(call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The float64 recurrence on fla's arguments."""
    known = double({name: y for name, y in call.items() if name in ORACLE and y is not None})
    heads, value_heads = known["q"].shape[2], known["v"].shape[2]
    if heads != value_heads or heads <= _HEADS_AT_ONCE:
        return oracle.kda(**known)
    parts = []
    for lo in range(0, heads, _HEADS_AT_ONCE):
        some = slice(lo, lo + _HEADS_AT_ONCE)
        part = {x: known[x][:, :, some] for x in ("q", "k", "v", "g", "beta")}
        part["initial_state"] = known["initial_state"][:, some]
        if "A_log" in known:
            part["A_log"] = known["A_log"].flatten()[some]
        if "dt_bias" in known:
            part["dt_bias"] = known["dt_bias"].reshape(heads, -1)[some]
        parts.append(oracle.kda(**(known | part)))
    return torch.cat([o for o, _ in parts], dim=2), torch.cat([state for _, state in parts], dim=1)


def check_outputs(x: FlaCase, got: tuple[Tensor, Tensor], reference: tuple[Tensor, Tensor]) -> None:
    for name, value, expected, limit in zip(
        ("o", "final_state"), got, reference, x.limits, strict=True
    ):
        assert value.shape == expected.shape
        error = norm_error(value, expected)
        assert error < limit, f"{name}: {error:.2e}, allowed {limit:.2e}"


def limits_of_gradients(x: FlaCase) -> dict[str, float]:
    varlen = x.test == "varlen"
    limits = dict(GRADIENTS_VARLEN if varlen else GRADIENTS)
    if x.gate:
        limits |= PARAMETERS_VARLEN if varlen else PARAMETERS
    return limits


@contextmanager
def enabled() -> Iterator[ModuleType]:
    """flashkda.integrations.fla, enabled."""
    from flashkda.integrations import fla as door

    fla_kda()
    assert os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") != "1"
    door.enable()
    try:
        yield door
    finally:
        door.disable()


@contextmanager
def served(door: ModuleType, function: str, times: int) -> Iterator[None]:
    """Asserts how many calls inside the block flashkda ran, by its own count."""
    before = door.status()[function].served
    yield
    ran = door.status()[function].served - before
    assert ran == times, (
        f"{ran} calls ran on flashkda; declined: {door.status()[function].declined}"
    )


def decode(x: FlaCase, device: str | torch.device, function: Callable[..., Any]) -> None:
    """Their vLLM-style decode: one token each, in a pool whose other slots hold 1e30."""
    call = make(x, device)
    slots = 3 * x.B
    pool = torch.randn(slots, x.H, x.D, x.D).to(device)
    indices = torch.randperm(slots)[: x.B].to(device, torch.int32)
    unused = torch.ones(slots, dtype=torch.bool, device=device)
    unused[indices.long()] = False
    pool[unused] = 1e30
    before = pool.clone()
    packed = {y: call[y].transpose(0, 1) for y in ("q", "k", "v", "g", "beta")}
    reference = want(call | {"initial_state": pool[indices.long()]})
    flags = ("scale", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias")
    o, final = function(
        **packed, **{y: call[y] for y in (*flags, "lower_bound") if y in call},
        initial_state=pool, output_final_state=False, inplace_final_state=True,
        cu_seqlens=torch.arange(x.B + 1, dtype=torch.int32, device=device),
        ssm_state_indices=indices, num_accepted_tokens=None,
    )  # fmt: skip
    assert final is pool
    check_outputs(x, (o.transpose(0, 1), pool[indices.long()]), reference)
    assert torch.equal(pool[unused], before[unused])


THROUGH_THE_SHIM = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from flashkda.integrations import flash_kda as door
module = door.install()
calls, ours = [], module.fwd
def fwd(*args, **kwargs):
    calls.append(len(args))
    return ours(*args, **kwargs)
module.fwd = fwd
from fla.ops.kda import chunk_kda
torch.manual_seed(0)
device = sys.argv[1]
q, k, v, g = (torch.randn(1, 40, 2, 128).to(device, torch.bfloat16) for _ in range(4))
call = dict(
    q=q, k=k, v=v, g=g, beta=torch.randn(1, 40, 2).to(device, torch.bfloat16),
    A_log=torch.zeros(2, device=device), dt_bias=torch.zeros(256, device=device),
    lower_bound=-5.0, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True,
    use_beta_sigmoid_in_kernel=True, state_v_first=True, output_final_state=True,
    initial_state=torch.randn(1, 2, 128, 128).to(device),
)
with torch.inference_mode():
    got = chunk_kda(**call, safe_gate=True)
import flashkda
want = flashkda.chunk_kda(**call)
assert all(torch.equal(a, b) for a, b in zip(got, want))
print(calls)
"""
"""fla's own flash_kda backend finds the shim and calls it with seven arguments by position."""


def run_through_the_shim(device: str) -> None:
    """In a process of its own: fla looks for flash_kda once."""
    command = [sys.executable, "-c", THROUGH_THE_SHIM, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[7]\n"
