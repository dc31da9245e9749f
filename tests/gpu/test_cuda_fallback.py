"""The PyTorch path on CUDA tensors: the same numbers, and one warning that says why it runs."""

from __future__ import annotations

import warnings
from typing import Any

import oracle
import pytest
import torch
from calls import double, gradients
from cases import EMPTIES, FLAGS, SHAPES, THREE_GATES, VARLEN, KdaCase, ids
from errors import BF16, BF16_GRADIENTS, FLOAT32, FLOAT64, check, check_pair

import flashkda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

EXACT = [
    *(KdaCase(T=T, gate=gate) for gate in THREE_GATES for T in (1, 16, 17, 64, 65, 300)),
    *SHAPES,
    *FLAGS,
    *EMPTIES,
    VARLEN,
]


def fallback_only() -> None:
    if flashkda.backend("cuda").name != "torch":
        pytest.skip("this build serves the device with kernels, so there is no fallback to see")


@pytest.mark.parametrize("case", EXACT, ids=ids)
def test_float64(case: KdaCase) -> None:
    call = case.make("cuda")
    o, state = flashkda.chunk_kda(**call, backend="torch")
    assert o.is_cuda
    check_pair((o, state), oracle.kda(**call), FLOAT64)


@pytest.mark.parametrize("gate", [*THREE_GATES, "softplus500", "saturated"])
def test_float32(gate: str) -> None:
    call = KdaCase(T=300, gate=gate, dtype=torch.float32).make("cuda")
    check_pair(flashkda.chunk_kda(**call, backend="torch"), oracle.kda(**call), FLOAT32)


@pytest.mark.parametrize("gate", THREE_GATES)
def test_bfloat16(gate: str) -> None:
    case = KdaCase(T=1024, K=128, V=128, gate=gate, dtype=torch.bfloat16)
    call = case.make("cuda")
    check_pair(flashkda.chunk_kda(**call, backend="torch"), oracle.kda(**call), BF16[gate])


@pytest.mark.parametrize("case", [KdaCase(T=100, HV=4), VARLEN], ids=ids)
def test_gradients(case: KdaCase) -> None:
    call = case.make("cuda")
    torch_path: Any = lambda **x: flashkda.chunk_kda(**x, backend="torch")  # noqa: E731
    check(gradients(torch_path, call), gradients(oracle.kda, call), FLOAT64)
    half = case.but(dtype=torch.bfloat16).make("cuda")
    check(gradients(torch_path, half), gradients(oracle.kda, double(half)), BF16_GRADIENTS)


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_host_and_device_agree(function: str) -> None:
    here, there = KdaCase(T=8, B=2).make(), KdaCase(T=8, B=2).make("cuda")
    want = getattr(flashkda, function)(**here)
    got = getattr(flashkda, function)(**there, backend="torch")
    check_pair(got, want, FLOAT64)


def test_pool_on_the_device() -> None:
    call = KdaCase(T=1, B=3, state=False).make("cuda")
    del call["output_final_state"]
    before = torch.randn(6, 2, 16, 16, dtype=torch.float64, device="cuda")
    pool, index = before.clone(), torch.tensor([4, -1, 2], device="cuda")
    o, _ = flashkda.fused_recurrent_kda(
        **call,
        initial_state=pool,
        ssm_state_indices=index,
        pad_slot_id=-1,
        inplace_final_state=True,
        backend="torch",
    )
    want = oracle.kda_pool(**call, pool=before, ssm_state_indices=index, pad_slot_id=-1)
    check({"o": o, "pool": pool}, {"o": want[0], "pool": want[1]}, FLOAT64)


def test_cu_seqlens_on_the_host_is_refused() -> None:
    call = VARLEN.make("cuda")
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        flashkda.chunk_kda(**(call | {"cu_seqlens": call["cu_seqlens"].cpu()}), backend="torch")


def test_unforced_fallback_warns_once() -> None:
    """In a fresh process, because an earlier test may have had the warning already."""
    import subprocess
    import sys

    fallback_only()
    code = """
import warnings, torch, flashkda
x = torch.randn(1, 20, 1, 8, device="cuda")
call = dict(q=x, k=x, v=x, g=-x.abs(), beta=torch.rand(1, 20, 1, device="cuda"),
            use_qk_l2norm_in_kernel=True)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    flashkda.chunk_kda(**call)
    flashkda.chunk_kda(**call)
    flashkda.fused_recurrent_kda(**call)
    ours = [x for x in seen if "flashkda" in str(x.message)]
assert len(ours) == 1, [str(x.message) for x in seen]
assert flashkda.backend("cuda").reason in str(ours[0].message)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_forced_torch_backend_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashkda.chunk_kda(**KdaCase(T=20).make("cuda"), backend="torch")


def test_forced_cuda_gives_the_reason() -> None:
    fallback_only()
    call = KdaCase(T=20, dtype=torch.bfloat16).make("cuda")
    with pytest.raises(RuntimeError) as caught:
        flashkda.chunk_kda(**call, backend="cuda")
    assert flashkda.backend("cuda").reason in str(caught.value)


def test_explain_on_the_device() -> None:
    choice = flashkda.explain(**KdaCase(T=20).make("cuda"))
    served = flashkda.backend("cuda")
    if served.name == "torch":
        assert choice == served
    else:  # the kernels refuse float64
        assert choice.name == "torch"
        assert "float64" in choice.reason
