"""Inputs at the ends of their range, where a wrong order of operations shows as Inf or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from calls import DIFFERENTIABLE, double, gradients
from cases import KdaCase
from errors import BF16, FLOAT32, FLOAT64, check, check_pair

import flashkda

Change = Callable[[dict[str, Any]], None]
T = 80


def _raw(value: float) -> Change:
    return lambda call: call["g"].fill_(value)


def _rows(names: tuple[str, ...], value: float) -> Change:
    def change(call: dict[str, Any]) -> None:
        for name in names:
            call[name][:, 3:40:4] = value

    return change


def _scaled(factor: float) -> Change:
    def change(call: dict[str, Any]) -> None:
        call["q"].mul_(factor)
        call["k"].mul_(factor)

    return change


def _beta(value: float) -> Change:
    def change(call: dict[str, Any]) -> None:
        call["beta"].fill_(value)

    return change


def _beta_alternating(call: dict[str, Any]) -> None:
    call["beta"][:, ::2] = 30.0
    call["beta"][:, 1::2] = -30.0


def _raw_alternating(call: dict[str, Any]) -> None:
    call["g"][:, ::2] = 1e4
    call["g"][:, 1::2] = -1e4


def _A_log(value: float) -> Change:
    return lambda call: call["A_log"].fill_(value)


def _dt_bias(value: float) -> Change:
    return lambda call: call["dt_bias"].fill_(value)


def _one_fast_channel(call: dict[str, Any]) -> None:
    call["g"].fill_(-12.0)
    call["g"][..., 0] = 30.0
    call["dt_bias"].zero_()
    call["A_log"].zero_()


# name, gate, what is done to the drawn inputs
TRICKY: list[tuple[str, str, Change]] = [
    ("g_zero", "none", lambda call: None),
    ("saturated_k_1e5", "saturated", _scaled(1e5)),
    ("saturated_k_1e3", "saturated", _scaled(1e3)),
    ("saturated_k_1e-3", "saturated", _scaled(1e-3)),
    ("bounded_k_1e5", "fast", _scaled(1e5)),
    ("one_fast_channel", "fast", _one_fast_channel),
    ("one_fast_channel_log", "mixed", lambda call: None),
    ("zero_k", "fast", _rows(("k",), 0.0)),
    ("zero_q", "fast", _rows(("q",), 0.0)),
    ("zero_v", "fast", _rows(("v",), 0.0)),
    ("zero_qkv", "none", _rows(("q", "k", "v"), 0.0)),
    ("beta_+30", "fast", _beta(30.0)),
    ("beta_-30", "slow", _beta(-30.0)),
    ("beta_+30_none", "none", _beta(30.0)),
    ("beta_+-30", "slow", _beta_alternating),
    ("raw_+1e4_bounded", "fast", _raw(1e4)),
    ("raw_-1e4_bounded", "fast", _raw(-1e4)),
    ("raw_+-1e4_bounded", "fast", _raw_alternating),
    ("raw_+1e4_softplus", "softplus", _raw(1e4)),
    ("raw_-1e4_softplus", "softplus", _raw(-1e4)),
    ("raw_+-1e4_softplus", "softplus", _raw_alternating),
    ("softplus_to_-500", "softplus500", lambda call: None),
    ("A_log_5_bounded", "fast", _A_log(5.0)),
    ("A_log_5_softplus", "softplus", _A_log(5.0)),
    ("A_log_-20_bounded", "fast", _A_log(-20.0)),
    ("A_log_-20_softplus", "softplus", _A_log(-20.0)),
    ("dt_bias_+100", "fast", _dt_bias(100.0)),
    ("dt_bias_-100", "fast", _dt_bias(-100.0)),
    ("dt_bias_+100_softplus", "softplus", _dt_bias(100.0)),
    ("dt_bias_-100_softplus", "softplus", _dt_bias(-100.0)),
]
tricky = pytest.mark.parametrize(
    ("gate", "change"), [x[1:] for x in TRICKY], ids=[x[0] for x in TRICKY]
)


def prepared(gate: str, change: Change, dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    call = KdaCase(T=T, gate=gate, dtype=dtype, **more).make()
    change(call)
    return call


@tricky
@pytest.mark.parametrize(
    "function", [flashkda.chunk_kda, flashkda.fused_recurrent_kda], ids=["chunk", "recurrent"]
)
def test_float64(function: Any, gate: str, change: Change) -> None:
    call = prepared(gate, change, torch.float64)
    check_pair(function(**call), oracle.kda(**call), FLOAT64)


@tricky
def test_float32(gate: str, change: Change) -> None:
    call = prepared(gate, change, torch.float32)
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)


@tricky
def test_bfloat16(gate: str, change: Change) -> None:
    call = prepared(gate, change, torch.bfloat16, K=32, V=32)
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), BF16["slow"])


@tricky
def test_gradients(gate: str, change: Change) -> None:
    """Finite in float32 and, in float64, those of the recurrence."""
    call = prepared(gate, change, torch.float32)
    for name, gradient in gradients(flashkda.chunk_kda, call).items():
        assert bool(torch.isfinite(gradient).all()), name
    wide = double(call)
    check(gradients(flashkda.chunk_kda, wide), gradients(oracle.kda, wide), FLOAT64)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("gate", ["fast", "saturated", "softplus500", "none"])
def test_short_sequences_in_float32(length: int, gate: str) -> None:
    call = KdaCase(T=length, gate=gate, dtype=torch.float32).make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("logit", [2.0, 4.0, 6.0, 9.0])
@pytest.mark.parametrize("keys", ["one", "repeated4", "cosine9"])
@pytest.mark.parametrize("l2norm", [True, False], ids=["norm", "nonorm"])
def test_correlated_keys(keys: str, logit: float, l2norm: bool) -> None:
    case = KdaCase(T=200, gate="none", keys=keys, beta_logit=logit, l2norm=l2norm)
    call = case.make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("keys", ["repeated4", "cosine9"])
def test_correlated_keys_in_float32(keys: str) -> None:
    case = KdaCase(T=500, gate="none", keys=keys, beta_logit=4.0, dtype=torch.float32)
    call = case.make()
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)


def test_large_state_erased_by_one_token_in_bfloat16() -> None:
    """Only what is after the erasing token is judged: before it the state dominates everything."""
    call = KdaCase(T=64, gate="none", dtype=torch.bfloat16).make()
    call["g"][:, 20] = -100.0
    call["initial_state"] *= 1e3
    o, state = flashkda.chunk_kda(**call)
    want_o, want_state = oracle.kda(**call)
    check_pair((o[:, 20:], state), (want_o[:, 20:], want_state), BF16["none"])


@pytest.mark.parametrize("gate", [-math.inf, -1e30, -1e4])
def test_log_decay_that_erases_completely(gate: float) -> None:
    call = KdaCase(T=40, gate="none", dtype=torch.float32).make()
    call["g"][:, [0, 7, 16, 17, 39]] = gate
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)
    check_pair(flashkda.fused_recurrent_kda(**call), oracle.kda(**call), FLOAT32)


def test_tiny_decays_do_not_drift() -> None:
    """2,000 tokens of g = -1e-6 keep the state to float32 rounding, not to a biased product."""
    call = KdaCase(T=2000, H=1, gate="none", dtype=torch.float32).make()
    call["g"].fill_(-1e-6)
    call["beta"].fill_(-60.0)
    call["initial_state"] *= 1e3
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("at", [1, 8, 16, 37, 64, 69])
@pytest.mark.parametrize("gate", ["none", "softplus500"])
def test_causality(gate: str, at: int) -> None:
    """Later tokens, however violent, change nothing before them (no anchor looks ahead)."""
    call = KdaCase(T=70, gate=gate, dtype=torch.float32).make()
    clean, _ = flashkda.chunk_kda(**call)
    for name, value in (("q", 1e6), ("k", 1e6), ("v", 1e6), ("g", -500.0), ("beta", 30.0)):
        changed = call | {name: call[name].clone()}
        changed[name][:, at:] = value
        o, _ = flashkda.chunk_kda(**changed)
        assert not torch.equal(o[:, at:], clean[:, at:])
        check({name: o[:, :at]}, {name: clean[:, :at]}, FLOAT64)


def test_causality_of_gradients() -> None:
    """A loss on token t has no gradient with respect to any later token."""
    call = KdaCase(T=70).make()
    names = [x for x in DIFFERENTIABLE[:5] if x in call]
    leaves = {x: call[x].requires_grad_() for x in names}
    o, _ = flashkda.chunk_kda(**(call | leaves))
    o[:, 37].sum().backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        assert bool((leaf.grad[:, 38:] == 0).all()), name
        assert bool((leaf.grad[:, 37] != 0).any()), name
