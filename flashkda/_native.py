"""The CUDA kernels: their library, what they serve, and the call.

Nothing here raises at import: a library that is missing or does not load is a reason, which
:func:`flashkda.backend` gives.
"""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _debug, _diagnosis

_ABI = 3  # csrc/flashkda.h: flashkda_abi()
HEAD_DIM = 128  # K and V
MAX_VALUE_HEADS = 65535  # of a CUDA grid
ALIGNMENT = 16  # bytes, of what TMA reads and writes
_LONGEST = 2**30  # no sequence of a call has more tokens: a multiple of 16 that an int32 holds
_GATE_DTYPES = (torch.bfloat16, torch.float32)

NOTHING_TO_COMPUTE = "the call has no tokens or no sequences, so there is nothing to compute"
DECLINED = "flashkda: the kernels declined a call that was fitted to them"
NO_BACKWARD = "the CUDA kernels have no backward pass yet, and an input requires grad"


# --- the library ---------------------------------------------------------------------------------


def _load() -> tuple[ctypes.CDLL | None, str]:
    """The C library, with the operator attached to torch; or None and the reason."""
    folder = Path(__file__).parent
    kernels, binding = (folder / f"libflashkda_{x}.so" for x in ("cuda", "torch"))
    if not binding.exists() and not kernels.exists():
        return None, _diagnosis.no_library()
    reason = _diagnosis.old_torch() or _diagnosis.bad_file(kernels) or _diagnosis.bad_file(binding)
    if reason is not None:
        return None, reason
    try:
        # The binding first: it leads to the kernels, which ctypes then finds in the process.
        torch.ops.load_library(binding)
        library = ctypes.CDLL(str(kernels))
        abi = library.flashkda_abi()
        library.flashkda_build_info.restype = ctypes.c_char_p
        library.flashkda_probe.restype = ctypes.c_char_p
    except (OSError, RuntimeError, AttributeError) as error:
        return None, _diagnosis.failure(error.__cause__ or error)
    if abi != _ABI:
        return None, (
            f"the library of the CUDA kernels belongs to another version of flashkda (its ABI is "
            f"{abi}, this package needs {_ABI}): {_diagnosis.REINSTALL}"
        )
    return library, ""


_library, _reason = _load()


def build_info() -> dict[str, str] | None:
    """What the kernels were built with; None without them."""
    if _library is None:
        return None
    names = ("version", "architectures", "cudart", "nvcc")
    return dict(zip(names, _library.flashkda_build_info().decode().split(";"), strict=True))


_variants: dict[int, str] = {}


def probe(device_index: int) -> tuple[str | None, str]:
    """The variant of the kernels that serves a CUDA device; or None and the reason, a sentence."""
    variant = _variants.get(device_index)
    if variant is not None:
        return variant, ""
    if _library is None:
        return None, _reason
    if not torch.cuda.is_available():
        return None, _diagnosis.no_device()
    message = ctypes.create_string_buffer(512)
    found = _library.flashkda_probe(device_index, message, ctypes.c_size_t(len(message)))
    if found is None:
        return None, f"the CUDA kernels can't serve cuda:{device_index}: {message.value.decode()}"
    # Failures are asked again: a driver may yet come up.
    _variants[device_index] = found.decode()
    return _variants[device_index], ""


# --- what the kernels serve ----------------------------------------------------------------------


def refusal(
    q: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    states: tuple[Tensor | None, ...],
    needs_grad: bool,
) -> str | None:
    """Why the kernels can't serve a valid call of ``chunk_kda`` on a device that they serve.

    A pure function of metadata; None if they can.
    """
    if needs_grad:
        return NO_BACKWARD
    if q.dtype != torch.bfloat16:
        return f"the CUDA kernels take bfloat16 q, k and v, not {_name(q.dtype)}"
    for name, x in (("g", g), ("beta", beta)):
        if x.dtype not in _GATE_DTYPES:
            return f"the CUDA kernels take {name} in bfloat16 or float32, not {_name(x.dtype)}"
    if q.shape[3] != HEAD_DIM or v.shape[3] != HEAD_DIM:
        return (
            f"the CUDA kernels take head dimensions K = V = {HEAD_DIM}, not K = {q.shape[3]}, "
            f"V = {v.shape[3]}"
        )
    if v.shape[2] > MAX_VALUE_HEADS:
        return f"the CUDA kernels take up to {MAX_VALUE_HEADS} value heads, not {v.shape[2]}"
    for state in states:
        if state is not None and state.dtype not in _GATE_DTYPES:
            return f"the CUDA kernels take states in bfloat16 or float32, not {_name(state.dtype)}"
    if q.shape[0] * q.shape[1] == 0 or (cu_seqlens is not None and cu_seqlens.shape[0] < 2):
        return NOTHING_TO_COMPUTE
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the call ------------------------------------------------------------------------------------


