"""The decode kernel: the recurrence token by token, in dense states and in pools."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import oracle
import pytest
import torch
from calls import double, record, tokens, unmodified
from cases import KdaCase, ids
from errors import BF16, check_pair, norm_error
from support import BACKEND, CASE, DEVICE, GPU, Call, Result, capture, same
from torch import Tensor

import flashkda
from flashkda import _known

pytestmark = GPU

# The output is rounded to bf16 once; nothing else is rounded to less than fp32.
EXACT = (2.2e-3, 1e-6)
BF16_STATE = (2.2e-3, 2.5e-3)
GATES = ("fast", "slow", "none", "softplus", "log", "saturated")


def decode(call: Call, **more: Any) -> Result:
    o, state = flashkda.fused_recurrent_kda(**(call | more), backend=BACKEND)
    return o, o.new_empty(0) if state is None else state


def want(call: Call) -> Result:
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    return oracle.kda(**on_cpu)


@pytest.mark.parametrize("v_first", [True, False], ids=["vfirst", "kfirst"])
@pytest.mark.parametrize("length", [1, 2, 4, 8, 9, 16, 33])
@pytest.mark.parametrize("gate", GATES)
def test_dense(gate: str, length: int, v_first: bool) -> None:
    call = CASE.but(T=length, B=3, gate=gate, state_v_first=v_first).make(DEVICE)
    with unmodified(call):
        got = decode(call)
    check_pair(got, want(call), EXACT)


FORMS = [
    CASE.but(T=4, B=2, HV=4),
    CASE.but(T=5, H=1, HV=3, gate="softplus", state_v_first=True),
    CASE.but(T=3, B=2, gate_dtype=torch.float32),
    CASE.but(T=3, gate="log", gate_dtype=torch.float32, l2norm=False, beta="activated"),
    CASE.but(T=3, beta="neg", gate="none"),
    CASE.but(T=7, state=False),
    CASE.but(T=2, gate="bare", scale=0.3),
    CASE.but(T=9, gate="softplus500"),
    CASE.but(T=9, gate="logdeep"),
    CASE.but(lengths=(3, 1, 0, 16, 5)),
    CASE.but(lengths=(0, 2, 0), tail=4, cu_dtype=torch.int32, state_v_first=True),
    CASE.but(lengths=(1,) * 40, H=1),
]


@pytest.mark.parametrize("case", FORMS, ids=ids)
def test_forms(case: KdaCase) -> None:
    call = case.make(DEVICE)
    check_pair(decode(call), want(call), EXACT)


@pytest.mark.parametrize("v_first", [True, False], ids=["vfirst", "kfirst"])
@pytest.mark.parametrize("length", [1, 6, 17])
def test_bfloat16_state(length: int, v_first: bool) -> None:
    case = CASE.but(T=length, B=2, state_v_first=v_first, state_dtype=torch.bfloat16, gate="slow")
    call = case.make(DEVICE)
    o, state = decode(call)
    assert state.dtype == torch.bfloat16
    check_pair((o, state), want(call), BF16_STATE)


@pytest.mark.parametrize("length", [1, 8, 9, 17])
@pytest.mark.parametrize("kind", ["dense", "in place", "pool", "per token"])
def test_many_heads_are_few_heads(kind: str, length: int) -> None:
    """One CTA takes both tiles of a bf16 head where there are many: the same bits as a CTA each."""
    sequences, columns = 330, 1 if kind != "per token" else length
    case = CASE.but(
        T=length, B=sequences, H=1, HV=2, state_dtype=torch.bfloat16, state_v_first=True,
        state=kind in ("dense", "in place"),
    )  # fmt: skip
    call = case.make(DEVICE)

    def decoded(lo: int, hi: int) -> tuple[Tensor, ...]:
        part = tokens(call, 0, length)
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            if name in part:
                part[name] = call[name][lo:hi].clone()
        if kind == "in place":
            part["inplace_final_state"] = True
        if kind in ("pool", "per token"):
            generator = torch.Generator(DEVICE).manual_seed(5)
            shape = (sequences * columns, 2, 128, 128)
            pool = torch.randn(shape, device=DEVICE, generator=generator).bfloat16()
            slots = torch.arange(sequences * columns, device=DEVICE).view(sequences, columns)
            part["ssm_state_indices"] = slots[lo:hi] if columns > 1 else slots[lo:hi, 0]
            o, _ = decode(part, initial_state=pool)
            return o, pool[lo * columns : hi * columns]
        return decode(part)

    cuts = [0, 100, 200, 300, sequences]
    parts = [decoded(lo, hi) for lo, hi in pairwise(cuts)]
    assert same(decoded(0, sequences), [torch.cat(x) for x in zip(*parts, strict=True)])


def test_many_packed_heads_are_few_heads() -> None:
    """Sequences without tokens, and more than are staged at a time, beside padding."""
    lengths = tuple((5 * n) % 19 for n in range(170))
    case = CASE.but(lengths=lengths, H=2, tail=7, state_dtype=torch.bfloat16, state_v_first=True)
    call = case.make(DEVICE)
    o, state = decode(call)
    bounds = call["cu_seqlens"].tolist()
    for n in range(0, 170, 10):
        part = tokens(call, bounds[n], bounds[n + 10])
        part["cu_seqlens"] = call["cu_seqlens"][n : n + 11] - bounds[n]
        part["initial_state"] = call["initial_state"][n : n + 10]
        assert same(decode(part), (o[:, bounds[n] : bounds[n + 10]], state[n : n + 10]))
    assert bool((o[:, bounds[-1] :] == 0).all())


def test_rows_of_a_packed_projection() -> None:
    """q, k and v as slices of one row, beta as a column of another."""
    call = CASE.but(T=3, B=2, H=2).make(DEVICE)
    plain = decode(call)
    qkv = torch.cat([call[x].flatten(2) for x in "qkv"], dim=2)
    parts = [x.unflatten(2, (2, 128)) for x in qkv.split(256, dim=2)]
    beta = torch.stack([call["beta"]] * 3, dim=3)[..., 1]
    assert not parts[1].is_contiguous()
    assert same(decode(call, q=parts[0], k=parts[1], v=parts[2], beta=beta), plain)


def test_rows_past_the_last_sequence_are_zero() -> None:
    call = CASE.but(lengths=(2, 0, 1), tail=5).make(DEVICE)
    for _ in range(2):  # the checked way, then the known one
        torch.empty(64, device=DEVICE).fill_(float("nan"))
        o, _ = flashkda.fused_recurrent_kda(**call)
        assert bool((o[:, 3:] == 0).all())
    out = torch.full_like(call["v"], 7.0)
    decode(call, out=out)
    assert bool((out[:, 3:] == 7).all())


@pytest.mark.parametrize("case", [*FORMS, CASE.but(T=2, state_dtype=torch.bfloat16)], ids=ids)
def test_known_calls_are_the_same(case: KdaCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced or not, first or later: one native operator and nothing else of flashkda."""
    monkeypatch.setattr(_known, "_options", {})
    call = case.make(DEVICE)
    results, names = [], []
    for backend in ("cuda", None, "cuda", None):
        calls = record(
            lambda b=backend: results.append(flashkda.fused_recurrent_kda(**call, backend=b))
        )
        names += [x[0].name() for x in calls]
    assert names == ["flashkda::recurrent_native_out"] * 2 + ["flashkda::recurrent_native"] * 2
    assert all(same(x, results[0]) for x in results)


