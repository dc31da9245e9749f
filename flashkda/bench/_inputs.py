"""Inputs of a case, and what they mean: activated in float64, for the token recurrence."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from flashkda.bench._cases import Case

DIM = 128  # K and V: what kernels serve
LOWER_BOUND = -5.0
_NO_DECAY = -30.0  # a gate logit: the log decay is -5e-13


@dataclass(frozen=True)
class Inputs:
    """Tensors of one call; q, k, g and v have K = V = D channels.

    Attributes:
        case: what they are of.
        q: [B, T, H, D].
        k: [B, T, H, D].
        v: [B, T, H, D].
        g: gate logits [B, T, H, D].
        beta: logits [B, T, H].
        A_log: [H] float32.
        dt_bias: [H, D] float32.
        state: initial states [N, H, V, K]; callers that overwrite them take a copy.
        cu_seqlens: [N + 1] of packed sequences, or None.
        out_grad: gradient of the outputs (train), or None.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    cu_seqlens: Tensor | None
    out_grad: Tensor | None

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g, beta."""
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def scale(self) -> float:
        """Of the outputs."""
        return float(self.q.shape[-1] ** -0.5)

    @property
    def boundaries(self) -> list[int] | None:
        """``cu_seqlens`` as a list."""
        shape = self.case.shape
        return [0, *accumulate(shape.lengths)] if shape.packed else None

    def num_bytes(self) -> int:
        """What a call has to move: inputs and states read, outputs, states and gradients written.

        A call with a backward pass reads its inputs and the output gradient, and writes an output
        and the gradients; states don't count there.
        """
        read = sum(x.nbytes for x in self.tokens)
        if self.out_grad is not None:
            return 2 * read + 2 * self.out_grad.nbytes
        return read + self.v.nbytes + 2 * self.state.nbytes

    @staticmethod
    def draw(case: Case, device: torch.device, dtype: torch.dtype, dim: int, seed: int) -> Inputs:
        """Random inputs: the same for the same seed on the same kind of device."""
        shape = case.shape
        generator = torch.Generator(device).manual_seed(seed)
        like: dict[str, Any] = {"device": device, "generator": generator}
        size = (*shape.batch, shape.heads)

        def normal(*more: int) -> Tensor:
            return torch.randn(*size, *more, dtype=dtype, **like)

        q, k, v, g = (normal(dim) for _ in range(4))
        beta = normal()
        uniform = torch.rand(shape.heads, dim, **like)
        if case.gate == "fast":
            A_log, bias = torch.rand(shape.heads, **like), uniform
        elif case.gate == "slow":
            dt = 1e-3 * 100**uniform
            A_log, bias = torch.zeros(shape.heads, device=device), dt + (-torch.expm1(-dt)).log()
        else:
            A_log, bias = torch.zeros(shape.heads, device=device), torch.zeros_like(uniform)
            g = torch.full_like(g, _NO_DECAY)
        state = torch.randn(len(shape.lengths), shape.heads, dim, dim, **like)
        if shape.bf16_state:
            state = state.bfloat16()
        boundaries = None
        if shape.packed:
            ends = [0, *accumulate(shape.lengths)]
            boundaries = torch.tensor(ends, dtype=torch.int32, device=device)
        grad = normal(dim) if shape.group == "train" else None
        return Inputs(case, q, k, v, g, beta, A_log, bias, state, boundaries, grad)

    def of_heads(self, heads: list[int]) -> Inputs:
        """Those of some heads alone, which depend on no other."""
        q, k, v, g, beta = (x[:, :, heads] for x in self.tokens)
        grad = None if self.out_grad is None else self.out_grad[:, :, heads]
        A_log, bias, state = self.A_log[heads], self.dt_bias[heads], self.state[:, heads]
        return Inputs(self.case, q, k, v, g, beta, A_log, bias, state, self.cu_seqlens, grad)


def activated(x: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decay and beta in float64, as the recurrence reads them."""
    q, k, v, g, beta = (y.double() for y in x.tokens)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    rate = x.A_log.double().exp()[:, None]
    decay = LOWER_BOUND * torch.sigmoid(rate * (g + x.dt_bias.double()))
    return q, k, v, decay, beta.sigmoid()
