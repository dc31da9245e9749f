"""Combinations of flags that passed the checks before: the next call goes straight to the kernels.

Checking every argument of a call costs more time on the host than two launches. Flags are checked
once for each combination, kept here; the tensors of a call are looked at by the operator itself,
which declines what it can't serve as it is, so that the checks then say what is wrong.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from . import _debug, _native
from ._validate import in_transform

_MAX_REMEMBERED = 4096
_options: dict[Hashable, tuple[Any, ...]] = {}


def _key(flags: tuple[Any, ...]) -> Hashable:
    return flags, tuple(map(type, flags))  # True is not 1


def _is_on_gpu(q: Any) -> bool:
    return type(q) is Tensor and q.is_cuda  # a subclass may have a say in what an operator does


def find(q: Tensor, others: tuple[Any, ...], flags: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The operator's options for known flags, if the call may go straight to the kernels."""
    if torch.compiler.is_compiling() or not _is_on_gpu(q) or _debug.enabled():
        return None
    if in_transform():
        return None
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (q, *others)):
        return None
    try:
        return _options.get(_key(flags))
    except TypeError:  # nothing to hash: the checks will say so
        return None


def remember(flags: tuple[Any, ...], options: tuple[Any, ...]) -> None:
    """Keeps flags that passed all checks in a call that the kernels served."""
    if len(_options) >= _MAX_REMEMBERED:
        _options.clear()
    _options[_key(flags)] = options


def run(tensors: tuple[Any, ...], *options: Any) -> tuple[Tensor, Tensor] | None:
    """Outputs and final states (q to cu_seqlens of the operator); None if it declines the call."""
    try:
        results: tuple[Tensor, Tensor] = torch.ops.flashkda.chunk_native.default(*tensors, *options)
    except (RuntimeError, TypeError):  # the checked way finds the words for it
        return None
    return results


def run_into(out: Any, final_state: Any, tensors: tuple[Any, ...], *options: Any) -> bool:
    """Whether the kernels took the call and wrote its results."""
    if any(getattr(x, "requires_grad", False) for x in (out, final_state)):
        return False
    try:
        return _native.operator(*tensors, out, final_state, *options)
    except (RuntimeError, TypeError):
        return False


def run_recurrent(
    tensors: tuple[Any, ...],
    pad_slot_id: int | None,
    inplace_final_state: bool | None,
    output_final_state: bool,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None] | None:
    """Outputs and final states; None if the decode kernel declines the call.

    ``tensors`` are q to num_accepted_tokens of the operator.
    """
    v, state, has_pool = tensors[2], tensors[7], tensors[9] is not None
    in_place = has_pool if inplace_final_state is None else inplace_final_state
    try:
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        if in_place:
            if state is None or state.requires_grad:
                return None
            final_state = state
        elif output_final_state:
            num_states = tensors[0].shape[0] if tensors[8] is None else tensors[8].shape[0] - 1
            shape = (num_states, *v.shape[2:], v.shape[3])
            dtype = torch.float32 if state is None else state.dtype
            final_state = v.new_empty(shape, dtype=dtype)
        else:
            final_state = None
        served = _native.recurrent_operator(
            *tensors, pad_slot_id, in_place, True, out, final_state, *options
        )
    except (RuntimeError, TypeError, AttributeError, IndexError):
        return None
    return (out, final_state) if served else None
