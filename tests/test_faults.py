"""Faults that users of kernels like these have met, one test for each, named by its id.

A test asserts the right value against the float64 token recurrence, not merely that nothing broke.
Rows that can't be shown here:

    B23  int32 offsets wrap at 2^31 elements: several tensors of 4 GB and more, needs a GPU
    B42  illegal access in an autotuned backward: compute-sanitizer on a GPU
    B48  memory taken outside the allocator by the first launch: needs a GPU
    B50  graph capture at batch 1: CUDA graphs
    B51  stale pointers across captures: CUDA graphs
    B54  zero fill on the wrong stream: CUDA streams
    B55  tensors on another device than the current one: two GPUs
    B56  launch failure unseen: kernel launches
    B72  sequences split by warm-up: the PyTorch path never splits a sequence
"""

from __future__ import annotations

import math
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from calls import double, gradients, record, sequence, unmodified
from cases import KdaCase, ids
from errors import BF16, FLOAT32, FLOAT64, check, check_pair, norm_error
from torch import Tensor

import flashkda

FP32 = torch.float32
HALF = torch.bfloat16


def exact(call: dict[str, Any], limit: float | tuple[float, float] = FLOAT64) -> None:
    check_pair(flashkda.chunk_kda(**call), oracle.kda(**call), limit)


# --- correlated keys ------------------------------------------------------------------------------


def one_key(length: int, logit: float, dtype: torch.dtype, keys: str = "one") -> dict[str, Any]:
    """Every q and k the same unit vector, no decay to speak of, bound -5, zero state."""
    case = KdaCase(T=length, H=1, K=32, V=32, dtype=dtype, keys=keys, beta_logit=logit)
    call = case.but(state=False).make()
    call["g"].fill_(-12.0)
    call["A_log"].zero_()
    call["dt_bias"].zero_()
    call["q"] = call["k"].clone()
    return call


@pytest.mark.parametrize("logit", [2.0, 4.0, 6.0, 8.0])
@pytest.mark.parametrize("keys", ["one", "cosine9"])
def test_B01_correlated_keys(keys: str, logit: float) -> None:
    exact(one_key(64, logit, torch.float64, keys))
    exact(one_key(64, logit, FP32, keys), FLOAT32)


def test_B01_correlated_keys_over_16384_tokens() -> None:
    exact(one_key(16384, 8.0, FP32), FLOAT32)


# --- empty and short sequences --------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2], ids=["0_0", "0_0_0"])
@pytest.mark.parametrize("state", [True, False], ids=["state", "nostate"])
def test_B02_no_tokens(count: int, state: bool) -> None:
    call = KdaCase(lengths=(0,) * count, state=state).make()
    o, final = flashkda.chunk_kda(**call)
    assert o.shape == (1, 0, 2, 16)
    assert final is not None
    assert torch.equal(final, call["initial_state"] if state else torch.zeros_like(final))


@pytest.mark.parametrize("lengths", [(16, 0, 24), (0, 16, 24), (16, 24, 0)], ids=str)
def test_B03_empty_sequence_among_others(lengths: tuple[int, ...]) -> None:
    call = KdaCase(lengths=lengths).make()
    o, final = flashkda.chunk_kda(**call)
    assert final is not None
    ends = call["cu_seqlens"].tolist()
    for n in range(3):
        alone = oracle.kda(**sequence(call, n))
        check_pair((o[:, ends[n] : ends[n + 1]], final[n : n + 1]), alone, FLOAT64)
    empty = lengths.index(0)
    assert torch.equal(final[empty], call["initial_state"][empty])


def test_B04_half_of_64_sequences_empty() -> None:
    lengths = tuple((7 * n) % 23 if n % 2 else 0 for n in range(64))
    call = KdaCase(lengths=lengths).make()
    begin = time.monotonic()
    exact(call)
    assert time.monotonic() - begin < 20


def test_B05_one_token_after_a_long_sequence() -> None:
    exact(KdaCase(lengths=(8191, 1), H=1, dtype=FP32).make(), FLOAT32)


@pytest.mark.parametrize("tail", [1, 2, 7, 15, 17])
def test_B05_tails(tail: int) -> None:
    exact(KdaCase(lengths=(64, tail)).make())
    exact(KdaCase(lengths=(64 + tail, 1)).make())


def test_B05_every_sequence_one_token() -> None:
    exact(KdaCase(lengths=(1,) * 200).make())


