"""How exact the CUDA forward is, against float64, and that it is the CUDA forward which ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from calls import record, unmodified
from cases import EDGE_LENGTHS, EMPTIES, KdaCase, ids
from errors import BF16, FLOAT64, check_pair, norm_error
from support import (
    BACKEND,
    CASE,
    DEVICE,
    GPU,
    Call,
    finite,
    reference,
    run,
    same,
    token_reference,
    without_state,
)
from torch import Tensor

import flashkda

pytestmark = GPU

Limits = tuple[float, float]


@dataclass(frozen=True)
class Kind:
    """A kind of input and what (output, state) may be off by."""

    case: KdaCase
    limits: Limits
    long_limits: Limits | None = None  # above 1k tokens, where they differ
    safe_gate: bool = False
    ceiling: bool = True  # has a figure at 64k tokens too

    def make(self, **changes: object) -> Call:
        call = self.case.but(**changes).make(DEVICE)
        return call | {"safe_gate": True} if self.safe_gate else call

    def limits_at(self, tokens: int) -> Limits:
        return self.limits if tokens <= 1024 or self.long_limits is None else self.long_limits


NO_DECAY_LONG = (5e-3, 4e-3)
DEEP = (5e-3, 4e-3)  # what clipping the decays of a block costs included
REPEATED = CASE.but(gate="none", keys="repeated4", beta_logit=9.0)

KINDS = {
    "fast": Kind(CASE.but(gate="fast"), BF16["fast"]),
    "slow": Kind(CASE.but(gate="slow"), BF16["slow"]),
    "mixed": Kind(CASE.but(gate="mixed"), BF16["mixed"]),
    "mixed_safe": Kind(CASE.but(gate="mixed"), BF16["mixed"], safe_gate=True),
    "none": Kind(CASE.but(gate="none"), BF16["none"], NO_DECAY_LONG),
    "none_safe": Kind(CASE.but(gate="none"), BF16["none"], NO_DECAY_LONG, safe_gate=True),
    "repeated4": Kind(REPEATED, BF16["repeated4"]),
    "repeated4_safe": Kind(REPEATED, BF16["repeated4"], safe_gate=True),
    "saturated": Kind(CASE.but(gate="saturated"), BF16["saturated"], ceiling=False),
    "softplus": Kind(CASE.but(gate="softplus"), BF16["slow"]),
    "log": Kind(CASE.but(gate="log"), BF16["slow"]),
    "logdeep": Kind(CASE.but(gate="logdeep"), BF16["slow"]),
}
kinds = pytest.mark.parametrize("kind", KINDS)


# --- which code ran -------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["fast", "softplus", "log"])
def test_the_kernels_are_what_runs(gate: str) -> None:
    """Forced or not, first or later: a native operator, once, and nothing else of flashkda."""
    call = CASE.but(gate=gate).make(DEVICE)
    assert flashkda.explain(**call).name == "cuda"
    assert flashkda.explain(**call, backend="cuda").name == "cuda"
    results = []
    for backend in ("cuda", None, "cuda", None):
        calls = record(lambda b=backend: results.append(flashkda.chunk_kda(**call, backend=b)))
        (operator,) = (x[0].name() for x in calls)
        assert operator in {"flashkda::chunk_native", "flashkda::chunk_native_out"}
    assert all(same(x, results[0]) for x in results)


def test_fwd_runs_the_kernels() -> None:
    call = CASE.but(state_v_first=True).make(DEVICE)
    out, state = torch.empty_like(call["v"]), torch.empty_like(call["initial_state"])
    inputs = [call[name] for name in ("q", "k", "v", "g", "beta")]
    parameters = call["A_log"], call["dt_bias"], call["lower_bound"]
    calls = record(
        lambda: flashkda.fwd(*inputs, 128**-0.5, out, *parameters, call["initial_state"], state)
    )
    assert [x[0].name() for x in calls] == ["flashkda::chunk_native_out"]
    assert same((out, state), run(call))


# --- budgets --------------------------------------------------------------------------------------


@kinds
def test_the_references_agree(kind: str) -> None:
    """The float64 path that serves long sequences, on this device, against the recurrence."""
    call = KINDS[kind].make(T=256)
    check_pair(reference(call), token_reference(call), FLOAT64)


@kinds
@pytest.mark.parametrize("length", [*(x for x in EDGE_LENGTHS if x <= 65), 256])
def test_short(kind: str, length: int) -> None:
    """Many heads: the budgets are for norms over many tokens, not for a lucky or unlucky row."""
    call = KINDS[kind].make(T=length, H=32)
    with unmodified(call):
        got = run(call)
    check_pair(got, token_reference(call), KINDS[kind].limits)


@kinds
@pytest.mark.parametrize("length", [1024, 8192])
def test_long(kind: str, length: int) -> None:
    call = KINDS[kind].make(T=length, H=4)
    check_pair(run(call), reference(call), KINDS[kind].limits_at(length))


@pytest.mark.parametrize("kind", [name for name, x in KINDS.items() if x.ceiling])
def test_65536_tokens(kind: str) -> None:
    """Within the figures, and hardly worse than the first 1024 tokens."""
    errors = {}
    for length in (1024, 65536):
        call = KINDS[kind].make(T=length)
        got, want = run(call), reference(call)
        check_pair(got, want, KINDS[kind].limits_at(length))
        errors[length] = [norm_error(a, b) for a, b in zip(got, want, strict=True)]
        print("{}, {} tokens: out {:.2e}, state {:.2e}".format(kind, length, *errors[length]))
    for short, long in zip(errors[1024], errors[65536], strict=True):
        assert long <= 1.3 * short, f"{short:.2e} at 1024 tokens, {long:.2e} at 65536"


@pytest.mark.parametrize("safe", [False, True], ids=["unbounded", "safe"])
@pytest.mark.parametrize("length", [1024, 8192])
def test_one_key_repeated(length: int, safe: bool) -> None:
    """Ill-conditioned: the figure to meet is a peer's, measured beside it. Here: no garbage."""
    call = CASE.but(gate="none", keys="one", T=length, H=4).make(DEVICE) | {"safe_gate": safe}
    call["beta"] += 6
    got, want = run(call), reference(call)
    out, state = (norm_error(a, b) for a, b in zip(got, want, strict=True))
    print(f"one key, {length} tokens, safe_gate={safe}: out {out:.2e}, state {state:.2e}")
    assert out < 0.1
    assert state < 0.1


