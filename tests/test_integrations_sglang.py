"""SGLang's phases on the CPU, with the tensors that its KDA backend passes."""

from __future__ import annotations

from typing import Any

import contracts
import pytest
import torch
from contracts import BF, F32
from torch import Tensor

from flashkda.integrations import sglang


@pytest.mark.parametrize("tracking", ["none", "chunk", "plan"])
@pytest.mark.parametrize("gate", ["slow", "softplus"])
def test_extend(tracking: str, gate: str) -> None:
    contracts.check_sglang_extend(sglang.extend, "cpu", tracking=tracking, gate=gate)


def test_extend_with_bfloat16_states() -> None:
    contracts.check_sglang_extend(sglang.extend, "cpu", state_dtype=BF)


def small_extend(**more: Any) -> Tensor:
    x = torch.randn(1, 130, 1, 128).to(BF)
    return sglang.extend(
        x, x, x, x, torch.randn(1, 130, 1).to(BF), A_log=torch.zeros(1), dt_bias=None,
        lower_bound=-5.0, cache_indices=torch.tensor([1, 0]),
        query_start_loc=torch.tensor([0, 130, 130]), **more,
    )  # fmt: skip


def test_a_plan_without_lengths_on_the_host_in_a_pool_of_its_own() -> None:
    pool, kept = torch.zeros(2, 1, 128, 128), torch.zeros(4, 1, 128, 128)
    small_extend(
        ssm_states=pool, state_checkpoints=kept,
        state_checkpoint_cu_starts=torch.tensor([0, 2, 2]),
        state_checkpoint_indices=torch.tensor([3, 1], dtype=torch.int32),
    )  # fmt: skip
    assert [bool(x.any()) for x in kept] == [False, True, False, True]
    assert [bool(x.any()) for x in pool] == [False, True]


def test_an_empty_plan_keeps_nothing() -> None:
    pool = torch.zeros(2, 1, 128, 128)
    none = torch.zeros(0, dtype=torch.int32)
    small_extend(ssm_states=pool, state_checkpoint_indices=none)
    assert [bool(x.any()) for x in pool] == [False, True]


def test_two_kinds_of_tracking_are_refused() -> None:
    pool, index = torch.zeros(2, 1, 128, 128), torch.zeros(2, dtype=torch.int32)
    plan = {"state_checkpoint_indices": index}
    with pytest.raises(ValueError, match="track_state: expected None"):
        small_extend(ssm_states=pool, track_state=pool, track_chunk_idx=index, **plan)
    with pytest.raises(ValueError, match="state_checkpoint_cu_starts: expected"):
        small_extend(ssm_states=pool, **plan)


Rows = tuple[Tensor, Tensor, Tensor]


def decode(rows: Rows, call: contracts.Call, pool: Tensor, index: Tensor, out: Tensor) -> Tensor:
    return sglang.decode(
        *rows, A_log=call["A_log"], dt_bias=call["dt_bias"], scale=128**-0.5,
        initial_state=pool, out=out, ssm_state_indices=index, use_qk_l2norm_in_kernel=True,
        lower_bound=call["lower_bound"],
    )  # fmt: skip


@pytest.mark.parametrize("gate", ["slow", "softplus"])
def test_decode(gate: str) -> None:
    contracts.check_packed_decode(decode, "cpu", table=contracts.SGLANG, pad=-1, gate=gate)


@pytest.mark.parametrize("state_dtype", [F32, BF], ids=str)
def test_verify(state_dtype: torch.dtype) -> None:
    contracts.check_sglang_verify(sglang.verify, "cpu", state_dtype=state_dtype)


def small_verify(buffer: Tensor, **more: Any) -> Tensor:
    x = torch.randn(1, 4, 1, 128, generator=torch.Generator().manual_seed(0)).to(BF)
    tables = {"cache_indices": torch.tensor([1, 2]), "query_start_loc": torch.tensor([0, 2, 4])}
    return sglang.verify(
        x, x, x, x, x[..., 0], A_log=torch.zeros(1), dt_bias=None, lower_bound=-5.0,
        ssm_states=torch.ones(3, 1, 128, 128), intermediate_states_buffer=buffer, **tables | more,
    )  # fmt: skip


def test_verify_without_rows_uses_the_first() -> None:
    buffer = torch.zeros(3, 2, 1, 128, 128)
    small_verify(buffer)
    assert [bool(x.any()) for x in buffer] == [True, True, False]


