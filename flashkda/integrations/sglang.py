"""The phases of a KDA kernel of SGLang (0.5): extend, decode, verify.

Each works on SGLang's pool ``ssm_states [slots, H, V, K]`` (float32 or bfloat16, any stride between
slots) by int32 tables in which slots below 0 are pads: their states are neither read nor written,
their outputs are zeros. Nothing is gathered, scattered or read back to the host; tables of fixed
size with padded rows suit CUDA graphs. q and k are normalised here, gates and betas are logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _validate as valid
from .. import ops
from . import _serving

PAD = -1  # slots up to this are pads
TRACK_INTERVAL = 64  # tokens between the states that the prefix cache keeps


def extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    scale: float | None = None,
    extend_seq_lens_cpu: Sequence[int] | Tensor | None = None,
    extend_prefix_lens: Sequence[int] | Tensor | None = None,
    is_spec_decode: bool = False,
    track_state: Tensor | None = None,
    track_chunk_idx: Tensor | None = None,
    state_checkpoints: Tensor | None = None,
    state_checkpoint_cu_starts: Tensor | None = None,
    state_checkpoint_indices: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """Prefill: whole sequences, from the states in their slots, which are updated in place.

    For the prefix cache states inside the sequences are kept, at multiples of 64 tokens from the
    start of a sequence in this call: one per sequence (``track_state``), or by FlashInfer's plan,
    as many as it names (``state_checkpoint_indices``).

    Args:
        q: ``[1, n, H, 128]`` bfloat16, a view of packed rows (any strides that :func:`chunk_kda`
            takes: rows of one convolution need no copy); the same for k, v and g.
        k: ``[1, n, H, 128]``.
        v: ``[1, n, H, 128]``.
        g: ``[1, n, H, 128]``, gate logits.
        beta: ``[1, n, H]``, logits.
        A_log: ``[H]``, or in the shape of a checkpoint (``[1, 1, H, 1]``).
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        lower_bound: in [-5, 0), or None for the softplus gate.
        ssm_states: the pool ``[slots, H, V, K]``, written.
        cache_indices: ``[N]`` int32 or int64, the slot of each sequence; below 0: a pad.
        query_start_loc: ``[N + 1]`` int32 or int64.
        scale: default ``K ** -0.5``.
        extend_seq_lens_cpu: ``[N]``, lengths on the host. The longest chooses between kernels for
            prefill and for a few tokens, and sizes the plan's table.
        extend_prefix_lens: ``[N]``, not needed: the slot of a request without a prefix holds zeros.
        is_spec_decode: not needed.
        track_state: ``[N, H, V, K]``, written.
        track_chunk_idx: ``[N]`` int32 or int64: the state after 64 times so many tokens goes to row
            n of ``track_state``. 0 or less, or past the end: row n stays as it is.
        state_checkpoints: ``[M, H, V, K]``, the pool of the plan, written. Default: ``ssm_states``.
        state_checkpoint_cu_starts: ``[N + 1]`` int64: the plan's entries of sequence n.
        state_checkpoint_indices: ``[P]`` int32: the slot for the state after 64, 128, ... tokens of
            a sequence; below 0: not kept.
        out: ``[1, n, H, 128]``, written and returned. Default: a new tensor.
        workspace: uint8 scratch memory of :func:`flashkda.get_workspace_size` bytes.

    Returns:
        The outputs ``[1, n, H, V]``. Rows past ``query_start_loc[-1]`` are zero, or untouched in
        ``out``.

    Raises:
        ValueError: both kinds of tracking at once; and as :func:`flashkda.chunk_kda`.
        TypeError: as :func:`flashkda.chunk_kda`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import sglang
        >>> q, k, v, g = (torch.randn(1, 30, 2, 128).bfloat16() for _ in range(4))
        >>> beta, pool = torch.randn(1, 30, 2).bfloat16(), torch.zeros(4, 2, 128, 128)
        >>> o = sglang.extend(
        ...     q, k, v, g, beta, A_log=torch.zeros(2), dt_bias=None, lower_bound=-5.0,
        ...     ssm_states=pool, cache_indices=torch.tensor([3, 1]),
        ...     query_start_loc=torch.tensor([0, 20, 30]),
        ... )
        >>> o.shape, [slot for slot in range(4) if pool[slot].any()]
        (torch.Size([1, 30, 2, 128]), [1, 3])
    """
    del extend_prefix_lens, is_spec_decode
    longest = None
    if extend_seq_lens_cpu is not None:
        longest = max((int(x) for x in extend_seq_lens_cpu), default=0)
    kept: dict[str, Any] = {}
    if track_state is not None and track_chunk_idx is not None:
        if state_checkpoint_indices is not None:
            raise ValueError(
                "track_state: expected None together with state_checkpoint_indices, got a tensor"
            )
        kept["checkpoint_states"] = track_state
        kept["checkpoint_offsets"] = TRACK_INTERVAL * track_chunk_idx.clamp(min=0)
    elif state_checkpoint_indices is not None and state_checkpoint_indices.shape[0] > 0:
        if state_checkpoint_cu_starts is None:
            raise ValueError(
                "state_checkpoint_cu_starts: expected a tensor with state_checkpoint_indices, got "
                "None"
            )
        width = (q.shape[1] if longest is None else longest) // TRACK_INTERVAL
        kept["checkpoint_states"] = ssm_states if state_checkpoints is None else state_checkpoints
        kept["checkpoint_offsets"] = TRACK_INTERVAL
        kept["checkpoint_indices"] = _plan(
            state_checkpoint_cu_starts, state_checkpoint_indices, width
        )
    o, _ = ops.chunk_kda(
        q, k, v, g, beta, scale, ssm_states, lower_bound=lower_bound, cu_seqlens=query_start_loc,
        ssm_state_indices=cache_indices, pad_slot_id=PAD, workspace=workspace, max_seqlen=longest,
        out=out, **kept, **_serving.parameters(A_log, dt_bias), **_serving.RAW,
    )  # fmt: skip
    return o


def _plan(cu_starts: Tensor, indices: Tensor, width: int) -> Tensor:
    """The ragged plan as a table ``[N, width]``, made on the device."""
    entry = cu_starts[:-1, None] + torch.arange(width, device=cu_starts.device)
    slots = indices[entry.clamp(max=indices.shape[0] - 1)]
    return torch.where(entry < cu_starts[1:, None], slots, PAD)


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    initial_state: Tensor,
    ssm_state_indices: Tensor,
    out: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    lower_bound: float | None = None,
) -> Tensor:
    """One token per request, as ``fused_recurrent_kda_packed_decode``: states updated in place.

    Args:
        mixed_qkv: ``[B, 3 * H * 128]`` bfloat16, rows q, k, v; any row stride. Nothing is copied
            where it is a multiple of 16 bytes.
        a: ``[B, H * 128]``, gate logits.
        b: ``[B, H]``, logits of the step size.
        A_log: ``[H]``, or in the shape of a checkpoint.
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        initial_state: the pool ``[slots, H, V, K]``, written.
        ssm_state_indices: ``[B]`` int32 or int64; below 0: a pad.
        out: ``[B, 1, H, V]``, written and returned. Default: a new tensor.
        scale: default ``K ** -0.5``.
        use_qk_l2norm_in_kernel: normalise q and k.
        lower_bound: in [-5, 0), or None for the softplus gate.

    Returns:
        The outputs ``[B, 1, H, V]``.

    Raises:
        ValueError: as :func:`flashkda.fused_recurrent_kda`; rows that don't match the states.
        TypeError: as :func:`flashkda.fused_recurrent_kda`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import sglang
        >>> rows, gates = torch.randn(2, 3 * 2 * 128).bfloat16(), torch.randn(2, 2 * 128).bfloat16()
        >>> pool = torch.zeros(4, 2, 128, 128)
        >>> o = sglang.decode(
        ...     rows, gates, torch.randn(2, 2).bfloat16(), A_log=torch.zeros(2), dt_bias=None,
        ...     initial_state=pool, ssm_state_indices=torch.tensor([3, -1]), lower_bound=-5.0,
        ... )
        >>> o.shape, [slot for slot in range(4) if pool[slot].any()]
        (torch.Size([2, 1, 2, 128]), [3])
    """
    raw = _serving.RAW | {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
    q, k, v, g, beta = _serving.split_packed(mixed_qkv, a, b, initial_state)
    o, _ = ops.fused_recurrent_kda(
        q, k, v, g, beta, scale=scale, lower_bound=lower_bound, initial_state=initial_state,
        ssm_state_indices=ssm_state_indices, pad_slot_id=PAD, out=out,
        **_serving.parameters(A_log, dt_bias), **raw,
    )  # fmt: skip
    return o


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    ssm_states: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    intermediate_states_buffer: Tensor,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A draft per request, as ``fused_sigmoid_gating_delta_rule_update`` with ``is_kda`` and
    ``disable_state_update``: the pool is only read, the state after every token is kept.

    The state after token t of request n goes to ``intermediate_states_buffer[m, t]`` with m its
    entry of ``intermediate_state_indices``. The last step of that row first takes the state to
    start from (N states are copied on the device), so steps past a request's tokens are undefined.
    The kernel gives a request whose slot or row is outside NaN outputs and keeps no state of it.

    Args:
        q: ``[1, n, H, 128]`` bfloat16, a view of packed rows; the same for k and v.
        k: ``[1, n, H, 128]``.
        v: ``[1, n, H, 128]``.
        a: ``[1, n, H, 128]`` or ``[n, H * 128]``, gate logits.
        b: ``[1, n, H]`` or ``[n, H]``, logits of the step size.
        A_log: ``[H]``, or in the shape of a checkpoint.
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        ssm_states: the pool ``[slots, H, V, K]``.
        cache_indices: ``[N]`` int32 or int64, the slot to start from; below 0: a pad.
        query_start_loc: ``[N + 1]`` int32 or int64; up to ``cache_steps`` tokens each.
        intermediate_states_buffer: ``[M, cache_steps, H, V, K]`` float32 or bfloat16, contiguous,
            written.
        intermediate_state_indices: ``[N]`` int32 or int64, no row twice; those of pads don't count.
            Default: row n.
        cache_steps: default: that of the buffer, which it must be.
        retrieve_parent_token: None: drafts are chains.
        scale: default ``K ** -0.5``.
        lower_bound: in [-5, 0), or None for the softplus gate.
        out: ``[1, n, H, V]``, written and returned. Default: a new tensor.

    Returns:
        The outputs ``[1, n, H, V]``.

    Raises:
        NotImplementedError: a draft that is a tree.
        ValueError: as :func:`flashkda.fused_recurrent_kda`; a buffer of another shape; on the CPU a
            slot outside the pool, a row outside the buffer, a row twice.
        TypeError: as :func:`flashkda.fused_recurrent_kda`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import sglang
        >>> q, k, v, a = (torch.randn(1, 4, 2, 128).bfloat16() for _ in range(4))
        >>> pool, kept = torch.zeros(4, 2, 128, 128), torch.zeros(2, 3, 2, 128, 128)
        >>> o = sglang.verify(  # a draft of three tokens, and one of a single token
        ...     q, k, v, a, torch.randn(1, 4, 2).bfloat16(), A_log=torch.zeros(2), dt_bias=None,
        ...     ssm_states=pool, cache_indices=torch.tensor([3, 1]),
        ...     query_start_loc=torch.tensor([0, 3, 4]), intermediate_states_buffer=kept,
        ...     lower_bound=-5.0,
        ... )
        >>> bool(pool.any()), kept[0].flatten(1).any(1).tolist()
        (False, [True, True, True])
    """
    if retrieve_parent_token is not None:
        raise NotImplementedError(
            "retrieve_parent_token: drafts that are trees are not offered by flashkda yet"
        )
    buffer = intermediate_states_buffer
    steps = buffer.shape[1] if cache_steps is None and buffer.dim() == 5 else cache_steps
    if buffer.dim() != 5 or buffer.shape[1:] != (steps, *ssm_states.shape[1:]):
        raise ValueError(
            "intermediate_states_buffer: expected shape [M, cache_steps, H, V, K] = [M, "
            f"{steps}, {', '.join(map(str, ssm_states.shape[1:]))}], got {list(buffer.shape)}"
        )
    if not buffer.is_contiguous():
        raise ValueError(
            "intermediate_states_buffer: expected a contiguous tensor, got strides "
            f"{list(buffer.stride())}"
        )
    valid.require_tensor("cache_indices", cache_indices)
    rows = intermediate_state_indices
    if rows is None:
        rows = torch.arange(cache_indices.numel(), device=q.device)
    _check_verify(q, query_start_loc, cache_indices, rows, ssm_states.shape[0], buffer.shape[0])
    table = rows[:, None].long() * buffer.shape[1] + torch.arange(buffer.shape[1], device=q.device)
    is_inside = (cache_indices < ssm_states.shape[0]) & (rows >= 0) & (rows < buffer.shape[0])
    is_pad = cache_indices <= PAD
    pool = buffer.flatten(0, 1)
    _copy_starts(ssm_states, cache_indices, pool, table[:, -1], is_inside & ~is_pad)
    # A slot outside the pool: the kernel touches none and makes the outputs NaN.
    slots = table.masked_fill(~is_inside[:, None], pool.shape[0]).masked_fill(is_pad[:, None], PAD)
    o, _ = ops.fused_recurrent_kda(
        q, k, v, a.reshape(*v.shape[:3], q.shape[3]), b.reshape(v.shape[:3]), scale=scale,
        lower_bound=lower_bound, initial_state=pool, cu_seqlens=query_start_loc,
        ssm_state_indices=slots, num_accepted_tokens=torch.full_like(slots[:, 0], buffer.shape[1]),
        pad_slot_id=PAD, out=out, **_serving.parameters(A_log, dt_bias), **_serving.RAW,
    )  # fmt: skip
    return o