# --- tricky inputs --------------------------------------------------------------------------------


def raw(gate: str, **changes: object) -> Callable[[], Call]:
    return lambda: CASE.but(gate=gate, T=256, **changes).make(DEVICE)


def keys_of_size(size: float) -> Callable[[], Call]:
    def make() -> Call:
        call = raw("saturated")()
        return call | {"q": call["q"] * size, "k": call["k"] * size}

    return make


def zero_rows() -> Call:
    call = raw("slow")()
    call["k"][:, 3::7] = 0
    call["q"][:, 2::5] = 0
    call["v"][:, 4::9] = 0
    call["q"][:, 64:70] = 0
    call["k"][:, 66:99] = 0
    return call


def extreme_beta(gate: str) -> Callable[[], Call]:
    def make() -> Call:
        call = raw(gate)()
        call["beta"] = torch.where(call["beta"] > 0, 30.0, -30.0).to(torch.bfloat16)
        return call

    return make


def extreme_gate(gate: str) -> Callable[[], Call]:
    def make() -> Call:
        call = raw(gate)()
        return call | {"g": torch.where(call["g"] > 0, 1e4, -1e4).to(torch.bfloat16)}

    return make


def large_amplitude(gate: str) -> Callable[[], Call]:
    return lambda: raw(gate)() | {"A_log": torch.full((2,), 5.0, device=DEVICE)}


def without(gate: str, *names: str) -> Callable[[], Call]:
    return lambda: {name: x for name, x in raw(gate)().items() if name not in names}


TRICKY: dict[str, tuple[Callable[[], Call], Limits]] = {
    "g_raw_to_zero": (lambda: raw("slow")() | {"g": raw("none")()["g"] - 1e4}, BF16["none"]),
    "keys_1e3": (keys_of_size(1e3), BF16["saturated"]),
    "keys_1e5": (keys_of_size(1e5), BF16["saturated"]),
    "keys_1e-3": (keys_of_size(1e-3), BF16["saturated"]),
    "zero_rows": (zero_rows, BF16["slow"]),
    "beta_30_fast": (extreme_beta("fast"), BF16["slow"]),
    "beta_30_slow": (extreme_beta("slow"), BF16["slow"]),
    "beta_30_softplus": (extreme_beta("softplus"), BF16["slow"]),
    "gate_1e4": (extreme_gate("fast"), BF16["slow"]),
    "gate_1e4_softplus": (extreme_gate("softplus"), BF16["slow"]),
    "softplus_500": (raw("softplus500"), DEEP),
    "softplus_500_fp32": (raw("softplus500", gate_dtype=torch.float32), DEEP),
    "A_log_5": (large_amplitude("fast"), BF16["slow"]),
    "A_log_5_softplus": (large_amplitude("softplus"), BF16["slow"]),
    "no_A_log": (without("fast", "A_log"), BF16["slow"]),
    "no_dt_bias": (without("fast", "dt_bias"), BF16["slow"]),
    "no_dt_bias_softplus": (without("softplus", "dt_bias"), BF16["slow"]),
    "bare": (raw("bare"), BF16["slow"]),
    "mild_bound": (raw("mild"), BF16["slow"]),
    "neg": (raw("slow", beta="neg"), BF16["slow"]),
    "activated": (raw("slow", beta="activated"), BF16["slow"]),
    "not_normalised": (raw("slow", l2norm=False), BF16["slow"]),
    "not_normalised_log": (raw("log", l2norm=False, beta="activated"), BF16["slow"]),
    "scale_1": (raw("fast", scale=1.0), BF16["fast"]),
    "fp32_gates": (raw("fast", gate_dtype=torch.float32), BF16["fast"]),
    "fp32_gates_softplus": (raw("softplus", gate_dtype=torch.float32), BF16["slow"]),
    "more_value_heads": (raw("fast", HV=6), BF16["fast"]),
    "v_first": (raw("slow", state_v_first=True), BF16["slow"]),
    "no_state": (raw("slow", state=False), BF16["slow"]),
    "batch": (raw("fast", B=3), BF16["fast"]),
}


