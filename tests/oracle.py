"""The float64 token recurrence against which every implementation is measured.

Nothing here comes from the product, and nothing is chunked, fused or approximated: one token after
the other, vectorised over batch and heads only, every input (gates and parameters too) cast to
float64 first. The functions are out of place, so autograd through them gives reference gradients.

    S' = diag(exp g_t) S_{t-1}              forget, per key channel
    u  = beta_t (v_t - S'^T k_t)            the delta reads the decayed state
    S_t = S' + k_t u^T
    o_t = scale S_t^T q_t                   reads the state after the update
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NORM_EPS = 1e-6

Activated = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _double(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float64)


def l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without a threshold."""
    return torch.logaddexp(x, torch.zeros_like(x))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) with a derivative that is right in the tail.

    `torch.sigmoid` differentiates as y (1 - y), which at x = 30 keeps three digits.
    """
    return torch.exp(-softplus(-x))


def log_decay(
    raw: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
) -> Tensor:
    """Log decay [B,T,HV,K] in float64 from the raw gate; bounded if `lower_bound` is given."""
    z = raw.to(torch.float64)
    heads, channels = z.shape[-2:]
    if dt_bias is not None:
        z = z + dt_bias.to(torch.float64).reshape(heads, channels)
    rate = torch.ones(heads, 1, dtype=torch.float64, device=z.device)
    if A_log is not None:
        rate = A_log.to(torch.float64).exp().reshape(heads, 1)
    if lower_bound is not None:
        return lower_bound * sigmoid(rate * z)
    return -rate * softplus(z)


def activate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
) -> Activated:
    """(q, k, v, log decay, beta) as the recurrence reads them: float64, HV heads, q scaled."""
    q, k, v, beta = (x.to(torch.float64) for x in (q, k, v, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2_normalise(q), l2_normalise(k)
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    decay = log_decay(g, A_log, dt_bias, lower_bound) if use_gate_in_kernel else g.to(torch.float64)
    if use_beta_sigmoid_in_kernel:
        beta = sigmoid(beta)
    if allow_neg_eigval:
        beta = 2 * beta
    return q, k, v, decay, beta


def recur(inputs: Activated, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output [B,T,HV,V] and the states [B,HV,K,V] after 0, 1, ..., T tokens."""
    q, k, v, decay, beta = inputs
    states = [state]
    outs = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp().unsqueeze(-1) * state
        recalled = (k[:, t].unsqueeze(-2) @ state).squeeze(-2)
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - recalled)
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        outs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
        states.append(state)
    return (torch.stack(outs, dim=1) if outs else torch.zeros_like(v)), states


def rows(inputs: Activated, b: int, lo: int, hi: int) -> Activated:
    q, k, v, decay, beta = (x[b : b + 1, lo:hi] for x in inputs)
    return q, k, v, decay, beta


def spans(batch: int, tokens: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(batch row, first token, end) of each sequence."""
    if cu_seqlens is None:
        return [(b, 0, tokens) for b in range(batch)]
    ends = cu_seqlens.tolist()
    return [(0, lo, hi) for lo, hi in pairwise(ends)]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output [B,T,HV,V] and final states in the layout asked for, in float64.

    `options` are those of `activate`. Rows past `cu_seqlens[-1]` are zero. The final state is
    always returned, so that one call serves tests that ask for it and tests that don't.
    """
    del output_final_state
    inputs = activate(q, k, v, g, beta, **options)
    batch, tokens, heads, width = inputs[2].shape
    first = _double(initial_state)
    if first is not None and state_v_first:
        first = first.transpose(-1, -2)
    if cu_seqlens is None:
        if first is None:
            first = inputs[0].new_zeros(batch, heads, q.shape[-1], width)
        o, states = recur(inputs, first)
        final = states[-1]
    else:
        ends = cu_seqlens.tolist()
        if first is None:
            first = inputs[0].new_zeros(len(ends) - 1, heads, q.shape[-1], width)
        pieces, finals = [], []
        for n, (_, lo, hi) in enumerate(spans(batch, tokens, cu_seqlens)):
            piece, states = recur(rows(inputs, 0, lo, hi), first[n : n + 1])
            pieces.append(piece)
            finals.append(states[-1])
        pieces.append(inputs[2].new_zeros(1, tokens - ends[-1], heads, width))
        o = torch.cat(pieces, dim=1)
        final = torch.cat(finals) if finals else first
    return o, final.transpose(-1, -2) if state_v_first else final


def kda_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    pool: Tensor,
    ssm_state_indices: Tensor,
    final_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Output and the pool [slots,...] after a call, in float64; `pool` itself is left alone.

    An index <= `pad_slot_id` is padding: nothing read, nothing written, zero output. With
    `final_state_indices` that holds for those; a source <= `pad_slot_id` is a state of zeros.
    """
    inputs = activate(q, k, v, g, beta, **options)
    o = torch.zeros_like(inputs[2])
    after = pool.to(torch.float64).clone()
    stored = after.transpose(-1, -2) if state_v_first else after  # a view: writes reach `after`
    before = stored.clone()
    table = ssm_state_indices.tolist()
    ends = None if final_state_indices is None else final_state_indices.tolist()

    def is_pad(slot: int) -> bool:
        return pad_slot_id is not None and slot <= pad_slot_id

    for n, (b, lo, hi) in enumerate(spans(q.shape[0], q.shape[1], cu_seqlens)):
        row = table[n]
        if lo == hi:
            continue
        accepted = 1 if num_accepted_tokens is None else int(num_accepted_tokens[n])
        start = row[accepted - 1] if isinstance(row, list) else row
        if is_pad(start if ends is None else ends[n]):
            continue
        first = torch.zeros_like(before[0]) if is_pad(start) else before[start]
        piece, states = recur(rows(inputs, b, lo, hi), first[None])
        o[b, lo:hi] = piece[0]
        if isinstance(row, list):
            for t in range(hi - lo):
                if not is_pad(row[t]):
                    stored[row[t]] = states[t + 1][0]
        else:
            stored[row if ends is None else ends[n]] = states[-1][0]
    return o, after


def states_inside(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    after: list[tuple[int, int]],
    initial_state: Tensor | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = True,
    **options: Any,
) -> list[Tensor]:
    """The state [HV,...] of sequence n after its first t tokens, for each (n, t) of `after`."""
    del output_final_state
    inputs = activate(q, k, v, g, beta, **options)
    result = []
    for n, count in after:
        b, lo, hi = spans(q.shape[0], q.shape[1], cu_seqlens)[n]
        assert 0 <= count <= hi - lo
        state = inputs[0].new_zeros(1, v.shape[2], q.shape[-1], v.shape[3])
        if initial_state is not None:
            state = initial_state[n : n + 1].to(torch.float64)
            state = state.transpose(-1, -2) if state_v_first else state
        _, states = recur(rows(inputs, b, lo, lo + count), state)
        result.append(states[-1][0].transpose(-1, -2) if state_v_first else states[-1][0])
    return result
