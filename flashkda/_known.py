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


def run(tensors: tuple[Any, ...], *options: Any) -> tuple[Tensor, Tensor | None] | None:
    """Outputs and final states; None if the kernels decline the call.

    ``tensors`` are q to cu_seqlens of the operator, ``options`` what follows them.
    """
    try:
        out, final_state = torch.ops.flashkda.chunk_native.default(*tensors, *options)
    except (RuntimeError, TypeError):  # the checked way finds the words for it
        return None
    return None if out is None else (out, final_state)


def run_into(out: Any, final_state: Any, tensors: tuple[Any, ...], *options: Any) -> bool:
    """Whether the kernels took the call and wrote its results."""
    if any(getattr(x, "requires_grad", False) for x in (out, final_state)):
        return False
    try:
        return _native.operator(*tensors, out, final_state, *options)
    except (RuntimeError, TypeError):
        return False


def run_recurrent(
    tensors: tuple[Any, ...], in_place: bool, *options: Any
) -> tuple[Tensor, Tensor | None] | None:
    """Outputs and final states; None if the decode kernel declines the call.

    ``tensors`` are q to num_accepted_tokens of the operator, ``options`` what follows them.
    """
    state = tensors[7]
    if in_place and getattr(state, "requires_grad", False):
        return None
    try:
        out, final_state = torch.ops.flashkda.recurrent_native.default(*tensors, *options)
    except (RuntimeError, TypeError):
        return None
    return None if out is None else (out, state if in_place else final_state)
