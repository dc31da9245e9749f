"""State pools as data: which slots a call starts from and writes, with sentinels around them.

Nothing here knows a backend: tests on the CPU and on a GPU build their calls from the same cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import oracle
import torch
from calls import PER_TOKEN, double
from cases import KdaCase
from errors import check, check_pair
from torch import Tensor

SENTINEL = 777.0

Function = Callable[..., tuple[Tensor, Tensor | None]]
Limit = float | tuple[float, float]


def state_shape(case: KdaCase) -> tuple[int, int, int]:
    return (case.heads, *((case.V, case.K) if case.state_v_first else (case.K, case.V)))


def pool_of(
    case: KdaCase,
    slots: int,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(slots, *state_shape(case), generator=generator, dtype=torch.float64)
    return pool.to(
        device, dtype or (torch.float64 if case.dtype == torch.float64 else torch.float32)
    )


def padded_pool(pool: Tensor, gap: int = 16) -> tuple[Tensor, Tensor]:
    """(view with an enlarged slot stride, its whole memory with sentinels in the gaps)."""
    row = pool[0].numel()
    memory = torch.full((pool.shape[0], row + gap), SENTINEL, dtype=pool.dtype, device=pool.device)
    memory[:, :row] = pool.reshape(pool.shape[0], row)
    view = memory.as_strided(pool.shape, (row + gap, *pool[0].stride()))
    assert torch.equal(view, pool)
    return view, memory


def empty_pool(
    case: KdaCase, slots: int, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Tensor:
    """A padded pool whose every element is the sentinel."""
    full = torch.full_like(pool_of(case, slots, dtype, device), SENTINEL)
    return padded_pool(full)[0]


@dataclass(frozen=True)
class PoolCase:
    """A call on a pool: sequence n goes from slot `index[n]` to slot `final[n]`, or back."""

    case: KdaCase
    index: tuple[int, ...]
    final: tuple[int, ...] | None = None
    pad: int | None = None
    slots: int = 12
    dtype: torch.dtype | None = None  # of the pool
    index_dtype: torch.dtype = torch.int32

    def of(self, **changes: Any) -> PoolCase:
        """The same slots for another call."""
        return replace(self, case=self.case.but(**changes))

    @property
    def id(self) -> str:
        words = [self.case.id, "from" + "_".join(map(str, self.index))]
        if self.final is not None:
            words.append("to" + "_".join(map(str, self.final)))
        if self.pad is not None:
            words.append(f"pad{self.pad}")
        if self.dtype is not None:
            words.append(str(self.dtype).removeprefix("torch."))
        return "-".join(words)

    def tables(self, device: str | torch.device = "cpu") -> dict[str, Any]:
        """The index tables as strided columns, each of a table that holds more."""
        result: dict[str, Any] = {}
        for name, values in (
            ("ssm_state_indices", self.index),
            ("final_state_indices", self.final),
        ):
            if values is not None:
                wide = torch.full((len(values), 3), 99, dtype=self.index_dtype, device=device)
                wide[:, 0] = torch.tensor(values, dtype=self.index_dtype)
                result[name] = wide[:, 0]
        if self.pad is not None:
            result["pad_slot_id"] = self.pad
        return result

    def is_pad(self, slot: int) -> bool:
        return self.pad is not None and slot <= self.pad

    def ends(self) -> tuple[int, ...]:
        return self.index if self.final is None else self.final


def pool_ids(x: PoolCase) -> str:
    return x.id


def run_in_pool(
    function: Function, x: PoolCase, device: str | torch.device = "cpu", **more: Any
) -> tuple[dict[str, Any], Tensor, Tensor, Tensor]:
    """(the call without its pool, the pool before, outputs, the pool after).

    Asserts that nothing but slots of running sequences changed: neither another slot nor the
    memory between slots.
    """
    call = x.case.but(state=False).make(device)
    del call["output_final_state"]
    before = pool_of(x.case, x.slots, x.dtype, device)
    pool, memory = padded_pool(before)
    o, final = function(**call, initial_state=pool, **x.tables(device), **more)
    assert final is pool
    assert bool((memory[:, before[0].numel() :] == SENTINEL).all()), "memory between slots changed"
    lengths = x.case.lengths or (x.case.T,) * x.case.B
    written = {
        end for end, length in zip(x.ends(), lengths, strict=True) if length and not x.is_pad(end)
    }
    untouched = [slot for slot in range(x.slots) if slot not in written]
    assert torch.equal(pool[untouched], before[untouched]), "another slot changed"
    return call, before, o, pool


def check_in_pool(
    function: Function,
    x: PoolCase,
    limit: Limit,
    device: str | torch.device = "cpu",
    **more: Any,
) -> tuple[Tensor, Tensor]:
    """Outputs and pool against the token recurrence; padded sequences against zeros."""
    call, before, o, pool = run_in_pool(function, x, device, **more)
    want = oracle.kda_pool(**double(call), pool=before, **x.tables(device))
    check_pair((o, pool), want, limit)
    for n, (b, lo, hi) in enumerate(
        oracle.spans(call["q"].shape[0], call["q"].shape[1], call.get("cu_seqlens"))
    ):
        if x.is_pad(x.ends()[n]):
            assert bool((o[b, lo:hi] == 0).all()), f"outputs of padded sequence {n}"
    return o, pool


def gather_run_scatter(
    function: Function, x: PoolCase, call: dict[str, Any], before: Tensor, **more: Any
) -> tuple[Tensor, Tensor]:
    """What a pool call stands for, done with plain tensors."""
    spans = oracle.spans(call["q"].shape[0], call["q"].shape[1], call.get("cu_seqlens"))
    initial = before.new_zeros(len(x.index), *before.shape[1:])
    for n, (_, lo, hi) in enumerate(spans):
        if hi > lo and not x.is_pad(x.ends()[n]) and not x.is_pad(x.index[n]):
            initial[n] = before[x.index[n]]
    o, final = function(**call, initial_state=initial, output_final_state=True, **more)
    assert final is not None
    after = before.clone()
    for n, (b, lo, hi) in enumerate(spans):
        if x.is_pad(x.ends()[n]):
            o[b, lo:hi] = 0
        elif hi > lo:
            after[x.ends()[n]] = final[n]
    return o, after


ORDER = (7, 2, 11, 0)

POOL_CASES = (
    PoolCase(KdaCase(T=40, B=4), ORDER, index_dtype=torch.int64),
    PoolCase(KdaCase(T=70, B=4, gate="softplus"), ORDER),
    PoolCase(KdaCase(T=70, B=4, gate="log", beta="activated", l2norm=False), ORDER),
    PoolCase(KdaCase(T=33, B=4, state_v_first=True, K=8, V=24), ORDER),
    PoolCase(KdaCase(T=40, B=4, H=2, HV=4, K=8, V=24, gate="slow", beta="neg"), ORDER),
    PoolCase(KdaCase(lengths=(33, 1, 16, 70)), ORDER),
    PoolCase(KdaCase(lengths=(33, 0, 5, 70), tail=9), ORDER),
    PoolCase(KdaCase(lengths=(0, 0, 0, 0), tail=9), ORDER),
    PoolCase(KdaCase(lengths=(20, 40, 0, 0), cu_dtype=torch.int32), (7, 2, 99, -3)),
    # pads in every position, and everywhere
    *(
        PoolCase(
            KdaCase(lengths=(33, 17, 5, 70), tail=3),
            tuple(pad - 2 * (n % 2) if n == at else slot + 1 for n, slot in enumerate(ORDER)),
            pad=pad,
            slots=13,
        )
        for pad in (-1, 0)
        for at in range(4)
    ),
    PoolCase(KdaCase(T=20, B=3), (-1, -2, -1), pad=-1),
    PoolCase(KdaCase(T=20, B=3), (4, 0, 5), pad=-1),
    # to other slots: two forks of one state, a swap over time, a sequence back to its own
    PoolCase(KdaCase(T=40, B=4), (7, 7, 11, 0), final=(8, 5, 11, 1)),
    PoolCase(KdaCase(lengths=(33, 0, 5, 70), tail=9), (7, 7, 11, 0), final=(8, 5, 11, 1)),
    PoolCase(
        KdaCase(lengths=(33, 17, 5, 70), state_v_first=True, K=8, V=24, H=1, HV=3),
        (7, 7, 11, 0),
        final=(8, 5, 11, 1),
    ),
    # without a prefix: from zeros
    PoolCase(KdaCase(lengths=(33, 17, 5, 70)), (-1, 7, -9, 11), final=(8, 5, 2, 1), pad=-1),
    PoolCase(KdaCase(lengths=(33, 17, 5, 70)), (0, 7, -9, 11), final=(8, 5, 2, 1), pad=0),
    PoolCase(KdaCase(T=20, B=3), (-1, -1, -1), final=(8, 5, 2), pad=-1),
    # padding by the final slot, whatever the source is
    PoolCase(KdaCase(lengths=(33, 17, 5, 70)), (3, -1, 99, 11), final=(-1, -1, -4, 1), pad=-1),
)


# --- checkpoints ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointCase:
    """Offsets `[N][P]` into each sequence; 0 and those past the end stand for none."""

    case: KdaCase
    offsets: tuple[tuple[int, ...], ...]
    dtype: torch.dtype | None = None  # of the checkpoints

    def of(self, **changes: Any) -> CheckpointCase:
        return replace(self, case=self.case.but(**changes))

    @property
    def id(self) -> str:
        words = [self.case.id, *("at" + "_".join(map(str, row)) for row in self.offsets)]
        if self.dtype is not None:
            words.append(str(self.dtype).removeprefix("torch."))
        return "-".join(words)

    def lengths(self) -> tuple[int, ...]:
        return self.case.lengths or (self.case.T,) * self.case.B

    def taken(self) -> list[tuple[int, int, int]]:
        """(sequence, offset, slot) of each checkpoint; slots are neither in order nor adjacent."""
        found = [
            (n, offset)
            for n, row in enumerate(self.offsets)
            for offset in row
            if 0 < offset <= self.lengths()[n]
        ]
        return [(n, at, 2 * (len(found) - i)) for i, (n, at) in enumerate(found)]

    def arguments(self, device: str | torch.device = "cpu") -> dict[str, Any]:
        """Checkpoint keywords; where there is no checkpoint its slot lies outside the pool."""
        slots = {(n, offset): slot for n, offset, slot in self.taken()}
        states = empty_pool(self.case, 2 * len(slots) + 2, self.dtype, device)
        indices = [
            [slots.get((n, offset), 10**6) for offset in row] for n, row in enumerate(self.offsets)
        ]
        return {
            "checkpoint_states": states,
            "checkpoint_offsets": torch.tensor(self.offsets, dtype=torch.int32, device=device),
            "checkpoint_indices": torch.tensor(indices, dtype=torch.int64, device=device),
        }


def checkpoint_ids(x: CheckpointCase) -> str:
    return x.id


def run_with_checkpoints(
    function: Function, x: CheckpointCase, device: str | torch.device = "cpu", **more: Any
) -> tuple[dict[str, Any], dict[tuple[int, int], Tensor], tuple[Tensor, Tensor | None]]:
    """(the call, checkpoints by (sequence, offset), its results); nothing else may be written."""
    call = x.case.make(device)
    arguments = x.arguments(device)
    states = arguments["checkpoint_states"]
    results = function(**call, **arguments, **more)
    taken = {(n, offset): states[slot] for n, offset, slot in x.taken()}
    others = sorted(set(range(states.shape[0])) - {slot for _, _, slot in x.taken()})
    assert bool((states[others] == SENTINEL).all()), "a slot that no checkpoint has was written"
    return call, taken, results


def check_checkpoints(
    function: Function,
    x: CheckpointCase,
    limit: float,
    device: str | torch.device = "cpu",
    **more: Any,
) -> None:
    """Against the token recurrence; and outputs and final states are those without checkpoints."""
    call, taken, results = run_with_checkpoints(function, x, device, **more)
    want = oracle.states_inside(**double(call), after=list(taken))
    check(
        {f"{n}@{offset}": state for (n, offset), state in taken.items()},
        {f"{n}@{offset}": state for (n, offset), state in zip(taken, want, strict=True)},
        limit,
    )
    for got, plain in zip(results, function(**call, **more), strict=True):
        assert got is not None
        assert plain is not None
        assert torch.equal(got, plain)


def check_stopped_runs(
    function: Function, x: CheckpointCase, device: str | torch.device = "cpu", **more: Any
) -> None:
    """Each checkpoint is to the bit the final state of a call that ends there."""
    call, taken, _ = run_with_checkpoints(function, x, device, **more)
    spans = oracle.spans(call["q"].shape[0], call["q"].shape[1], call.get("cu_seqlens"))
    for (n, offset), state in taken.items():
        b, lo, _ = spans[n]
        alone = {x: y for x, y in call.items() if x != "cu_seqlens"}
        for name in PER_TOKEN:
            alone[name] = call[name][b : b + 1, lo : lo + offset]
        if call.get("initial_state") is not None:
            alone["initial_state"] = call["initial_state"][n : n + 1]
        _, final = function(**alone, **more)
        assert final is not None
        assert torch.equal(state, final[0].to(state.dtype)), f"sequence {n}, offset {offset}"


CHECKPOINT_CASES = (
    *(CheckpointCase(KdaCase(T=160, gate=gate), ((16, 64, 160),)) for gate in ("fast", "slow")),
    CheckpointCase(KdaCase(T=100, gate="softplus"), ((16, 32, 48, 64, 80, 96),)),
    CheckpointCase(KdaCase(T=100, gate="log", beta="activated", l2norm=False), ((48, 64, 96),)),
    CheckpointCase(KdaCase(T=100, state=False, gate="none"), ((16, 96),)),
    CheckpointCase(KdaCase(T=96, B=3, H=2, HV=4, K=8, V=24), ((0,), (48,), (96,))),
    CheckpointCase(
        KdaCase(T=80, B=2, H=2, HV=4, K=8, V=24, state_v_first=True), ((80, 64), (16, 96))
    ),
    *(CheckpointCase(KdaCase(T=T), ((16, 32, 48, 64),)) for T in (15, 16, 17, 32, 33, 48, 64, 65)),
    CheckpointCase(
        KdaCase(lengths=(160, 0, 15, 16, 33, 64, 127), tail=5),
        (
            (16, 64, 160),
            (16, 32, 48),
            (16, 0, 0),
            (0, 16, 32),
            (32, 48, 16),
            (64, 48, 80),
            (112, 64, 128),
        ),
    ),
    CheckpointCase(KdaCase(lengths=(0, 0)), ((16,), (0,))),
    CheckpointCase(KdaCase(lengths=(40, 70)), ((), ())),
)
