"""The operators of vLLM's FlashKDA extension, and functions that work on vLLM's pool in place.

:func:`register` defines ``torch.ops._flashkda_C.fwd`` and ``get_workspace_size`` with the schema of
``vllm._flashkda_C`` (vLLM 0.33), so that code written for it runs on flashkda when it imports this
in place of the extension. Its caller gathers states from the pool and scatters them back.
:func:`prefill`, :func:`packed_decode` and :func:`speculative_decode` need neither: they take the
pool ``[num_blocks, H, V, K]`` (float32 or bfloat16, blocks dense, any stride between them) and
tables of blocks, in which block 0 is the null block: never read, never written.

q and k are normalised here; gates and betas are logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _fwd, ops
from .. import _validate as valid
from . import _serving

NULL_BLOCK = 0  # blocks up to this are pads
NAMESPACE = "_flashkda_C"
SCHEMAS = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, float scale, Tensor(a!) out, "
    "Tensor(b!) workspace, Tensor A_log, Tensor dt_bias, float lower_bound, "
    "Tensor? initial_state=None, Tensor(c!)? final_state=None, Tensor? cu_seqlens=None, "
    "Tensor(d!)? checkpoint_state=None, Tensor? checkpoint_offsets=None) -> ()",
    "get_workspace_size(int T, int H, int N) -> int",
)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """``_flashkda_C::fwd``: :func:`flashkda.fwd` with scratch memory and a checkpoint per sequence.

    Args:
        q: ``[1, n, H, 128]`` bfloat16, with k, v and g; any strides, as for :func:`flashkda.fwd`.
        k: ``[1, n, H, 128]``.
        v: ``[1, n, H, 128]``.
        g: ``[1, n, H, 128]``, gate logits.
        beta: ``[1, n, H]``, logits, rows of any stride.
        scale: factor on the outputs.
        out: ``[1, n, H, 128]``, written.
        workspace: uint8, at least :func:`get_workspace_size` bytes; its contents are lost.
        A_log: ``[H]``, or in the shape of a checkpoint (``[1, 1, H, 1]``).
        dt_bias: ``[H, 128]`` or ``[H * 128]``.
        lower_bound: in [-5, 0).
        initial_state: ``[N, H, V, K]`` float32 or bfloat16. Default: zeros.
        final_state: ``[N, H, V, K]``, written.
        cu_seqlens: ``[N + 1]`` int32 or int64.
        checkpoint_state: ``[N, H, V, K]``, written: the state of sequence n after
            ``checkpoint_offsets[n]`` tokens of this call.
        checkpoint_offsets: ``[N]`` int32 or int64, multiples of 16; 0 and offsets past the end
            leave the row as it is.

    Raises:
        ValueError: as :func:`flashkda.fwd`.
        TypeError: as :func:`flashkda.fwd`.
        RuntimeError: the launch of a kernel fails.

    Example:
        >>> import torch
        >>> from flashkda.integrations import vllm
        >>> q, k, v, g = (torch.randn(1, 20, 2, 128).bfloat16() for _ in range(4))
        >>> out, beta = torch.empty_like(v), torch.randn(1, 20, 2).bfloat16()
        >>> work = torch.empty(vllm.get_workspace_size(20, 2, 1), dtype=torch.uint8)
        >>> A_log, dt_bias = torch.zeros(2), torch.zeros(2, 128)
        >>> vllm.fwd(q, k, v, g, beta, 128**-0.5, out, work, A_log, dt_bias, -5.0)
        >>> bool(out.isfinite().all())
        True
    """
    where = _serving.parameters(A_log, dt_bias)
    if checkpoint_offsets is None:
        checkpoint_state = None  # a buffer that a step has no use for
    _fwd.fwd(
        q, k, v, g, beta, scale, out, where["A_log"], where["dt_bias"], lower_bound,
        initial_state, final_state, cu_seqlens, workspace=workspace,
        checkpoint_states=checkpoint_state, checkpoint_offsets=checkpoint_offsets,
    )  # fmt: skip


def get_workspace_size(T: int, H: int, N: int) -> int:
    """``_flashkda_C::get_workspace_size``: that of flashkda, with vLLM's names.

    Args:
        T: tokens of all sequences.
        H: value heads.
        N: sequences.

    Returns:
        Bytes.

    Raises:
        TypeError: as :func:`flashkda.get_workspace_size`.
        ValueError: as :func:`flashkda.get_workspace_size`.

    Example:
        >>> from flashkda.integrations import vllm
        >>> vllm.get_workspace_size(8192, 4, 1)
        30527488
    """
    return _fwd.get_workspace_size(T, H, N)


_libraries: dict[str, torch.library.Library] = {}


def register(namespace: str = NAMESPACE) -> None:
    """Defines ``torch.ops.<namespace>.fwd`` and ``get_workspace_size``; once, in this process.

    Args:
        namespace: another one than vLLM's keeps its own extension loadable beside it.

    Raises:
        RuntimeError: the namespace has these operators already (vLLM's extension is loaded).

    Example:
        >>> import torch
        >>> from flashkda.integrations import vllm
        >>> vllm.register("flashkda_example")
        >>> torch.ops.flashkda_example.get_workspace_size(8192, 4, 1)
        30527488
    """
    if namespace in _libraries:
        return
    if hasattr(getattr(torch.ops, namespace), "fwd"):
        raise RuntimeError(
            f"namespace: expected one without an operator fwd, got {namespace!r}, where vLLM's "
            "extension is loaded"
        )
    library = torch.library.Library(namespace, "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("fwd", fwd, "CompositeExplicitAutograd")
    library.impl("fwd", lambda *_, **__: None, "Meta")
    library.impl("get_workspace_size", get_workspace_size, "CompositeExplicitAutograd")
    _libraries[namespace] = library


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    pool: Tensor,
    state_indices: Tensor,
    cu_seqlens: Tensor,
    has_initial_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    scale: float | None = None,
    max_seqlen: int | None = None,
    workspace: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Whole sequences on the pool: what gather, ``fwd``, scatter and the copy of checkpoints do.

    Args:
        q: ``[1, n, H, 128]`` bfloat16, with k, v and g; any strides, as for
            :func:`flashkda.chunk_kda`.
        k: ``[1, n, H, 128]``.
        v: ``[1, n, H, 128]``.
        g: ``[1, n, H, 128]``, gate logits.
        beta: ``[1, n, H]``, logits, rows of any stride.
        A_log: ``[H]``, or in the shape of a checkpoint.
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        lower_bound: in [-5, 0), or None for the softplus gate.
        pool: ``[num_blocks, H, V, K]``, written.
        state_indices: ``[N]`` int32 or int64, the block of each sequence; 0 or less: a pad.
        cu_seqlens: ``[N + 1]`` int32 or int64.
        has_initial_state: ``[N]`` bool; sequences without one start from zeros, whatever their
            block holds. Default: all have one.
        checkpoint_offsets: ``[N]`` or ``[N, P]``, tokens from the start of a sequence in this call,
            multiples of 16; 0 is none.
        checkpoint_indices: the block of ``pool`` for each, in the same shape; 0 or less: not kept.
        scale: default ``K ** -0.5``.
        max_seqlen: the longest sequence, where the host knows it.
        workspace: uint8 scratch memory of :func:`get_workspace_size` bytes.
        out: ``[1, n, H, 128]``, written and returned. Default: a new tensor.

    Returns:
        The outputs ``[1, n, H, V]``; those of pads are zero, rows past ``cu_seqlens[-1]`` zero, or
        untouched in ``out``.

    Raises:
        ValueError: as :func:`flashkda.chunk_kda`; only one of the two tables of checkpoints;
            ``has_initial_state`` of another shape or on another device.
        TypeError: as :func:`flashkda.chunk_kda`; ``has_initial_state`` is no bool tensor.

    Example:
        >>> import torch
        >>> from flashkda.integrations import vllm
        >>> q, k, v, g = (torch.randn(1, 30, 2, 128).bfloat16() for _ in range(4))
        >>> beta, pool = torch.randn(1, 30, 2).bfloat16(), torch.zeros(4, 2, 128, 128)
        >>> o = vllm.prefill(
        ...     q, k, v, g, beta, A_log=torch.zeros(2), dt_bias=None, lower_bound=-5.0, pool=pool,
        ...     state_indices=torch.tensor([3, 1]), cu_seqlens=torch.tensor([0, 20, 30]),
        ... )
        >>> o.shape, [block for block in range(4) if pool[block].any()]
        (torch.Size([1, 30, 2, 128]), [1, 3])
    """
    kept: dict[str, Any] = {}
    if (checkpoint_offsets is None) != (checkpoint_indices is None):
        raise ValueError(
            "checkpoint_offsets: expected checkpoint_indices with it, and the reverse, got one"
        )
    if checkpoint_indices is not None:
        valid.require_tensor("checkpoint_indices", checkpoint_indices)
        kept = {
            "checkpoint_states": pool,
            "checkpoint_offsets": checkpoint_offsets,
            # chunk_kda has no pad for checkpoints but what is negative.
            "checkpoint_indices": checkpoint_indices.masked_fill(
                checkpoint_indices <= NULL_BLOCK, -1
            ),
        }
    source = state_indices
    if has_initial_state is not None:
        given = {"state_indices": state_indices, "has_initial_state": has_initial_state}
        for name, x in ({"pool": pool} | given).items():
            valid.require_tensor(name, x)
        valid.require_shape("has_initial_state", has_initial_state, "[N]", state_indices.shape)
        valid.require_dtype("has_initial_state", has_initial_state, (torch.bool,))
        for name, x in given.items():
            valid.require_device(name, x, pool.device)
        source = torch.where(has_initial_state, state_indices, NULL_BLOCK)
    o, _ = ops.chunk_kda(
        q, k, v, g, beta, scale, pool, lower_bound=lower_bound, cu_seqlens=cu_seqlens,
        ssm_state_indices=source, final_state_indices=state_indices, pad_slot_id=NULL_BLOCK,
        workspace=workspace, max_seqlen=max_seqlen, out=out, **kept,
        **_serving.parameters(A_log, dt_bias), **_serving.RAW,
    )  # fmt: skip
    return o


def packed_decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    out: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """One token per request, as vLLM's ``fused_recurrent_kda_packed_decode``: states in place.

    Args:
        mixed_qkv: ``[B, 3 * H * 128]`` bfloat16, rows q, k, v; any row stride. Nothing is copied
            where it is a multiple of 16 bytes.
        raw_g: ``[B, H * 128]`` or ``[B, H, 128]``, gate logits.
        raw_beta: ``[B, H]``, logits, rows of any stride.
        A_log: ``[H]``, or in the shape of a checkpoint.
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        lower_bound: in [-5, 0), or None for the softplus gate.
        initial_state: the pool ``[num_blocks, H, V, K]``, written.
        state_indices: ``[B]`` int32 or int64; 0 or less: a pad.
        out: ``[B, 1, H, V]``, ``[1, B, H, V]`` or ``[B, H, V]``, written and returned. Default: a
            new tensor ``[B, 1, H, V]``.
        scale: default ``K ** -0.5``.

    Returns:
        The outputs; those of pads are zero.

    Raises:
        ValueError: as :func:`flashkda.fused_recurrent_kda`; rows that don't match the states.
        TypeError: as :func:`flashkda.fused_recurrent_kda`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import vllm
        >>> rows, gates = torch.randn(2, 3 * 2 * 128).bfloat16(), torch.randn(2, 2 * 128).bfloat16()
        >>> pool = torch.zeros(4, 2, 128, 128)
        >>> o = vllm.packed_decode(
        ...     rows, gates, torch.randn(2, 2).bfloat16(), torch.zeros(2), None, -5.0, pool,
        ...     state_indices=torch.tensor([3, 0]),
        ... )
        >>> o.shape, [block for block in range(4) if pool[block].any()]
        (torch.Size([2, 1, 2, 128]), [3])
    """
    q, k, v, g, beta = _serving.split_packed(mixed_qkv, raw_g, raw_beta, initial_state)
    o, _ = ops.fused_recurrent_kda(
        q, k, v, g, beta, scale=scale, lower_bound=lower_bound, initial_state=initial_state,
        ssm_state_indices=state_indices, pad_slot_id=NULL_BLOCK,
        out=None if out is None else _serving.one_token_each(out, v),
        **_serving.parameters(A_log, dt_bias), **_serving.RAW,
    )  # fmt: skip
    return o if out is None else out


def speculative_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """A draft per request, as vLLM's ``fused_recurrent_kda`` with a block for every token.

    Sequence n starts from block ``ssm_state_indices[n, num_accepted_tokens[n] - 1]``; its state
    after token t goes to block ``ssm_state_indices[n, t]``.

    Args:
        q: ``[1, n, H, 128]`` bfloat16; q, k and v may be views of rows that they share.
        k: ``[1, n, H, 128]``.
        v: ``[1, n, H, 128]``.
        raw_g: ``[1, n, H, 128]``, gate logits.
        raw_beta: ``[1, n, H]``, logits, rows of any stride.
        A_log: ``[H]``, or in the shape of a checkpoint.
        dt_bias: ``[H * 128]`` or ``[H, 128]``, or None.
        lower_bound: in [-5, 0), or None for the softplus gate.
        initial_state: the pool ``[num_blocks, H, V, K]``, written.
        cu_seqlens: ``[N + 1]`` int32 or int64.
        ssm_state_indices: ``[N, 1 + S]`` int32 or int64, S draft tokens. 0 or less: a sequence that
            would start there is a pad; a state that would go there is not kept.
        num_accepted_tokens: ``[N]`` int32 or int64, of the draft before. Default: 1.
        out: ``[1, n, H, V]``, written and returned. Default: a new tensor.
        scale: default ``K ** -0.5``.

    Returns:
        The outputs ``[1, n, H, V]``; those of pads are zero.

    Raises:
        ValueError: as :func:`flashkda.fused_recurrent_kda`.
        TypeError: as :func:`flashkda.fused_recurrent_kda`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import vllm
        >>> q, k, v, g = (torch.randn(1, 3, 2, 128).bfloat16() for _ in range(4))
        >>> pool = torch.zeros(6, 2, 128, 128)
        >>> o = vllm.speculative_decode(  # drafts of two tokens and of one
        ...     q, k, v, g, torch.randn(1, 3, 2).bfloat16(), torch.zeros(2), None, -5.0, pool,
        ...     cu_seqlens=torch.tensor([0, 2, 3]),
        ...     ssm_state_indices=torch.tensor([[5, 1], [2, 4]]),
        ... )
        >>> o.shape, [block for block in range(6) if pool[block].any()]
        (torch.Size([1, 3, 2, 128]), [1, 2, 5])
    """
    o, _ = ops.fused_recurrent_kda(
        q, k, v, raw_g, raw_beta, scale=scale, lower_bound=lower_bound,
        initial_state=initial_state, cu_seqlens=cu_seqlens, ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens, pad_slot_id=NULL_BLOCK, out=out,
        **_serving.parameters(A_log, dt_bias), **_serving.RAW,
    )  # fmt: skip
    return o
