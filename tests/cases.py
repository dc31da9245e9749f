"""Inputs as data: a `KdaCase` says what a call looks like, `make` draws its tensors from a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Gate = tuple[Tensor, dict[str, Any]]
Draw = Callable[..., Tensor]

EDGE_LENGTHS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 1000)
THREE_GATES = ("fast", "slow", "none")


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


class _Source:
    """Random numbers in float64 from one seed, so that a case is the same in every dtype."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)


def _layer_bias(src: _Source, heads: int, channels: int) -> Tensor:
    """dt_bias as the FLA layer draws it: inverse softplus of a log-uniform step in [1e-3, 1e-1]."""
    low, high = math.log(1e-3), math.log(1e-1)
    return _inverse_softplus((low + (high - low) * src.uniform(heads, channels)).exp())


def _fast(src: _Source, shape: tuple[int, ...]) -> Gate:
    """The benchmark recipe of the peers: mean log decay about -3.2 a token."""
    heads, channels = shape[-2:]
    return src.normal(*shape), {
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "A_log": src.uniform(heads),
        "dt_bias": src.uniform(heads, channels),
    }


def _slow(src: _Source, shape: tuple[int, ...]) -> Gate:
    """A freshly initialised FLA layer: mean log decay about -0.13 a token."""
    heads, channels = shape[-2:]
    return src.normal(*shape), {
        "use_gate_in_kernel": True,
        "lower_bound": -5.0,
        "A_log": torch.zeros(heads, dtype=torch.float64),
        "dt_bias": _layer_bias(src, heads, channels),
    }


def _none(src: _Source, shape: tuple[int, ...]) -> Gate:
    """g = 0 exactly: nothing is ever forgotten."""
    return torch.zeros(shape, dtype=torch.float64), {}


def _bounded_bare(src: _Source, shape: tuple[int, ...]) -> Gate:
    """Bounded, neither A_log nor dt_bias."""
    return src.normal(*shape), {"use_gate_in_kernel": True, "lower_bound": -5.0}


def _bounded_mild(src: _Source, shape: tuple[int, ...]) -> Gate:
    gate, extra = _fast(src, shape)
    return gate, extra | {"lower_bound": -1.0}


def _saturated(src: _Source, shape: tuple[int, ...]) -> Gate:
    """g = -5 to the last digit everywhere."""
    gate, extra = _fast(src, shape)
    return gate + 30, extra


def _softplus(src: _Source, shape: tuple[int, ...]) -> Gate:
    """The FLA layer without a bound: A_log = log U(1, 16)."""
    heads, channels = shape[-2:]
    return src.normal(*shape), {
        "use_gate_in_kernel": True,
        "A_log": (1 + 15 * src.uniform(heads)).log(),
        "dt_bias": _layer_bias(src, heads, channels),
    }


def _softplus_500(src: _Source, shape: tuple[int, ...]) -> Gate:
    """Softplus with log decays from about 0 to -500, mixed over tokens and channels."""
    heads, channels = shape[-2:]
    return 41.25 * src.uniform(*shape) - 10, {
        "use_gate_in_kernel": True,
        "A_log": torch.full((heads,), math.log(16), dtype=torch.float64),
        "dt_bias": torch.zeros(heads, channels, dtype=torch.float64),
    }


def _log(src: _Source, shape: tuple[int, ...]) -> Gate:
    """Log decay computed by the caller."""
    return torch.nn.functional.logsigmoid(src.normal(*shape)), {}


def _log_deep(src: _Source, shape: tuple[int, ...]) -> Gate:
    """Log decay by the caller: slow, but one token in five forgets with -100."""
    gate = -0.01 * src.uniform(*shape)
    return torch.where(src.uniform(*shape[:2], 1, 1) < 0.2, torch.full_like(gate, -100.0), gate), {}


def _mixed(src: _Source, shape: tuple[int, ...]) -> Gate:
    """One fast channel among slow ones."""
    gate = -0.02 * src.uniform(*shape)
    gate[..., 0] = -5 + src.uniform(*shape[:-1])
    return gate, {}


