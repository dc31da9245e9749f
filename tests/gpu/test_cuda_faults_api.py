"""Faults that users of kernels like these have met, on the CUDA forward: layouts, dtypes, flags,
sizes and processes. Those of the computation are in test_cuda_faults.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import unmodified
from cases import KdaCase, ids
from errors import BF16, check_pair, norm_error
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
    watchdog,
)

import flashkda

pytestmark = GPU

NAN = float("nan")
HALF = torch.bfloat16
FP32 = torch.float32


def right(call: Call, limits: tuple[float, float] = BF16["slow"]) -> None:
    check_pair(run(call), token_reference(call), limits)


# --- layouts and strides --------------------------------------------------------------------------


@pytest.mark.parametrize("safe", [False, True], ids=["unbounded", "safe"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kfirst", "vfirst"])
def test_B22_layout_of_a_square_state(v_first: bool, safe: bool) -> None:
    """S[k=1, v=3] = 1, no decay, beta 0: the output at v=3 is q[1], and nothing moves."""
    case = CASE.but(T=40, gate="none", beta="activated", l2norm=False, scale=1.0)
    call = case.but(state_v_first=v_first).make(DEVICE) | {"safe_gate": safe}
    call["beta"].zero_()
    call["initial_state"].zero_()
    call["initial_state"][(..., 3, 1) if v_first else (..., 1, 3)] = 1.0
    o, state = run(call)
    want = torch.zeros_like(o)
    want[..., 3] = call["q"][..., 1]
    assert same((o, state), (want, call["initial_state"]))


@pytest.mark.parametrize("gate_dtype", [HALF, FP32], ids=str)
def test_B26_beta_is_a_slice_of_a_projection(gate_dtype: torch.dtype) -> None:
    call = CASE.but(T=30, gate_dtype=gate_dtype).make(DEVICE)
    want = run(call)
    big = torch.full((1, 30, 6288), NAN, dtype=gate_dtype, device=DEVICE)
    call["beta"] = big[..., 100:102].copy_(call["beta"])
    assert same(run(call), want)
    right(call, BF16["fast"])


def test_B27_strides_are_honoured() -> None:
    buffer = torch.randn(33, 2, 256, device=DEVICE).to(HALF)
    call = CASE.but(T=33, gate="softplus").make(DEVICE)
    for name in ("q", "k", "v", "g"):
        right(call | {name: buffer[None][..., :128]})
    rows = torch.full((1, 40000), NAN, device=DEVICE)
    rows[:, :32768] = call["initial_state"].flatten(1)
    padded = rows.as_strided((1, 2, 128, 128), (40000, 16384, 128, 1))
    right(call | {"initial_state": padded})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["i32", "i64"])
def test_B28_strided_cu_seqlens(dtype: torch.dtype) -> None:
    call = CASE.but(lengths=(3, 0, 18)).make(DEVICE)
    want = run(call)
    cu = torch.tensor([0, 99, 3, 99, 3, 99, 21], dtype=dtype, device=DEVICE)[::2]
    assert same(run(call | {"cu_seqlens": cu}), want)
    misplaced = torch.tensor([99, 0, 3, 3, 21], dtype=dtype, device=DEVICE)[1:]
    assert same(run(call | {"cu_seqlens": misplaced}), want)


def test_B28_cu_seqlens_on_the_host_is_an_error() -> None:
    call = CASE.but(lengths=(3, 0, 18)).make(DEVICE)
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        run(call | {"cu_seqlens": call["cu_seqlens"].cpu()})


def spare_memory() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_B23_offsets_beyond_int32(packed: bool) -> None:
    """2^31 elements a tensor and 16 tokens more; some heads again, copied into small tensors."""
    torch.cuda.empty_cache()
    if spare_memory() < 60 << 30:
        pytest.skip("needs 60 GB of device memory")
    heads, length, chosen = 128, 2**31 // (128 * 128) + 16, [0, 1, 77, 127]
    shape = (1, length, heads, 128)
    q, k, v, g = (torch.randn(shape, device=DEVICE, dtype=HALF) for _ in range(4))
    call = {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": torch.randn(shape[:3], device=DEVICE, dtype=HALF),
        "A_log": torch.rand(heads, device=DEVICE),
        "dt_bias": torch.rand(heads, 128, device=DEVICE) - 4,
        "lower_bound": -5.0,
        "use_gate_in_kernel": True,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "output_final_state": True,
    }
    if packed:
        ends = [0, 5, 100_000, length - 20, length - 3, length]
        call["cu_seqlens"] = torch.tensor(ends, device=DEVICE)

    def pick(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, :, h] for h in chosen], dim=2)

    o, state = run(call)
    small: Call = dict(call)
    for name in ("q", "k", "v", "g", "beta"):
        small[name] = pick(call[name])
    for name in ("A_log", "dt_bias"):
        small[name] = call[name][chosen]
    want, want_state = run(small)
    assert finite(want, want_state)
    assert same((pick(o), state[:, chosen]), (want, want_state))
    assert bool((o[:, -16:] != 0).any())


# --- processes, memory, launches ------------------------------------------------------------------


def _in_a_child(queue: Any) -> None:
    call = CASE.make(DEVICE)
    queue.put(norm_error(run(call)[0], token_reference(call)[0]))


def test_B34_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_in_a_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=120) <= BF16["fast"][0]
        child.join(timeout=20)
        assert child.exitcode == 0
    finally:
        if child.is_alive():
            child.terminate()


def test_B48_no_memory_is_taken_outside_the_allocator() -> None:
    """Code and constants of the kernels are a few MB; a grown stack would be gigabytes."""
    code = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from cases import KdaCase
import flashkda
call = KdaCase(T=4096, H=4, K=128, V=128, dtype=torch.bfloat16).make("cuda")
for name in ("q", "k", "v", "g", "beta"):
    call[name] = call[name].repeat(1, 1, 8, *(1,) * (call[name].dim() - 3))
call["A_log"], call["dt_bias"] = call["A_log"].repeat(8), call["dt_bias"].repeat(8, 1)
call["initial_state"] = call["initial_state"].repeat(1, 8, 1, 1)
torch.cuda.synchronize()
def hidden():
    return -torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
before = hidden()
flashkda.chunk_kda(**call, backend="cuda")
torch.cuda.synchronize()
print(hidden() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 128 << 20


def test_B56_more_heads_than_a_grid_holds_is_refused() -> None:
    """Before any launch. No call that passes the checks can make a launch that fails."""
    call = KdaCase(T=1, H=1, HV=65536, K=128, V=128, dtype=HALF, state=False, gate="none")
    with pytest.raises(RuntimeError, match="65536"):
        flashkda.chunk_kda(**call.make(DEVICE), backend="cuda")


# --- dtypes ---------------------------------------------------------------------------------------


def test_B36_float16_is_not_read_as_bfloat16() -> None:
    call = CASE.but(T=40, dtype=torch.float16).make(DEVICE)
    with pytest.raises(RuntimeError, match="float16"):
        flashkda.chunk_kda(**call, backend="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the PyTorch path runs
        got = flashkda.chunk_kda(**call)
    check_pair(got, token_reference(call), BF16["fast"])


def test_B36_two_results_alive_at_once() -> None:
    first = run(CASE.make(DEVICE))
    kept = [x.clone() for x in first]
    second = run(CASE.but(seed=1).make(DEVICE))
    assert same(first, kept)
    assert not same(first, second)


@pytest.mark.parametrize("gate", ["fast", "softplus", "log"])
def test_B37_alternating_gate_dtypes(gate: str) -> None:
    case = CASE.but(T=1500, gate=gate)
    for gate_dtype in (HALF, FP32, HALF, FP32):
        call = case.but(gate_dtype=gate_dtype).make(DEVICE)
        check_pair(run(call), reference(call), BF16["slow"])
    mixed = case.make(DEVICE)
    for name in ("g", "beta"):  # one alone
        call = mixed | {name: mixed[name].float()}
        assert same(run(call), run(mixed))


# --- flags and parameters -------------------------------------------------------------------------


def test_B39_final_state_is_what_was_asked() -> None:
    call = CASE.make(DEVICE)
    o, _ = run(call)
    for _ in range(2):
        again, state = flashkda.chunk_kda(**(call | {"output_final_state": False}), backend=BACKEND)
        assert state is None
        assert same(again, o)
    right(call, BF16["fast"])


@pytest.mark.parametrize("gate", ["fast", "softplus"])
def test_B40_parameters_belong_to_value_heads(gate: str) -> None:
    call = CASE.but(T=40, H=2, HV=8, gate=gate).make(DEVICE)
    call["A_log"] = torch.linspace(-2, 2, 8, device=DEVICE)
    right(call)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float64], ids=str)
def test_B40_parameters_of_any_dtype(dtype: torch.dtype) -> None:
    call = CASE.make(DEVICE)
    rounded = {name: call[name].to(dtype) for name in ("A_log", "dt_bias")}
    widened = {name: x.float() for name, x in rounded.items()}
    flat = rounded | {"dt_bias": rounded["dt_bias"].flatten()}
    assert same(run(call | rounded), run(call | widened))
    assert same(run(call | flat), run(call | widened))


@pytest.mark.parametrize("gate", ["slow", "softplus"])
def test_B47_arguments_that_others_ignore_or_crash_on(gate: str) -> None:
    right(CASE.but(beta="neg", gate=gate).make(DEVICE))
    call = CASE.but(state_dtype=HALF, gate=gate).make(DEVICE)
    _, state = run(call)
    assert state.dtype == HALF
    bare = CASE.make(DEVICE)
    del bare["A_log"]
    right(bare)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"])
def test_B57_inputs_that_need_grad_are_not_detached(name: str) -> None:
    call = CASE.but(T=20).make(DEVICE)
    run(call)  # known to the kernels without a gradient
    call[name].requires_grad_()
    with pytest.raises(RuntimeError, match="grad"):
        flashkda.chunk_kda(**call, backend="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the PyTorch path runs
        o, state = flashkda.chunk_kda(**call)
    assert state is not None
    (gradient,) = torch.autograd.grad(o.float().sum() + state.sum(), call[name])
    assert bool((gradient != 0).any())
    with torch.no_grad():
        assert finite(*run(call))


@pytest.mark.parametrize("bound", [-10.0, 1.0])
@pytest.mark.parametrize("safe", [False, True])
def test_B58_lower_bound_out_of_range(bound: float, safe: bool) -> None:
    call = CASE.but(T=4).make(DEVICE) | {"lower_bound": bound, "safe_gate": safe}
    with pytest.raises(ValueError, match="lower_bound: expected"):
        run(call)


def test_B58_scale_is_not_rounded_to_bfloat16() -> None:
    """0.1 in bfloat16 is off by 1e-3; rounding of the single outputs averages out."""

    def size(scale: float) -> float:
        call = CASE.but(T=256, H=4, scale=scale).make(DEVICE)
        got, want = run(call)[0].double(), token_reference(call)[0]
        return float((got * want).sum() / (want * want).sum())

    assert abs(size(0.1) - size(0.125)) < 3e-4


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_B60_wrong_dt_bias_is_an_error_and_inputs_are_never_modified(packed: bool) -> None:
    case = CASE.but(lengths=(5, 0, 20), tail=3) if packed else CASE.but(T=70)
    call = case.make(DEVICE)
    per_head = call["dt_bias"][:, 0].contiguous()
    with pytest.raises(ValueError, match="dt_bias: expected"):
        run(call | {"dt_bias": per_head})
    with unmodified(call):
        run(call)


@pytest.mark.parametrize("value", [1.0, NAN], ids=["ones", "nan"])
@pytest.mark.parametrize("case", [CASE.but(T=40), CASE.but(T=33, gate="softplus")], ids=ids)
def test_B67_output_is_overwritten_not_accumulated(case: KdaCase, value: float) -> None:
    call = case.make(DEVICE)
    out = torch.full_like(call["v"], value)
    with watchdog(20):
        _, state = run(call, out=out)
    assert same((out, state), run(call))
