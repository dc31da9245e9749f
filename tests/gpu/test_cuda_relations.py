"""Calls of the CUDA forward that must agree with each other, nearly all of them to the bit."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from calls import sequence, tokens, unmodified
from cases import VARLEN, KdaCase, ids
from errors import BF16, check_pair
from support import (
    CASE,
    DEVICE,
    GPU,
    Call,
    bounded,
    chunk_of,
    finite,
    run,
    same,
    token_reference,
    without_state,
)
from torch import Tensor

import flashkda

pytestmark = GPU

gates = pytest.mark.parametrize("gate", ["fast", "slow", "softplus", "log"])
STATES = (None, torch.bfloat16, torch.float32)


def fwd(call: Call, out: Tensor, initial: Tensor | None, final: Tensor | None) -> None:
    """`flashkda.fwd` on a call whose states have V first."""
    inputs = [call[name] for name in ("q", "k", "v", "g", "beta")]
    parameters = (call.get(name) for name in ("A_log", "dt_bias", "lower_bound"))
    flashkda.fwd(*inputs, 128**-0.5, out, *parameters, initial, final, call.get("cu_seqlens"))


# --- sequences, batches, heads --------------------------------------------------------------------

PACK = VARLEN.but(K=128, V=128, dtype=torch.bfloat16)
PACKS = [
    PACK,
    PACK.but(tail=9, cu_dtype=torch.int32),
    PACK.but(HV=4, state_v_first=True),
    PACK.but(state=False),
    PACK.but(lengths=(1, 2, 7, 15, 17, 63, 64, 65, 0, 31, 32, 33)),
    PACK.but(lengths=(0, 3) * 20),
    PACK.but(lengths=(300, 5, 0, 511), H=48),
    PACK.but(lengths=tuple((7 * n) % 40 for n in range(50)), H=1),
]


@gates
@pytest.mark.parametrize("case", PACKS, ids=ids)
def test_packed_sequences_are_what_they_are_alone(case: KdaCase, gate: str) -> None:
    call = case.but(gate=gate).make(DEVICE)
    with unmodified(call):
        o, state = run(call)
    ends = call["cu_seqlens"].tolist()
    assert not bool(o[:, ends[-1] :].any())
    for n, (lo, hi) in enumerate(pairwise(ends)):
        if lo < hi:
            assert same((o[:, lo:hi], state[n : n + 1]), run(sequence(call, n))), n


@gates
@pytest.mark.parametrize("length", [1, 32, 37, 100])
def test_batch_rows_are_what_they_are_alone(gate: str, length: int) -> None:
    call = CASE.but(gate=gate, B=3, T=length).make(DEVICE)
    o, state = run(call)
    for b in range(3):
        alone = {name: call[name][b : b + 1] for name in ("q", "k", "v", "g", "beta")}
        alone["initial_state"] = call["initial_state"][b : b + 1]
        assert same((o[b : b + 1], state[b : b + 1]), run(call | alone)), b


@gates
@pytest.mark.parametrize(("heads", "value_heads"), [(5, 5), (2, 6), (1, 8)])
def test_heads_are_what_they_are_alone(gate: str, heads: int, value_heads: int) -> None:
    """Each value head with its own query head, gate parameters and state."""
    call = CASE.but(gate=gate, H=heads, HV=value_heads).make(DEVICE)
    if "A_log" in call:
        call["A_log"] = torch.linspace(-2, 2, value_heads, device=DEVICE)
    o, state = run(call)
    for h in range(value_heads):
        group = h * heads // value_heads
        alone = {name: call[name][:, :, group : group + 1] for name in ("q", "k")}
        alone |= {name: call[name][:, :, h : h + 1] for name in ("v", "g", "beta")}
        alone |= {name: call[name][h : h + 1] for name in ("A_log", "dt_bias") if name in call}
        alone["initial_state"] = call["initial_state"][:, h : h + 1]
        assert same((o[:, :, h : h + 1], state[:, h : h + 1]), run(call | alone)), h


# --- cuts -----------------------------------------------------------------------------------------


def in_two(call: Call, cut: int) -> tuple[Tensor, Tensor]:
    length = call["q"].shape[1]
    first_o, handed_on = run(tokens(call, 0, cut))
    assert handed_on.dtype == torch.float32
    second_o, state = run(tokens(call, cut, length) | {"initial_state": handed_on})
    return torch.cat([first_o, second_o], dim=1), state


@pytest.mark.parametrize("chunks", [1, 3, 5])
@pytest.mark.parametrize(
    "case",
    [
        CASE.but(gate="fast"),
        CASE.but(gate="slow", state_v_first=True),
        CASE.but(gate="slow", state=False),
        CASE.but(gate="softplus", B=2),
        CASE.but(gate="log"),
        CASE.but(gate="mixed", H=80),
    ],
    ids=ids,
)
def test_a_cut_between_chunks_changes_nothing(case: KdaCase, chunks: int) -> None:
    call = case.but(T=200).make(DEVICE)
    assert same(in_two(call, chunks * chunk_of(call)), run(call))
    if not bounded(call):  # the promise that a given gate is bounded makes longer chunks
        safe = call | {"safe_gate": True}
        if not call.get("use_gate_in_kernel") and bool((call["g"] >= -5).all()):
            assert same(in_two(safe, chunks * chunk_of(safe)), run(safe))


@gates
@pytest.mark.parametrize("cut", [1, 7, 50, 99])
def test_a_cut_anywhere_is_within_the_figures(gate: str, cut: int) -> None:
    call = CASE.but(gate=gate).make(DEVICE)
    check_pair(in_two(call, cut), token_reference(call), BF16["slow"])


# --- the same call again --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        CASE.but(gate="softplus", H=40),
        CASE.but(gate="slow", lengths=(33, 0, 70, 1, 15, 200), H=16),
    ],
    ids=ids,
)
def test_a_thousand_repeats(case: KdaCase) -> None:
    call = case.make(DEVICE)
    first = run(call)
    assert finite(*first)
    differs = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        for a, b in zip(first, run(call), strict=True):
            differs |= (a != b).any()
    assert not bool(differs)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [None, (33, 0, 48)], ids=["dense", "packed"])
@pytest.mark.parametrize("gate", ["fast", "softplus"])
@pytest.mark.parametrize("given", STATES, ids=str)
def test_states_of_every_kind(gate: str, given: Any, lengths: tuple[int, ...] | None) -> None:
    """Given and final state are chosen independently; whatever is written is written whole."""
    call = CASE.but(gate=gate, lengths=lengths, state_v_first=True).make(DEVICE)
    initial = None if given is None else call["initial_state"].to(given)
    want_o, want_state = run(call | {"initial_state": None if initial is None else initial.float()})
    for kind in STATES:
        out = torch.full_like(call["v"], math.nan)
        final = None if kind is None else torch.full_like(want_state, math.nan, dtype=kind)
        fwd(call, out, initial, final)
        assert same(out, want_o)
        if final is not None:
            assert same(final, want_state.to(kind))


@pytest.mark.parametrize("lengths", [None, (33, 0, 48)], ids=["dense", "packed"])
@pytest.mark.parametrize("heads", [2, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_state_updated_in_place(
    dtype: torch.dtype, heads: int, lengths: tuple[int, ...] | None
) -> None:
    call = CASE.but(lengths=lengths, H=heads, state_dtype=dtype, state_v_first=True).make(DEVICE)
    want = run(call)
    out = torch.empty_like(call["v"])
    with unmodified(call, but=("initial_state",)):
        fwd(call, out, call["initial_state"], call["initial_state"])
    assert same((out, call["initial_state"]), want)


@gates
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_state_layouts_are_transposes_of_each_other(gate: str, dtype: torch.dtype) -> None:
    call = CASE.but(gate=gate, state_dtype=dtype).make(DEVICE)
    o, state = run(call)
    flipped = call["initial_state"].transpose(-1, -2).contiguous()
    o_v, state_v = run(call | {"initial_state": flipped, "state_v_first": True})
    assert same((o_v, state_v.transpose(-1, -2)), (o, state))


@gates
def test_no_state_is_a_state_of_zeros(gate: str) -> None:
    call = CASE.but(gate=gate).make(DEVICE)
    zeros = torch.zeros_like(call["initial_state"])
    assert same(run(without_state(call)), run(call | {"initial_state": zeros}))


# --- layouts of inputs and outputs ----------------------------------------------------------------


def packed_qkv(call: Call, gap: int = 0) -> Call:
    """q, k, v (and g) as slices of one projection; `gap` more columns between rows, all NaN."""
    names = ("q", "k", "v", "g")
    parts = [call[name].flatten(2) for name in names]
    batch, length, _ = parts[0].shape
    pad = parts[0].new_full((batch, length, gap), math.nan)
    columns = torch.cat([*parts, pad], dim=2).split([*(x.shape[2] for x in parts), gap], dim=2)
    return call | {
        name: column.unflatten(2, (call[name].shape[2], 128))
        for name, column in zip(names, columns[:4], strict=True)
    }


@gates
@pytest.mark.parametrize("gap", [0, 8, 3], ids=["rows", "gap8", "gap3_unaligned"])
@pytest.mark.parametrize("batch", [1, 2])
def test_strides_do_not_matter(gate: str, gap: int, batch: int) -> None:
    call = CASE.but(gate=gate, H=2, HV=4, B=batch).make(DEVICE)
    want = run(call)
    strided = packed_qkv(call, gap)
    assert not strided["q"].is_contiguous()
    wide = torch.full((batch, 100, 6288), math.nan, dtype=torch.bfloat16, device=DEVICE)
    strided["beta"] = wide[..., 37:41].copy_(call["beta"])
    with unmodified(strided):
        assert same(run(strided), want)
    for name in ("q", "k", "v", "g", "beta"):
        assert same(run(call | {name: strided[name]}), want), name


def test_strided_float32_gates() -> None:
    call = CASE.but(gate_dtype=torch.float32).make(DEVICE)
    big = torch.full((1, 100, 2, 256), math.nan, device=DEVICE)
    rows = torch.full((1, 100, 300), math.nan, device=DEVICE)
    inner = big[..., :128].copy_(call["g"])
    row = rows[..., :256].unflatten(2, (2, 128)).copy_(call["g"])
    beta = torch.full((1, 2, 100), math.nan, device=DEVICE).transpose(1, 2).copy_(call["beta"])
    want = run(call)
    for gate in (inner, row):
        assert same(run(call | {"g": gate, "beta": beta}), want)


@gates
def test_out_is_written_whole_and_nothing_beside_it(gate: str) -> None:
    """Into rows of a larger buffer, past which and between which a sentinel stays."""
    call = CASE.but(gate=gate, lengths=(33, 0, 40), tail=20).make(DEVICE)
    want, want_state = run(call)
    assert finite(want, want_state)
    buffer = torch.full((1, 100, 320), 7.0, dtype=torch.bfloat16, device=DEVICE)
    out = buffer[:, :93, 32:288].unflatten(2, (2, 128))
    out[:, :73] = math.nan
    got, state = run(call, out=out)
    assert got is out
    assert same((out[:, :73], state), (want[:, :73], want_state))
    assert not bool(want[:, 73:].any())
    buffer[:, :73, 32:288] = 7.0
    assert bool((buffer == 7.0).all())


def test_index_dtypes_agree() -> None:
    call = PACK.make(DEVICE)
    assert same(run(call | {"cu_seqlens": call["cu_seqlens"].int()}), run(call))


def test_a_host_copy_of_cu_seqlens_changes_nothing() -> None:
    call = PACK.make(DEVICE)
    assert same(run(call, cu_seqlens_cpu=call["cu_seqlens"].cpu()), run(call))