@pytest.mark.parametrize("gate", ["fast", "slow", "none"])
def test_many_steps_after_a_prefill_are_one_prefill(gate: str) -> None:
    call = CASE.but(T=100 + 4096, H=1, gate=gate).make(DEVICE)
    expected = want(call)
    o, state = flashkda.chunk_kda(**tokens(call, 0, 100), backend=BACKEND)
    pieces = [o]
    for t in range(100, 100 + 4096):
        o, state = decode(tokens(call, t, t + 1), initial_state=state)
        pieces.append(o)
    check_pair((torch.cat(pieces, dim=1), state), expected, BF16[gate])


def test_tokens_at_once_are_tokens_one_by_one() -> None:
    call = CASE.but(T=16, B=2).make(DEVICE)
    together = decode(call)
    state, pieces = call["initial_state"], []
    for t in range(16):
        o, state = decode(tokens(call, t, t + 1), initial_state=state)
        pieces.append(o)
    assert same((torch.cat(pieces, dim=1), state), together)


# --- short calls of chunk_kda ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 8, 16])
def test_chunk_takes_short_sequences_token_by_token(length: int) -> None:
    call = CASE.but(T=length, B=2).make(DEVICE)
    assert same(flashkda.chunk_kda(**call, backend=BACKEND), decode(call))