# --- rows past the end, NaN of a neighbour --------------------------------------------------------


def test_B07_rows_past_the_end() -> None:
    """Zero in a functional call, what they were with `out`."""
    call = KdaCase(lengths=(40,), tail=24).make()
    want, want_state = oracle.kda(**call)
    for name in ("q", "k", "v", "g", "beta"):
        call[name][:, 40:] = math.nan
    o, state = flashkda.chunk_kda(**call)
    check_pair((o, state), (want, want_state), FLOAT64)
    assert bool((o[:, 40:] == 0).all())
    out = torch.full_like(o, 7.0)
    flashkda.chunk_kda(**call, out=out)
    assert bool((out[:, 40:] == 7).all())
    assert torch.equal(out[:, :40], o[:, :40])


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_B08_nan_of_the_next_sequence(name: str) -> None:
    call = KdaCase(lengths=(5, 11)).make()
    clean = flashkda.chunk_kda(**call)
    assert clean[1] is not None
    call[name][:, 5:] = math.nan
    o, state = flashkda.chunk_kda(**call)
    assert state is not None
    assert torch.equal(o[:, :5], clean[0][:, :5])
    assert torch.equal(state[0], clean[1][0])
    check_pair((o[:, :5], state[:1]), oracle.kda(**sequence(call, 0)), FLOAT64)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_B08_nan_of_the_next_batch_row(name: str) -> None:
    call = KdaCase(T=21, B=3).make()
    want_o, want_state = oracle.kda(**call)
    call[name][1] = math.nan
    o, state = flashkda.chunk_kda(**call)
    assert state is not None
    check_pair((o[[0, 2]], state[[0, 2]]), (want_o[[0, 2]], want_state[[0, 2]]), FLOAT64)


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
def test_B09_nan_stays_in_its_request(name: str, function: str) -> None:
    call = KdaCase(lengths=(20, 0, 33, 7, 40)).make()
    want_o, want_state = oracle.kda(**call)
    if name == "initial_state":
        call[name][2] = math.nan
    else:
        call[name][:, 20:53] = math.nan
    o, state = getattr(flashkda, function)(**call)
    others, rows = [0, 1, 3, 4], [*range(20), *range(53, 100)]
    check_pair((o[:, rows], state[others]), (want_o[:, rows], want_state[others]), FLOAT64)
    assert bool(torch.isnan(o[:, 20:53]).any())


@pytest.mark.parametrize("length", range(1, 34))
def test_B11_shorter_than_a_chunk(length: int) -> None:
    exact(KdaCase(T=length).make())
    exact(KdaCase(T=length, dtype=HALF).make(), BF16["slow"])


# --- strong decay ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 64))
def test_B12_short_and_saturated(length: int) -> None:
    exact(KdaCase(T=length, gate="saturated", dtype=FP32).make(), FLOAT32)


@pytest.mark.parametrize("decay", [-5.0, -20.0, -100.0, -320.0])
def test_B13_unbounded_gate(decay: float) -> None:
    """A_log = log 16: the raw gate +20 decays by 320 a token."""
    raw = math.log(math.expm1(-decay / 16)) if decay > -100 else -decay / 16
    call = KdaCase(T=80, gate="softplus", dtype=FP32).make()
    call["A_log"].fill_(math.log(16))
    call["dt_bias"].zero_()
    call["g"].fill_(raw)
    exact(call, FLOAT32)


@pytest.mark.parametrize("mean", [-5.6, -6.0, -9.0])
def test_B14_mean_decay_beyond_the_range_of_a_chunk(mean: float) -> None:
    case = KdaCase(T=129, H=8, gate="softplus")
    for dtype, limit in ((FP32, FLOAT32), (HALF, BF16["slow"])):
        call = case.but(dtype=dtype).make()
        call["A_log"].zero_()
        call["dt_bias"].zero_()
        call["g"].fill_(-mean)
        exact(call, limit)


@pytest.mark.parametrize("length", [17, 32, 33, 64, 100])
def test_B15_gradient_under_strong_decay(length: int) -> None:
    """Finite through a saturated gate in any dtype; right where nothing of it cancels."""
    for dtype in (FP32, HALF):
        call = KdaCase(T=length, gate="saturated", dtype=dtype).make()
        got = gradients(flashkda.chunk_kda, call)
        assert all(bool(torch.isfinite(x).all()) for x in got.values())
    call = KdaCase(T=length, gate="none", dtype=FP32).make()
    call["g"].fill_(-5.0)
    check(gradients(flashkda.chunk_kda, call), gradients(oracle.kda, double(call)), FLOAT32)


