"""The operators ``torch.ops.flashkda.*``: schemas, the PyTorch path for them, autograd.

One operator is opaque to ``torch.compile`` and ``torch.export``. ``chunk`` is functional and
differentiable; ``chunk_out``, ``chunk_pool_out`` (states in a pool, checkpoints) and
``recurrent_out`` write into tensors of the caller and are not.
Schemas are defined here, so that they exist whatever the build holds; the PyTorch path is their
implementation for every device. The ``*_out`` take the CUDA kernels where they serve the call.
The operators ``*_native`` and ``*_native_out`` are the kernels alone: the native library attaches
their implementation, for CUDA, and it wants the layouts that ``_native`` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from . import (
    _backend,
    _dispatch,
    _native,
    _torch,
    _torch_checkpoints,
    _torch_pool,
    _torch_recurrent,
    _torch_slots,
)
from ._torch_plan import sequences_of

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias"
_OPTIONS = (
    "float scale, float? lower_bound, bool gate_in_kernel, bool l2norm, bool beta_sigmoid, "
    "bool neg_eigval, bool state_v_first"
)

_library = torch.library.Library("flashkda", "DEF")
_library.define(
    f"chunk({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, bool output_final_state, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_library.define(
    f"chunk_backward({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, Tensor grad_out, "
    f"Tensor? grad_final_state, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"chunk_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, Tensor(a!) out, "
    f"Tensor(b!)? final_state, {_OPTIONS}, bool gate_is_bounded, str? backend) -> ()"
)
_library.define(
    f"chunk_native({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, "
    "int flags, float scale, float lower_bound) -> (Tensor?, Tensor?)"
)
_library.define(
    f"chunk_native_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, Tensor(a!) out, "
    f"Tensor(b!)? final_state, {_OPTIONS}, bool gate_is_bounded, int? max_seqlen=None) -> bool"
)
_library.define(
    f"recurrent_native({_TENSORS}, Tensor(a!)? initial_state, Tensor? cu_seqlens, "
    "Tensor? ssm_state_indices, Tensor? final_state_indices, Tensor? num_accepted_tokens, "
    "int flags, float scale, float lower_bound, int pad_slot_id) -> (Tensor?, Tensor?)"
)
_library.define(
    f"recurrent_native_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? ssm_state_indices, Tensor? final_state_indices, Tensor? num_accepted_tokens, "
    "int? pad_slot_id, bool in_place, bool clear_padding, Tensor(a!) out, "
    f"Tensor(b!)? final_state, {_OPTIONS}, bool state_is_ready) -> bool"
)
_library.define(
    f"chunk_pool_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? ssm_state_indices, Tensor? final_state_indices, int? pad_slot_id, bool in_place, "
    "Tensor(a!) out, Tensor(b!)? final_state, Tensor(c!)? checkpoint_states, "
    "Tensor? checkpoint_offsets, int checkpoint_every, Tensor? checkpoint_indices, "
    f"Tensor(d!)? workspace, {_OPTIONS}, bool gate_is_bounded, int? max_seqlen, str? backend) -> ()"
)
_library.define(
    f"chunk_pool_native_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? ssm_state_indices, Tensor? final_state_indices, int? pad_slot_id, bool in_place, "
    "bool clear_padding, Tensor(a!) out, Tensor(b!)? final_state, Tensor(c!)? checkpoint_states, "
    "Tensor? checkpoint_offsets, int checkpoint_every, Tensor? checkpoint_indices, "
    f"Tensor(d!)? workspace, {_OPTIONS}, bool gate_is_bounded, int? max_seqlen) -> bool"
)
_library.define(
    f"recurrent_out({_TENSORS}, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? ssm_state_indices, Tensor? final_state_indices, Tensor? num_accepted_tokens, "
    f"int? pad_slot_id, bool in_place, Tensor(a!) out, Tensor(b!)? final_state, {_OPTIONS}, "
    "bool state_is_ready, str? backend) -> ()"
)


def num_sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def empty_final_state(
    q: Tensor, v: Tensor, initial_state: Tensor | None, num_states: int, state_v_first: bool
) -> Tensor:
    """``[N, HV, K, V]`` or ``[N, HV, V, K]`` in the dtype that a final state has."""
    if initial_state is not None:
        dtype = initial_state.dtype
    else:
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    dims = (v.shape[3], q.shape[3]) if state_v_first else (q.shape[3], v.shape[3])
    return v.new_empty((num_states, v.shape[2], *dims), dtype=dtype)


def new_out(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Zeros where rows past the last sequence may be part of the result."""
    if cu_seqlens is None:
        return torch.empty_like(v, memory_format=torch.contiguous_format)
    return torch.zeros_like(v, memory_format=torch.contiguous_format)


# --- implementations: the PyTorch path -----------------------------------------------------------


