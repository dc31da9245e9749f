"""`fused_recurrent_kda`: the token recurrence of decode, with and without a pool of states."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from calls import double, tokens, unmodified
from cases import EMPTIES, FLAGS, SHAPES, VARLEN, KdaCase, ids
from errors import BF16, FLOAT32, FLOAT64, check, check_pair
from pools import padded_pool, pool_of
from torch import Tensor

import flashkda

DENSE = [
    *(KdaCase(T=T, B=3, gate=gate) for gate in ("fast", "slow", "softplus") for T in (1, 2, 8, 20)),
    *(x.but(T=min(x.T, 12)) for x in (*SHAPES, *FLAGS)),
    VARLEN,
    *EMPTIES,
]


decode: Any = flashkda.fused_recurrent_kda  # called in ways that its annotations don't allow


def recurrent(call: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor | None]:
    result: tuple[Tensor, Tensor | None] = flashkda.fused_recurrent_kda(**(call | more))
    return result


@pytest.mark.parametrize("case", DENSE, ids=ids)
def test_float64_is_exact(case: KdaCase) -> None:
    call = case.make()
    with unmodified(call):
        got = recurrent(call)
    check_pair(got, oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("gate", ["fast", "slow", "none", "softplus500", "logdeep"])
def test_float32(gate: str) -> None:
    call = KdaCase(T=40, B=2, gate=gate, dtype=torch.float32).make()
    check_pair(recurrent(call), oracle.kda(**call), FLOAT32)


def test_a_slow_decay_does_not_drift() -> None:
    """Factors are 1 up to a few roundings, all to one side: over 4096 tokens these add up."""
    call = KdaCase(T=4096, H=1, K=16, V=16, gate="log", dtype=torch.float32).make()
    call |= {
        "g": torch.full_like(call["g"], -3e-5),
        "beta": torch.full_like(call["beta"], -8),
        "initial_state": 100 * call["initial_state"],
    }
    check_pair(recurrent(call), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    call = KdaCase(T=8, B=4, dtype=dtype, state_dtype=state_dtype, K=64, V=64).make()
    o, state = recurrent(call)
    assert o.dtype == dtype
    assert state is not None
    assert state.dtype == state_dtype
    check_pair((o, state), oracle.kda(**call), BF16["fast"])


def test_positional_order_is_that_of_fla() -> None:
    call = KdaCase(T=4, B=2).make()
    state = call["initial_state"]
    order = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    got = decode(
        *(call[x] for x in order), 0.3, state, True, True, True, True, False, -5.0, False, None
    )
    check_pair(got, oracle.kda(**(call | {"scale": 0.3})), FLOAT64)


@pytest.mark.parametrize("case", [KdaCase(T=40, B=2), VARLEN, KdaCase(T=40, gate="none")], ids=ids)
def test_agrees_with_chunk(case: KdaCase) -> None:
    call = case.make()
    chunk = flashkda.chunk_kda(**call)
    assert chunk[1] is not None
    check_pair(recurrent(call), (chunk[0], chunk[1]), FLOAT64)


@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
@pytest.mark.parametrize("gate", ["fast", "slow", "softplus"])
def test_prefill_then_decode_is_one_long_prefill(gate: str, v_first: bool) -> None:
    case = KdaCase(T=170, B=2, H=1, HV=2, K=16, V=24, gate=gate, state_v_first=v_first)
    call = case.make()
    want = flashkda.chunk_kda(**call)
    assert want[1] is not None
    o, state = flashkda.chunk_kda(**tokens(call, 0, 70))
    pieces = [o]
    for t in range(70, 170):
        o, state = recurrent(tokens(call, t, t + 1), initial_state=state)
        pieces.append(o)
    check_pair((torch.cat(pieces, dim=1), state), (want[0], want[1]), FLOAT64)


def test_state_in_place() -> None:
    call = KdaCase(T=5, B=3).make()
    want = oracle.kda(**call)
    state = call["initial_state"].clone()
    o, final = recurrent(call, initial_state=state, inplace_final_state=True)
    assert final is not None
    assert final.data_ptr() == state.data_ptr()
    check_pair((o, state), want, FLOAT64)


def test_state_in_place_varlen_with_empties() -> None:
    call = KdaCase(lengths=(0, 3, 0, 1)).make()
    want = oracle.kda(**call)
    state = call["initial_state"].clone()
    o, _ = recurrent(call, initial_state=state, inplace_final_state=True)
    check_pair((o, state), want, FLOAT64)
    assert torch.equal(state[[0, 2]], call["initial_state"][[0, 2]])


def test_out_is_written_and_returned() -> None:
    call = KdaCase(T=3, B=2).make()
    out = torch.full_like(call["v"], float("nan"))
    o, state = recurrent(call, out=out)
    assert o.data_ptr() == out.data_ptr()
    check_pair((out, state), oracle.kda(**call), FLOAT64)


def test_out_rows_past_the_end_are_left_alone() -> None:
    call = KdaCase(lengths=(3, 0, 2), tail=4).make()
    out = torch.full_like(call["v"], 7.0)
    recurrent(call, out=out)
    want, _ = oracle.kda(**call)
    assert bool((out[:, 5:] == 7).all())
    check({"o": out[:, :5]}, {"o": want[:, :5]}, FLOAT64)


# --- pools ----------------------------------------------------------------------------------------


def check_pool(
    case: KdaCase,
    index: Tensor,
    *,
    slots: int = 12,
    limit: float | tuple[float, float] = FLOAT64,
    view_of: Any = None,
    **more: Any,
) -> Tensor:
    """Run pool decode, compare output and pool with the oracle, and untouched slots bit by bit."""
    call = case.but(state=False).make()
    del call["output_final_state"]
    original = pool_of(case, slots, more.pop("pool_dtype", None))
    pool = original.clone() if view_of is None else view_of(original)
    table, accepted = index.clone(), more.get("num_accepted_tokens")
    o, final = recurrent(
        call, initial_state=pool, ssm_state_indices=index, inplace_final_state=True, **more
    )
    assert torch.equal(index, table)
    if final is not None:
        assert final.data_ptr() == pool.data_ptr()
    tables = ("final_state_indices", "num_accepted_tokens", "pad_slot_id")
    reference = {x: y for x, y in more.items() if x in tables}
    want_o, want_pool = oracle.kda_pool(
        **double(call), pool=original, ssm_state_indices=table, **reference
    )
    check_pair((o, pool), (want_o, want_pool), limit)
    untouched = (want_pool == original.double()).flatten(1).all(1)
    assert torch.equal(pool[untouched], original[untouched])
    assert accepted is None or more["num_accepted_tokens"] is accepted
    return o


ORDER = [7, 2, 11, 0]
POOL_CASES = [
    KdaCase(T=1, B=4),
    KdaCase(T=5, B=4, gate="softplus"),
    KdaCase(T=1, B=4, state_v_first=True, K=8, V=24),
    KdaCase(T=3, B=4, H=2, HV=4, K=8, V=24, gate="slow"),
    KdaCase(lengths=(1, 1, 1, 1)),
    KdaCase(lengths=(3, 0, 2, 1)),
    KdaCase(lengths=(0, 0, 0, 0), tail=3),
    KdaCase(lengths=(2, 1, 0, 4), tail=3, state_v_first=True, K=8, V=24),
]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pool_one_slot_each(case: KdaCase, index_dtype: torch.dtype) -> None:
    check_pool(case, torch.tensor(ORDER, dtype=index_dtype))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
@pytest.mark.parametrize("pad_slot_id", [None, -1, 0])
@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pool_to_given_slots(case: KdaCase, pad_slot_id: int | None, index_dtype: Any) -> None:
    """Two forks of one state; with pads also a fresh start, and a sequence that is none."""
    index, final = torch.tensor([7, 7, 11, 3]), torch.tensor([8, 5, 11, 9])
    if pad_slot_id is not None:
        index[2], final[3] = pad_slot_id - 40, pad_slot_id
    more: dict[str, Any] = {} if pad_slot_id is None else {"pad_slot_id": pad_slot_id}
    final = torch.stack([final, final], dim=1).to(index_dtype)[:, 0]
    o = check_pool(case, index.to(index_dtype), final_state_indices=final, **more)
    if case.lengths is None and pad_slot_id is not None:
        assert bool((o[3] == 0).all())


def test_pool_of_no_use_when_all_start_from_zeros() -> None:
    case = KdaCase(T=2, B=2)
    final = torch.tensor([1, 0])
    check_pool(case, torch.tensor([-1, -7]), slots=2, final_state_indices=final, pad_slot_id=-1)


@pytest.mark.parametrize("ready", [False, True])
def test_promise_of_a_ready_state_changes_nothing(ready: bool) -> None:
    check_pool(KdaCase(T=1, B=4), torch.tensor(ORDER), state_is_ready=ready)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pool_in_half_precision(state_dtype: torch.dtype) -> None:
    case = KdaCase(T=1, B=4, K=32, V=32, dtype=torch.bfloat16)
    check_pool(case, torch.tensor(ORDER), limit=BF16["slow"], pool_dtype=state_dtype)


@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pool_with_padded_slots(case: KdaCase) -> None:
    memories = []

    def pad(pool: Tensor) -> Tensor:
        view, memory = padded_pool(pool)
        memories.append((memory, pool[0].numel()))
        return view

    check_pool(case, torch.tensor(ORDER), view_of=pad)
    for memory, row in memories:
        assert bool((memory[:, row:] == 777).all())


def test_pool_slots_may_interleave_with_other_memory() -> None:
    """Slots that are every third row of a larger tensor."""
    case = KdaCase(T=2, B=4)
    big = torch.full((36, 2, 16, 16), 777.0, dtype=torch.float64)

    def every_third(pool: Tensor) -> Tensor:
        big[::3] = pool
        return big[::3]

    check_pool(case, torch.tensor(ORDER), view_of=every_third)
    assert bool((big[1::3] == 777).all())
    assert bool((big[2::3] == 777).all())


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
@pytest.mark.parametrize("case", POOL_CASES, ids=ids)
def test_pool_padding_rows(case: KdaCase, pad_slot_id: int) -> None:
    """Nothing read, nothing written, zero output; every index <= pad_slot_id is padding."""
    index = torch.tensor([7, pad_slot_id, 11, pad_slot_id - 4])
    o = check_pool(case, index, pad_slot_id=pad_slot_id)
    if case.lengths is None:
        assert bool((o[[1, 3]] == 0).all())


def test_pool_slot_zero_is_real_unless_named_as_padding() -> None:
    index = torch.tensor([0, 3])
    real = check_pool(KdaCase(T=1, B=2), index)
    assert bool((real[0] != 0).any())
    pad = check_pool(KdaCase(T=1, B=2), index, pad_slot_id=0)
    assert bool((pad[0] == 0).all())
    check_pool(KdaCase(T=1, B=2), index, pad_slot_id=-1)


def test_pool_all_rows_padding() -> None:
    o = check_pool(KdaCase(T=2, B=3), torch.tensor([-1, -1, -1]), pad_slot_id=-1)
    assert bool((o == 0).all())


def test_padding_rows_may_hold_nan() -> None:
    case = KdaCase(T=1, B=3, state=False)
    call = case.make()
    del call["output_final_state"]
    for name in ("q", "k", "v", "g", "beta"):
        call[name][1] = float("nan")
    pool = pool_of(case, 6)
    before = pool.clone()
    index = torch.tensor([4, -1, 2])
    o, _ = recurrent(
        call,
        initial_state=pool,
        ssm_state_indices=index,
        inplace_final_state=True,
        pad_slot_id=-1,
    )
    assert bool(torch.isfinite(o).all())
    assert bool((o[1] == 0).all())
    assert torch.equal(pool[[0, 1, 3, 5]], before[[0, 1, 3, 5]])
    assert bool(torch.isfinite(pool).all())


TABLE = [[7, 2, 9, 1], [5, 0, 3, 8], [11, 10, 6, 4]]
SPECULATIVE = [
    KdaCase(T=4, B=3),
    KdaCase(T=3, B=3, H=1, HV=2, K=8, V=24, gate="softplus", state_v_first=True),
    KdaCase(lengths=(4, 1, 3)),
    KdaCase(lengths=(2, 0, 4), tail=2),
]


@pytest.mark.parametrize("accepted", [None, [1, 1, 1], [3, 1, 4], [4, 2, 1]], ids=str)
@pytest.mark.parametrize("case", SPECULATIVE, ids=ids)
def test_pool_one_slot_per_token(case: KdaCase, accepted: list[int] | None) -> None:
    """The state after token t goes to index[n, t]; the start is the last accepted token's slot."""
    more: dict[str, Any] = (
        {} if accepted is None else {"num_accepted_tokens": torch.tensor(accepted)}
    )
    check_pool(case, torch.tensor(TABLE, dtype=torch.int32), **more)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_num_accepted_tokens_in_either_dtype(dtype: torch.dtype) -> None:
    accepted = torch.tensor([2, 1, 3], dtype=dtype)
    check_pool(KdaCase(T=4, B=3), torch.tensor(TABLE), num_accepted_tokens=accepted)