@pytest.mark.parametrize("name", TRICKY)
def test_tricky(name: str) -> None:
    make, limits = TRICKY[name]
    call = make()
    with unmodified(call):
        got = run(call)
    check_pair(got, token_reference(call), limits)


@pytest.mark.parametrize("lengths", [None, (33, 0, 1, 64, 31)], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["fast", "softplus", "log"])
def test_states_in_bfloat16(gate: str, lengths: tuple[int, ...] | None) -> None:
    """The given state is taken as it is; the final one is the fp32 one, rounded once."""
    call = CASE.but(gate=gate, lengths=lengths, state_dtype=torch.bfloat16).make(DEVICE)
    o, state = run(call)
    assert state.dtype == torch.bfloat16
    wide_o, wide_state = run(call | {"initial_state": call["initial_state"].float()})
    assert wide_state.dtype == torch.float32
    assert same(o, wide_o)
    assert same(state, wide_state.to(torch.bfloat16))
    check_pair((o, wide_state), token_reference(call), BF16["slow"])


@pytest.mark.parametrize(
    "case", [x.but(K=128, V=128, dtype=torch.bfloat16) for x in EMPTIES if x.tokens], ids=ids
)
@pytest.mark.parametrize("gate", ["fast", "softplus"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
def test_empty_sequences(case: KdaCase, gate: str, state: bool) -> None:
    """They keep their state to the bit, or end at zero."""
    call = case.but(gate=gate, state=state).make(DEVICE)
    o, final = run(call)
    want_o, want_final = token_reference(call)
    assert finite(o, final)
    empty = call["cu_seqlens"].diff() == 0
    kept = call["initial_state"] if state else torch.zeros_like(final)
    assert same(final[empty], kept[empty])
    check_pair((o, final), (want_o, want_final), BF16["slow"])


def erased(call: Call, at: int) -> Call:
    """Slow, except for one token that forgets with e^-100; the state is large before it."""
    gate: Tensor = call["g"]
    if call.get("use_gate_in_kernel"):
        call["A_log"].zero_()
        call["dt_bias"].zero_()
        gate.fill_(-10)
        gate[:, at] = 100
    else:
        gate.fill_(-math.exp(-10))
        gate[:, at] = -100
    call["initial_state"] *= 1e3
    return call


@pytest.mark.parametrize("gate", ["softplus", "log"])
@pytest.mark.parametrize("at", [0, 8, 16, 20, 31, 40])
def test_large_state_erased_by_one_token(gate: str, at: int) -> None:
    """Only what is after the erasing token is judged: before it the state dominates everything."""
    call = erased(CASE.but(gate=gate).make(DEVICE), at)
    o, state = run(call)
    want_o, want_state = token_reference(call)
    check_pair((o[:, at:], state), (want_o[:, at:], want_state), BF16["none"])


def test_refused_calls_say_why() -> None:
    """What the kernels do not take is an error when forced, never another answer."""
    refused = {
        "float16": CASE.but(dtype=torch.float16),
        "K = 64": CASE.but(K=64),
    }
    for reason, case in refused.items():
        call = case.make(DEVICE)
        assert flashkda.explain(**call).name == "torch"
        with pytest.raises(RuntimeError, match=reason):
            flashkda.chunk_kda(**call, backend="cuda")


def test_no_tokens_need_no_kernel() -> None:
    call = CASE.but(T=0, B=3).make(DEVICE)
    o, state = flashkda.chunk_kda(**call)
    assert o.shape == call["v"].shape
    assert state is not None
    assert same(state, call["initial_state"])
    _, state = flashkda.chunk_kda(**without_state(call), backend=BACKEND)
    assert state is not None
    assert not bool(state.any())