def _write_rows(out: Tensor, write: Callable[[Tensor], None]) -> None:
    """Calls ``write`` with ``out`` as ``[B * T, HV, V]``, a copy if no view has that shape."""
    rows = out.flatten(0, 1)
    write(rows)
    if out.numel() and rows.data_ptr() != out.data_ptr():
        out.copy_(rows.view_as(out))


def _chunk_out(
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
    (*numbers, gate_is_bounded, backend) = options
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    if backend != "torch" and q.is_cuda:
        chosen = _dispatch.select_chunk(tensors, cu_seqlens, final_state, backend)
        if chosen.name == "cuda":
            _native.chunk_out(*tensors, cu_seqlens, out, final_state, *numbers, gate_is_bounded)
            return
        _backend.warn_of_fallback(chosen, q.device, backend)
    inputs = _torch.make_inputs(q, k, v, g, beta, A_log, dt_bias, _torch.Options(*numbers))
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    _write_rows(
        out, lambda rows: _torch.forward(inputs, sequences, initial_state, rows, final_state)
    )


def _chunk_pool_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    final_state_indices: Tensor | None,
    pad_slot_id: int | None,
    in_place: bool,
    out: Tensor,
    final_state: Tensor | None,
    checkpoint_states: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_every: int,
    checkpoint_indices: Tensor | None,
    workspace: Tensor | None,
    *options: Any,
) -> None:
    (*numbers, gate_is_bounded, max_seqlen, backend) = options
    if backend != "torch" and q.is_cuda:
        tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
        pool = (ssm_state_indices, final_state_indices, pad_slot_id, in_place)
        chosen = _dispatch.select_chunk_pool(
            tensors, cu_seqlens, pool, final_state, checkpoint_states, backend
        )
        if chosen.name == "cuda":
            _native.chunk_pool_out(
                tensors, cu_seqlens, pool, out, final_state,
                (checkpoint_states, checkpoint_offsets, checkpoint_every, checkpoint_indices),
                workspace, *numbers, gate_is_bounded, max_seqlen,
            )  # fmt: skip
            return
        _backend.warn_of_fallback(chosen, q.device, backend)
    inputs = _torch.make_inputs(q, k, v, g, beta, A_log, dt_bias, _torch.Options(*numbers))
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    state_in = final_state if in_place else initial_state
    # All tables are read and checked before anything is written.
    slots = checkpoints = None
    if ssm_state_indices is not None:
        assert state_in is not None
        slots = _torch_slots.slots_of(
            ssm_state_indices, final_state_indices, None, pad_slot_id, state_in.shape[0],
            sequences, in_place=in_place,
        )  # fmt: skip
    if checkpoint_states is not None:
        checkpoints = _torch_checkpoints.checkpoints_of(
            checkpoint_states, checkpoint_offsets, checkpoint_every, checkpoint_indices, sequences,
            _torch_pool.padding_of(slots, sequences),
        )  # fmt: skip
        _torch_pool.check_apart(checkpoints, sequences, state_in, slots, final_state)
    _write_rows(
        out,
        lambda rows: _torch_pool.forward(
            inputs, sequences, state_in, slots, rows, final_state, checkpoints
        ),
    )


def _chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    num_states = num_sequences(q, cu_seqlens) if output_final_state else 0
    final_state = empty_final_state(
        q, v, initial_state, num_states, _torch.Options(*options).state_v_first
    )
    out = new_out(v, cu_seqlens)
    _chunk_out(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, out,
        final_state if output_final_state else None, *options, False, "torch",
    )  # fmt: skip
    return out, final_state


def _chunk_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    grad_out: Tensor,
    grad_final_state: Tensor | None,
    *options: Any,
) -> tuple[Tensor, ...]:
    inputs = _torch.make_inputs(q, k, v, g, beta, A_log, dt_bias, _torch.Options(*options))
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    results = _empty_gradients(q, k, v, g, beta, A_log, dt_bias, initial_state)
    grad_q, grad_k, grad_v, grad_g, grad_beta = (x.zero_().flatten(0, 1) for x in results[:5])
    # Sums over all tokens: accumulated in the working precision, rounded once.
    sums = [
        torch.zeros(x.shape, dtype=inputs.dtype, device=x.device) if x.numel() else None
        for x in results[5:7]
    ]
    _torch.backward(
        inputs,
        sequences,
        initial_state,
        grad_out.flatten(0, 1),
        grad_final_state,
        _torch.Gradients(
            grad_q,
            grad_k,
            grad_v,
            grad_g,
            grad_beta,
            sums[0],
            None if sums[1] is None else sums[1].view(v.shape[2], q.shape[3]),
            None if initial_state is None else results[7],
        ),
    )
    for result, total in zip(results[5:7], sums, strict=True):
        if total is not None:
            result.copy_(total)
    return results