def test_pool_one_slot_per_token_with_padding() -> None:
    table = torch.tensor([[7, 2, -1, -1], [-1, -1, -1, -1], [11, 10, 6, 4]])
    o = check_pool(KdaCase(lengths=(2, 3, 4)), table, pad_slot_id=-1)
    assert bool((o[:, 2:5] == 0).all())


def test_rejected_draft_equals_never_having_seen_it() -> None:
    """Draft three tokens, accept one, go on from there: the same as decoding without the draft."""
    case = KdaCase(T=6, B=1, state=False)
    call = case.make()
    del call["output_final_state"]
    pool = pool_of(case, 6)
    start = pool[5].clone()
    common = {
        "initial_state": pool,
        "ssm_state_indices": torch.tensor([[5, 1, 2]]),
        "inplace_final_state": True,
    }
    recurrent(tokens(call, 0, 3), **common)
    accepted = torch.tensor([1])
    o, _ = recurrent(tokens(call, 3, 6), **common, num_accepted_tokens=accepted)
    kept = {x: call[x][:, [0, 3, 4, 5]] for x in ("q", "k", "v", "g", "beta")}
    want_o, want_s = oracle.kda(**(call | kept), initial_state=start[None])
    check_pair((o, pool[2][None]), (want_o[:, 1:], want_s), FLOAT64)


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_strided_indices(two_d: bool) -> None:
    """A column of a block table, and a table with gaps."""
    if two_d:
        big = torch.full((6, 8), 99, dtype=torch.int32)
        big[::2, ::2] = torch.tensor(TABLE, dtype=torch.int32)
        index, case = big[::2, ::2], KdaCase(T=4, B=3)
    else:
        big = torch.full((4, 3), 99, dtype=torch.int32)
        big[:, 0] = torch.tensor(ORDER, dtype=torch.int32)
        index, case = big[:, 0], KdaCase(T=1, B=4)
    assert not index.is_contiguous()
    check_pool(case, index)