GATES: dict[str, Callable[[_Source, tuple[int, ...]], Gate]] = {
    "fast": _fast,
    "slow": _slow,
    "none": _none,
    "bare": _bounded_bare,
    "mild": _bounded_mild,
    "saturated": _saturated,
    "softplus": _softplus,
    "softplus500": _softplus_500,
    "log": _log,
    "logdeep": _log_deep,
    "mixed": _mixed,
}

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


@dataclass(frozen=True)
class KdaCase:
    """One call of `chunk_kda`; `lengths` makes it varlen, `tail` adds rows past the last one."""

    T: int = 64
    B: int = 1
    H: int = 2
    HV: int | None = None
    K: int = 16
    V: int = 16
    gate: str = "fast"
    dtype: torch.dtype = torch.float64
    gate_dtype: torch.dtype | None = None  # of g and beta; that of q by default
    lengths: tuple[int, ...] | None = None
    tail: int = 0
    cu_dtype: torch.dtype = torch.int64
    state: bool = True
    state_dtype: torch.dtype | None = None  # float64 for float64 inputs, else float32
    state_v_first: bool = False
    l2norm: bool = True
    beta: str = "sigmoid"  # sigmoid | activated | neg
    beta_logit: float | None = None
    keys: str = "random"  # random | one | repeated4 | cosine9
    scale: float | None = None
    seed: int = 0
    label: str = ""

    @property
    def heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def tokens(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths) + self.tail

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def id(self) -> str:
        parts = [self.label] if self.label else []
        parts.append(self.gate)
        if self.lengths is None:
            parts.append(f"T{self.T}")
        elif len(self.lengths) <= 6:
            parts.append("varlen" + "_".join(map(str, self.lengths)))
        else:
            parts.append(f"varlen{len(self.lengths)}x")
        if self.tail:
            parts.append(f"tail{self.tail}")
        if self.B != 1:
            parts.append(f"B{self.B}")
        parts.append(f"H{self.H}" if self.HV is None else f"H{self.H}_{self.HV}")
        parts.append(f"K{self.K}" if self.K == self.V else f"K{self.K}V{self.V}")
        parts.append(_SHORT[self.dtype])
        if self.gate_dtype is not None:
            parts.append(f"g{_SHORT[self.gate_dtype]}")
        if not self.state:
            parts.append("nostate")
        if self.state_dtype is not None:
            parts.append(f"s{_SHORT[self.state_dtype]}")
        if self.state_v_first:
            parts.append("vfirst")
        if not self.l2norm:
            parts.append("nonorm")
        if self.beta != "sigmoid":
            parts.append(self.beta)
        if self.beta_logit is not None:
            parts.append(f"logit{self.beta_logit:g}")
        if self.keys != "random":
            parts.append(self.keys)
        return "-".join(parts)

    def but(self, **changes: Any) -> KdaCase:
        return replace(self, **changes)

    def make(self, device: str | torch.device = "cpu") -> dict[str, Any]:
        """Keyword arguments of `chunk_kda`."""
        src = _Source(self.seed)
        tokens, heads = self.tokens, self.heads
        q = src.normal(self.B, tokens, self.H, self.K)
        k = self._keys(src)
        v = src.normal(self.B, tokens, heads, self.V)
        beta = src.normal(self.B, tokens, heads)
        if self.beta_logit is not None:
            beta = torch.full_like(beta, self.beta_logit)
        g, extra = GATES[self.gate](src, (self.B, tokens, heads, self.K))
        if not self.l2norm:
            q = q / q.norm(dim=-1, keepdim=True)
            k = k / k.norm(dim=-1, keepdim=True)
        if self.beta == "activated":
            beta = torch.sigmoid(beta)

        parameters = torch.float64 if self.dtype == torch.float64 else torch.float32
        gate_dtype = self.gate_dtype or self.dtype
        call: dict[str, Any] = {
            "q": q.to(device, self.dtype),
            "k": k.to(device, self.dtype),
            "v": v.to(device, self.dtype),
            "g": g.to(device, gate_dtype),
            "beta": beta.to(device, gate_dtype),
            "output_final_state": True,
        }
        for name, value in extra.items():
            call[name] = value.to(device, parameters) if isinstance(value, Tensor) else value
        if self.l2norm:
            call["use_qk_l2norm_in_kernel"] = True
        if self.beta != "activated":
            call["use_beta_sigmoid_in_kernel"] = True
        if self.beta == "neg":
            call["allow_neg_eigval"] = True
        if self.scale is not None:
            call["scale"] = self.scale
        if self.state:
            state = src.normal(self.sequences, heads, self.K, self.V)
            if self.state_v_first:
                state = state.transpose(-1, -2).contiguous()
            call["initial_state"] = state.to(device, self.state_dtype or parameters)
        if self.state_v_first:
            call["state_v_first"] = True
        if self.lengths is not None:
            ends = [0]
            for length in self.lengths:
                ends.append(ends[-1] + length)
            call["cu_seqlens"] = torch.tensor(ends, dtype=self.cu_dtype, device=device)
        return call

    def _keys(self, src: _Source) -> Tensor:
        shape = (self.B, self.tokens, self.H, self.K)
        if self.keys == "random":
            return src.normal(*shape)
        if self.keys == "one":
            return src.normal(1, 1, self.H, self.K).expand(shape)
        if self.keys == "repeated4":
            pool = src.normal(4, self.H, self.K)
            return pool[torch.arange(self.tokens) % 4].expand(shape)
        if self.keys == "cosine9":  # every pair of keys at a cosine of about 0.9
            common = src.normal(1, 1, self.H, self.K)
            common = common / common.norm(dim=-1, keepdim=True)
            own = src.normal(*shape)
            own = own / own.norm(dim=-1, keepdim=True)
            return common * math.sqrt(0.9) + own * math.sqrt(0.1)
        raise ValueError(self.keys)


