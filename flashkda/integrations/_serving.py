"""What the doors for serving systems share: raw inputs, packed rows, parameters of models."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

RAW: dict[str, Any] = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
}
"""Gate and beta are logits, q and k not normalised; states are ``[V, K]``."""


def parameters(A_log: Tensor | None, dt_bias: Tensor | None) -> dict[str, Any]:
    """``A_log [HV]``, also from ``[1, 1, HV, 1]``, and ``dt_bias [HV * K]``, as views."""
    return {
        "A_log": None if A_log is None else A_log.reshape(-1),
        "dt_bias": None if dt_bias is None else dt_bias.reshape(-1),
    }


def split_packed(
    mixed_qkv: Tensor, raw_g: Tensor, raw_beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, g, beta ``[B, 1, ...]`` as views of rows ``[q | k | v]``; sizes are the state's."""
    if mixed_qkv.dim() != 2 or state.dim() != 4:
        raise ValueError(
            "mixed_qkv: expected shape [B, 2 * H * K + HV * V] and states [slots, HV, V, K], got "
            f"{list(mixed_qkv.shape)} and {list(state.shape)}"
        )
    rows = mixed_qkv.shape[0]
    _, value_heads, value_dim, key_dim = state.shape
    key_part = mixed_qkv.shape[1] - value_heads * value_dim
    if key_part < 2 * key_dim or key_part % (2 * key_dim):
        raise ValueError(
            f"mixed_qkv: expected rows of 2 * H * {key_dim} + {value_heads} * {value_dim}, got "
            f"{mixed_qkv.shape[1]}"
        )
    q, k, v = mixed_qkv.split([key_part // 2, key_part // 2, value_heads * value_dim], dim=1)
    return (
        q.unflatten(1, (-1, key_dim)).unsqueeze(1),
        k.unflatten(1, (-1, key_dim)).unsqueeze(1),
        v.unflatten(1, (value_heads, value_dim)).unsqueeze(1),
        _one_token("raw_g", raw_g, rows, value_heads, key_dim),
        _one_token("raw_beta", raw_beta, rows, value_heads),
    )


def _one_token(name: str, x: Tensor, rows: int, *sizes: int) -> Tensor:
    """``[B, 1, *sizes]`` from that, or without dimensions of 1, or with ``sizes`` as one."""

    def without_ones(*shape: int) -> list[int]:
        return [n for n in shape if n != 1]

    if without_ones(*x.shape) not in (
        without_ones(rows, *sizes),
        without_ones(rows, math.prod(sizes)),
    ):
        raise ValueError(f"{name}: expected shape {[rows, *sizes]}, got {list(x.shape)}")
    return x.reshape(rows, 1, *sizes)


def one_token_each(out: Tensor, like: Tensor) -> Tensor:
    """``out`` as ``[B, 1, HV, V]``, a view, from that, ``[1, B, HV, V]``, or ``[B, HV, V]``."""
    if out.dim() == 3:
        return out.unsqueeze(1)
    if out.dim() == 4 and out.shape[0] == 1 and like.shape[0] != 1:
        return out.transpose(0, 1)
    return out