def test_verify_refuses() -> None:
    buffer = torch.zeros(3, 2, 1, 128, 128)
    with pytest.raises(NotImplementedError, match="retrieve_parent_token: drafts that are trees"):
        small_verify(buffer, retrieve_parent_token=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="intermediate_states_buffer: expected shape"):
        small_verify(buffer, cache_steps=3)
    with pytest.raises(ValueError, match="intermediate_states_buffer: expected shape"):
        small_verify(buffer[0])
    with pytest.raises(ValueError, match="intermediate_states_buffer: expected a contiguous"):
        small_verify(buffer.transpose(-1, -2))


BAD_TABLES: dict[str, tuple[str, Any, type[Exception], str]] = {
    "slot": ("cache_indices", [1, 3], ValueError, "slots below 3, got 3 for sequence 1"),
    "row": ("intermediate_state_indices", [3, 0], ValueError, r"\[0, 3\), got 3 for sequence 0"),
    "negative_row": ("intermediate_state_indices", [0, -1], ValueError, r"\[0, 3\), got -1"),
    "row_twice": ("intermediate_state_indices", [2, 2], ValueError, "got 2 twice"),
    "slots_shape": ("cache_indices", [1, 2, 0], ValueError, r"shape \[N\] = \[2\], got \[3\]"),
    "rows_shape": ("intermediate_state_indices", [1], ValueError, r"shape .*, got \[1\]"),
    "rows_dtype": ("intermediate_state_indices", [1.0, 2.0], TypeError, "int32 or int64"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_verify_refuses_tables_before_anything_is_written(name: str) -> None:
    argument, table, kind, message = BAD_TABLES[name]
    buffer = torch.zeros(3, 2, 1, 128, 128)
    with pytest.raises(kind, match=f"^{argument}: expected .*{message}"):
        small_verify(buffer, **{argument: torch.tensor(table)})
    assert not bool(buffer.any())


def test_verify_refuses_lists() -> None:
    buffer = torch.zeros(3, 2, 1, 128, 128)
    for argument in ("cache_indices", "intermediate_state_indices", "query_start_loc"):
        with pytest.raises(TypeError, match=f"^{argument}: expected a torch.Tensor, got"):
            small_verify(buffer, **{argument: [0, 1, 2]})


def test_rows_of_pads_in_verify_do_not_count() -> None:
    """A clamped row of a pad is the row of another request: that keeps its state."""
    want, buffer = torch.zeros(3, 2, 1, 128, 128), torch.zeros(3, 2, 1, 128, 128)
    index = torch.tensor([-1, 2])
    o = small_verify(want, cache_indices=index, intermediate_state_indices=torch.tensor([1, 2]))
    for row in (2, 99, -99):
        rows = torch.tensor([row, 2])
        got = small_verify(buffer, cache_indices=index, intermediate_state_indices=rows)
        assert torch.equal(got, o)
        assert torch.equal(buffer, want)
    buffer = torch.full_like(buffer, 5)
    rows = torch.tensor([9, 0])
    small_verify(buffer, cache_indices=torch.tensor([-1, -3]), intermediate_state_indices=rows)
    assert bool((buffer == 5).all())


def test_verify_without_requests() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    x, buffer = torch.zeros(1, 0, 1, 128, dtype=BF), torch.zeros(3, 2, 1, 128, 128)
    o = sglang.verify(
        x, x, x, x, x[..., 0], A_log=torch.zeros(1), dt_bias=None, lower_bound=-5.0,
        ssm_states=torch.ones(3, 1, 128, 128), cache_indices=none,
        query_start_loc=torch.tensor([0]), intermediate_states_buffer=buffer,
    )  # fmt: skip
    assert o.shape == (1, 0, 1, 128)


@pytest.mark.parametrize(
    ("index", "rows"), [([1, 3], [0, 2]), ([1, 99], [0, 0]), ([1, 2], [0, 3]), ([1, 2], [0, -1])]
)
def test_verify_where_tables_are_not_read(
    monkeypatch: pytest.MonkeyPatch, index: list[int], rows: list[int]
) -> None:
    """As on a GPU: a kernel gets a slot outside for what is outside, others their states."""
    monkeypatch.setattr(sglang, "_check_verify", lambda *_: None)
    calls: list[dict[str, Any]] = []

    def kernel(*args: Any, **call: Any) -> tuple[Tensor, None]:
        calls.append(call)
        return args[2], None

    monkeypatch.setattr(sglang.ops, "fused_recurrent_kda", kernel)
    buffer = torch.zeros(3, 2, 1, 128, 128)
    table = torch.tensor(rows)
    small_verify(buffer, cache_indices=torch.tensor(index), intermediate_state_indices=table)
    assert calls[0]["ssm_state_indices"].tolist() == [[0, 1], [6, 6]]
    assert calls[0]["pad_slot_id"] == -1
    assert [bool(x.all()) for x in buffer.flatten(0, 1)] == [False, True] + [False] * 4
