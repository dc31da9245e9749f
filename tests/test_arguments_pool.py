"""What is wrong with pools, checkpoints and workspaces is named, and nothing is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import KdaCase
from refusals import META, Bad, Change, Ty, V, away, cast, cut, put, refused, table

import flashkda

both = pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)


def pool_call() -> dict[str, Any]:
    call = KdaCase(T=2, B=3, H=2, HV=4, K=8, V=12, dtype=torch.float32, state=False).make()
    del call["output_final_state"]
    return call | {
        "initial_state": torch.randn(6, 4, 8, 12),
        "ssm_state_indices": torch.tensor([5, 0, 2]),
        "inplace_final_state": True,
    }


def packed_call() -> dict[str, Any]:
    """Of `chunk_kda`: a whole-sequence call without a pool."""
    case = KdaCase(lengths=(20, 0, 20), H=2, HV=4, K=8, V=12, dtype=torch.float32, state=False)
    return case.make()


def unpacked(call: dict[str, Any]) -> dict[str, Any]:
    """The tokens of a packed call as a batch of 20, with two each."""
    return {x: call[x].unflatten(1, (20, 2))[0] for x in ("q", "k", "v", "g", "beta")}


ROOM = torch.zeros(3, 4, 8, 12)
NEGATED = torch.complex(ROOM, ROOM).conj().imag
SCRATCH = torch.zeros(1 << 20, dtype=torch.uint8)


def checkpoints(**values: Any) -> Change:
    good = {"checkpoint_states": ROOM, "checkpoint_offsets": torch.tensor([16, 0, 16])}
    return put(**(good | values))


def without_pool(**values: Any) -> Change:
    return put(ssm_state_indices=None, initial_state=torch.randn(3, 4, 8, 12), **values)


TABLE = torch.tensor([[5, 0, 2], [1, 3, 4], [5, 5, 5]])
SLOTS, ACCEPTED = "ssm_state_indices", "num_accepted_tokens"
FINAL, PAD = "final_state_indices", "pad_slot_id"
GOOD = torch.tensor([1, 1, 2])
OTHER = torch.tensor([1, 3, 4])

COMMON: list[Bad] = [
    ("indices_without_pool", V, "initial_state", put(initial_state=None)),
    ("indices_list", Ty, SLOTS, put(ssm_state_indices=[5, 0, 2])),
    ("indices_float", Ty, SLOTS, put(ssm_state_indices=torch.tensor([5.0, 0.0, 2.0]))),
    ("indices_sparse", Ty, SLOTS, put(ssm_state_indices=torch.tensor([5, 0, 2]).to_sparse())),
    ("pool_negated", V, "initial_state", put(initial_state=NEGATED)),
    ("indices_int16", Ty, SLOTS, cast(SLOTS, torch.int16)),
    ("indices_count", V, SLOTS, put(ssm_state_indices=torch.tensor([5, 0]))),
    ("indices_three_dims", V, SLOTS, put(ssm_state_indices=TABLE[None])),
    ("indices_elsewhere", V, SLOTS, away(SLOTS)),
    ("index_past_the_pool", V, SLOTS, put(ssm_state_indices=torch.tensor([5, 6, 2]))),
    ("index_negative", V, SLOTS, put(ssm_state_indices=torch.tensor([5, -1, 2]))),
    (
        "index_past_the_pool_with_pads",
        V,
        SLOTS,
        put(ssm_state_indices=torch.tensor([5, 6, -1]), pad_slot_id=-1),
    ),
    (
        "index_negative_but_not_a_pad",
        V,
        SLOTS,
        put(ssm_state_indices=torch.tensor([5, -1, 2]), pad_slot_id=-2),
    ),
    ("pad_text", Ty, "pad_slot_id", put(pad_slot_id="-1")),
    ("pad_float", Ty, "pad_slot_id", put(pad_slot_id=-1.0)),
    *(
        (f"pad_{text}", V, "pad_slot_id", put(pad_slot_id=x))
        for text, x in (
            ("past_int64", 2**63),
            ("below_int64", -(2**63) - 1),
            ("too_long_to_print", 10**5000),
        )
    ),
    ("pool_heads", V, "initial_state", cut("initial_state", 1)),
    ("pool_layout", V, "initial_state", put(state_v_first=True)),
    ("pool_float16", Ty, "initial_state", cast("initial_state", torch.float16)),
    (
        "pool_requires_grad",
        V,
        "initial_state",
        put(initial_state=torch.zeros(6, 4, 8, 12, requires_grad=True)),
    ),
    (
        "pool_overlaps_itself",
        V,
        "initial_state",
        put(initial_state=torch.zeros(1, 4, 8, 12).expand(6, 4, 8, 12)),
    ),
    (
        "pool_slots_overlap",
        V,
        "initial_state",
        put(initial_state=torch.zeros(2400).as_strided((6, 4, 8, 12), (380, 96, 12, 1))),
    ),
    ("index_shared", V, SLOTS, put(ssm_state_indices=torch.tensor([5, 0, 5]))),
    ("final_without_indices", V, FINAL, without_pool(final_state_indices=OTHER)),
    ("pad_without_indices", V, PAD, without_pool(pad_slot_id=-1)),
    ("final_list", Ty, FINAL, put(final_state_indices=[1, 3, 4])),
    ("final_float", Ty, FINAL, put(final_state_indices=OTHER / 1)),
    ("final_count", V, FINAL, put(final_state_indices=OTHER[:2])),
    ("final_two_dims", V, FINAL, put(final_state_indices=TABLE)),
    ("final_elsewhere", V, FINAL, put(final_state_indices=OTHER.to(META))),
    (
        "final_of_a_pool_only_read",
        V,
        FINAL,
        put(final_state_indices=OTHER, inplace_final_state=False),
    ),
    ("final_past_the_pool", V, FINAL, put(final_state_indices=OTHER + 2)),
    ("final_negative", V, FINAL, put(final_state_indices=OTHER - 2)),
    ("final_shared", V, FINAL, put(final_state_indices=torch.tensor([1, 3, 1]))),
    ("final_is_the_source_of_another", V, FINAL, put(final_state_indices=torch.tensor([1, 5, 4]))),
    (
        "source_past_the_pool",
        V,
        SLOTS,
        put(final_state_indices=OTHER, ssm_state_indices=torch.tensor([5, 6, 2])),
    ),
    ("in_place_number", Ty, "inplace_final_state", put(inplace_final_state=1)),
]

RECURRENT: list[Bad] = [
    ("table_of_three_dims", V, SLOTS, put(ssm_state_indices=TABLE[None])),
    ("table_too_narrow", V, SLOTS, put(ssm_state_indices=TABLE[:, :1])),
    ("table_index_past_the_pool", V, SLOTS, put(ssm_state_indices=TABLE + 2)),
    ("accepted_without_table", V, ACCEPTED, put(num_accepted_tokens=GOOD)),
    (
        "accepted_without_indices",
        V,
        ACCEPTED,
        put(
            num_accepted_tokens=GOOD,
            ssm_state_indices=None,
            initial_state=torch.randn(3, 4, 8, 12),
        ),
    ),
    ("accepted_zero", V, ACCEPTED, put(ssm_state_indices=TABLE, num_accepted_tokens=GOOD - 1)),
    ("accepted_past_S", V, ACCEPTED, put(ssm_state_indices=TABLE, num_accepted_tokens=GOOD + 2)),
    ("accepted_count", V, ACCEPTED, put(ssm_state_indices=TABLE, num_accepted_tokens=GOOD[:2])),
    ("accepted_float", Ty, ACCEPTED, put(ssm_state_indices=TABLE, num_accepted_tokens=GOOD / 1)),
    ("slot_shared_in_a_table", V, SLOTS, put(ssm_state_indices=TABLE[:, :2])),
    ("final_with_a_table", V, FINAL, put(ssm_state_indices=TABLE, final_state_indices=OTHER)),
    ("ready_number", Ty, "state_is_ready", put(state_is_ready=1)),
]

STATES, OFFSETS, ROWS = "checkpoint_states", "checkpoint_offsets", "checkpoint_indices"
AT = torch.tensor([16, 0, 0])
TWO = torch.tensor([[16, 0], [0, 16], [0, 0]])

CHUNK: list[Bad] = [
    ("table_of_slots", V, SLOTS, put(ssm_state_indices=TABLE, initial_state=ROOM)),
    # checkpoints
    ("states_alone", Ty, OFFSETS, checkpoints(checkpoint_offsets=None)),
    ("offsets_alone", V, OFFSETS, put(checkpoint_offsets=AT)),
    ("every_alone", V, OFFSETS, put(checkpoint_offsets=64)),
    ("rows_alone", V, ROWS, put(checkpoint_indices=AT)),
    ("states_list", Ty, STATES, checkpoints(checkpoint_states=[0.0])),
    ("states_float16", Ty, STATES, checkpoints(checkpoint_states=torch.zeros(3, 4, 8, 12).half())),
    ("states_of_two_dims", V, STATES, checkpoints(checkpoint_states=torch.zeros(3, 4))),
    ("states_heads", V, STATES, checkpoints(checkpoint_states=torch.zeros(3, 2, 8, 12))),
    ("states_layout", V, STATES, checkpoints(checkpoint_states=torch.zeros(3, 4, 12, 8))),
    ("states_elsewhere", V, STATES, checkpoints(checkpoint_states=ROOM.to(META))),
    (
        "states_require_grad",
        V,
        STATES,
        checkpoints(checkpoint_states=ROOM.clone().requires_grad_()),
    ),
    ("states_negated", V, STATES, checkpoints(checkpoint_states=NEGATED)),
    ("states_overlap", V, STATES, checkpoints(checkpoint_states=ROOM[:1].expand(3, 4, 8, 12))),
    ("states_without_a_row_each", V, STATES, checkpoints(checkpoint_states=ROOM[:2])),
    ("offsets_list", Ty, OFFSETS, checkpoints(checkpoint_offsets=[16, 0, 0])),
    ("offsets_bool", Ty, OFFSETS, checkpoints(checkpoint_offsets=True)),
    ("offsets_float", Ty, OFFSETS, checkpoints(checkpoint_offsets=AT / 1)),
    ("offsets_int16", Ty, OFFSETS, checkpoints(checkpoint_offsets=AT.short())),
    ("offsets_sparse", Ty, OFFSETS, checkpoints(checkpoint_offsets=AT.to_sparse())),
    ("rows_sparse", Ty, ROWS, checkpoints(checkpoint_indices=AT.to_sparse())),
    ("offsets_count", V, OFFSETS, checkpoints(checkpoint_offsets=AT[:2])),
    ("offsets_of_three_dims", V, OFFSETS, checkpoints(checkpoint_offsets=AT[:, None, None])),
    ("offsets_elsewhere", V, OFFSETS, checkpoints(checkpoint_offsets=AT.to(META))),
    ("offset_24", V, OFFSETS, checkpoints(checkpoint_offsets=AT + 8)),
    ("offset_negative", V, OFFSETS, checkpoints(checkpoint_offsets=AT - 16)),
    *(
        (f"every_{x}", V, OFFSETS, checkpoints(checkpoint_offsets=x, checkpoint_indices=TWO))
        for x in (-16, 0, 8, 24)
    ),
    *(
        (
            f"every_{text}",
            V,
            OFFSETS,
            checkpoints(checkpoint_offsets=x, checkpoint_indices=TWO),
        )
        for text, x in (("past_int32", 2**31), ("past_int64", 16 * 2**70))
    ),
    ("table_without_rows", V, ROWS, checkpoints(checkpoint_offsets=TWO)),
    ("every_without_rows", V, ROWS, checkpoints(checkpoint_offsets=16)),
    ("every_with_rows_1d", V, ROWS, checkpoints(checkpoint_offsets=16, checkpoint_indices=AT)),
    (
        "every_with_rows_count",
        V,
        ROWS,
        checkpoints(checkpoint_offsets=16, checkpoint_indices=TWO[:2]),
    ),
    ("rows_of_another_shape", V, ROWS, checkpoints(checkpoint_indices=TWO)),
    ("rows_list", Ty, ROWS, checkpoints(checkpoint_indices=[0, 1, 2])),
    ("rows_float", Ty, ROWS, checkpoints(checkpoint_indices=AT / 1)),
    ("rows_elsewhere", V, ROWS, checkpoints(checkpoint_indices=AT.to(META))),
    ("row_past_the_states", V, ROWS, checkpoints(checkpoint_indices=torch.tensor([3, 1, 2]))),
    # workspace and promise
    ("workspace_list", Ty, "workspace", put(workspace=[0])),
    ("workspace_float", Ty, "workspace", put(workspace=torch.zeros(1 << 20))),
    ("workspace_elsewhere", V, "workspace", put(workspace=SCRATCH.to(META))),
    ("workspace_strided", V, "workspace", put(workspace=SCRATCH[::2])),
    ("max_seqlen_text", Ty, "max_seqlen", put(max_seqlen="20")),
    ("max_seqlen_bool", Ty, "max_seqlen", put(max_seqlen=True)),
    ("max_seqlen_negative", V, "max_seqlen", put(max_seqlen=-1)),
    ("max_seqlen_past_int64", V, "max_seqlen", put(max_seqlen=2**63, workspace=SCRATCH)),
    ("max_seqlen_broken", V, "max_seqlen", put(max_seqlen=19)),
    (
        "max_seqlen_broken_by_a_batch",
        V,
        "max_seqlen",
        lambda c: {"max_seqlen": 1, "cu_seqlens": None} | unpacked(c),
    ),
]


def test_largest_integers_are_taken() -> None:
    o, _ = flashkda.chunk_kda(**pool_call(), pad_slot_id=2**63 - 1, max_seqlen=2**63 - 1)
    assert not o.any()  # every slot is a pad
    flashkda.chunk_kda(**pool_call(), pad_slot_id=-(2**63), max_seqlen=2**63 - 1)
    every = checkpoints(checkpoint_offsets=2**31 - 16, checkpoint_indices=TWO)
    call = packed_call()
    flashkda.chunk_kda(**call | every(call))


@both
@table(COMMON)
def test_refused(function: Any, error: type[Exception], name: str, change: Change) -> None:
    call = pool_call()
    refused(function, call | change(call), error, name)


@table(RECURRENT)
def test_refused_by_recurrent(error: type[Exception], name: str, change: Change) -> None:
    call = pool_call()
    refused(flashkda.fused_recurrent_kda, call | change(call), error, name)


@table(CHUNK)
def test_refused_by_chunk(error: type[Exception], name: str, change: Change) -> None:
    call = packed_call()
    refused(flashkda.chunk_kda, call | change(call), error, name)


def test_workspace_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size function says of the call's tokens, value heads and sequences."""
    asked = []

    def size(*arguments: int) -> int:
        asked.append(arguments)
        return 1000

    monkeypatch.setattr("flashkda.ops.get_workspace_size", size)
    call = packed_call() | {"workspace": torch.zeros(999, dtype=torch.uint8)}
    message = refused(flashkda.chunk_kda, call, ValueError, "workspace")
    assert "1000" in message
    assert "999" in message
    assert asked == [(40, 4, 3)]
    flashkda.chunk_kda(**call | {"workspace": torch.zeros(1000, dtype=torch.uint8)})