# --- pools ----------------------------------------------------------------------------------------

SENTINEL = 777.0


def pool_of(case: KdaCase, slots: int, dtype: torch.dtype, gap: int) -> tuple[Tensor, Tensor]:
    """(pool whose slots lie `gap` elements apart, the gaps)."""
    generator = torch.Generator().manual_seed(3)
    row = case.heads * case.K * case.V
    memory = torch.full((slots, row + gap), SENTINEL, dtype=dtype)
    memory[:, :row] = torch.randn(slots, row, generator=generator).to(dtype)
    memory = memory.to(DEVICE)
    pool = memory.as_strided(
        (slots, case.heads, case.K, case.V), (row + gap, case.K * case.V, case.V, 1)
    )
    return pool, memory[:, row:]


def check_pool(
    case: KdaCase, index: list[Any], *, dtype: torch.dtype = torch.float32, gap: int = 16,
    index_dtype: torch.dtype = torch.int32, **more: Any,
) -> Tensor:  # fmt: skip
    """Decodes in a pool; outputs and pool against the oracle, all that is not theirs to the bit."""
    call = case.but(state=False).make(DEVICE)
    del call["output_final_state"]
    pool, gaps = pool_of(case, 12, dtype, gap)
    before = pool.cpu()
    slots = torch.tensor(index, dtype=index_dtype)
    reference = {x: y for x, y in more.items() if x in ("num_accepted_tokens", "pad_slot_id")}
    on_cpu = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    want_o, want_pool = oracle.kda_pool(
        **double(on_cpu), pool=before, ssm_state_indices=slots, **reference
    )
    moved = {x: y.to(DEVICE) if isinstance(y, Tensor) else y for x, y in more.items()}
    o, final = decode(call, initial_state=pool, ssm_state_indices=slots.to(DEVICE), **moved)
    assert final is pool
    limits = EXACT if dtype == torch.float32 else BF16_STATE
    check_pair((o, pool), (want_o, want_pool), limits)
    untouched = (want_pool == before.double()).flatten(1).all(1)
    assert torch.equal(pool.cpu()[untouched], before[untouched])
    assert bool((gaps == SENTINEL).all())
    return o


IN_POOL: dict[str, dict[str, Any]] = {
    "in place": {"index": [7, 2, 11]},
    "pads": {"index": [7, 0, 11], "pad_slot_id": 0},
    "negative pads": {"index": [-3, 2, 11], "pad_slot_id": -2},
    "only read": {"index": [7, 2, 2], "inplace_final_state": False},
    "to other slots": {"index": [7, 2, 11], "final_state_indices": torch.tensor([1, 0, 5])},
    "a slot per token": {"index": [[7, 2], [1, 0], [5, 6]]},
    "accepted": {
        "index": [[7, 2], [1, 0], [5, 6]], "num_accepted_tokens": torch.tensor([2, 1, 2])
    },
    "state is ready": {"index": [7, 2, 11], "state_is_ready": True},
}  # fmt: skip


