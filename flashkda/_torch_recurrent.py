"""KDA one token at a time in plain PyTorch: decode, state pools, speculative tokens.

The recurrence as written (Kimi Linear, arXiv 2510.26692, eq. 1), vectorised over sequences and
heads; see :func:`flashkda.fused_recurrent_kda` for what slots and accepted tokens mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _torch_activations as act
from ._torch import Inputs
from ._torch_plan import Sequences
from ._torch_slots import Slots, carry_over, load_states


def forward(
    inputs: Inputs,
    sequences: Sequences,
    state_in: Tensor | None,
    slots: Slots | None,
    out: Tensor,
    state_out: Tensor | None,
) -> None:
    """Writes ``out [B * T, HV, V]`` and the states.

    Args:
        inputs: the tensors of the call.
        sequences: where they lie.
        state_in: ``[N, HV, ...]``, or the pool ``[slots, HV, ...]`` when there are ``slots``.
        slots: the slot table, or None.
        out: rows of tokens inside a sequence are overwritten, those of padded sequences with zeros.
        state_out: None, the pool itself (only with ``slots``), or ``[N, HV, ...]``.
    """
    options = inputs.options
    into_pool = slots is not None and state_out is not None and state_out is state_in
    running = [n for n, length in enumerate(sequences.lengths) if length > 0]
    if slots is not None:
        padded = [n for n in running if slots.is_padding(n)]
        for n in padded:
            out[sequences.starts[n] : sequences.starts[n] + sequences.lengths[n]] = 0
        running = [n for n in running if n not in set(padded)]
    running.sort(key=lambda n: -sequences.lengths[n])
    if state_out is not None and not into_pool:
        carry_over(state_in, slots, state_out, set(running))
    if not running:
        return

    device = out.device

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, device=device)

    num_keys, num_values = inputs.k.shape[-1], inputs.v.shape[-1]
    if state_in is None:
        shape = (len(running), inputs.num_heads, num_keys, num_values)
        state = inputs.k.new_zeros(shape, dtype=inputs.dtype)
    else:
        sources = running if slots is None else [slots.start(n) for n in running]
        state = load_states(state_in, sources, slots).to(inputs.dtype)
        if options.state_v_first:
            state = state.transpose(2, 3).contiguous()

    def store(members: list[int], targets: list[int], states: Tensor) -> None:
        """Writes the states of some of the running sequences, given by their rank."""
        assert state_out is not None
        if options.state_v_first:
            states = states.transpose(2, 3)
        rows = states.index_select(0, on_device(members)).to(state_out.dtype)
        state_out.index_copy_(0, on_device(targets), rows)

    starts = on_device([sequences.starts[n] for n in running])
    lengths = [sequences.lengths[n] for n in running]
    active = len(running)
    for t in range(lengths[0]):
        while lengths[active - 1] <= t:
            active -= 1
        rows = starts[:active] + t
        out.index_copy_(0, rows, _one_token(inputs, rows, state[:active]).to(out.dtype))
        if into_pool and slots is not None and slots.per_token:
            written = [
                (rank, slots.table[n][t])
                for rank, n in enumerate(running[:active])
                if not slots.is_pad(slots.table[n][t])
            ]
            if written:
                store([rank for rank, _ in written], [slot for _, slot in written], state)
    if state_out is None or (into_pool and slots is not None and slots.per_token):
        return
    targets = [slots.end(n) for n in running] if into_pool and slots is not None else running
    store(list(range(len(running))), targets, state)


def _one_token(inputs: Inputs, rows: Tensor, state: Tensor) -> Tensor:
    """Advances ``state [n, HV, K, V]`` by the token at ``rows [n]``; returns ``[n, HV, V]``."""
    options = inputs.options

    def load(x: Tensor) -> Tensor:
        return x.index_select(0, rows).to(inputs.dtype)

    def load_row(x: Tensor) -> Tensor:
        row = load(x)
        if options.l2norm:
            row, _ = act.l2norm(row)
        return row.repeat_interleave(inputs.num_heads // row.shape[1], dim=1)

    q, k, v, log_decay, beta = (
        load_row(inputs.q) * options.scale,
        load_row(inputs.k),
        load(inputs.v),
        load(inputs.g),
        load(inputs.beta),
    )
    if options.gate_in_kernel:
        log_decay = act.gate(log_decay.unsqueeze(2), inputs.gate).squeeze(2)
    if options.beta_sigmoid:
        beta = act.step_size(beta, options.beta_maximum)
    _decay(state, log_decay.unsqueeze(-1))
    recalled = torch.matmul(k.unsqueeze(2), state).squeeze(2)
    update = beta.unsqueeze(-1) * (v - recalled)
    state.addcmul_(k.unsqueeze(-1), update.unsqueeze(2))
    return torch.matmul(q.unsqueeze(2), state).squeeze(2)


# Weaker decays are applied as a difference from 1.
_WEAK = -0.5


def _decay(state: Tensor, log_decay: Tensor) -> None:
    """``state *= exp(log_decay)`` in place.

    A factor just below 1 has lost most digits of the decay, in the same direction at every token if
    the gate is constant: over 32k tokens that adds up to 1e-4 in float32.
    """
    is_weak = log_decay > _WEAK
    factor, difference = log_decay.exp(), log_decay.expm1()
    state.mul_(factor.masked_fill_(is_weak, 1))
    state.addcmul_(state, difference.masked_fill_(~is_weak, 0))