def test_strided_num_accepted_tokens() -> None:
    big = torch.tensor([2, 99, 1, 99, 3, 99])
    check_pool(KdaCase(T=4, B=3), torch.tensor(TABLE), num_accepted_tokens=big[::2])


def test_pool_with_out() -> None:
    case = KdaCase(T=1, B=3)
    out = torch.full((3, 1, 2, 16), float("nan"), dtype=torch.float64)
    o = check_pool(case, torch.tensor([4, -1, 2]), pad_slot_id=-1, out=out)
    assert o.data_ptr() == out.data_ptr()
    assert bool((out[1] == 0).all())


@pytest.mark.parametrize("two_d", [False, True], ids=["1d", "2d"])
def test_pool_that_is_only_read(two_d: bool) -> None:
    """Verification of a draft: states come back, the pool stays."""
    case = KdaCase(T=3, B=3)
    call = case.but(state=False).make()
    pool = pool_of(case, 12)
    index = torch.tensor(TABLE)[:, :3] if two_d else torch.tensor(ORDER[:3])
    starts = pool[index[:, 0] if two_d else index]
    with unmodified({"pool": pool}):
        got = recurrent(
            call, initial_state=pool, ssm_state_indices=index, inplace_final_state=False
        )
    check_pair(got, oracle.kda(**call, initial_state=starts), FLOAT64)