@pytest.mark.parametrize("name", IN_POOL)
def test_known_calls_in_a_pool_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_known, "_options", {})
    case = CASE.but(T=2, B=3, state=False)
    index, *more = IN_POOL[name].items()
    call = case.make(DEVICE) | {x: y.to(DEVICE) if isinstance(y, Tensor) else y for x, y in more}
    results, names = [], []
    for _ in range(2):
        pool, _ = pool_of(case, 12, torch.float32, 16)
        slots = torch.tensor(index[1], device=DEVICE)
        decoded: list[Any] = []
        calls = record(
            lambda p=pool, i=slots, d=decoded: d.extend(
                flashkda.fused_recurrent_kda(**call, initial_state=p, ssm_state_indices=i)
            )
        )
        names += [x[0].name() for x in calls]
        results.append((*decoded, pool))
    assert names == ["flashkda::recurrent_native_out", "flashkda::recurrent_native"]
    assert same(*results)
    for o, state, pool in results:
        assert (state is pool) is (name != "only read")
        assert o.shape == call["v"].shape


def test_a_pool_that_requires_grad_is_not_overwritten() -> None:
    case = CASE.but(T=1, B=1, state=False)
    call = case.make(DEVICE) | {"ssm_state_indices": torch.tensor([1], device=DEVICE)}
    pool, _ = pool_of(case, 3, torch.float32, 0)
    with torch.no_grad():
        flashkda.fused_recurrent_kda(**call, initial_state=pool)
        with pytest.raises(ValueError, match="does not require grad"):
            flashkda.fused_recurrent_kda(**call, initial_state=pool.requires_grad_())


ORDER = [7, 2, 11, 0]
POOL_CASES = [
    CASE.but(T=1, B=4),
    CASE.but(T=5, B=4, gate="softplus"),
    CASE.but(T=1, B=4, state_v_first=True),
    CASE.but(T=3, B=4, HV=4, gate="slow", state_v_first=True),
    CASE.but(lengths=(1, 1, 1, 1)),
    CASE.but(lengths=(3, 0, 2, 1)),
    CASE.but(lengths=(0, 0, 0, 0), tail=3),
    CASE.but(lengths=(2, 1, 0, 4), tail=3, state_v_first=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pool(case: KdaCase, index_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check_pool(case, ORDER, index_dtype=index_dtype, dtype=dtype)


@pytest.mark.parametrize("pad", [-1, 0])
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pads_in_every_position(case: KdaCase, position: int, pad: int) -> None:
    index = [7, 2, 11, 5]
    index[position] = pad
    o = check_pool(case, index, pad_slot_id=pad)
    if case.lengths is None:
        assert bool((o[position] == 0).all())


def test_all_rows_are_padding() -> None:
    o = check_pool(CASE.but(T=2, B=3), [-1, -2, -1], pad_slot_id=-1)
    assert bool((o == 0).all())


TABLE = [[7, 2, 9, 1], [5, 0, 3, 8], [11, 10, 6, 4]]


@pytest.mark.parametrize("accepted", [None, [1, 1, 1], [3, 1, 4], [4, 2, 1]], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        CASE.but(T=4, B=3),
        CASE.but(T=3, B=3, H=1, HV=2, gate="softplus", state_v_first=True),
        CASE.but(lengths=(4, 1, 3)),
        CASE.but(lengths=(2, 0, 4), tail=2),
    ],
    ids=ids,
)
def test_a_slot_per_token(case: KdaCase, accepted: list[int] | None) -> None:
    more = {} if accepted is None else {"num_accepted_tokens": torch.tensor(accepted)}
    check_pool(case, TABLE, **more)


def test_a_slot_per_token_with_padding() -> None:
    table = [[7, 2, -1, -1], [-1, -1, -1, -1], [11, 10, -1, 4]]
    check_pool(CASE.but(lengths=(2, 3, 4)), table, pad_slot_id=-1)


def test_verify_writes_no_state() -> None:
    case = CASE.but(T=4, B=3)
    call = case.but(state=False).make(DEVICE)
    pool, _ = pool_of(case, 12, torch.float32, 0)
    index = torch.tensor(TABLE, dtype=torch.int32, device=DEVICE)
    with unmodified({"pool": pool}):
        got = decode(call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False)
        del call["output_final_state"]
        decode(call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False)
    check_pair(got, want(call | {"initial_state": pool[[7, 5, 11]]}), EXACT)


def test_slots_outside_the_pool_are_loud_and_harmless() -> None:
    """The host can't see them: outputs are NaN, and no memory is touched."""
    case = CASE.but(T=2, B=4)
    call = case.but(state=False).make(DEVICE)
    del call["output_final_state"]
    pool, gaps = pool_of(case, 12, torch.float32, 16)
    before = pool.clone()
    index = torch.tensor([3, 12, -1, 2**30], device=DEVICE)
    o, _ = decode(call, initial_state=pool, ssm_state_indices=index)
    assert bool(torch.isfinite(o[0]).all())
    assert bool(torch.isnan(o[1:]).all())
    kept = [n for n in range(12) if n != 3]
    assert same(pool[kept], before[kept])
    assert bool((gaps == SENTINEL).all())
    accepted = torch.tensor([1, 5, 0, 1], device=DEVICE)
    table = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 12]], device=DEVICE)
    o, _ = decode(call, initial_state=pool, ssm_state_indices=table, num_accepted_tokens=accepted)
    assert bool(torch.isnan(o[1:3]).all())
    assert bool(torch.isfinite(o[0]).all())
    assert bool(torch.isfinite(o[3, 0]).all())
    assert bool(torch.isnan(o[3, 1]).all())