def fits(x: Tensor) -> bool:
    """Whether TMA can read ``[B, T, heads, 128]`` as rows of tokens where it lies."""
    if x.data_ptr() % ALIGNMENT != 0:
        return False
    if x.is_contiguous():
        return True
    batch, tokens, heads, dim = x.shape
    by_batch, by_token, by_head, by_element = x.stride()
    if by_element != 1 or (heads > 1 and by_head != dim):
        return False
    row = by_token if tokens > 1 else by_batch  # a dimension of size 1 has no stride
    if batch > 1 and tokens > 1 and by_batch != tokens * by_token:
        return False
    # Rows that overlap are left to a copy.
    return (batch * tokens == 1 or row >= heads * dim) and row * x.itemsize % ALIGNMENT == 0


def _fit(x: Tensor) -> Tensor:
    # Not .contiguous(): that keeps a dense tensor at an unaligned address.
    return x if fits(x) else x.clone(memory_format=torch.contiguous_format)


def _fit_beta(beta: Tensor) -> Tensor:
    """``[B, T, HV]`` with any strides, as long as the rows of a batch follow each other."""
    if beta.shape[0] == 1 or beta.is_contiguous():
        return beta
    if beta.shape[1] == 1 or beta.stride(0) == beta.shape[1] * beta.stride(1):
        return beta
    return beta.contiguous()


def _parameter(x: Tensor | None) -> Tensor | None:
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):
        return x
    return x.to(torch.float32).contiguous()


def _dense(x: Tensor | None) -> Tensor | None:
    if x is None or (x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


class CallFlag(enum.IntFlag):
    """What ``chunk_native`` and ``recurrent_native`` are asked for, in one argument.

    csrc/torch/call.h has the same.
    """

    GATE_IN_KERNEL = 1 << 0
    L2NORM = 1 << 1
    BETA_SIGMOID = 1 << 2
    NEG_EIGVAL = 1 << 3
    STATE_V_FIRST = 1 << 4
    HAS_LOWER_BOUND = 1 << 5
    OUTPUT_FINAL_STATE = 1 << 6
    GATE_IS_BOUNDED = 1 << 7
    HAS_PADS = 1 << 8
    IN_PLACE = 1 << 9
    STATE_IS_READY = 1 << 10


def _pack(options: tuple[Any, ...], *more: bool) -> tuple[int, float, float]:
    """``options`` are scale to state_v_first, ``more`` the flags from OUTPUT_FINAL_STATE on."""
    scale, lower_bound, *switches = options
    on = (*switches, lower_bound is not None, *more)
    return sum(1 << bit for bit, is_on in enumerate(on) if is_on), scale, lower_bound or 0.0


def chunk_options(
    options: tuple[Any, ...], output_final_state: bool, gate_is_bounded: bool
) -> tuple[int, float, float]:
    """What ``chunk_native`` takes after its tensors. ``options``: scale to state_v_first."""
    return _pack(options, output_final_state, gate_is_bounded)


def recurrent_options(
    options: tuple[Any, ...],
    output_final_state: bool,
    pad_slot_id: int | None,
    in_place: bool,
    state_is_ready: bool,
) -> tuple[int, float, float, int]:
    """What ``recurrent_native`` takes after its tensors. ``options``: scale to state_v_first."""
    has_pads = pad_slot_id is not None
    packed = _pack(options, output_final_state, False, has_pads, in_place, state_is_ready)
    return *packed, pad_slot_id or 0


def operator(*args: Any) -> bool:
    """The kernels on tensors as they are; False, and nothing is done, if they can't take them."""
    served: bool = torch.ops.flashkda.chunk_native_out.default(*args)
    return served


class _Target(NamedTuple):
    """A tensor that the kernels write: itself, or a copy in a layout that they can take."""

    wanted: Tensor | None
    fitted: Tensor | None

    def deliver(self) -> None:
        if self.wanted is not None and self.fitted is not self.wanted:
            assert self.fitted is not None
            self.wanted.copy_(self.fitted)


def _deliver(served: bool, *targets: _Target) -> None:
    if not served:
        raise RuntimeError(DECLINED)
    for target in targets:
        target.deliver()


def _target_out(out: Tensor, cu_seqlens: Tensor | None) -> _Target:
    if fits(out):
        return _Target(out, out)
    fitted = torch.empty_like(out, memory_format=torch.contiguous_format)
    if cu_seqlens is not None:
        fitted.copy_(out)  # rows past the last sequence stay as they are
    return _Target(out, fitted)


def _fit_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *parameters: Tensor | None
) -> tuple[Tensor | None, ...]:
    return _fit(q), _fit(k), _fit(v), _fit(g), _fit_beta(beta), *map(_parameter, parameters)


