"""The chunked form on a pool of states, with prefix checkpoints, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from . import _torch, _torch_checkpoints
from ._torch import Inputs
from ._torch_checkpoints import Checkpoints
from ._torch_plan import Sequences
from ._torch_slots import Slots, carry_over, load_states


def padding_of(slots: Slots | None, sequences: Sequences) -> set[int]:
    """Sequences with tokens that are padding all the same."""
    if slots is None:
        return set()
    return {n for n, length in enumerate(sequences.lengths) if length and slots.is_padding(n)}


def check_apart(
    checkpoints: Checkpoints,
    sequences: Sequences,
    state_in: Tensor | None,
    slots: Slots | None,
    state_out: Tensor | None,
) -> None:
    """Refuses a checkpoint that would overwrite the state of a sequence, or be overwritten by it.

    Where ``checkpoint_states`` is the pool, or shares rows with it: slots are the same if they
    start at one address. A slot that a sequence only starts from is refused to its own checkpoints
    too: kernels promise no order of reads and writes within a call.

    Raises:
        ValueError: a sequence starts from that slot, or its final state goes there.
    """
    owners = {
        _address(pool, slot): n for pool, slot, n in _used(sequences, state_in, slots, state_out)
    }
    for n, row in enumerate(checkpoints.wanted):
        for _, slot in row:
            owner = owners.get(_address(checkpoints.states, slot))
            if owner is not None:
                raise ValueError(
                    "checkpoint_indices: expected slots that no sequence starts from or ends in, "
                    f"got {slot} for sequence {n}, which is a slot of sequence {owner}"
                )


def _address(pool: Tensor, slot: int) -> int:
    return pool.data_ptr() + slot * pool.stride(0) * pool.element_size()


def _used(
    sequences: Sequences, state_in: Tensor | None, slots: Slots | None, state_out: Tensor | None
) -> Iterator[tuple[Tensor, int, int]]:
    """(pool, slot, sequence) of every state that is read or written."""
    for n, length in enumerate(sequences.lengths):
        is_returned = state_out is not None and state_out is not state_in
        if state_out is not None and is_returned:
            yield state_out, n, n
        if state_in is None or not (length or is_returned):
            continue  # one without tokens is read only to be returned
        if slots is None:
            yield state_in, n, n
        elif not slots.is_padding(n):
            for slot in (slots.start(n), slots.end(n)):
                if not slots.is_pad(slot) and 0 <= slot < state_in.shape[0]:
                    yield state_in, slot, n


def forward(
    inputs: Inputs,
    sequences: Sequences,
    state_in: Tensor | None,
    slots: Slots | None,
    out: Tensor,
    state_out: Tensor | None,
    checkpoints: Checkpoints | None,
) -> None:
    """Writes ``out [B * T, HV, V]``, the states and the checkpoints.

    Args:
        inputs: the tensors of the call.
        sequences: where they lie.
        state_in: ``[N, HV, ...]``, or the pool ``[slots, HV, ...]`` when there are ``slots``.
        slots: the slot table, or None.
        out: rows of tokens inside a sequence are overwritten, those of padded sequences with zeros.
        state_out: None, ``state_in`` itself, or ``[N, HV, ...]``.
        checkpoints: which states inside the sequences go where.
    """
    padding = padding_of(slots, sequences)
    for n in padding:
        out[sequences.starts[n] : sequences.starts[n] + sequences.lengths[n]] = 0
    lengths = tuple(0 if n in padding else x for n, x in enumerate(sequences.lengths))
    sequences = Sequences(sequences.starts, lengths)
    observe = None
    if checkpoints is not None:
        observe = _torch_checkpoints.Writer(inputs, sequences, checkpoints)
    if slots is None:
        _torch.forward(inputs, sequences, state_in, out, state_out, observe)
        return

    assert state_in is not None
    running = [n for n, length in enumerate(lengths) if length]
    rows = torch.tensor(running, dtype=torch.int64, device=out.device)
    initial = state_in.new_zeros(len(lengths), *state_in.shape[1:])
    if running:
        sources = load_states(state_in, [slots.start(n) for n in running], slots)
        initial.index_copy_(0, rows, sources)
    final = None if state_out is None else torch.empty_like(initial)
    _torch.forward(inputs, sequences, initial, out, final, observe)
    if state_out is None or final is None:
        return
    if state_out is state_in:
        ends = torch.tensor([slots.end(n) for n in running], dtype=torch.int64, device=out.device)
        state_out.index_copy_(0, ends, final.index_select(0, rows))
    else:
        state_out.copy_(final)
        carry_over(state_in, slots, state_out, set(running))