def test_slots_past_two_gigabytes() -> None:
    """Slots at an offset past 2^31 bytes, and past 2^31 elements."""
    case = CASE.but(T=1, B=2, H=4)
    call = case.but(state=False).make(DEVICE)
    del call["output_final_state"]
    elements = 4 * 128 * 128
    slots = 2**31 // elements + 3
    pool = torch.zeros(slots, 4, 128, 128, dtype=torch.bfloat16, device=DEVICE)
    index = torch.tensor([slots - 1, 2**30 // elements + 1], device=DEVICE)
    pool[index] = torch.randn(2, 4, 128, 128, device=DEVICE).bfloat16()
    small = pool[index].clone()
    o, _ = decode(call, initial_state=pool, ssm_state_indices=index)
    two = torch.tensor([0, 1], device=DEVICE)
    assert same(o, decode(call, initial_state=small, ssm_state_indices=two)[0])
    assert same(pool[index], small)
    assert int(pool.flatten(1).any(1).sum()) == 2


def test_graph_with_changing_contents() -> None:
    """Slots, counts and boundaries are refilled in place between replays."""
    case = CASE.but(lengths=(2, 2, 2, 2), H=1)
    call = case.but(state=False).make(DEVICE)
    del call["output_final_state"]
    pool, _ = pool_of(case, 12, torch.float32, 0)
    index = torch.tensor([1, 2, 3, -1], dtype=torch.int32, device=DEVICE)

    def step() -> Result:
        return decode(call, initial_state=pool, ssm_state_indices=index, pad_slot_id=-1)

    replay, results = capture(step)
    for lengths, slots in (((2, 2, 2, 2), (5, 1, 7, 0)), ((1, 0, 3, 0), (4, -1, 2, -1))):
        ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        call["cu_seqlens"].copy_(ends)
        index.copy_(torch.tensor(slots, device=DEVICE))
        for name in ("q", "k", "v", "g"):
            call[name].normal_()
        before = pool.clone()
        replay()
        replayed = results[0].clone(), pool.clone()
        pool.copy_(before)
        expected = step()
        assert same(replayed, (expected[0], pool))


def test_more_sequences_than_one_row_of_a_grid() -> None:
    """The sequences of a launch take two dimensions of its grid, the first of up to 65535."""
    call = CASE.but(T=1, B=66_000, H=1, state=False).make(DEVICE) | {"output_final_state": False}
    o, _ = decode(call)
    for part in (slice(0, 40_000), slice(40_000, None)):
        rows = {name: call[name][part] for name in ("q", "k", "v", "g", "beta")}
        assert same(decode(call | rows)[0], o[part])


def test_repeats_are_equal_to_the_bit() -> None:
    call = CASE.but(T=4, B=8, H=8).make(DEVICE)
    first = decode(call)
    assert all(same(decode(call), first) for _ in range(200))


class Chain:
    """Launches that each need what the one just before wrote, a large one and a small one in turns.

    The values of a launch are outputs of the last sequence of the one before. Its states are what
    the last but one wrote, as the promise of `state_is_ready` has it, or what the one before wrote.
    """

    LAUNCHES = 24
    STALE = 8192.0  # what a buffer holds until its launch: outputs are about 1

    def __init__(self, ready: bool) -> None:
        # A slow gate and other values each time: no launch leaves a state as it was.
        self.call = CASE.but(T=1, B=64, H=8, gate="slow").make(DEVICE)
        self.last = {name: self.call[name][-1:] for name in ("q", "k", "g", "beta")}
        self.ready = ready
        self.start = self.call.pop("initial_state")
        self.state = self.start.clone()
        self.small_state = self.start[-1:].clone() if ready else self.state[-1:]
        turns = range(self.LAUNCHES // 2 + 1)
        self.values = [self.call["v"].roll(i, dims=0) for i in turns]
        self.outputs = [torch.empty_like(self.call["v"]) for _ in turns[:-1]]

    def reset(self) -> None:
        self.state.copy_(self.start)
        self.small_state.copy_(self.start[-1:])
        for x in self.values[1:]:
            x[-1] = self.STALE
        for x in self.outputs:
            x.fill_(self.STALE)

    def run(self, wait: Callable[[], None] = lambda: None) -> Result:
        more = {"inplace_final_state": True, "state_is_ready": self.ready}
        small = self.call | self.last
        for i, out in enumerate(self.outputs):
            decode(self.call, v=self.values[i], initial_state=self.state, out=out, **more)
            wait()
            target = self.values[i + 1][-1:]
            decode(small, v=out[-1:], initial_state=self.small_state, out=target, **more)
            wait()
        return self.state, self.small_state

    def written(self) -> list[Tensor]:
        return [x.clone() for x in (*self.outputs, *self.values, self.state, self.small_state)]


@pytest.mark.parametrize("ready", [False, True])
def test_launches_that_overlap_see_what_those_before_wrote(ready: bool) -> None:
    """A promise changes nothing but time: queued launches, a graph, and one launch at a time."""
    chain = Chain(ready)
    chain.reset()
    chain.run(torch.cuda.synchronize)
    expected = chain.written()
    assert not any(bool((x == chain.STALE).any()) for x in expected)
    replay, _ = capture(chain.run)
    for _ in range(20):
        chain.reset()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # some 10 ms, in which the host queues all of them
        chain.run()
        assert same(chain.written(), expected)
        chain.reset()
        torch.cuda.synchronize()
        replay()
        assert same(chain.written(), expected)


def test_one_sequence_of_nan_stays_alone() -> None:
    call = CASE.but(T=3, B=3).make(DEVICE)
    clean = decode(call)
    call["v"][1, 1] = float("nan")
    o, state = decode(call)
    assert same((o[[0, 2]], state[[0, 2]]), (clean[0][[0, 2]], clean[1][[0, 2]]))
    assert same(o[1, 0], clean[0][1, 0])
    assert bool(torch.isnan(state[1]).any())
    assert norm_error(o[0], clean[0][0]) == 0
