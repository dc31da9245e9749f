"""KDA one token at a time in plain PyTorch: decode, state pools, speculative tokens.

The recurrence as written (Kimi Linear, arXiv 2510.26692, eq. 1), vectorised over sequences and
heads; see :func:`flashkda.fused_recurrent_kda` for what slots and accepted tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import _torch_activations as act
from ._torch import Inputs
from ._torch_plan import Sequences


@dataclass(frozen=True)
class Slots:
    """Where a pool keeps the states of each sequence, on the host."""

    table: tuple[tuple[int, ...], ...]  # [N][S] slot per sequence and token; S = 1: one slot
    per_token: bool  # whether the state after each token goes to a slot of its own
    accepted: tuple[int, ...] | None  # [N] tokens accepted last time: start from that token's slot
    pad_slot_id: int | None

    def start(self, sequence: int) -> int:
        position = 0 if self.accepted is None else self.accepted[sequence] - 1
        return self.table[sequence][position]

    def is_padding(self, slot: int) -> bool:
        return self.pad_slot_id is not None and slot <= self.pad_slot_id


def slots_of(
    indices: Tensor,
    num_accepted_tokens: Tensor | None,
    pad_slot_id: int | None,
    num_slots: int,
    sequences: Sequences,
) -> Slots:
    """Reads the slot table on the host and checks it.

    Raises:
        ValueError: a slot outside the pool that is no padding, a sequence with more tokens than
            slots, or an accepted count outside ``[1, S]``.
    """
    per_token = indices.dim() == 2
    table = tuple(map(tuple, (indices if per_token else indices.unsqueeze(1)).tolist()))
    accepted = None if num_accepted_tokens is None else tuple(num_accepted_tokens.tolist())
    slots = Slots(table, per_token, accepted, pad_slot_id)
    for n, length in enumerate(sequences.lengths):
        if length == 0:
            continue
        width = len(table[n])
        if per_token and length > width:
            raise ValueError(
                f"ssm_state_indices: expected a slot for each of the {length} tokens of sequence "
                f"{n}, got {width}"
            )
        if accepted is not None and not 1 <= accepted[n] <= width:
            raise ValueError(
                f"num_accepted_tokens: expected values in [1, {width}], got {accepted[n]} for "
                f"sequence {n}"
            )
        used = {slots.start(n), *table[n][: length if per_token else 1]}
        for slot in used:
            if not slots.is_padding(slot) and not 0 <= slot < num_slots:
                raise ValueError(
                    f"ssm_state_indices: expected slots in [0, {num_slots}), got {slot} for "
                    f"sequence {n} (pad_slot_id={pad_slot_id})"
                )
    return slots


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
        padded = [n for n in running if slots.is_padding(slots.start(n))]
        for n in padded:
            out[sequences.starts[n] : sequences.starts[n] + sequences.lengths[n]] = 0
        running = [n for n in running if n not in set(padded)]
    running.sort(key=lambda n: -sequences.lengths[n])
    if state_out is not None and not into_pool:
        _carry_over(state_in, slots, state_out, set(running))
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
        state = state_in.index_select(0, on_device(sources)).to(inputs.dtype)
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
                if not slots.is_padding(slots.table[n][t])
            ]
            if written:
                store([rank for rank, _ in written], [slot for _, slot in written], state)
    if state_out is None or (into_pool and slots is not None and slots.per_token):
        return
    targets = [slots.start(n) for n in running] if into_pool and slots is not None else running
    store(list(range(len(running))), targets, state)


def _carry_over(
    state_in: Tensor | None, slots: Slots | None, state_out: Tensor, running: set[int]
) -> None:
    """Final states of the sequences that do not run: empty ones keep theirs, padded ones get 0."""
    if state_in is state_out:
        return
    for n in range(state_out.shape[0]):
        if n in running:
            continue
        if state_in is None:
            state_out[n] = 0
        elif slots is None:
            state_out[n] = state_in[n]
        else:
            slot = slots.start(n)
            state_out[n] = state_in[slot] if 0 <= slot < len(state_in) else 0


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
    state.mul_(log_decay.exp().unsqueeze(-1))
    recalled = torch.matmul(k.unsqueeze(2), state).squeeze(2)
    update = beta.unsqueeze(-1) * (v - recalled)
    state.addcmul_(k.unsqueeze(-1), update.unsqueeze(2))
    return torch.matmul(q.unsqueeze(2), state).squeeze(2)
