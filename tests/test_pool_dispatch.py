"""Where calls with pools, checkpoints and workspaces go, with a CPU that plays a served device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import KdaCase
from torch import Tensor

import flashkda
from flashkda import _backend, _known, _native

CASE = KdaCase(T=20, K=128, V=128, dtype=torch.bfloat16)
ROOM = torch.zeros(2, 2, 128, 128)

SERVING: dict[str, dict[str, Any]] = {
    "pool": {"initial_state": ROOM, "ssm_state_indices": torch.tensor([1])},
    "in_place": {"initial_state": ROOM[:1], "inplace_final_state": True},
    "checkpoints": {"checkpoint_states": ROOM, "checkpoint_offsets": torch.tensor([16])},
    "workspace": {"workspace": torch.zeros(1 << 20, dtype=torch.uint8)},
}


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the kernels of plain calls, checked or known."""
    calls: list[tuple[Any, ...]] = []

    class Operator:
        @staticmethod
        def default(*args: Any) -> tuple[Tensor, Tensor]:
            calls.append(args)
            return torch.empty_like(args[2]), torch.empty(1)

    served = _backend.Backend("cuda", "the kernels of this test serve every device")
    monkeypatch.setattr(_backend, "_served", {torch.device("cpu"): served})
    for function in ("chunk_out", "chunk_pool_out"):
        monkeypatch.setattr(_native, function, lambda *args: calls.append(args))
    monkeypatch.setattr(_known, "_options", {})
    monkeypatch.setattr(_known, "_is_on_gpu", lambda q: type(q) is Tensor)
    monkeypatch.setattr(torch.ops.flashkda, "chunk_native", Operator)
    return calls


@pytest.mark.parametrize("name", list(SERVING))
def test_explain_of_what_servers_ask_for(kernel_calls: list[tuple[Any, ...]], name: str) -> None:
    call = CASE.make()
    assert flashkda.explain(**call).name == "cuda"
    assert flashkda.explain(**call | SERVING[name]).name == "cuda"
    assert flashkda.explain(**call | SERVING[name], backend="torch").name == "torch"
    wide = CASE.but(K=64, V=64).make()
    assert "head dimensions" in flashkda.explain(**wide | SERVING[name]).reason
    assert kernel_calls == []


@pytest.mark.parametrize("name", list(SERVING))
def test_the_kernels_get_what_servers_ask_for(
    kernel_calls: list[tuple[Any, ...]], name: str
) -> None:
    serving = {x: y.clone() if isinstance(y, Tensor) else y for x, y in SERVING[name].items()}
    flashkda.chunk_kda(**CASE.make() | serving)
    (arguments,) = kernel_calls
    flat = [x for y in arguments for x in (y if isinstance(y, tuple) else (y,))]
    for value in serving.values():
        assert any(value is x for x in flat)


def test_pools_and_checkpoints_that_kernels_refuse(kernel_calls: list[tuple[Any, ...]]) -> None:
    call = CASE.make()
    odd = torch.zeros(3 * (2 * 128 * 128 + 1)).as_strided(
        (3, 2, 128, 128), (2 * 128 * 128 + 1, 128 * 128, 128, 1)
    )
    pool = {"initial_state": odd, "ssm_state_indices": torch.tensor([1])}
    assert "dense slots that start at multiples" in flashkda.explain(**call | pool).reason
    pool["initial_state"] = odd[:1]  # what would be between slots means nothing
    assert flashkda.explain(**call | pool).name == "cuda"
    kept = {"checkpoint_states": odd, "checkpoint_offsets": torch.tensor([16])}
    assert "dense slots that start at multiples" in flashkda.explain(**call | kept).reason
    kept["checkpoint_states"] = ROOM.double()
    with pytest.raises(TypeError, match=r"^checkpoint_states"):
        flashkda.chunk_kda(**call | kept)
    assert kernel_calls == []


@pytest.mark.parametrize("name", list(SERVING))
def test_a_known_call_does_not_lose_what_servers_ask_for(
    kernel_calls: list[tuple[Any, ...]], name: str
) -> None:
    call = CASE.make()
    flashkda.chunk_kda(**call)
    flashkda.chunk_kda(**call)
    assert len(kernel_calls) == 2
    flashkda.chunk_kda(**call | SERVING[name])
    *_, served = kernel_calls
    assert len(kernel_calls) == 3
    assert isinstance(served[0], tuple)  # the checked way: a known call passes plain tensors


REFUSED: dict[str, Any] = {
    "ssm_state_indices": [1],
    "final_state_indices": torch.tensor([1]),
    "pad_slot_id": -1,
    "inplace_final_state": 1,
    "checkpoint_states": [0.0],
    "checkpoint_offsets": 16,
    "checkpoint_indices": torch.tensor([1]),
    "workspace": [0],
    "max_seqlen": 19,
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_known_call_checks_every_keyword(kernel_calls: list[tuple[Any, ...]], name: str) -> None:
    call = CASE.make()
    flashkda.chunk_kda(**call)
    with pytest.raises((ValueError, TypeError), match=rf"^{name}: expected .*, got "):
        flashkda.chunk_kda(**call, **{name: REFUSED[name]})
    assert len(kernel_calls) == 1


def test_a_promise_alone_is_a_plain_call(kernel_calls: list[tuple[Any, ...]]) -> None:
    flashkda.chunk_kda(**CASE.make(), max_seqlen=20)
    assert len(kernel_calls) == 1