def _empty_gradients(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """One per tensor; of no elements where there is no tensor."""
    like = next(x for x in tensors if x is not None)
    return tuple(
        like.new_empty(0)
        if x is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in tensors
    )


def _recurrent_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    final_state_indices: Tensor | None,
    num_accepted_tokens: Tensor | None,
    pad_slot_id: int | None,
    in_place: bool,
    out: Tensor,
    final_state: Tensor | None,
    *options: Any,
) -> None:
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    (*numbers, state_is_ready, backend) = options
    if backend != "torch" and q.is_cuda:
        chosen = _dispatch.select_recurrent(
            tensors, cu_seqlens, ssm_state_indices, in_place, final_state, backend
        )
        if chosen.name == "cuda":
            slots_given = (ssm_state_indices, final_state_indices, num_accepted_tokens, pad_slot_id)
            _native.recurrent_out(
                tensors,
                cu_seqlens,
                slots_given,
                in_place,
                out,
                final_state,
                *numbers,
                state_is_ready,
            )
            return
        _backend.warn_of_fallback(chosen, q.device, backend)
    inputs = _torch.make_inputs(q, k, v, g, beta, A_log, dt_bias, _torch.Options(*numbers))
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    state_in = final_state if in_place else initial_state
    slots = None
    if ssm_state_indices is not None:
        assert state_in is not None
        slots = _torch_slots.slots_of(
            ssm_state_indices, final_state_indices, num_accepted_tokens, pad_slot_id,
            state_in.shape[0], sequences, in_place=in_place,
        )  # fmt: skip
    _write_rows(
        out,
        lambda rows: _torch_recurrent.forward(
            inputs, sequences, state_in, slots, rows, final_state
        ),
    )


# --- shapes without data -------------------------------------------------------------------------


def _chunk_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None,
    dt_bias: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    output_final_state: bool, *options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_states = num_sequences(q, cu_seqlens) if output_final_state else 0
    state_v_first = _torch.Options(*options).state_v_first
    return new_out(v, cu_seqlens), empty_final_state(q, v, initial_state, num_states, state_v_first)


def _chunk_backward_fake(*args: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(*args[:8])


def _writes_only(*args: Any) -> None:
    """Fake of an operator that only writes into its arguments."""


def _native_fake(*args: Any) -> tuple[Tensor, Tensor | None]:
    """Fake of ``chunk_native`` and ``recurrent_native``: flags are the first integer."""
    q, v, initial_state, cu_seqlens = args[0], args[2], args[7], args[8]
    flags = _native.CallFlag(next(x for x in args if isinstance(x, int)))
    out = new_out(v, cu_seqlens)
    if flags.IN_PLACE in flags or flags.OUTPUT_FINAL_STATE not in flags:
        return out, None
    num_states, v_first = num_sequences(q, cu_seqlens), flags.STATE_V_FIRST in flags
    return out, empty_final_state(q, v, initial_state, num_states, v_first)


def _serves(*args: Any) -> bool:
    """Fake of the kernels."""
    return True


# --- autograd ------------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, output_final_state = inputs[:10]
    ctx.save_for_backward(*tensors)
    ctx.output_final_state = output_final_state
    ctx.options = inputs[10:]


def _autograd_backward(ctx: Any, grad_out: Tensor, grad_final_state: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    grads = torch.ops.flashkda.chunk_backward(
        *tensors, grad_out, grad_final_state if ctx.output_final_state else None, *ctx.options
    )
    given = [
        grad if needed and tensor is not None else None
        for tensor, grad, needed in zip(tensors, grads, ctx.needs_input_grad, strict=False)
    ]
    return (*given, None, None, *(None for _ in ctx.options))  # cu_seqlens, output_final_state


def _twice(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    raise NotImplementedError("chunk_kda: it can be differentiated once, not twice")


def _isolated(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps autograd and autocast, which end at the operator, out of its implementation."""

    @wraps(implementation)
    def run(q: Tensor, *args: Any) -> Any:
        device_type = q.device.type
        if not torch.amp.is_autocast_available(device_type):
            with torch.no_grad():
                return implementation(q, *args)
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            return implementation(q, *args)

    return run


def _register() -> None:
    implementations: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "chunk": (_chunk, _chunk_fake),
        "chunk_backward": (_chunk_backward, _chunk_backward_fake),
        "chunk_out": (_chunk_out, _writes_only),
        "chunk_pool_out": (_chunk_pool_out, _writes_only),
        "recurrent_out": (_recurrent_out, _writes_only),
    }
    for name, (implementation, fake) in implementations.items():
        _library.impl(name, _isolated(implementation), "CompositeExplicitAutograd")
        torch.library.register_fake(f"flashkda::{name}", fake, lib=_library)
    for name in ("chunk_native", "recurrent_native"):
        torch.library.register_fake(f"flashkda::{name}", _native_fake, lib=_library)
    for name in ("chunk_native_out", "chunk_pool_native_out", "recurrent_native_out"):
        torch.library.register_fake(f"flashkda::{name}", _serves, lib=_library)
    torch.library.register_autograd(
        "flashkda::chunk", _autograd_backward, setup_context=_setup_context, lib=_library
    )
    torch.library.register_autograd("flashkda::chunk_backward", _twice, lib=_library)


_register()
