"""Checks of what tables and promises of a call hold, which cost a wait for the device.

Off unless asked for: kernels can't raise, and the host reads no device memory of a call that they
serve.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from . import _torch_checkpoints, _torch_pool, _torch_slots
from ._torch_plan import sequences_of
from ._validate import LOWEST_BOUND, check_host_copy, require_bool

_enabled = False


def enabled() -> bool:
    return _enabled


class _Switch(AbstractContextManager[None]):
    """Puts back what there was when a block ends; outside of a block nothing does."""

    def __init__(self, previous: bool) -> None:
        self._previous = previous

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _enabled
        _enabled = self._previous


def debug_checks(enabled: bool = True) -> AbstractContextManager[None]:
    """Makes every call check on the host what the kernels take on trust.

    The CUDA kernels never read ``cu_seqlens`` and the tables of slots, counts and offsets on the
    host: what is wrong there is undefined, or gives NaN. With these checks every call reads them
    before its launch, which waits for the device, and raises as the PyTorch path does. Promises are
    checked on both paths: ``safe_gate`` (no log decay in g below -5), ``max_seqlen``, and that
    ``cu_seqlens_cpu`` holds the values of ``cu_seqlens``. ``state_is_ready`` can't be checked, and
    can't be broken, since the host waits before the launch.

    In effect from the call on, in all threads; as a context manager, until the block ends. Results
    are the same. What torch.compile made checks tables when it runs, not promises; a CUDA graph
    can't be captured, and one that was captured before replays unchecked.

    Args:
        enabled: False turns the checks off.

    Returns:
        A context manager that, at the end of its block, puts back what there was before this call.

    Raises:
        TypeError: ``enabled`` is no bool.
        ValueError: in calls, what they document for the PyTorch path; a broken promise.
        RuntimeError: in calls while a CUDA graph is captured.

    Example:
        >>> import torch, flashkda
        >>> x, g = torch.randn(1, 8, 2, 32), torch.full((1, 8, 2, 32), -9.0)
        >>> with flashkda.debug_checks():
        ...     flashkda.chunk_kda(x, x, x, g, torch.rand(1, 8, 2), safe_gate=True)
        Traceback (most recent call last):
        ...
        ValueError: g: expected log decays of at least -5 with safe_gate=True, got -9.0
    """
    require_bool("enabled", enabled)
    return _turn(enabled)


def _turn(on: bool) -> _Switch:
    global _enabled
    switch = _Switch(_enabled)
    _enabled = on
    return switch


# --- the checks: called where debug checks are enabled --------------------------------------------


def refuse_capture(device: torch.device) -> None:
    """A graph under capture has no values to read."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "debug_checks: expected no capture of a CUDA graph (the checks read device memory), "
            "got a call in one; use debug_checks(False) around it"
        )


def check_tables(
    q: Tensor,
    cu_seqlens: Tensor | None,
    slots: tuple[Any, ...] = (None, None, None, None),
    pool: Tensor | None = None,
    in_place: bool = False,
    checkpoints: tuple[Any, ...] = (None, None, 0, None),
    final_state: Tensor | None = None,
) -> None:
    """What the tables of a call hold that the kernels are about to take.

    ``slots`` are ssm_state_indices to pad_slot_id, ``checkpoints`` checkpoint_states to
    checkpoint_indices; ``pool`` and ``final_state`` count with checkpoints also without slots.

    Raises:
        ValueError: as :func:`._torch_plan.sequences_of`, :func:`._torch_slots.slots_of`,
            :func:`._torch_checkpoints.checkpoints_of` and :func:`._torch_pool.check_apart`.
    """
    refuse_capture(q.device)
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    indices, final_indices, num_accepted_tokens, pad_slot_id = slots
    table = None
    if indices is not None and pool is not None:
        table = _torch_slots.slots_of(
            indices, final_indices, num_accepted_tokens, pad_slot_id, pool.shape[0], sequences,
            in_place=in_place,
        )  # fmt: skip
    states, offsets, every, kept_indices = checkpoints
    if states is not None:
        padding = _torch_pool.padding_of(table, sequences)
        wanted = _torch_checkpoints.checkpoints_of(
            states, offsets, every, kept_indices, sequences, padding
        )
        _torch_pool.check_apart(wanted, sequences, pool, table, final_state)


def check_promises(
    q: Tensor,
    g: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    max_seqlen: int | None,
    gate_is_bounded: bool,
) -> None:
    """What a call says of values; ``gate_is_bounded``: that of g, which are log decays.

    Raises:
        ValueError: ``cu_seqlens`` is wrong, or a promise is broken.
    """
    if torch.compiler.is_compiling() or type(q) is not Tensor:
        return  # there are no values yet
    refuse_capture(q.device)
    sequences = sequences_of(q.shape[0], q.shape[1], cu_seqlens)
    if cu_seqlens is not None and cu_seqlens_cpu is not None:
        check_host_copy(cu_seqlens_cpu, cu_seqlens)
    if max_seqlen is not None and sequences.longest > max_seqlen:
        raise ValueError(
            f"max_seqlen: expected at least the {sequences.longest} tokens of the longest "
            f"sequence, got {max_seqlen}"
        )
    if not gate_is_bounded:
        return
    # Rows past the last sequence may hold anything.
    used = g if cu_seqlens is None else g[:, : sum(sequences.lengths)]
    broken = used[used < LOWEST_BOUND]  # NaN breaks no promise
    if broken.numel():
        raise ValueError(
            f"g: expected log decays of at least {LOWEST_BOUND:g} with safe_gate=True, got "
            f"{float(broken.min())}"
        )
