"""Small cases of the installed package against a token recurrence in float64.

:func:`recurrence` shares no code with the package: it is written from the equations, loops over
tokens, and casts every input to float64 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashkda._backend import backend
from flashkda.ops import chunk_kda, fused_recurrent_kda

# Allowed ||got - want|| / ||want|| for outputs and states. A bfloat16 output has 8 bits; the
# CUDA kernels round the operands of their products as well.
BUDGETS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4.5e-3}
KERNEL_BUDGET = 6e-3
LOWER_BOUND = -5.0


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    cu_seqlens: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention, token by token, in float64.

    R_t = diag(exp g_t) S_{t-1};  S_t = R_t + beta_t k_t (v_t - R_t^T k_t)^T;  o_t = scale S_t^T q_t

    Args:
        q: queries [B, T, H, K].
        k: keys [B, T, H, K].
        v: values [B, T, HV, V].
        log_decay: g [B, T, HV, K].
        beta: step sizes [B, T, HV].
        scale: of the output.
        initial_state: [N, HV, K, V], zeros if None.
        cu_seqlens: boundaries of N sequences packed into a batch of 1.

    Returns:
        o [B, T, HV, V], zero outside every sequence, and the final states [N, HV, K, V]. Autograd
        can follow it.
    """
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    if cu_seqlens is not None:
        pieces, finals = [], []
        for n, (start, end) in enumerate(pairwise(cu_seqlens)):
            before = None if initial_state is None else initial_state[n : n + 1]
            piece, final = recurrence(
                *(x[:, start:end] for x in (q, k, v, log_decay, beta)),
                scale=scale,
                initial_state=before,
            )
            pieces.append(piece)
            finals.append(final)
        pieces.append(torch.zeros_like(v[:, cu_seqlens[-1] :]))
        return torch.cat(pieces, dim=1), torch.cat(finals)
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    batch, _, heads, key_dim = k.shape
    state = v.new_zeros(batch, heads, key_dim, v.shape[-1])
    if initial_state is not None:
        state = state + initial_state.double()
    outputs = []
    for q_t, k_t, v_t, g_t, beta_t in zip(
        *(x.unbind(1) for x in (q, k, v, log_decay, beta)), strict=True
    ):
        state = g_t[..., None].exp() * state
        recalled = torch.einsum("bhk,bhkv->bhv", k_t, state)
        correction = beta_t[..., None] * (v_t - recalled)
        state = state + k_t[..., None] * correction[..., None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q_t, state))
    return (torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)), state


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want|| in float64; infinite when ``got`` is not finite."""
    got, want = got.double(), want.double()
    if got.shape != want.shape or not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = float(want.norm())
    return float((got - want).norm()) / norm if norm > 0 else float(got.norm())


@dataclass(frozen=True)
class Case:
    """One call that is checked.

    Attributes:
        operator: "chunk" or "recurrent".
        gate: "fast" (random, bounded), "slow" (as a fresh layer has it, bounded), "none" (g = 0) or
            "softplus" (unbounded).
        dtype: of q, k, v, g, beta.
        cu_seqlens: boundaries of packed sequences, or None for a batch of 2.
        backend: "torch", or "cuda" for the kernels, with the head dimension that they serve.
    """

    operator: str
    gate: str
    dtype: torch.dtype
    cu_seqlens: tuple[int, ...] | None = None
    backend: str = "torch"

    @property
    def name(self) -> str:
        """A readable identifier."""
        layout = "dense" if self.cu_seqlens is None else "varlen"
        name = f"{self.operator}-{self.gate}-{layout}-{str(self.dtype).removeprefix('torch.')}"
        return name if self.backend == "torch" else f"{name}-{self.backend}"


@dataclass(frozen=True)
class Result:
    """Errors of one case on one device."""

    case: Case
    device: str
    output_error: float
    state_error: float

    @property
    def budget(self) -> float:
        """What the errors may be."""
        return BUDGETS[self.case.dtype] if self.case.backend == "torch" else KERNEL_BUDGET

    @property
    def passed(self) -> bool:
        """Whether both errors are within the budget."""
        return self.output_error <= self.budget and self.state_error <= self.budget


GATES = ("fast", "slow", "none", "softplus")
PACKED = (0, 0, 33, 34, 34, 98)


def cases(*, float64: bool = True) -> Iterator[Case]:
    """The PyTorch path: every gate with both operators, dense and packed (with empty sequences)."""
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float64] if float64 else [])
    for dtype in dtypes:
        for gate in GATES:
            for operator in ("chunk", "recurrent"):
                yield Case(operator, gate, dtype)
                yield Case(operator, gate, dtype, PACKED)


def kernel_cases() -> Iterator[Case]:
    """What the CUDA kernels serve: every gate, dense and packed."""
    for gate in GATES:
        for packed in (None, PACKED):
            yield Case("chunk", gate, torch.bfloat16, packed, "cuda")


def _normalised(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _gate_inputs(
    case: Case, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, dict[str, Any], Tensor]:
    """The g argument, the arguments that say how to read it, and the log decay it means."""
    _, _, heads, dim = shape
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.gate == "none":
        g = torch.zeros(shape, dtype=case.dtype)
        return g, {}, g.double()
    g = x.to(case.dtype)
    A_log = torch.rand(heads, generator=generator, dtype=torch.float64)
    dt_bias = torch.rand(heads, dim, generator=generator, dtype=torch.float64)
    if case.gate == "slow":
        A_log = torch.zeros_like(A_log)
        dt = 1e-3 * 100**dt_bias
        dt_bias = dt + torch.log(-torch.expm1(-dt))
    parameter_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    A_log, dt_bias = A_log.to(parameter_dtype), dt_bias.to(parameter_dtype)
    how: dict[str, Any] = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
    shifted = g.double() + dt_bias.double()
    rate = A_log.double().exp()[:, None]
    if case.gate == "softplus":
        return g, how, -rate * torch.logaddexp(shifted, torch.zeros_like(shifted))
    how["lower_bound"] = LOWER_BOUND
    return g, how, LOWER_BOUND * torch.sigmoid(rate * shifted)


def run_case(case: Case, device: torch.device, seed: int = 0) -> Result:
    """Runs one case on ``device`` and compares it with :func:`recurrence` on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    heads, value_heads, key_dim, value_dim = 1, 2, 64, 32
    if case.backend == "cuda":
        key_dim = value_dim = 128
    batch, tokens = (2, 70) if case.cu_seqlens is None else (1, 100)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (normal(batch, tokens, heads, key_dim).to(case.dtype) for _ in "qk")
    v = normal(batch, tokens, value_heads, value_dim).to(case.dtype)
    beta = normal(batch, tokens, value_heads).to(case.dtype)
    g, how, log_decay = _gate_inputs(case, (batch, tokens, value_heads, key_dim), generator)
    num_seqs = batch if case.cu_seqlens is None else len(case.cu_seqlens) - 1
    state_dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
    state = normal(num_seqs, value_heads, key_dim, value_dim).to(state_dtype)

    want = recurrence(
        _normalised(q),
        _normalised(k),
        v,
        log_decay,
        beta.double().sigmoid(),
        scale=key_dim**-0.5,
        initial_state=state,
        cu_seqlens=None if case.cu_seqlens is None else list(case.cu_seqlens),
    )
    options: dict[str, Any] = {
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        **how,
    }
    if case.cu_seqlens is not None:
        options["cu_seqlens"] = torch.tensor(case.cu_seqlens)
    options = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in options.items()}
    operator = chunk_kda if case.operator == "chunk" else fused_recurrent_kda
    q, k, v, g, beta = (x.to(device) for x in (q, k, v, g, beta))
    with torch.inference_mode():
        o, final_state = operator(q, k, v, g, beta, backend=case.backend, **options)
    assert final_state is not None
    return Result(
        case,
        str(device),
        relative_error(o.cpu(), want[0]),
        relative_error(final_state.cpu(), want[1]),
    )


def main(devices: list[torch.device]) -> int:
    """Runs every case on every device, prints the table and returns the exit status."""
    results = []
    for device in devices:
        chosen = backend(device)
        print(f"{device}: backend {chosen.name} ({chosen.reason})")
        results += [run_case(case, device) for case in cases(float64=device.type != "mps")]
        if chosen.name == "cuda":
            results += [run_case(case, device) for case in kernel_cases()]
    print(f"\n{'case':36} {'device':8} {'output':>9} {'state':>9} {'allowed':>9}")
    for r in results:
        verdict = "ok" if r.passed else "MISMATCH"
        print(
            f"{r.case.name:36} {r.device:8} {r.output_error:9.1e} {r.state_error:9.1e} "
            f"{r.budget:9.1e}  {verdict}"
        )
    failed = sum(not r.passed for r in results)
    if failed:
        print(f"\nFAILED: {failed} of {len(results)} cases do not match the float64 recurrence")
        return 1
    print(f"\nOK: {len(results)} cases match the float64 recurrence")
    return 0
