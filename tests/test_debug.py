"""`debug_checks`: what kernels take on trust is read on the host, with a CPU that plays a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import unmodified
from cases import KdaCase
from torch import Tensor

import flashkda
from flashkda import _backend, _debug, _known

CASE = KdaCase(lengths=(20, 0, 12), tail=2, K=128, V=128, dtype=torch.bfloat16, state=False)
BOUNDS = torch.tensor([0, 20, 20, 32])
POOL = torch.zeros(6, 2, 128, 128)


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    assert not _debug.enabled()
    yield
    _debug._turn(False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the kernels that were called; they compute nothing."""
    names: list[str] = []

    def operator(name: str) -> type:
        class Operator:
            @staticmethod
            def default(*args: Any) -> Any:
                names.append(name)
                return (torch.empty_like(args[2]), torch.empty(1)) if name[-3:] != "out" else True

        return Operator

    for name in (
        "chunk_native", "chunk_native_out", "chunk_pool_native_out", "recurrent_native_out",
    ):  # fmt: skip
        monkeypatch.setattr(torch.ops.flashkda, name, operator(name))
    served = _backend.Backend("cuda", "the kernels of this test serve every device")
    monkeypatch.setattr(_backend, "_served", {torch.device("cpu"): served})
    monkeypatch.setattr(_known, "_options", {})
    monkeypatch.setattr(_known, "_is_on_gpu", lambda q: type(q) is Tensor)
    return names


def fwd(**call: Any) -> Any:
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    out = torch.empty_like(call["v"])
    return flashkda.fwd(
        *order, 0.1, out, call["A_log"], call["dt_bias"], -5.0, cu_seqlens=call["cu_seqlens"]
    )


def call_of(**more: Any) -> dict[str, Any]:
    call = CASE.make() | {"initial_state": POOL.clone()} | more
    call.setdefault("ssm_state_indices", torch.tensor([3, 0, 5]))
    return call


def plain(**more: Any) -> dict[str, Any]:
    return CASE.make() | more


def kept(offsets: list[int], slots: list[int]) -> dict[str, Any]:
    return {
        "checkpoint_states": POOL.clone(),
        "checkpoint_offsets": torch.tensor(offsets),
        "checkpoint_indices": torch.tensor(slots),
    }


def kept_by_fwd(checkpoint_indices: Tensor, **call: Any) -> None:
    order = [call[x] for x in ("q", "k", "v", "g", "beta")]
    flashkda.fwd(
        *order, 0.1, torch.empty_like(call["v"]), call["A_log"], call["dt_bias"], -5.0,
        final_state=POOL[:3], cu_seqlens=call["cu_seqlens"], checkpoint_states=POOL,
        checkpoint_offsets=torch.tensor([16, 0, 0]), checkpoint_indices=checkpoint_indices,
    )  # fmt: skip


