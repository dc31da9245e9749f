"""Gate, step size and normalisation of one batch of tokens, and their derivatives.

Formulas: Kimi Linear (arXiv 2510.26692), section 3. ``x`` are raw gate logits,
``z = x + dt_bias`` and ``a = exp(A_log)``::

    softplus gate   g = -a softplus(z)
    bounded gate    g = lower_bound sigmoid(a z)
    step size       beta = sigmoid(b), or 2 sigmoid(b) when negative eigenvalues are allowed
    normalisation   y = x / sqrt(sum x^2 + 1e-6)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-6

# From here on softplus(z) = z to the last bit of a float64, and exp(z) is far from overflow.
_SOFTPLUS_IS_LINEAR = 40.0


@dataclass(frozen=True)
class GateParams:
    """Gate parameters in the working precision, broadcastable against ``[chunks, HV, C, K]``."""

    amplitude: Tensor | None  # exp(A_log) [HV, 1, 1]; None means 1
    bias: Tensor | None  # dt_bias [HV, 1, K]; None means 0
    lower_bound: float | None  # None means the softplus gate


def gate(logits: Tensor, params: GateParams) -> Tensor:
    """Log decay of each channel from its raw gate logits, ``[chunks, HV, C, K]``."""
    z = logits if params.bias is None else logits + params.bias
    if params.lower_bound is not None:
        scaled = z if params.amplitude is None else z * params.amplitude
        return torch.sigmoid(scaled).mul_(params.lower_bound)
    assert params.amplitude is not None
    return F.softplus(z, threshold=_SOFTPLUS_IS_LINEAR).mul_(-params.amplitude)


def gate_backward(
    logits: Tensor, params: GateParams, log_decay: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of the logits, and of ``A_log`` token by token (summed by the caller).

    The gradient of ``dt_bias`` is that of the logits, summed over tokens.
    """
    z = logits if params.bias is None else logits + params.bias
    if params.lower_bound is not None:
        scaled = z if params.amplitude is None else z * params.amplitude
        s = torch.sigmoid(scaled)
        # 1 - s as a sigmoid of its own: near saturation the subtraction would leave no digits.
        grad_z = grad * (s * torch.sigmoid(-scaled)).mul_(params.lower_bound)
        if params.amplitude is not None:
            grad_z = grad_z.mul_(params.amplitude)
        return grad_z, grad_z * z
    assert params.amplitude is not None
    return grad * torch.sigmoid(z).mul_(-params.amplitude), grad * log_decay


def step_size(logits: Tensor, maximum: float) -> Tensor:
    """``maximum * sigmoid(logits)``."""
    return torch.sigmoid(logits).mul_(maximum)


def step_size_backward(logits: Tensor, maximum: float, grad: Tensor) -> Tensor:
    return grad * (torch.sigmoid(logits) * torch.sigmoid(-logits)).mul_(maximum)


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of unit length, and the inverse norms ``[..., 1]``; a zero row stays zero."""
    inverse_norm = x.square().sum(-1, keepdim=True).add_(NORM_EPS).rsqrt_()
    return x * inverse_norm, inverse_norm


def l2norm_backward(y: Tensor, inverse_norm: Tensor, grad: Tensor) -> Tensor:
    return (grad - y * (y * grad).sum(-1, keepdim=True)).mul_(inverse_norm)