def test_B16_saturated_for_a_whole_chunk() -> None:
    for dtype, limit in ((FP32, FLOAT32), (HALF, BF16["saturated"])):
        exact(KdaCase(T=64, gate="saturated", dtype=dtype).make(), limit)


def test_B19_gradient_of_a_saturated_log_decay() -> None:
    """g given in log space, so that dg is not hidden behind a vanishing sigmoid."""
    call = KdaCase(T=64, gate="none", dtype=FP32).make()
    call["g"].fill_(-5.0)
    check(gradients(flashkda.chunk_kda, call), gradients(oracle.kda, double(call)), FLOAT32)


def test_B20_slow_decay_over_32768_tokens() -> None:
    call = KdaCase(T=32768, H=1, gate="slow", dtype=FP32).make()
    call["initial_state"] *= 100
    exact(call, FLOAT32)


# --- layouts and strides --------------------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
def test_B22_layout_of_a_square_state(v_first: bool) -> None:
    call = KdaCase(T=20, state_v_first=v_first).make()
    call["initial_state"].zero_()
    call["initial_state"][:, :, 2, 5] = 3.0
    call["q"].zero_()
    call["q"][..., 5 if v_first else 2] = 1.0
    exact(call)


def test_B24_slot_offset_beyond_int32(tmp_path: Path) -> None:
    """Two slots more than 2^31 elements apart, in a sparse file."""
    stride = 2**31 + 64
    memory = torch.from_file(str(tmp_path / "pool"), shared=True, size=stride + 2 * 256, dtype=HALF)
    pool = memory.as_strided((2, 2, 16, 16), (stride, 256, 16, 1))
    torch.manual_seed(0)
    pool[1] = torch.randn(2, 16, 16)
    call = KdaCase(T=1, B=1, dtype=FP32, state=False).make()
    del call["output_final_state"]
    index = torch.tensor([1])
    want = oracle.kda_pool(**call, pool=pool, ssm_state_indices=index)
    o, _ = flashkda.fused_recurrent_kda(
        **call, initial_state=pool, ssm_state_indices=index, inplace_final_state=True
    )
    check({"o": o}, {"o": want[0]}, FLOAT32)
    assert torch.equal(pool[1].double(), want[1][1].to(HALF).double())
    assert bool((pool[0] == 0).all())


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_B26_beta_is_a_slice_of_a_projection(function: str) -> None:
    call = KdaCase(T=30).make()
    big = torch.full((1, 30, 6288), math.nan, dtype=torch.float64)
    big[..., 100:102] = call["beta"]
    want = oracle.kda(**call)
    check_pair(getattr(flashkda, function)(**(call | {"beta": big[..., 100:102]})), want, FLOAT64)


def test_B27_strides_are_honoured() -> None:
    buffer = torch.randn(33, 2, 256, dtype=torch.float64)
    call = KdaCase(T=33, K=128, V=128).make()
    for name in ("q", "k", "v", "g"):
        exact(call | {name: buffer[None][..., :128]})
    rows = torch.full((1, 40000), math.nan, dtype=torch.float64)
    rows[:, :32768] = call["initial_state"].flatten(1)
    padded = rows.as_strided((1, 2, 128, 128), (40000, 16384, 128, 1))
    exact(call | {"initial_state": padded})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_B28_strided_cu_seqlens(dtype: torch.dtype) -> None:
    call = KdaCase(lengths=(3, 0, 18)).make()
    want = oracle.kda(**call)
    cu = torch.tensor([0, 99, 3, 99, 3, 99, 21], dtype=dtype)[::2]
    check_pair(flashkda.chunk_kda(**(call | {"cu_seqlens": cu})), want, FLOAT64)
    check_pair(flashkda.fused_recurrent_kda(**(call | {"cu_seqlens": cu})), want, FLOAT64)


# --- pools ----------------------------------------------------------------------------------------