def chunk_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    *options: Any,
) -> None:
    """The kernels on a call that they serve; a tensor whose layout TMA can't take is copied."""
    if _debug.enabled():
        _debug.check_tables(q, cu_seqlens)
    outputs = _target_out(out, cu_seqlens)
    states = _Target(final_state, _dense(final_state))
    if initial_state is final_state:
        initial_state = states.fitted
    served = operator(
        *_fit_inputs(q, k, v, g, beta, A_log, dt_bias),
        _dense(initial_state),
        _dense(cu_seqlens),
        outputs.fitted,
        states.fitted,
        *options,
    )
    _deliver(served, outputs, states)


def refuses_checkpoints(states: Tensor) -> str | None:
    """Why the kernels can't write checkpoints to ``states``."""
    if states.dtype not in _GATE_DTYPES:
        return f"the CUDA kernels take states in bfloat16 or float32, not {_name(states.dtype)}"
    return refuses_pool(states)


def chunk_pool_out(
    tensors: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    pool: tuple[Any, ...],
    out: Tensor,
    final_state: Tensor | None,
    checkpoints: tuple[Any, ...],
    workspace: Tensor | None,
    *options: Any,
) -> None:
    """The chunked kernels on a call with a pool, checkpoints or a workspace, which they serve.

    ``tensors`` are q to initial_state, ``pool`` ssm_state_indices to in_place, ``checkpoints``
    checkpoint_states to checkpoint_indices. A tensor whose layout TMA can't take is copied.
    """
    *inputs, initial_state = tensors
    indices, final_indices, pad_slot_id, in_place = pool
    has_pool = indices is not None
    if _debug.enabled():
        source = final_state if in_place else initial_state
        tables = (indices, final_indices, None, pad_slot_id)
        _debug.check_tables(
            inputs[0], cu_seqlens, tables, source, in_place, checkpoints, final_state
        )
    kept, offsets, every, kept_indices = checkpoints
    table = kept_indices if offsets is None else offsets
    if table is not None and table.numel() == 0:
        kept = offsets = kept_indices = None
    outputs = _target_out(out, cu_seqlens)
    states = _Target(final_state, final_state if has_pool and in_place else _dense(final_state))
    served = torch.ops.flashkda.chunk_pool_native_out.default(
        *_fit_inputs(*inputs),
        initial_state if has_pool else _dense(initial_state),
        _dense(cu_seqlens),
        indices,
        final_indices,
        pad_slot_id,
        in_place,
        False,
        outputs.fitted,
        states.fitted,
        kept,
        offsets,
        min(every, _LONGEST),
        kept_indices,
        workspace,
        *options,
    )
    _deliver(served, outputs, states)


def recurrent_operator(*args: Any) -> bool:
    """The decode kernel on tensors as they are; False, and nothing is done, if it can't."""
    served: bool = torch.ops.flashkda.recurrent_native_out.default(*args)
    return served


def refuses_pool(pool: Tensor) -> str | None:
    """Why the kernels can't work in a state pool where it lies; pools are not copied."""
    inner = pool[0].is_contiguous() if pool.shape[0] else True
    step = pool.stride(0) if pool.shape[0] > 1 else 0  # one slot has no next
    if inner and pool.data_ptr() % ALIGNMENT == step * pool.itemsize % ALIGNMENT == 0:
        return None
    return (
        f"the CUDA kernels take a pool of dense slots that start at multiples of {ALIGNMENT} "
        f"bytes, not strides {tuple(pool.stride())} at an address of {pool.data_ptr() % ALIGNMENT} "
        f"modulo {ALIGNMENT}"
    )


def recurrent_out(
    tensors: tuple[Any, ...],
    cu_seqlens: Tensor | None,
    slots: tuple[Any, ...],
    in_place: bool,
    out: Tensor,
    final_state: Tensor | None,
    *options: Any,
) -> None:
    """The decode kernel on a call that it serves; a tensor whose layout it can't take is copied.

    ``tensors`` are q to initial_state, ``slots`` ssm_state_indices to pad_slot_id.
    """
    *inputs, initial_state = tensors
    has_pool = slots[0] is not None
    if _debug.enabled():
        source = final_state if in_place else initial_state
        _debug.check_tables(inputs[0], cu_seqlens, slots, source, in_place)
    outputs = _target_out(out, cu_seqlens)
    in_pool = has_pool and in_place
    states = _Target(final_state, final_state if in_pool else _dense(final_state))
    served = recurrent_operator(
        *_fit_inputs(*inputs),
        initial_state if has_pool else _dense(initial_state),
        _dense(cu_seqlens),
        *slots,
        in_place,
        False,
        outputs.fitted,
        states.fitted,
        *options,
    )
    _deliver(served, outputs, states)
