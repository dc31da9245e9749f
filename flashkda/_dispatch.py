"""From a validated call to the implementation that runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _backend, _native
from ._validate import requires_grad

# q, k, v, g, beta, A_log, dt_bias, initial_state
Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def select_chunk(
    tensors: Tensors, cu_seqlens: Tensor | None, final_state: Tensor | None, forced: str | None
) -> _backend.Backend:
    """The implementation that serves a call. Looks at metadata only."""
    q, _, v, g, beta, _, _, initial_state = tensors

    def refusal() -> str | None:
        states = (initial_state, final_state)
        return _native.refusal(q, v, g, beta, cu_seqlens, states, requires_grad(*tensors))

    return _backend.select(q.device, forced, refusal)


def select_recurrent(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    ssm_state_indices: Tensor | None,
    in_place: bool,
    final_state: Tensor | None,
    forced: str | None,
) -> _backend.Backend:
    """The implementation that serves a call token by token. Looks at metadata only."""
    q, _, v, g, beta, _, _, initial_state = tensors

    def refusal() -> str | None:
        reason = _native.refusal(q, v, g, beta, cu_seqlens, (initial_state, final_state), False)
        pool = final_state if in_place else initial_state
        if reason is None and ssm_state_indices is not None and pool is not None:
            reason = _native.refuses_pool(pool)
        return reason

    return _backend.select(q.device, forced, refusal)


def recurrent_out(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    slots: tuple[Tensor | None, Tensor | None, Tensor | None, int | None],
    in_place: bool,
    out: Tensor,
    final_state: Tensor | None,
    options: tuple[Any, ...],
    state_is_ready: bool,
    forced: str | None,
) -> bool:
    """Runs the call token by token; whether the kernel did it here and now.

    ``slots`` are ssm_state_indices, final_state_indices, num_accepted_tokens, pad_slot_id.
    """
    if _is_traced(tensors[0]):
        _backend.check_forced(forced)
        backend = forced
    else:
        chosen = select_recurrent(tensors, cu_seqlens, slots[0], in_place, final_state, forced)
        backend = chosen.name
        if backend == "cuda":
            _native.recurrent_out(
                tensors, cu_seqlens, slots, in_place, out, final_state, *options, state_is_ready
            )
            return True
        _backend.warn_of_fallback(chosen, tensors[0].device, forced, stacklevel=4)
    *inputs, initial_state = tensors
    torch.ops.flashkda.recurrent_out(
        *inputs,
        None if in_place else initial_state,
        cu_seqlens,
        *slots,
        in_place,
        out,
        final_state,
        *options,
        state_is_ready,
        backend,
    )
    return False


def select_chunk_pool(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    pool: tuple[Any, ...],
    final_state: Tensor | None,
    checkpoint_states: Tensor | None,
    forced: str | None,
) -> _backend.Backend:
    """The implementation that serves a call with a pool, checkpoints or a workspace."""
    indices, _, _, in_place = pool
    chosen = select_recurrent(tensors, cu_seqlens, indices, in_place, final_state, forced)
    if chosen.name == "cuda" and checkpoint_states is not None:
        states = checkpoint_states
        return _backend.select(
            tensors[0].device, forced, lambda: _native.refuses_checkpoints(states)
        )
    return chosen


def _is_traced(q: Tensor) -> bool:
    """There is no data yet, perhaps another device later: the operator chooses when it runs."""
    return q.is_cuda and (torch.compiler.is_compiling() or type(q) is not Tensor)


def chunk_with_grad(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    output_final_state: bool,
    options: tuple[Any, ...],
    forced: str | None,
) -> tuple[Tensor, Tensor]:
    """Runs the call so that autograd can follow it: on the PyTorch path."""
    if _is_traced(tensors[0]):
        _backend.check_forced(forced)
        if forced == "cuda":
            raise RuntimeError(f"backend: 'cuda' can't serve this call: {_native.NO_BACKWARD}")
    else:
        chosen = select_chunk(tensors, cu_seqlens, None, forced)
        _backend.warn_of_fallback(chosen, tensors[0].device, forced, stacklevel=4)
    boundaries = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    result: tuple[Tensor, Tensor] = torch.ops.flashkda.chunk(
        *tensors, boundaries, output_final_state, *options
    )
    return result


def chunk_out(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    out: Tensor,
    final_state: Tensor | None,
    options: tuple[Any, ...],
    gate_is_bounded: bool,
    max_seqlen: int | None,
    forced: str | None,
) -> bool:
    """Runs the call without autograd; whether the kernels did it here and now."""
    if _is_traced(tensors[0]):
        _backend.check_forced(forced)
        backend = forced
    else:
        chosen = select_chunk(tensors, cu_seqlens, final_state, forced)
        backend = chosen.name
        if backend == "cuda":
            _native.chunk_out(
                *tensors, cu_seqlens, out, final_state, *options, gate_is_bounded, max_seqlen
            )
            return True
        _backend.warn_of_fallback(chosen, tensors[0].device, forced, stacklevel=4)
    if backend == "torch" and cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu  # saves a wait for the device
    torch.ops.flashkda.chunk_out(
        *tensors, cu_seqlens, out, final_state, *options, gate_is_bounded, backend
    )
    return False


def chunk_pool_out(
    tensors: Tensors,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    pool: tuple[Any, ...],
    out: Tensor,
    final_state: Tensor | None,
    checkpoints: tuple[Any, ...],
    workspace: Tensor | None,
    options: tuple[Any, ...],
    gate_is_bounded: bool,
    max_seqlen: int | None,
    forced: str | None,
) -> None:
    """Runs a call with a state pool, checkpoints or a workspace of the caller.

    ``pool`` are ssm_state_indices to in_place of the operator, ``checkpoints`` checkpoint_states to
    checkpoint_indices; initial_state is one of ``tensors`` also in place.
    """
    if _is_traced(tensors[0]):
        _backend.check_forced(forced)
        backend = forced
    else:
        chosen = select_chunk_pool(tensors, cu_seqlens, pool, final_state, checkpoints[0], forced)
        backend = chosen.name
        if backend == "cuda":
            _native.chunk_pool_out(
                tensors, cu_seqlens, pool, out, final_state, checkpoints, workspace,
                *options, gate_is_bounded, max_seqlen,
            )  # fmt: skip
            return
        _backend.warn_of_fallback(chosen, tensors[0].device, forced, stacklevel=4)
    if backend == "torch" and cu_seqlens_cpu is not None:
        cu_seqlens = cu_seqlens_cpu  # saves a wait for the device
    *inputs, initial_state = tensors
    in_place = pool[-1]
    torch.ops.flashkda.chunk_pool_out(
        *inputs, None if in_place else initial_state, cu_seqlens, *pool, out, final_state,
        *checkpoints, workspace, *options, gate_is_bounded, max_seqlen, backend,
    )  # fmt: skip