def pool_step(
    index: Tensor, slots: int = 8, **more: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(output, pool, wanted output, wanted pool, pool before) of one decode step."""
    call = KdaCase(T=1, B=index.shape[0], state=False).make()
    del call["output_final_state"]
    before = torch.randn(slots, 2, 16, 16, dtype=torch.float64)
    pool = before.clone()
    o, _ = flashkda.fused_recurrent_kda(
        **call, initial_state=pool, ssm_state_indices=index, inplace_final_state=True, **more
    )
    want = oracle.kda_pool(**call, pool=before, ssm_state_indices=index, **more)
    check({"o": o, "pool": pool}, {"o": want[0], "pool": want[1]}, FLOAT64)
    return o, pool, *want, before


def test_B29_strided_state_indices() -> None:
    block_table = torch.tensor([[5, 77, 77], [0, 77, 77], [3, 77, 77]], dtype=torch.int32)
    pool_step(block_table[:, 0])


def test_B30_minus_one_is_no_slot() -> None:
    o, pool, _, _, before = pool_step(torch.tensor([5, -1, 3]), pad_slot_id=-1)
    assert bool((o[1] == 0).all())
    assert torch.equal(pool[[0, 1, 2, 4, 6, 7]], before[[0, 1, 2, 4, 6, 7]])
    with pytest.raises(ValueError, match="ssm_state_indices"):
        pool_step(torch.tensor([5, -1, 3]))


def test_B31_padding_is_what_the_caller_says() -> None:
    index = torch.tensor([0, 3])
    o, pool, _, _, before = pool_step(index)
    assert not torch.equal(pool[0], before[0])
    o, pool, _, _, before = pool_step(index, pad_slot_id=-1)
    assert not torch.equal(pool[0], before[0])
    o, pool, _, _, before = pool_step(index, pad_slot_id=0)
    assert torch.equal(pool[0], before[0])
    assert bool((o[0] == 0).all())


def test_B32_slot_beyond_the_pool() -> None:
    with pytest.raises(ValueError, match="ssm_state_indices: expected"):
        pool_step(torch.tensor([7, 8]))


def test_B65_decode_of_no_tokens() -> None:
    call = KdaCase(T=0, B=3).make()
    o, final = flashkda.fused_recurrent_kda(**call)
    assert o.shape == (3, 0, 2, 16)
    assert final is not None
    assert torch.equal(final, call["initial_state"])
    without = call | {"initial_state": None}
    _, final = flashkda.fused_recurrent_kda(**without)
    assert final is not None
    assert bool((final == 0).all())


# --- processes, load ------------------------------------------------------------------------------


def _in_a_child(queue: Any) -> None:
    call = KdaCase(T=20).make()
    queue.put(norm_error(flashkda.chunk_kda(**call)[0], oracle.kda(**call)[0]))


def test_B34_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) <= FLOAT64
        child.join(timeout=20)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.terminate()


def test_B35_a_thousand_random_batches() -> None:
    """Under a watchdog, and each one right: the float64 path is compared on every tenth."""
    generator = torch.Generator().manual_seed(0)
    begin = time.monotonic()
    for n in range(1000):
        count = int(torch.randint(1, 7, (), generator=generator))
        lengths = torch.randint(0, 20, (count,), generator=generator)
        call = KdaCase(lengths=tuple(lengths.tolist()), H=1, K=8, V=8, seed=n).make()
        o, final = flashkda.chunk_kda(**call)
        assert final is not None
        assert bool(torch.isfinite(o).all())
        assert bool(torch.isfinite(final).all())
        if n % 10 == 0:
            check_pair((o, final), oracle.kda(**call), FLOAT64)
        assert time.monotonic() - begin < 120


# --- dtypes, flags --------------------------------------------------------------------------------


def test_B36_float16_is_read_as_float16() -> None:
    exact(KdaCase(T=40, dtype=torch.float16).make(), BF16["fast"])


def test_B36_two_results_alive_at_once() -> None:
    first, _ = flashkda.chunk_kda(**KdaCase(T=40).make())
    kept = first.clone()
    flashkda.chunk_kda(**KdaCase(T=40, seed=1).make())
    assert torch.equal(first, kept)


def test_B37_alternating_gate_dtypes() -> None:
    case = KdaCase(T=1500, H=1, dtype=FP32)
    for gate_dtype in (HALF, FP32, HALF, torch.float16):
        exact(case.but(gate_dtype=gate_dtype).make(), FLOAT32)


def test_B39_final_state_is_what_was_asked() -> None:
    call = KdaCase(T=20).make()
    for function in (flashkda.chunk_kda, flashkda.fused_recurrent_kda):
        assert function(**(call | {"output_final_state": False}))[1] is None
        check_pair(function(**call), oracle.kda(**call), FLOAT64)


def test_B40_parameters_belong_to_value_heads() -> None:
    call = KdaCase(T=40, H=2, HV=8).make()
    call["A_log"] = torch.linspace(-2, 2, 8, dtype=torch.float64)
    assert len(set(call["A_log"].tolist())) == 8
    exact(call)
    exact(call | {"lower_bound": None})
    check(gradients(flashkda.chunk_kda, call), gradients(oracle.kda, call), FLOAT64)


@pytest.mark.parametrize("width", [1, 3, 60, 100, 129, 255])
def test_B41_odd_widths(width: int) -> None:
    exact(KdaCase(T=35, H=1, K=width, V=width).make())


def test_B43_context_parallelism_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="cp_context"):
        flashkda.chunk_kda(**KdaCase(T=4).make(), cp_context=object())


def test_B44_our_operator_is_what_ran() -> None:
    calls = record(lambda: flashkda.chunk_kda(**KdaCase(T=20).make()))
    assert len(calls) == 1
    assert calls[0][0].name().startswith("flashkda::chunk")


@pytest.mark.parametrize("capability", [(12, 1), (8, 0), (7, 5), (13, 0)], ids=str)
def test_B45_B46_unserved_architectures_fall_back(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    choice = flashkda.backend("cuda")
    assert choice.name == "torch"
    assert choice.reason


def test_B47_arguments_that_others_ignore_or_crash_on() -> None:
    exact(KdaCase(T=40, beta="neg").make())
    bare = KdaCase(T=40).make()
    del bare["A_log"]
    exact(bare)
    call = KdaCase(T=40, dtype=HALF, state_dtype=HALF).make()
    exact(call, BF16["fast"])


def test_B52_padded_rows_in_a_decode_batch() -> None:
    """Fixed batch, the last rows padding: zero output, their slots untouched."""
    o, _, _, _, _ = pool_step(torch.tensor([6, 2, -1, -1]), pad_slot_id=-1)
    assert bool((o[2:] == 0).all())


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_B57_inputs_that_need_grad_are_not_detached(name: str) -> None:
    call = KdaCase(T=20).make()
    call[name].requires_grad_()
    o, state = flashkda.chunk_kda(**call)
    assert o.requires_grad
    assert state is not None
    (gradient,) = torch.autograd.grad(o.sum() + state.sum(), call[name])
    assert bool((gradient != 0).any())
    with pytest.raises(NotImplementedError, match="chunk_kda"):
        flashkda.fused_recurrent_kda(**call)


@pytest.mark.parametrize("bound", [-10.0, 1.0])
def test_B58_lower_bound_out_of_range(bound: float) -> None:
    for safe in (False, True):
        call = KdaCase(T=4).make() | {"lower_bound": bound, "safe_gate": safe}
        with pytest.raises(ValueError, match="lower_bound: expected"):
            flashkda.chunk_kda(**call)


def test_B58_scale_is_not_rounded_to_bfloat16() -> None:
    """0.1 in bfloat16 is off by 1e-3: a doubled scale would then not halve the output exactly."""
    call = KdaCase(T=40, dtype=FP32, scale=0.1).make()
    exact(call, FLOAT32)


def test_B60_dt_bias_per_head() -> None:
    call = KdaCase(T=4).make()
    call["dt_bias"] = call["dt_bias"][:, 0].contiguous()
    with pytest.raises(ValueError, match="dt_bias: expected"):
        flashkda.chunk_kda(**call)


@pytest.mark.parametrize("case", [KdaCase(T=70), KdaCase(lengths=(5, 0, 20), tail=3)], ids=ids)
def test_B60_inputs_are_never_modified(case: KdaCase) -> None:
    call = case.make()
    for function in (flashkda.chunk_kda, flashkda.fused_recurrent_kda):
        with unmodified(call):
            function(**call)
    with unmodified(call):
        gradients(flashkda.chunk_kda, call)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 64))
def test_B66_backward_of_short_sequences(length: int) -> None:
    call = KdaCase(T=length, H=1, HV=2, K=8, V=8).make()
    got = gradients(flashkda.chunk_kda, call)
    assert len(got) == 8
    check(got, gradients(oracle.kda, call), FLOAT64)


def test_B67_output_is_overwritten_not_accumulated() -> None:
    call = KdaCase(T=40).make()
    out = torch.ones_like(call["v"])
    flashkda.chunk_kda(**call, out=out)
    check({"out": out}, {"out": oracle.kda(**call)[0]}, FLOAT64)


@pytest.mark.parametrize("sequences", [40, 70])
def test_B69_more_work_than_one_wave(sequences: int) -> None:
    exact(KdaCase(T=18, B=sequences, H=4, K=8, V=8).make())


@pytest.mark.parametrize(
    "case",
    [
        KdaCase(T=70, beta="neg", gate="none", beta_logit=9.0),
        KdaCase(T=70, beta="neg", gate="slow", keys="repeated4"),
        KdaCase(T=70, l2norm=False, gate="slow"),
    ],
    ids=ids,
)
def test_B73_beta_beyond_one_and_keys_that_are_not_normalised(case: KdaCase) -> None:
    call = case.make()
    exact(call)
    if not case.l2norm:
        exact(call | {"k": 1.2 * call["k"]})  # keys longer than one


def test_B75_left_padding_does_not_reach_the_recurrence() -> None:
    from flashkda.nn import KimiDeltaAttention

    layer = KimiDeltaAttention(hidden_size=32, head_dim=8, num_heads=2).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    with torch.no_grad():
        padded = layer(x, attention_mask=mask)[0]
        alone = layer(x[:1, 5:])[0]
        noise = torch.where(mask[..., None] == 0, 100 * torch.randn_like(x), x)
        disturbed = layer(noise, attention_mask=mask)[0]
    check({"o": padded[:1, 5:]}, {"o": alone}, FLOAT64)
    check({"o": disturbed[:1, 5:]}, {"o": alone}, FLOAT64)


def test_B76_no_triton_needed() -> None:
    """Neither imported nor missed: Triton is blocked in a fresh process."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, flashkda\n"
        "x = torch.randn(1, 20, 1, 8)\n"
        "o, s = flashkda.chunk_kda(x, x, x, -x.abs(), torch.rand(1, 20, 1),\n"
        "    use_qk_l2norm_in_kernel=True, output_final_state=True)\n"
        "assert o.isfinite().all() and s.isfinite().all()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- checkpoints ----------------------------------------------------------------------------------


def checkpointed(offsets: list[list[int]]) -> tuple[dict[str, Any], Tensor]:
    """A call of 40 tokens and its checkpoints, of which those not taken are NaN."""
    call = KdaCase(T=40).make()
    states = torch.full((len(offsets[0]), 2, 16, 16), float("nan"), dtype=torch.float64)
    flashkda.chunk_kda(
        **call,
        checkpoint_states=states,
        checkpoint_offsets=torch.tensor(offsets),
        checkpoint_indices=torch.arange(len(offsets[0]))[None],
    )
    return call, states


def test_B62_a_checkpoint_is_written_or_an_error() -> None:
    call, states = checkpointed([[0, 16, 32, 48]])
    want = oracle.states_inside(**call, after=[(0, 16), (0, 32)])
    check_pair((states[1], states[2]), (want[0], want[1]), FLOAT64)
    assert bool(states[[0, 3]].isnan().all())  # none, and past the end
    for offset in (24, 40, 56):
        with pytest.raises(ValueError, match=f"checkpoint_offsets: .*16, got {offset}"):
            checkpointed([[offset]])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_B63_any_number_of_checkpoints(count: int) -> None:
    call, states = checkpointed([[16, 32, 16, 32][:count]])
    want = oracle.states_inside(**call, after=[(0, 16), (0, 32), (0, 16), (0, 32)][:count])
    check({"states": states}, {"states": torch.stack(want)}, FLOAT64)


# --- completeness ---------------------------------------------------------------------------------

NUMBERS = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 14, 15, 16, 19, 20, 22, 23, 24, 26, 27, 28, 29, 30, 31),
    *(32, 34, 35, 36, 37, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 50, 51, 52, 54, 55, 56, 57, 58),
    *(60, 62, 63, 65, 66, 67, 69, 72, 73, 75, 76),
)


@pytest.mark.parametrize("row", [f"B{n:02}" for n in NUMBERS])
def test_each_known_fault_has_a_test_or_a_reason(row: str) -> None:
    tests: list[Callable[..., Any]] = [
        value for name, value in globals().items() if name.startswith("test_") and row in name
    ]
    excused = re.search(rf"^    {row}  \w", __doc__ or "", flags=re.MULTILINE)
    assert bool(tests) != bool(excused)