SAME_POOL = {"checkpoint_states": POOL}
chunk, decode = flashkda.chunk_kda, flashkda.fused_recurrent_kda
Bad = tuple[Callable[..., Any], dict[str, Any], str]
BAD: dict[str, Bad] = {
    "chunk: decreases": (
        chunk, plain(cu_seqlens=torch.tensor([0, 20, 19, 32])), "cu_seqlens: .* never decrease",
    ),
    "chunk: past T": (chunk, plain(cu_seqlens=torch.tensor([0, 20, 20, 35])), "cu_seqlens: .* 35"),
    "fwd: starts late": (fwd, plain(cu_seqlens=torch.tensor([1, 20, 20, 32])), "cu_seqlens: .* 1"),
    "decode: past T": (
        decode, plain(cu_seqlens=torch.tensor([0, 20, 20, 35])), "cu_seqlens: .* 35",
    ),
    "decode: slot": (
        decode, call_of(ssm_state_indices=torch.tensor([3, 0, 6])), "ssm_state_indices: .* got 6",
    ),
    "decode: slot, read only": (
        decode, call_of(ssm_state_indices=torch.tensor([3, 0, 6]), inplace_final_state=False),
        "ssm_state_indices: .* got 6",
    ),
    "decode: final slot": (
        decode, call_of(final_state_indices=torch.tensor([3, 0, -1])), "final_state_indices: ",
    ),
    "decode: shared": (
        decode, call_of(ssm_state_indices=torch.tensor([3, 0, 3])), "no other sequence uses",
    ),
    "decode: count": (
        decode,
        call_of(
            initial_state=torch.zeros(60, 2, 128, 128),
            ssm_state_indices=torch.arange(60).view(3, 20),
            num_accepted_tokens=torch.tensor([1, 1, 21]),
        ),
        "num_accepted_tokens: .* got 21",
    ),
    "chunk: slot": (
        chunk, call_of(ssm_state_indices=torch.tensor([3, 0, -1])), "ssm_state_indices: .* got -1",
    ),
    "chunk: offset": (chunk, call_of() | kept([16, 0, 8], [0, 1, 2]), "checkpoint_offsets: .* 8"),
    "chunk: checkpoint slot": (
        chunk, plain() | kept([16, 0, 0], [6, 1, 2]), "checkpoint_indices: .* got 6",
    ),
    "chunk: one slot twice": (
        chunk, plain(cu_seqlens=torch.tensor([0, 16, 16, 32])) | kept([16, 0, 16], [1, 1, 1]),
        "checkpoint_indices: .* got 1 twice",
    ),
    "chunk: checkpoint in a slot of a sequence": (
        chunk, call_of(initial_state=POOL) | kept([16, 0, 0], [3, 1, 2]) | SAME_POOL,
        "checkpoint_indices: .* got 3 for sequence 0",
    ),
    "fwd: checkpoint in a final state": (
        kept_by_fwd, plain(checkpoint_indices=torch.tensor([2, 0, 0])),
        "checkpoint_indices: .* got 2 for sequence 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_tables_that_kernels_would_trust(launches: list[str], name: str) -> None:
    function, call, message = BAD[name]
    function(**call)
    assert len(launches) == 1
    with flashkda.debug_checks(), pytest.raises(ValueError, match=message), unmodified(call):
        function(**call)
    assert len(launches) == 1
    function(**call)
    assert len(launches) == 2


GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "chunk": (chunk, plain()),
    "fwd": (fwd, plain()),
    "decode": (decode, plain()),
    "decode, no slots of an empty one": (
        decode, call_of(ssm_state_indices=torch.tensor([3, 99, 5])),
    ),
    "decode, pads": (
        decode, call_of(ssm_state_indices=torch.tensor([0, 0, -7]), pad_slot_id=0),
    ),
    "decode, from one slot": (
        decode,
        call_of(ssm_state_indices=torch.tensor([3, 3, 3]), inplace_final_state=False),
    ),
    "chunk, pool": (chunk, call_of()),
    "chunk, in place": (
        chunk, plain(initial_state=torch.zeros(3, 2, 128, 128), inplace_final_state=True),
    ),
    "chunk, checkpoints": (chunk, call_of() | kept([16, 0, 32], [0, 1, 99])),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_good_calls_reach_the_kernels(launches: list[str], name: str) -> None:
    function, call = GOOD[name]
    with flashkda.debug_checks():
        function(**call)
        function(**call)
    assert len(launches) == 2


def test_a_known_call_is_checked(launches: list[str]) -> None:
    """Flags that passed before go straight to the kernels, but not in debugging."""
    call = call_of()
    decode(**call)
    with flashkda.debug_checks():
        with pytest.raises(ValueError, match="ssm_state_indices"):
            decode(**call | {"ssm_state_indices": torch.tensor([3, 0, 6])})
        decode(**call)
    assert launches == ["recurrent_native_out"] * 2


# --- promises -------------------------------------------------------------------------------------


def test_a_promise_on_the_gate() -> None:
    case = KdaCase(lengths=(5, 8), tail=3, gate="log")
    call = case.make()
    call["g"] = call["g"].clamp(min=-5)
    call["g"][0, 0, 0, 0] = -5
    call["g"][0, 3, 0, 0] = float("nan")
    call["g"][0, 13:] = -100
    with flashkda.debug_checks():
        chunk(**call, safe_gate=True)
        call["g"][0, 12, 1, 2] = -5.25
        chunk(**call)
        with pytest.raises(ValueError, match=r"^g: expected .* -5 with safe_gate.*, got -5.25$"):
            chunk(**call, safe_gate=True)
        del call["cu_seqlens"], call["initial_state"]
        with pytest.raises(ValueError, match=r"got -100.0$"):
            chunk(**call, safe_gate=True)
    chunk(**call, safe_gate=True)


def test_a_bounded_gate_is_no_promise_on_its_logits() -> None:
    call = KdaCase(T=8, gate="fast").make()
    call["g"] = call["g"] - 100
    with flashkda.debug_checks():
        chunk(**call, safe_gate=True)


def test_promises_on_lengths() -> None:
    """Through the checks alone: on the CPU the host sees these values in any case."""
    q = torch.randn(1, 40, 2, 16)
    _debug.check_promises(q, q, BOUNDS, BOUNDS, 20, False)
    with pytest.raises(ValueError, match=r"^max_seqlen: expected at least the 20 .*, got 19$"):
        _debug.check_promises(q, q, BOUNDS, BOUNDS, 19, False)
    with pytest.raises(ValueError, match=r"^cu_seqlens_cpu: expected the values of cu_seqlens"):
        _debug.check_promises(q, q, BOUNDS, torch.tensor([0, 20, 21, 32]), None, False)


# --- the switch -----------------------------------------------------------------------------------


def test_a_block_ends_as_it_began() -> None:
    with flashkda.debug_checks():
        assert _debug.enabled()
        with flashkda.debug_checks(False):
            assert not _debug.enabled()
        assert _debug.enabled()
        with pytest.raises(KeyError), flashkda.debug_checks(False):
            raise KeyError
        assert _debug.enabled()
    assert not _debug.enabled()


def test_a_switch_stays() -> None:
    flashkda.debug_checks()
    assert _debug.enabled()
    flashkda.debug_checks(False)
    assert not _debug.enabled()


def test_a_switch_takes_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^enabled: expected a bool, got a value of type int$"):
        flashkda.debug_checks(1)  # type: ignore[arg-type]
    assert not _debug.enabled()


def test_a_capture_has_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _debug.refuse_capture(torch.device("cpu"))
    for capturing in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda x=capturing: x)
        _debug.refuse_capture(torch.device("cpu"))
        if capturing:
            with pytest.raises(RuntimeError, match=r"^debug_checks: expected no capture"):
                _debug.refuse_capture(torch.device("cuda"))
        else:
            _debug.refuse_capture(torch.device("cuda"))


def test_results_are_the_same() -> None:
    call = KdaCase(lengths=(20, 0, 5)).make()
    want = chunk(**call)
    with flashkda.debug_checks():
        got = chunk(**call)
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, Tensor)
        assert isinstance(b, Tensor)
        assert torch.equal(a, b)


def test_a_call_is_traced_without_values() -> None:
    call = KdaCase(lengths=(20, 5), gate="log").make()
    compiled = torch.compile(chunk, fullgraph=True, backend="aot_eager")
    with flashkda.debug_checks():
        assert compiled(**call, safe_gate=True)[0].shape == call["v"].shape
