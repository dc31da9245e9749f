"""The doors on a GPU: fla's own cases through fla, and the tensors of vLLM, SGLang and FlashKDA.

A call that left the kernels would warn, which is an error here. Run first, for a quick answer:
-k "contract or verdict"; the cases of fla need fla-core on the path, and one of them Triton's
autotuning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

import contracts
import fla_cases
import oracle
import pytest
import torch
from calls import double, gradients
from contracts import BF, F32
from errors import check
from fla_cases import (
    BF16,
    CHUNK,
    CHUNKED,
    DECODE,
    FLASH_KDA,
    FLASH_KDA_VARLEN,
    NEEDS_FLA,
    RECURRENT,
    SIGMOID,
    VARLEN,
    FlaCase,
)
from support import DEVICE, GPU
from torch import Tensor

from flashkda.integrations import flash_kda, sglang, vllm

pytestmark = GPU

Rows = tuple[Tensor, Tensor, Tensor]
state_dtypes = pytest.mark.parametrize("state_dtype", [F32, BF], ids=str)
gates = pytest.mark.parametrize("gate", ["slow", "softplus"])


def _sync_debug(mode: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def without_waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; reading anything back from the GPU inside it is an error."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if DEVICE == "cuda":
            _sync_debug("error")
        try:
            return function(*args, **kwargs)
        finally:
            if DEVICE == "cuda":
                _sync_debug("default")

    return call


# --- contracts -----------------------------------------------------------------------------------


@state_dtypes
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "nostate"])
def test_contract_of_flash_kda(state_dtype: torch.dtype, with_state: bool) -> None:
    fwd = without_waiting(flash_kda.fwd)
    contracts.check_flash_kda(fwd, DEVICE, state_dtype=state_dtype, with_state=with_state)


def test_contract_of_flash_kda_with_a_bound_of_zero() -> None:
    contracts.check_flash_kda(flash_kda.fwd, DEVICE, lower_bound=0.0)


@state_dtypes
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "nostate"])
def test_contract_of_vllms_operator(state_dtype: torch.dtype, with_state: bool) -> None:
    vllm.register("flashkda_test")
    contracts.check_vllm_fwd(
        without_waiting(torch.ops.flashkda_test.fwd), vllm.get_workspace_size, DEVICE,
        state_dtype=state_dtype, with_state=with_state,
    )  # fmt: skip


def test_contract_of_vllms_operator_with_an_old_checkpoint() -> None:
    contracts.check_vllm_fwd(
        without_waiting(vllm.fwd), vllm.get_workspace_size, DEVICE,
        table=contracts.VLLM_OLD_CHECKPOINT, offsets=None,
    )  # fmt: skip


@gates
@state_dtypes
def test_contract_of_vllms_prefill(gate: str, state_dtype: torch.dtype) -> None:
    prefill = without_waiting(vllm.prefill)
    contracts.check_vllm_prefill(prefill, DEVICE, gate=gate, state_dtype=state_dtype)


def vllm_decode(
    rows: Rows, call: contracts.Call, pool: Tensor, index: Tensor, out: Tensor
) -> Tensor:
    return vllm.packed_decode(
        *rows, call["A_log"], call["dt_bias"], call["lower_bound"], initial_state=pool,
        state_indices=index, out=out,
    )  # fmt: skip


def sglang_decode(
    rows: Rows, call: contracts.Call, pool: Tensor, index: Tensor, out: Tensor
) -> Tensor:
    return sglang.decode(
        *rows, A_log=call["A_log"], dt_bias=call["dt_bias"], scale=128**-0.5,
        initial_state=pool, out=out, ssm_state_indices=index, lower_bound=call["lower_bound"],
    )  # fmt: skip


@gates
@state_dtypes
@pytest.mark.parametrize("out_shape", [(6, 1), (1, 6), (6,)], ids=str)
def test_contract_of_vllms_decode(
    gate: str, state_dtype: torch.dtype, out_shape: tuple[int, ...]
) -> None:
    contracts.check_packed_decode(
        without_waiting(vllm_decode), DEVICE, table=contracts.VLLM, pad=0, out_shape=out_shape,
        gate=gate, state_dtype=state_dtype,
    )  # fmt: skip


@gates
def test_contract_of_vllms_drafts(gate: str) -> None:
    contracts.check_vllm_speculative(without_waiting(vllm.speculative_decode), DEVICE, gate=gate)


@gates
@state_dtypes
@pytest.mark.parametrize("tracking", ["none", "chunk", "plan"])
def test_contract_of_sglangs_extend(gate: str, state_dtype: torch.dtype, tracking: str) -> None:
    contracts.check_sglang_extend(
        without_waiting(sglang.extend), DEVICE,
        tracking=tracking, gate=gate, state_dtype=state_dtype,
    )  # fmt: skip


@gates
@state_dtypes
def test_contract_of_sglangs_decode(gate: str, state_dtype: torch.dtype) -> None:
    contracts.check_packed_decode(
        without_waiting(sglang_decode), DEVICE, table=contracts.SGLANG, pad=-1, gate=gate,
        state_dtype=state_dtype,
    )  # fmt: skip


@state_dtypes
def test_contract_of_sglangs_verify(state_dtype: torch.dtype) -> None:
    contracts.check_sglang_verify(without_waiting(sglang.verify), DEVICE, state_dtype=state_dtype)


@pytest.mark.parametrize("decode", [vllm_decode, sglang_decode])
def test_contract_of_decode_in_a_graph(decode: Callable[..., Tensor]) -> None:
    """Captured once, replayed on another batch: equal to the call without a graph."""
    table = contracts.for_tokens(contracts.SGLANG, 4)
    call = contracts.make(table, DEVICE)
    rows = contracts.packed(call)
    pool = contracts.states(6, contracts.SGLANG_HEADS, DEVICE, F32)
    start = pool.clone()
    index = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=DEVICE)
    out = torch.empty(4, 1, contracts.SGLANG_HEADS, contracts.D, dtype=BF, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decode(rows, call, pool, index, out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(rows, call, pool, index, out)
    index.copy_(torch.tensor([5, 1, 3, 2]))
    rows[0].copy_(rows[0].flip(0))
    pool.copy_(start)
    graph.replay()
    want_pool, want = start.clone(), torch.empty_like(out)
    decode(rows, call, want_pool, index, want)
    assert torch.equal(out, want)
    assert torch.equal(pool, want_pool)


@pytest.mark.parametrize("phase", ["extend", "prefill"])
def test_contract_of_memory(phase: str) -> None:
    """A pool of 128 states, 50 MB, is not copied, nor is a state gathered or scattered."""
    call = contracts.make(contracts.SGLANG, DEVICE)
    pool = torch.zeros(128, contracts.SGLANG_HEADS, contracts.D, contracts.D, device=DEVICE)
    index = torch.tensor([4, 2, 9, 7], dtype=torch.int32, device=DEVICE)
    starts = contracts.boundaries(contracts.LENGTHS, DEVICE, torch.int32)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if phase == "extend":
        sglang.extend(**call, ssm_states=pool, cache_indices=index, query_start_loc=starts)
    else:
        vllm.prefill(**call, pool=pool, state_indices=index, cu_seqlens=starts)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < 8 * 2**20, f"{extra} bytes"


# --- fla -----------------------------------------------------------------------------------------


@pytest.fixture
def enabled() -> Iterator[ModuleType]:
    with fla_cases.enabled() as door:
        yield door


SERVED = (
    *FLASH_KDA,
    *FLASH_KDA_VARLEN,
    *(x.forward_only(x.dtype) for x in SIGMOID if x.dtype == BF16),
    *(x.forward_only(BF16) for x in (*CHUNK, *VARLEN) if x.D == 128),
)
"""Their cases that the kernels serve, and the forward pass of those that only differ in dtype."""


@NEEDS_FLA
@pytest.mark.parametrize("x", SERVED, ids=fla_cases.ids)
def test_chunk_kda_of_fla(enabled: ModuleType, x: FlaCase) -> None:
    call = fla_cases.make(x, DEVICE)
    with fla_cases.served(enabled, "chunk_kda", 1), torch.no_grad():
        got = fla_cases.fla_kda().chunk_kda(**call)
    fla_cases.check_outputs(x, got, fla_cases.want(call))


@NEEDS_FLA
@pytest.mark.parametrize("x", [x for x in DECODE if not x.declined], ids=fla_cases.ids)
def test_decode_of_fla(enabled: ModuleType, x: FlaCase) -> None:
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    with fla_cases.served(enabled, "fused_recurrent_kda_fwd", 1):
        fla_cases.decode(x, DEVICE, fused_recurrent_kda_fwd)


@NEEDS_FLA
@pytest.mark.parametrize("x", [*CHUNKED, *RECURRENT], ids=fla_cases.ids)
def test_verdict(enabled: ModuleType, x: FlaCase) -> None:
    """All their cases: what only Triton serves, and the reason."""
    call = fla_cases.make(x, DEVICE)
    recurrent = x in RECURRENT
    if x.trains:
        call["q"].requires_grad_()
    if recurrent:
        call["inplace_final_state"] = False
    function = enabled._functions["fused_recurrent_kda_fwd" if recurrent else "chunk_kda"]
    accepted, reason = function.verify(**call)
    assert accepted == (not x.declined), reason
    assert x.declined in (reason or "")


@NEEDS_FLA
@pytest.mark.filterwarnings("ignore")  # what fla and Triton say while they tune
def test_training_is_tritons(enabled: ModuleType) -> None:
    """The smallest of their training cases goes through to Triton, gradients too."""
    x = CHUNK[0]
    call = fla_cases.make(x, DEVICE)
    limits = fla_cases.limits_of_gradients(x)
    with fla_cases.served(enabled, "chunk_kda", 0):
        grads = gradients(fla_cases.fla_kda().chunk_kda, call, list(limits))
    reference = {name: y for name, y in call.items() if name in fla_cases.ORACLE}
    want = gradients(lambda **y: oracle.kda(**y), double(reference), list(limits))
    check(grads, want, limits)
    assert any(fla_cases.GRAD in reason for reason in enabled.status()["chunk_kda"].declined)


@NEEDS_FLA
def test_flas_own_backend_runs_on_the_shim() -> None:
    fla_cases.run_through_the_shim(DEVICE)
