"""Prefix checkpoints on the PyTorch path: states inside a sequence, written to slots of a pool.

A checkpoint is the final state of a call that stops there, to the last operation: where the offset
is a multiple of the chunk length it is the running state itself; elsewhere the rest of the tokens
pass through a chunk of their own, as they would at the end of a sequence. The main computation
knows nothing of it, so that outputs and final states don't depend on checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ._torch import Inputs, activate, advance, factor
from ._torch_plan import MIN_CHUNK, Group, Segment, Sequences, chunk_size_of


@dataclass(frozen=True)
class Checkpoints:
    states: Tensor  # the pool [M, HV, ...]
    wanted: tuple[tuple[tuple[int, int], ...], ...]  # [N] (offset, slot) of each checkpoint


def checkpoints_of(
    states: Tensor,
    offsets: Tensor | None,
    every: int,
    indices: Tensor | None,
    sequences: Sequences,
    padding: set[int],
) -> Checkpoints:
    """Reads the tables on the host and checks them, but for empty and padded sequences.

    Raises:
        ValueError: an offset that is no multiple of 16, or negative; a slot outside the pool; two
            checkpoints in one slot.
    """
    num_sequences = len(sequences.lengths)
    if indices is None:
        slot_rows = [[n] for n in range(num_sequences)]
    else:
        slot_rows = (indices if indices.dim() == 2 else indices.unsqueeze(1)).tolist()
    if offsets is None:
        offset_rows = [[(p + 1) * every for p in range(len(row))] for row in slot_rows]
    else:
        offset_rows = (offsets if offsets.dim() == 2 else offsets.unsqueeze(1)).tolist()
    wanted = [
        ()
        if length == 0 or n in padding
        else _of_sequence(n, offset_rows[n], slot_rows[n], length, states.shape[0])
        for n, length in enumerate(sequences.lengths)
    ]
    owners: dict[int, int] = {}
    for n, row in enumerate(wanted):
        for _, slot in row:
            if slot in owners:
                raise ValueError(
                    f"checkpoint_indices: expected a slot for each checkpoint, got {slot} twice "
                    f"(sequences {owners[slot]} and {n})"
                )
            owners[slot] = n
    return Checkpoints(states, tuple(wanted))


def _of_sequence(
    n: int, offsets: list[int], slots: list[int], length: int, num_slots: int
) -> tuple[tuple[int, int], ...]:
    wanted = []
    for offset, slot in zip(offsets, slots, strict=True):
        if slot < 0:
            continue
        if offset < 0 or offset % MIN_CHUNK != 0:
            raise ValueError(
                f"checkpoint_offsets: expected multiples of {MIN_CHUNK}, got {offset} for "
                f"sequence {n}"
            )
        if offset == 0 or offset > length:
            continue
        if slot >= num_slots:
            raise ValueError(
                f"checkpoint_indices: expected slots below {num_slots}, got {slot} for sequence {n}"
            )
        wanted.append((offset, slot))
    return tuple(wanted)


@dataclass(frozen=True)
class _Due:
    """A checkpoint that can be taken once some steps of a group are done."""

    rank: int  # of its sequence in the group
    slot: int
    offset: int
    rest: int  # tokens after those steps


class Writer:
    """Writes checkpoints while ``_torch.forward`` runs: its ``observe``."""

    def __init__(self, inputs: Inputs, sequences: Sequences, checkpoints: Checkpoints) -> None:
        self._inputs = inputs
        self._sequences = sequences
        self._checkpoints = checkpoints
        self._due: dict[int, list[_Due]] = {}  # by steps done, of the current group

    def __call__(self, group: Group, steps_done: int, state: Tensor) -> None:
        if steps_done == 0:
            self._due = self._plan(group)
        due = self._due.get(steps_done, [])
        for chunk_size, members in groupby(due, lambda x: chunk_size_of(x.offset) if x.rest else 0):
            batch = list(members)
            ranks = torch.tensor([x.rank for x in batch], device=state.device)
            states = state.unflatten(0, (-1, self._inputs.num_heads)).index_select(0, ranks)
            if chunk_size:
                self._pass_rest(group, steps_done, batch, chunk_size, states.flatten(0, 1))
            self._store(batch, states)

    def _plan(self, group: Group) -> dict[int, list[_Due]]:
        due: dict[int, list[_Due]] = {}
        for rank, n in enumerate(group.members):
            for offset, slot in self._checkpoints.wanted[n]:
                steps, rest = divmod(offset, group.chunk_size)
                if rest and offset == self._sequences.lengths[n]:
                    steps, rest = steps + 1, 0  # the last chunk of the sequence ends here
                due.setdefault(steps, []).append(_Due(rank, slot, offset, rest))
        for checkpoints in due.values():
            checkpoints.sort(key=lambda x: chunk_size_of(x.offset) if x.rest else 0)
        return due

    def _pass_rest(
        self, group: Group, steps_done: int, batch: list[_Due], chunk_size: int, state: Tensor
    ) -> None:
        """Advances ``state [n * HV, K, V]`` by the rest of the tokens up to each checkpoint."""
        firsts = [
            self._sequences.starts[group.members[x.rank]] + steps_done * group.chunk_size
            for x in batch
        ]
        positions = torch.arange(chunk_size)
        rests = torch.tensor([x.rest for x in batch])[:, None]
        valid = positions < rests
        rows = torch.tensor(firsts)[:, None] + torch.minimum(positions, rests - 1)
        segment = Segment(
            rows=rows.flatten().to(state.device),
            span=None,
            valid=None if bool(valid.all()) else valid.to(state.device),
            active=(len(batch),),
        )
        # With queries, though they are not needed: the very products of a call that stops here.
        factors = factor(activate(self._inputs, segment, chunk_size, with_q=True))
        advance(state, factors, slice(0, state.shape[0]))

    def _store(self, batch: list[_Due], states: Tensor) -> None:
        target = self._checkpoints.states
        if self._inputs.options.state_v_first:
            states = states.transpose(2, 3)
        slots = torch.tensor([x.slot for x in batch], device=target.device)
        target.index_copy_(0, slots, states.to(target.dtype))
