"""State pools on the host: where each sequence starts from, and where its states go.

See :func:`flashkda.fused_recurrent_kda` for what slots, pads and accepted tokens mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ._torch_plan import Sequences


@dataclass(frozen=True)
class Slots:
    """The slot tables of a call."""

    table: tuple[tuple[int, ...], ...]  # [N][S] slot per sequence and token; S = 1: one slot
    per_token: bool  # whether the state after each token goes to a slot of its own
    final: tuple[int, ...] | None  # [N] where final states go; None: where they came from
    accepted: tuple[int, ...] | None  # [N] tokens accepted last time: start from that token's slot
    pad_slot_id: int | None

    def is_pad(self, slot: int) -> bool:
        return self.pad_slot_id is not None and slot <= self.pad_slot_id

    def start(self, sequence: int) -> int:
        """The slot that a sequence starts from; where it is a pad there is no state."""
        position = 0 if self.accepted is None else self.accepted[sequence] - 1
        return self.table[sequence][position]

    def has_start(self, sequence: int) -> bool:
        """Whether the tables name a slot to start from; nobody checks those of an empty one."""
        accepted = 1 if self.accepted is None else self.accepted[sequence]
        return 1 <= accepted <= len(self.table[sequence])

    def end(self, sequence: int) -> int:
        """The slot that the last state goes to, where there is one slot per sequence."""
        return self.start(sequence) if self.final is None else self.final[sequence]

    def is_padding(self, sequence: int) -> bool:
        return self.is_pad(self.end(sequence))

    def written(self, sequence: int, length: int) -> list[int]:
        """The slots that a sequence with this many tokens overwrites in a pool."""
        slots = self.table[sequence][:length] if self.per_token else (self.end(sequence),)
        return [slot for slot in slots if not self.is_pad(slot)]


def slots_of(
    indices: Tensor,
    final_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    pad_slot_id: int | None,
    num_slots: int,
    sequences: Sequences,
    *,
    in_place: bool,
) -> Slots:
    """Reads the slot tables on the host and checks them.

    Raises:
        ValueError: a slot outside the pool that is no pad, a sequence with more tokens than slots,
            an accepted count outside ``[1, S]``, a slot that is written for one sequence and used
            by another.
    """
    per_token = indices.dim() == 2
    slots = Slots(
        table=tuple(map(tuple, (indices if per_token else indices.unsqueeze(1)).tolist())),
        per_token=per_token,
        final=None if final_indices is None else tuple(final_indices.tolist()),
        accepted=None if num_accepted_tokens is None else tuple(num_accepted_tokens.tolist()),
        pad_slot_id=pad_slot_id,
    )
    running = [n for n, length in enumerate(sequences.lengths) if length > 0]
    for n in running:
        _check_counts(slots, n, sequences.lengths[n])
    running = [n for n in running if not slots.is_padding(n)]
    for n in running:
        for name, slot in _used(slots, n, sequences.lengths[n]):
            if not slots.is_pad(slot) and not 0 <= slot < num_slots:
                raise ValueError(
                    f"{name}: expected slots in [0, {num_slots}), got {slot} for sequence {n} "
                    f"(pad_slot_id={pad_slot_id})"
                )
    if in_place:
        _check_sharing(slots, running, sequences)
    return slots


def _check_counts(slots: Slots, n: int, length: int) -> None:
    width = len(slots.table[n])
    if slots.per_token and length > width:
        raise ValueError(
            f"ssm_state_indices: expected a slot for each of the {length} tokens of sequence "
            f"{n}, got {width}"
        )
    if slots.accepted is not None and not 1 <= slots.accepted[n] <= width:
        raise ValueError(
            f"num_accepted_tokens: expected values in [1, {width}], got {slots.accepted[n]} for "
            f"sequence {n}"
        )


def _used(slots: Slots, n: int, length: int) -> Iterator[tuple[str, int]]:
    yield "ssm_state_indices", slots.start(n)
    if slots.final is not None:
        yield "final_state_indices", slots.final[n]
    elif slots.per_token:
        for slot in slots.table[n][:length]:
            yield "ssm_state_indices", slot


def _check_sharing(slots: Slots, running: list[int], sequences: Sequences) -> None:
    """Sequences may start from one slot together, but then none of them may overwrite it."""
    name = "ssm_state_indices" if slots.final is None else "final_state_indices"
    writer: dict[int, int] = {}

    def check(n: int, slot: int) -> None:
        other = writer.get(slot, n)
        if other != n:
            raise ValueError(
                f"{name}: expected slots to write that no other sequence uses, got {slot} for "
                f"sequences {other} and {n}"
            )

    for n in running:
        for slot in slots.written(n, sequences.lengths[n]):
            check(n, slot)
            writer[slot] = n
    for n in running:
        check(n, slots.start(n))


def load_states(pool: Tensor, sources: list[int], slots: Slots | None) -> Tensor:
    """A copy of some slots of a pool, with zeros for pads."""
    fresh = [i for i, slot in enumerate(sources) if slots is not None and slots.is_pad(slot)]
    if len(fresh) == len(sources):
        return pool.new_zeros(len(sources), *pool.shape[1:])
    # A pad may be no slot at all: another one is read in its place.
    first = next(slot for i, slot in enumerate(sources) if i not in set(fresh))
    rows = [first if i in set(fresh) else slot for i, slot in enumerate(sources)]
    states = pool.index_select(0, torch.tensor(rows, device=pool.device))
    if fresh:
        states[fresh] = 0
    return states


def carry_over(
    state_in: Tensor | None, slots: Slots | None, state_out: Tensor, running: set[int]
) -> None:
    """Final states of the sequences that do not run: empty ones keep theirs, padded ones get 0.

    An empty one may name a slot outside the pool. It gets NaN, as from the kernels.
    """
    if state_in is state_out:
        return
    for n in range(state_out.shape[0]):
        if n in running:
            continue
        if state_in is None:
            state_out[n] = 0
        elif slots is None:
            state_out[n] = state_in[n]
        elif not slots.has_start(n):
            state_out[n] = float("nan")
        elif slots.is_padding(n):
            state_out[n] = 0
        elif 0 <= slots.start(n) < state_in.shape[0]:
            state_out[n] = state_in[slots.start(n)]
        else:
            state_out[n] = float("nan")
