"""The contract of state pools, checkpoints, workspaces and promises on lengths.

As in :mod:`._validate`, checks look at metadata; what tables hold is checked where they are read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _validate as valid
from ._torch_plan import MIN_CHUNK


def resolve_in_place(inplace_final_state: Any, is_pool: bool, initial_state: Any) -> bool:
    """Whether final states overwrite ``initial_state``."""
    if inplace_final_state is None:
        inplace_final_state = is_pool
    valid.require_bool("inplace_final_state", inplace_final_state)
    if initial_state is None and (is_pool or inplace_final_state):
        needed_by = "ssm_state_indices" if is_pool else "inplace_final_state"
        raise ValueError(f"initial_state: expected a tensor with {needed_by}, got None")
    return bool(inplace_final_state)


def _check_indices(name: str, x: Any, letters: str, shape: tuple[int, ...], q: Tensor) -> None:
    valid.require_tensor(name, x)
    valid.require_shape(name, x, letters, shape)
    valid.require_dtype(name, x, valid.INDEX_DTYPES)
    valid.require_device(name, x, q.device)


def _require_int(name: str, x: Any, kinds: str = "an int or None", bits: int = 64) -> None:
    """An int of so many bits with its sign, as operators and kernels hold it."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name}: expected {kinds}, got a value of type {type(x).__name__}")
    limit = 2 ** (bits - 1)
    if not -limit <= x < limit:  # one that may be too long to be printed
        raise ValueError(
            f"{name}: expected a value in [-2**{bits - 1}, 2**{bits - 1}), got an int of "
            f"{x.bit_length()} bits"
        )


def check_slots(
    ssm_state_indices: Any,
    final_state_indices: Any,
    num_accepted_tokens: Any,
    pad_slot_id: Any,
    *,
    in_place: bool,
    q: Tensor,
    num_sequences: int,
    slot_per_token: bool,
) -> None:
    """Slot tables of a state pool; ``slot_per_token``: they may be ``[N, S]``."""
    if ssm_state_indices is None:
        for name, x in (
            ("final_state_indices", final_state_indices),
            ("num_accepted_tokens", num_accepted_tokens),
            ("pad_slot_id", pad_slot_id),
        ):
            if x is not None:
                raise ValueError(f"{name}: expected ssm_state_indices with it, got None")
        return
    valid.require_tensor("ssm_state_indices", ssm_state_indices)
    letters = "[N] or [N, S]" if slot_per_token else "[N]"
    dims = (1, 2) if slot_per_token else (1,)
    shape = ssm_state_indices.shape
    if len(shape) not in dims or shape[0] != num_sequences or 0 in shape[1:]:
        raise ValueError(
            f"ssm_state_indices: expected shape {letters} with N = {num_sequences} and S > 0, got "
            f"{list(shape)}"
        )
    valid.require_dtype("ssm_state_indices", ssm_state_indices, valid.INDEX_DTYPES)
    valid.require_device("ssm_state_indices", ssm_state_indices, q.device)
    if final_state_indices is not None:
        _check_indices("final_state_indices", final_state_indices, "[N]", (num_sequences,), q)
        if ssm_state_indices.dim() != 1:
            raise ValueError(
                "final_state_indices: expected ssm_state_indices of shape [N] with it, got "
                f"{list(ssm_state_indices.shape)}"
            )
        if not in_place:
            raise ValueError(
                "final_state_indices: expected inplace_final_state=True with it (final states go "
                "to the pool), got False"
            )
    if num_accepted_tokens is not None:
        _check_indices("num_accepted_tokens", num_accepted_tokens, "[N]", (num_sequences,), q)
        if ssm_state_indices.dim() != 2:
            raise ValueError(
                "num_accepted_tokens: expected ssm_state_indices of shape [N, S] with it, got "
                f"{list(ssm_state_indices.shape)}"
            )
    if pad_slot_id is not None:
        _require_int("pad_slot_id", pad_slot_id)