def ids(case: KdaCase) -> str:
    return case.id


VARLEN = KdaCase(lengths=(40, 1, 0, 65, 17), H=2)
"""One sequence of each kind: across a boundary, one token, none, many."""

EMPTIES = (
    KdaCase(lengths=(0, 16, 40), label="front"),
    KdaCase(lengths=(16, 0, 24), label="middle"),
    KdaCase(lengths=(16, 40, 0), label="last"),
    KdaCase(lengths=(0, 0, 33, 0, 0), label="around"),
    KdaCase(lengths=(0,), label="only"),
    KdaCase(lengths=(0, 0), label="all"),
    KdaCase(lengths=(0, 0, 0), tail=20, label="all_with_tail"),
)

SHAPES = (
    KdaCase(T=70, H=1, K=1, V=1),
    KdaCase(T=70, H=1, K=60, V=100),
    KdaCase(T=70, H=3, K=32, V=8),
    KdaCase(T=70, H=1, K=128, V=128),
    KdaCase(T=40, H=1, K=256, V=256),
    KdaCase(T=70, B=3, H=2, K=16, V=24),
    KdaCase(T=70, H=2, HV=4),
    KdaCase(T=70, H=2, HV=8, K=8, V=24, state_v_first=True),
    KdaCase(T=70, B=2, H=1, HV=3, gate="softplus"),
    KdaCase(lengths=(33, 0, 5), H=2, HV=6, K=8, V=24, gate="slow"),
)

FLAGS = (
    KdaCase(T=70, l2norm=False),
    KdaCase(T=70, beta="activated"),
    KdaCase(T=70, beta="neg"),
    KdaCase(T=70, beta="neg", gate="none"),
    KdaCase(T=70, l2norm=False, beta="activated", gate="log"),
    KdaCase(T=70, scale=0.1),
    KdaCase(T=70, scale=1.0, gate="softplus"),
    KdaCase(T=70, state=False),
    KdaCase(T=70, state_v_first=True, K=8, V=24),
    KdaCase(T=70, gate="bare"),
    KdaCase(T=70, gate="mild"),
    KdaCase(T=70, gate="log"),
    KdaCase(T=70, gate="logdeep"),
    KdaCase(T=70, gate="mixed"),
    KdaCase(T=70, gate="saturated"),
    KdaCase(T=70, gate="softplus"),
    KdaCase(T=200, gate="softplus500"),
)