@pytest.mark.parametrize("pad", [-1, 0, 1])
def test_pool_that_is_only_read_with_padding_and_empties(pad: int) -> None:
    """A padded sequence ends at zero, an empty one at the state it would have started from."""
    case = KdaCase(lengths=(2, 3, 0, 1))
    call = case.but(state=False).make()
    pool = pool_of(case, 6)
    index = torch.tensor([4, pad, 3, 2])
    with unmodified({"pool": pool}):
        o, final = recurrent(
            call,
            initial_state=pool,
            ssm_state_indices=index,
            inplace_final_state=False,
            pad_slot_id=pad,
        )
    want_o, after = oracle.kda_pool(
        **{x: y for x, y in call.items() if x != "output_final_state"},
        pool=pool,
        ssm_state_indices=index,
        pad_slot_id=pad,
    )
    want = torch.stack([after[4], torch.zeros_like(after[4]), pool[3], after[2]])
    check_pair((o, final), (want_o, want), FLOAT64)


def test_hundred_pool_steps_are_one_prefill() -> None:
    case = KdaCase(T=100, B=3, gate="slow")
    call = case.make()
    want_o, want_s = oracle.kda(**call)
    index = torch.tensor([4, 0, 2])
    pool = pool_of(case, 6)
    sentinels = pool[[1, 3, 5]].clone()
    pool[index] = call["initial_state"]
    pieces = []
    for t in range(100):
        o, _ = recurrent(
            tokens(call, t, t + 1) | {"output_final_state": False},
            initial_state=pool,
            ssm_state_indices=index,
            inplace_final_state=True,
        )
        pieces.append(o)
    check_pair((torch.cat(pieces, dim=1), pool[index]), (want_o, want_s), FLOAT64)
    assert torch.equal(pool[[1, 3, 5]], sentinels)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_strided_inputs(name: str) -> None:
    call = KdaCase(T=3, B=2, H=2, HV=4).make()
    want = oracle.kda(**call)
    x = call[name]
    wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), float("nan"), dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    check_pair(recurrent(call, **{name: wide[..., : x.shape[-1]]}), want, FLOAT64)