def check_checkpoints(
    states: Any,
    offsets: Any,
    indices: Any,
    *,
    q: Tensor,
    v: Tensor,
    num_sequences: int,
    state_v_first: bool,
) -> None:
    """Where states inside the sequences go."""
    if states is None:
        for name, x in (("checkpoint_offsets", offsets), ("checkpoint_indices", indices)):
            if x is not None:
                raise ValueError(f"{name}: expected checkpoint_states with it, got None")
        return
    valid.check_states(
        "checkpoint_states", states, q=q, v=v, num_states=None, state_v_first=state_v_first,
        written=True,
    )  # fmt: skip
    shape: tuple[int, ...]
    if isinstance(offsets, Tensor):
        valid.require_tensor("checkpoint_offsets", offsets)
        if offsets.dim() not in (1, 2) or offsets.shape[0] != num_sequences:
            raise ValueError(
                f"checkpoint_offsets: expected shape [N] or [N, P] with N = {num_sequences}, got "
                f"{list(offsets.shape)}"
            )
        valid.require_dtype("checkpoint_offsets", offsets, valid.INDEX_DTYPES)
        valid.require_device("checkpoint_offsets", offsets, q.device)
        letters, shape = "[N]" if offsets.dim() == 1 else "[N, P]", tuple(offsets.shape)
    else:
        _require_int("checkpoint_offsets", offsets, "a torch.Tensor or an int", bits=32)
        if offsets < MIN_CHUNK or offsets % MIN_CHUNK != 0:
            raise ValueError(
                f"checkpoint_offsets: expected a multiple of {MIN_CHUNK}, got {offsets}"
            )
        if isinstance(indices, Tensor) and indices.dim() != 2:
            raise ValueError(
                f"checkpoint_indices: expected shape [N, P] with a checkpoint every {offsets} "
                f"tokens, got {list(indices.shape)}"
            )
        width = indices.shape[1] if isinstance(indices, Tensor) else 0
        letters, shape = "[N, P]", (num_sequences, width)
    if indices is not None:
        _check_indices("checkpoint_indices", indices, letters, shape, q)
    elif letters != "[N]":
        raise ValueError(
            "checkpoint_indices: expected a tensor of shape [N, P] with several checkpoints per "
            "sequence, got None"
        )
    elif states.shape[0] < num_sequences:
        raise ValueError(
            f"checkpoint_states: expected a row for each of the {num_sequences} sequences without "
            f"checkpoint_indices, got {states.shape[0]}"
        )


WORKSPACE_ALIGNMENT = 128  # bytes, of the records in it


def check_workspace(workspace: Any, needed: int, q: Tensor) -> None:
    """Scratch memory of the caller."""
    if workspace is None:
        return
    valid.require_tensor("workspace", workspace)
    valid.require_dtype("workspace", workspace, (torch.uint8,))
    valid.require_device("workspace", workspace, q.device)
    if not workspace.is_contiguous():
        raise ValueError(
            f"workspace: expected a contiguous tensor, got strides {list(workspace.stride())}"
        )
    is_real = type(workspace) is Tensor and not torch.compiler.is_compiling()
    if is_real and workspace.is_cuda and workspace.data_ptr() % WORKSPACE_ALIGNMENT != 0:
        raise ValueError(
            f"workspace: expected an address that is a multiple of {WORKSPACE_ALIGNMENT}, got one "
            f"that is {workspace.data_ptr() % WORKSPACE_ALIGNMENT} past it"
        )
    if workspace.numel() < needed:
        raise ValueError(
            f"workspace: expected at least the {needed} bytes of get_workspace_size, got "
            f"{workspace.numel()}"
        )


def resolve_max_seqlen(
    max_seqlen: Any, q: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> int | None:
    """The promise on the longest sequence, checked where the host knows lengths; or these."""
    promised: int | None = None
    if max_seqlen is not None:
        _require_int("max_seqlen", max_seqlen)
        if max_seqlen < 0:
            raise ValueError(f"max_seqlen: expected at least 0, got {max_seqlen}")
        promised = int(max_seqlen)
    if cu_seqlens is None:
        longest = q.shape[1] if q.shape[0] else 0
    else:
        on_host = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
        if torch.compiler.is_compiling() or type(on_host) is not Tensor:
            return promised  # there are no values yet
        if on_host.device.type != "cpu":
            return promised
        longest = max((b - a for a, b in pairwise(on_host.tolist())), default=0)
    if promised is None:
        return longest if cu_seqlens_cpu is not None else None
    if longest > promised:
        raise ValueError(
            f"max_seqlen: expected at least the {longest} tokens of the longest sequence, got "
            f"{promised}"
        )
    return promised


def first_given(**keywords: Any) -> str | None:
    """The first of the keywords that asks for something."""
    return next((name for name, x in keywords.items() if x is not None and x is not False), None)


def refuse_grad(name: str) -> NoReturn:
    raise ValueError(
        f"{name}: expected inputs that do not require grad with it (autograd can't follow a write "
        "in place), got one that does; use torch.no_grad()"
    )


def checkpoint_arguments(
    states: Tensor | None, offsets: Tensor | int | None, indices: Tensor | None
) -> tuple[Tensor | None, Tensor | None, int, Tensor | None]:
    """As the operator has them: checkpoint_states, _offsets, _every, _indices."""
    if isinstance(offsets, int):
        return states, None, offsets, indices
    return states, offsets, 0, indices