def _check_verify(
    q: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    rows: Tensor,
    num_slots: int,
    num_rows: int,
) -> None:
    """The tables of a verify step; what they hold only on the CPU, where reading them is free."""
    valid.require_tensor("query_start_loc", query_start_loc)
    for name, x in (("cache_indices", cache_indices), ("intermediate_state_indices", rows)):
        valid.require_tensor(name, x)
        valid.require_shape(name, x, "[N]", (query_start_loc.numel() - 1,))
        valid.require_dtype(name, x, valid.INDEX_DTYPES)
        valid.require_device(name, x, q.device)
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.device.type != "cpu":
        return
    owners: dict[int, int] = {}
    for n, (slot, row) in enumerate(zip(cache_indices.tolist(), rows.tolist(), strict=True)):
        if slot <= PAD:
            continue
        if slot >= num_slots:
            raise ValueError(
                f"cache_indices: expected slots below {num_slots}, got {slot} for sequence {n}"
            )
        if not 0 <= row < num_rows:
            raise ValueError(
                f"intermediate_state_indices: expected rows in [0, {num_rows}), got {row} for "
                f"sequence {n}"
            )
        if row in owners:
            raise ValueError(
                f"intermediate_state_indices: expected a row for each sequence, got {row} twice "
                f"(sequences {owners[row]} and {n})"
            )
        owners[row] = n


def _copy_starts(
    source: Tensor, source_slots: Tensor, target: Tensor, target_slots: Tensor, runs: Tensor
) -> None:
    """``target[target_slots[n]] = source[source_slots[n]]`` where ``runs[n]``, reading no table.

    A sequence that doesn't run has slots that may not be used, and each has to write something: it
    repeats the copy of one that runs. Where none does, a slot keeps what it holds.
    """
    if 0 in (source.shape[0], target.shape[0], runs.shape[0]):
        return
    which = torch.arange(runs.shape[0], device=runs.device)
    which = torch.where(runs, which, runs.int().argmax())
    start = target_slots.clamp(0, target.shape[0] - 1)[which]
    first = source[source_slots.clamp(0, source.shape[0] - 1)[which]].to(target.dtype)
    target[start] = torch.where(runs[which][:, None, None, None], first, target[start])
