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
    x = torch.randn(1, 4, 1, 128).to(BF)
    return sglang.verify(
        x, x, x, x, torch.randn(1, 4, 1).to(BF), A_log=torch.zeros(1), dt_bias=None,
        lower_bound=-5.0, ssm_states=torch.zeros(3, 1, 128, 128),
        cache_indices=torch.tensor([1, 2]), query_start_loc=torch.tensor([0, 2, 4]),
        intermediate_states_buffer=buffer, **more,
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
