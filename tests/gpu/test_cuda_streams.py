"""The CUDA forward in streams and graphs: order, other streams, capture, replay, padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import KdaCase
from support import CASE, DEVICE, GPU, Call, capture, run, same, watchdog, without_state
from torch import Tensor

import flashkda

pytestmark = GPU

gates = pytest.mark.parametrize("gate", ["fast", "softplus"])
packings = pytest.mark.parametrize("lengths", [None, (33, 0, 67)], ids=["dense", "packed"])


def busy() -> None:
    """Some 50 ms of work on the current stream."""
    torch.cuda._sleep(100_000_000)


def put(call: Call, values: Call) -> None:
    """New values in the tensors that a graph holds."""
    for name, x in call.items():
        if isinstance(x, Tensor):
            x.copy_(values[name])


def keep(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone() for x in results]


# --- order in one stream --------------------------------------------------------------------------


@gates
def test_a_call_waits_for_what_is_before_it(gate: str) -> None:
    """Every input is written at the end of a busy stream; no wait on the host before the call."""
    call = CASE.but(gate=gate).make(DEVICE)
    want = run(call)
    late = {n: torch.full_like(x, 0) if isinstance(x, Tensor) else x for n, x in call.items()}
    torch.cuda.synchronize()
    busy()
    put(late, call)
    assert same(run(late), want)


@gates
def test_what_comes_after_a_call_waits_for_it(gate: str) -> None:
    """Inputs and memory of earlier results are overwritten at once, many times over."""
    call = CASE.but(gate=gate, H=16, T=400).make(DEVICE)
    want = run(call)
    originals = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    good = torch.ones((), dtype=torch.bool, device=DEVICE)
    for _ in range(50):
        o, state = run(call)
        for x in call.values():
            if isinstance(x, Tensor):
                x.fill_(math.nan)
        # Freed scratch memory is taken again by these, in the same stream.
        scratch = [torch.full((1 << n,), math.nan, device=DEVICE) for n in range(12, 24)]
        good &= (o == want[0]).all() & (state == want[1]).all()
        put(call, originals)
        del scratch
    assert bool(good)


@gates
def test_a_chain_of_calls(gate: str) -> None:
    """Each call reads what the one before has just written: its output as v, its state."""
    call = CASE.but(gate=gate, T=64).make(DEVICE)

    def chain(wait: bool) -> tuple[Tensor, Tensor]:
        step = dict(call)
        for _ in range(30):
            o, state = run(step)
            step |= {"v": o, "initial_state": state}
            if wait:
                torch.cuda.synchronize()
        return o, state

    assert same(chain(wait=False), chain(wait=True))


# --- other streams --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
@packings
def test_B54_a_busy_side_stream(lengths: Any, state: bool) -> None:
    """Nothing of a call, zero fills included, runs on another stream than the current one."""
    call = CASE.but(lengths=lengths, tail=5 if lengths else 0, state=state).make(DEVICE)
    want = run(call)
    late = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    late["v"].fill_(math.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        # Memory that holds NaN until the stream gets there, for the allocator to hand out.
        dirty = [torch.full_like(x, math.nan) for x in want for _ in range(3)]
        busy()
        for x in dirty:
            x.fill_(math.nan)
        del dirty, x
        late["v"].copy_(call["v"])
        got = run(late)
    stream.synchronize()
    assert same(got, want)


def test_calls_on_many_streams_at_once() -> None:
    """They share no scratch memory."""
    cases = [CASE.but(seed=n, gate=("fast", "softplus")[n % 2], T=300) for n in range(6)]
    calls = [case.make(DEVICE) for case in cases]
    wants = [run(call) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    results: list[list[tuple[Tensor, ...]]] = [[] for _ in calls]
    with watchdog(60):
        for _ in range(20):
            for n, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[n].append(run(calls[n]))
        torch.cuda.synchronize()
    for want, got in zip(wants, results, strict=True):
        assert all(same(x, want) for x in got)


# --- graphs ---------------------------------------------------------------------------------------


@gates
@packings
@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
def test_B50_replay_with_other_inputs(gate: str, lengths: Any, state: bool) -> None:
    case = CASE.but(gate=gate, lengths=lengths, state=state)
    call = case.make(DEVICE)
    replay, results = capture(lambda: run(call))
    for seed in (1, 2, 0):
        other = case.but(seed=seed).make(DEVICE)
        want = run(other)
        put(call, other)
        for x in results:
            x.fill_(math.nan)
        replay()
        assert same(results, want)


@pytest.mark.parametrize("length", [1, 16, 33, 1024])
def test_B50_replay_at_batch_1(length: int) -> None:
    case = CASE.but(T=length, H=4)
    call = case.make(DEVICE)
    replay, results = capture(lambda: run(call))
    for seed in (1, 2):
        other = case.but(seed=seed).make(DEVICE)
        put(call, other)
        replay()
        assert same(results, run(other))


def test_B51_two_graphs_in_turn() -> None:
    cases = [CASE.but(seed=1), CASE.but(seed=2, T=333, gate="softplus", H=4)]
    calls = [case.make(DEVICE) for case in cases]
    wants = [keep(run(call)) for call in calls]
    graphs = [capture(lambda call=call: run(call)) for call in calls]
    for turn in (0, 1, 0, 0, 1, 1, 0):
        replay, results = graphs[turn]
        for x in results:
            x.fill_(math.nan)
        replay()
        run(calls[1 - turn])  # an eager call between replays
        assert same(results, wants[turn])


def test_B51_a_graph_of_several_calls() -> None:
    """Each reads the state of the one before."""
    calls = [CASE.but(seed=n, T=40 + n, state=n == 0).make(DEVICE) for n in range(4)]

    def chain() -> tuple[Tensor, Tensor]:
        o, state = run(calls[0])
        for call in calls[1:]:
            o, state = run(call | {"initial_state": state})
        return o, state

    want = keep(chain())
    replay, results = capture(chain)
    for _ in range(3):
        for x in results:
            x.fill_(math.nan)
        replay()
        assert same(results, want)


PADDED = [(40, 1, 33), (100,), (0, 7), (1, 1, 1, 1, 1, 1, 1, 1)]


@gates
@pytest.mark.parametrize("inplace", [False, True], ids=["functional", "inplace"])
def test_B52_padded_batches_in_a_graph(gate: str, inplace: bool) -> None:
    """Eight places and 120 rows are captured; each replay fills some, the rest is empty."""
    case = CASE.but(gate=gate, lengths=(15,) * 8, state_v_first=True)
    call = case.make(DEVICE)
    call |= {"use_graph": True, "max_num_seqs": 8}
    states = call["initial_state"].clone()
    out = torch.zeros_like(call["v"])

    def step() -> tuple[Tensor, Tensor]:
        if not inplace:
            return run(call, out=out)
        inputs = [call[name] for name in ("q", "k", "v", "g", "beta")]
        parameters = [call.get(name) for name in ("A_log", "dt_bias", "lower_bound")]
        state, cu_seqlens = call["initial_state"], call["cu_seqlens"]
        flashkda.fwd(*inputs, 128**-0.5, out, *parameters, state, state, cu_seqlens)
        return out, state

    replay, (_, final) = capture(step)
    for lengths in PADDED:
        ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
        total, count = int(ends[-1]), len(lengths)
        call["cu_seqlens"][: count + 1] = ends
        call["cu_seqlens"][count + 1 :] = total
        call["initial_state"].copy_(states)
        out.fill_(7.0)
        replay()
        assert bool((out[:, total:] == 7.0).all())
        assert same(final[count:], states[count:])
        alone = {name: call[name][:, :total] for name in ("q", "k", "v", "g", "beta")}
        alone |= {"cu_seqlens": ends, "initial_state": states[:count], "max_num_seqs": count}
        assert same((out[:, :total], final[:count]), run(call | alone))


@gates
def test_B54_no_state_under_capture(gate: str) -> None:
    """Zeros are made inside the graph, at every replay."""
    call = without_state(CASE.but(gate=gate, lengths=(0, 33, 67)).make(DEVICE))
    want = keep(run(call))
    replay, results = capture(lambda: run(call))
    for _ in range(2):
        results[1].fill_(math.nan)
        busy()
        replay()
        assert same(results, want)


def test_a_larger_call_after_capture_leaves_the_graph_alone() -> None:
    """The scratch memory of a graph is its own."""
    call = CASE.make(DEVICE)
    want = keep(run(call))
    replay, results = capture(lambda: run(call))
    large = KdaCase(T=3000, H=8, K=128, V=128, dtype=torch.bfloat16).make(DEVICE)
    for _ in range(3):
        run(large)
        replay()
        assert same(results, want)
