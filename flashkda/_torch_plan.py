"""How sequences are cut into chunks, and chunks into batches of bounded size.

The recurrence of a sequence is serial over its chunks, but sequences and heads are independent.
A *group* is a set of sequences that advance together, longest first, so that the sequences still
running at any step are a prefix of the group. A *segment* is a run of steps of a group, small
enough that everything computed for it at once fits a fixed budget: working memory depends neither
on the length of a sequence nor on how many there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

# Longest chunk. The state is read and written once a chunk, the pair products grow with its
# length; on a CPU 64 measured fastest of 16, 32, 64 and 128.
MAX_CHUNK = 64
MIN_CHUNK = 16

# Token-heads worked on at once. On a CPU a segment should stay near the caches; an accelerator
# wants enough work to hide its launches. One step of one sequence is the smallest segment.
CPU_BUDGET = 4096
ACCELERATOR_BUDGET = 1 << 17


@dataclass(frozen=True)
class Sequences:
    """Where each sequence lies in the flattened token axis ``[B * T]``."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return max(self.lengths, default=0)


@dataclass(frozen=True)
class Segment:
    """A run of steps of a group; its chunks are ordered by step, then by sequence."""

    rows: Tensor  # [chunks * C] token of each row; past a sequence's end its last token again
    span: tuple[int, int] | None  # first and last + 1 token, where the rows are of one sequence
    valid: Tensor | None  # [chunks, C] False past a sequence's end; None when there is no such row
    active: tuple[int, ...]  # sequences that run at each step: the first ones of the group


@dataclass(frozen=True)
class Group:
    members: tuple[int, ...]  # which sequences, longest first
    sequences: Tensor  # [n] the same on the device
    chunk_size: int
    segments: tuple[Segment, ...]


def sequences_of(batch: int, tokens: int, cu_seqlens: Tensor | None) -> Sequences:
    """Reads the sequence boundaries on the host and checks them.

    Raises:
        ValueError: ``cu_seqlens`` does not start at 0, decreases, or ends past the last token.
    """
    if cu_seqlens is None:
        return Sequences(tuple(b * tokens for b in range(batch)), (tokens,) * batch)
    bounds: list[int] = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens: expected the first value to be 0, got {bounds[0]}")
    lengths = tuple(stop - start for start, stop in pairwise(bounds))
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens: expected values that never decrease, got {bounds[index]} then "
                f"{bounds[index + 1]} at position {index + 1}"
            )
    if bounds[-1] > tokens:
        raise ValueError(
            f"cu_seqlens: expected the last value to be at most T={tokens}, got {bounds[-1]}"
        )
    return Sequences(tuple(bounds[:-1]), lengths)


def plan_groups(
    sequences: Sequences, num_heads: int, device: torch.device, *, reverse: bool = False
) -> Iterator[Group]:
    """Yields the groups one at a time; ``reverse`` only turns the order of groups.

    How a sequence is cut into chunks depends on its length alone, so that its results don't depend
    on what it is batched with.
    """
    budget = CPU_BUDGET if device.type == "cpu" else ACCELERATOR_BUDGET
    order = sorted(range(len(sequences.lengths)), key=lambda n: -sequences.lengths[n])
    group_size = max(1, budget // (num_heads * MAX_CHUNK))
    groups = [
        members[first : first + group_size]
        for members in (
            list(run) for _, run in groupby(order, lambda n: chunk_size_of(sequences.lengths[n]))
        )
        for first in range(0, len(members), group_size)
    ]
    for members in reversed(groups) if reverse else groups:
        yield _plan_group(sequences, members, num_heads, budget, device)


def chunk_size_of(length: int) -> int:
    """The chunk length of a sequence."""
    chunk_size = MIN_CHUNK
    while chunk_size < min(length, MAX_CHUNK):
        chunk_size *= 2
    return chunk_size


def _plan_group(
    sequences: Sequences, members: Sequence[int], num_heads: int, budget: int, device: torch.device
) -> Group:
    lengths = [sequences.lengths[n] for n in members]
    chunk_size = chunk_size_of(lengths[0])
    starts = torch.tensor([sequences.starts[n] for n in members])
    stops = starts + torch.tensor(lengths)

    active: list[int] = []
    running = len(members)
    for step in range(-(-lengths[0] // chunk_size)):
        while lengths[running - 1] <= step * chunk_size:
            running -= 1
        active.append(running)

    segments: list[Segment] = []
    step = 0
    while step < len(active):
        steps = max(1, budget // (active[step] * num_heads * chunk_size))
        segment_active = active[step : step + steps]
        rows = torch.cat(
            [starts[:n] + (step + i) * chunk_size for i, n in enumerate(segment_active)]
        )[:, None] + torch.arange(chunk_size)
        limits = torch.cat([stops[:n] for n in segment_active])[:, None]
        valid = rows < limits
        rows = torch.minimum(rows, limits - 1)
        segments.append(
            Segment(
                rows=rows.flatten().to(device),
                span=(int(rows[0, 0]), int(rows[-1, -1]) + 1) if len(members) == 1 else None,
                valid=None if bool(valid.all()) else valid.to(device),
                active=tuple(segment_active),
            )
        )
        step += steps
    on_device = torch.tensor(members, device=device)
    return Group(tuple(members), on_device, chunk_size, tuple(segments))