SERVING: dict[str, dict[str, Any]] = {
    "ssm_state_indices": {
        "initial_state": torch.zeros(6, 4, 8, 12),
        "ssm_state_indices": torch.tensor([5, 0, 2]),
    },
    "inplace_final_state": {
        "initial_state": torch.zeros(3, 4, 8, 12),
        "inplace_final_state": True,
    },
    "checkpoint_states": {
        "checkpoint_states": torch.zeros(3, 4, 8, 12),
        "checkpoint_offsets": torch.tensor([16, 0, 0]),
    },
    "workspace": {"workspace": torch.zeros(1 << 20, dtype=torch.uint8)},
}


@pytest.mark.parametrize("with_out", [False, True], ids=["", "out"])
@pytest.mark.parametrize("name", list(SERVING))
@pytest.mark.parametrize("tracked", ["q", "g", "A_log"])
def test_nothing_in_place_under_autograd(tracked: str, name: str, with_out: bool) -> None:
    call = packed_call() | SERVING[name]
    call[tracked] = call[tracked].clone().requires_grad_()
    if with_out:
        call["out"] = torch.zeros_like(call["v"])
    refused(flashkda.chunk_kda, call, ValueError, name)
    with torch.no_grad():
        o, _ = flashkda.chunk_kda(**call)
    assert not o.requires_grad


def test_promise_is_checked_by_the_host_copy_too() -> None:
    call = packed_call() | {"cu_seqlens_cpu": torch.tensor([0, 20, 20, 40]), "max_seqlen": 19}
    refused(flashkda.chunk_kda, call, ValueError, "max_seqlen")
    flashkda.chunk_kda(**call | {"max_seqlen": 20})


def test_forced_cuda_on_cpu_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"^backend: 'cuda' can't serve this call: .*cpu"):
        flashkda.chunk_kda(**pool_call(), backend="cuda")
