"""The public functions; every backend sits behind them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from . import _backend, _debug, _dispatch, _known, _library, _native
from . import _validate as valid
from . import _validate_pool as valid_pool
from ._fwd import fwd as fwd
from ._fwd import get_workspace_size as get_workspace_size

_check_inputs = valid.once_per_metadata(valid.check_inputs)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    pad_slot_id: int | None = None,
    inplace_final_state: bool | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | int | None = None,
    checkpoint_indices: Tensor | None = None,
    workspace: Tensor | None = None,
    max_seqlen: int | None = None,
    out: Tensor | None = None,
    backend: str | None = None,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over whole sequences (arXiv 2510.26692), for prefill and training.

    For every sequence and value head, with ``S`` the ``[K, V]`` state::

        R_t = diag(exp(g_t)) S_{t-1}                      decay, a rate per key channel
        S_t = R_t + beta_t k_t (v_t - R_t^T k_t)^T        the delta rule
        o_t = scale * S_t^T q_t

    Differentiable, once, in q, k, v, g, beta, A_log, dt_bias and initial_state, by
    ``torch.autograd`` in reverse mode; transforms of ``torch.func`` (grad, vjp, jvp, jacrev, vmap)
    are not offered. Inputs keep their dtype; under autocast float32 q, k and v are cast to its
    dtype, as a matmul would.

    CUDA kernels take calls that need no gradient, on a device that they serve, with K = V = 128,
    bfloat16 q, k and v, and g, beta and states in bfloat16 or float32; slots of pools and of
    ``checkpoint_states`` must be dense and start at multiples of 16 bytes. All other calls take the
    PyTorch path, forward and backward (see :func:`explain`).

    **State pool.** With ``ssm_state_indices``, ``initial_state`` is a pool ``[slots, HV, K, V]``
    with any stride between slots. Sequence n starts from slot ``ssm_state_indices[n]``, and its
    final state is written to slot ``final_state_indices[n]``, or back to where it came from.
    Sequences may start from one slot together; a slot that is written must serve no other sequence.
    A sequence without tokens leaves its slots alone.

    **Prefix checkpoints.** States inside the sequences, after multiples of 16 tokens, can be
    written to ``checkpoint_states``. Each is, to the bit, the final state of a call whose sequence
    stops there, in the dtype of ``checkpoint_states``; on the PyTorch path as far as torch's
    operations give a row the same result in batches of any size, which they do on one CPU thread.
    Outputs and final states don't depend on checkpoints.

    Calls with a pool, checkpoints or a workspace are not differentiable.

    Args:
        q: ``[B, T, H, K]``, bfloat16, float16, float32 or float64; K up to 256. Any strides: the
            kernels read rows of tokens in place (adjacent heads, row strides of a multiple of 16
            bytes), and a tensor that is laid out otherwise is copied. The same for k, v, g, out.
        k: ``[B, T, H, K]`` of q's dtype.
        v: ``[B, T, HV, V]`` of q's dtype; V up to 256; HV a multiple of H.
        g: ``[B, T, HV, K]``: the log decay (at most 0), or with ``use_gate_in_kernel`` raw logits.
            Any of the 16- and 32-bit dtypes (float64 with float64 inputs).
        beta: ``[B, T, HV]``: the step size, or with ``use_beta_sigmoid_in_kernel`` its logits.
            Dtypes as for g.
        scale: factor on the outputs. Default: ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` float32 or bfloat16 (float64 with float64 inputs), a state
            per sequence; or a pool. Default: zeros.
        output_final_state: return the states after the last tokens.
        use_qk_l2norm_in_kernel: normalise q and k: ``x / sqrt(sum(x^2) + 1e-6)``. Without it, keys
            with ``beta * |k|^2`` above 6e4 overflow the float16 inverse of the kernels.
        use_gate_in_kernel: g are logits. Without ``lower_bound`` the log decay is
            ``-exp(A_log) * softplus(g + dt_bias)``; with it
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: beta are logits.
        allow_neg_eigval: ``2 * sigmoid(beta)`` instead of ``sigmoid(beta)``.
        safe_gate: the caller's promise that a log decay given as g is at least -5. The kernels then
            take longer chunks, which is faster; results differ by rounding, and are wrong where the
            promise is broken (g below -5.4). The PyTorch path has no use for it. With
            ``use_gate_in_kernel`` it needs ``lower_bound``, which alone decides.
        lower_bound: bound of the gate, in [-5, 0). Its presence chooses the formula above. Without
            ``use_gate_in_kernel`` it has no effect, as in fla.
        disable_recompute: accepted; the backward pass recomputes either way.
        return_intermediate_states: not offered.
        state_v_first: states are ``[N, HV, V, K]``.
        cu_seqlens: ``[N + 1]`` int32 or int64 on q's device, sequence n is the tokens
            ``cu_seqlens[n]`` to ``cu_seqlens[n + 1] - 1`` of the one batch row. Starts at 0, never
            decreases (sequences may be empty), ends at most at T. The PyTorch path checks this
            (which on a GPU waits for it); kernels do not, and other values are undefined there.
        cu_seqlens_cpu: ``[N + 1]``, the same values on the CPU; saves the PyTorch path that wait.
        cp_context: not offered.
        use_graph: accepted; ``cu_seqlens`` may be padded with empty sequences, always.
        max_num_seqs: with ``use_graph``, the N that ``cu_seqlens`` is padded to.
        A_log: ``[HV]``, any floating dtype. Needed by the softplus gate.
        dt_bias: ``[HV, K]`` or ``[HV * K]``, any floating dtype. Default: zeros.
        ssm_state_indices: ``[N]`` int32 or int64 on q's device, any stride: the slot of each
            sequence in the pool ``initial_state``.
        final_state_indices: the same for final states. Default: ``ssm_state_indices``.
        pad_slot_id: slots up to this are pads: -1 for SGLang, 0 where slot 0 is the null slot
            (vLLM). A sequence whose final state would go to a pad is padding: none of its states
            is read or written, its outputs are zeros. One that merely starts from a pad starts
            from zeros, as a request without a prefix does. Default: there are no pads. A slot
            outside the pool that is no pad is an error on the PyTorch path; kernels can't raise,
            leave the slots of that sequence alone and make its outputs and a returned final state
            NaN. Of a sequence without tokens it is no error: its returned final state is NaN.
        inplace_final_state: overwrite ``initial_state``, and return it. Default: True for a pool,
            else False. False with a pool only reads it.
        checkpoint_states: ``[M, HV, K, V]``, or ``[M, HV, V, K]`` with ``state_v_first``; float32
            or bfloat16 (float64 with float64 inputs), whatever ``initial_state`` has; any stride
            between slots. Written. May be the pool itself if no sequence starts from, or ends in, a
            slot of a checkpoint.
        checkpoint_offsets: ``[N]`` or ``[N, P]`` int32 or int64 on q's device, any strides: tokens
            from the start of a sequence in this call, multiples of 16. 0 is no checkpoint, and an
            offset past the end is ignored. An int instead, below 2**31, stands for a checkpoint
            after every so many tokens: column p of ``checkpoint_indices`` then is for offset
            ``(p + 1)`` times it.
            The kernels ignore an offset that is no multiple of 16; the PyTorch path refuses it.
        checkpoint_indices: int32 or int64 slots of ``checkpoint_states``, in the shape of
            ``checkpoint_offsets``; negative ones are skipped. No two checkpoints may share a slot.
            Default, with offsets ``[N]``: sequence n has slot n.
        workspace: uint8 on q's device, contiguous, of at least ``get_workspace_size(B * T, HV, N)``
            bytes, on a GPU at an address that is a multiple of 128: scratch memory, for CUDA graphs
            of a fixed capacity. Its contents are lost. Checkpoints take 4608 bytes more each, for
            each value head, from torch's allocator where the gate is bounded and they are not known
            to be at multiples of 32. The PyTorch path has no use for it.
        max_seqlen: the caller's promise, in tokens, that no sequence is longer, checked where the
            host knows the lengths. Up to 16 (default: T, or the longest of ``cu_seqlens_cpu``) the
            kernels take a call without checkpoints token by token, others in chunks: results
            differ by rounding, and promises of equal bits hold between calls that are taken in the
            same way. Under torch.compile it counts with a pool or a workspace only.
        out: ``[B, T, HV, V]`` of v's dtype, written in place and returned; must overlap no input.
        backend: ``"cuda"``, ``"torch"``, or None for the best that serves the call.
        chunk_size: accepted; results do not depend on it.
        transpose_state_layout: deprecated name of ``state_v_first``.

    Returns:
        The outputs ``[B, T, HV, V]`` in v's dtype, and the final states in the layout and dtype of
        ``initial_state`` (float32, or float64 for float64 inputs, without one), or None. Rows past
        ``cu_seqlens[-1]`` are zero, or untouched in ``out``. A sequence without tokens returns its
        initial state, a padded one zeros. With ``inplace_final_state`` the second is
        ``initial_state`` itself. A NaN spreads to the later tokens of its own sequence, and within
        its chunk of up to 64 tokens to earlier ones, never to another sequence.

    Raises:
        ValueError: a shape, device, stride, range or combination is wrong; ``out``, a pool,
            checkpoints or a workspace are given while an input requires grad. On the PyTorch path
            also ``cu_seqlens`` that decrease or leave T, a slot outside its pool, a written slot
            that serves two, and an offset that is no multiple of 16: what tables on a GPU hold,
            kernels can't refuse.
        TypeError: a dtype or the kind of an argument is wrong.
        NotImplementedError: ``cp_context`` or ``return_intermediate_states`` is asked for; a
            transform of ``torch.func`` or forward mode follows an input; in the backward pass, a
            second derivative.
        RuntimeError: ``backend="cuda"`` can't serve the call; the launch of a kernel fails.

    Example:
        >>> import torch, flashkda
        >>> q, k, v, g = (torch.randn(1, 64, 2, 32) for _ in range(4))
        >>> o, state = flashkda.chunk_kda(
        ...     q, k, v, g, torch.randn(1, 64, 2), A_log=torch.zeros(2), output_final_state=True,
        ...     use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
        ...     use_beta_sigmoid_in_kernel=True,
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 64, 2, 32]), torch.Size([1, 2, 32, 32]))
    """
    others = (k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    flags = (
        A_log is None, dt_bias is None, cu_seqlens is None,
        scale, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
        return_intermediate_states, state_v_first, cp_context, use_graph, max_num_seqs, backend,
        chunk_size, transpose_state_layout,
    )  # fmt: skip
    # What flags alone do not settle goes the checked way.
    is_plain = (
        out is None and cu_seqlens_cpu is None and max_num_seqs is None
        and ssm_state_indices is None and final_state_indices is None and pad_slot_id is None
        and inplace_final_state is None and checkpoint_states is None
        and checkpoint_offsets is None and checkpoint_indices is None and workspace is None
        and max_seqlen is None
    )  # fmt: skip
    known = _known.find(q, others, flags) if is_plain else None
    if known is not None:
        results = _known.run((q, *others), *known)
        if results is not None:
            return results

    valid.refuse("cp_context", cp_context is not None, "context parallelism over several devices")
    valid.require_bool("return_intermediate_states", return_intermediate_states)
    valid.refuse(
        "return_intermediate_states", return_intermediate_states, "states after every chunk"
    )
    for name, flag in (
        ("output_final_state", output_final_state),
        ("safe_gate", safe_gate),
        ("disable_recompute", disable_recompute),
        ("use_graph", use_graph),
    ):
        valid.require_bool(name, flag)
    state_v_first = valid.fold_state_v_first(state_v_first, transpose_state_layout)
    lower_bound = valid.resolve_lower_bound(lower_bound)
    if safe_gate and use_gate_in_kernel and lower_bound is None:
        raise ValueError(
            "safe_gate: expected lower_bound with it when use_gate_in_kernel is True, got None"
        )
    q, k, v = valid.autocast(q, k, v)
    _check_inputs(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound,
    )  # fmt: skip
    scale = valid.resolve_scale(scale, q.shape[3])
    valid.check_cu_seqlens_cpu(cu_seqlens_cpu, cu_seqlens)
    num_sequences = _library.num_sequences(q, cu_seqlens)
    valid.check_graph(use_graph, max_num_seqs, cu_seqlens, num_sequences)
    valid.check_chunk_size(chunk_size)
    is_pool = ssm_state_indices is not None
    in_place = valid_pool.resolve_in_place(inplace_final_state, is_pool, initial_state)
    valid_pool.check_slots(
        ssm_state_indices, final_state_indices, None, pad_slot_id, in_place=in_place, q=q,
        num_sequences=num_sequences, slot_per_token=False,
    )  # fmt: skip
    valid.check_states(
        "initial_state", initial_state, q=q, v=v, num_states=None if is_pool else num_sequences,
        state_v_first=state_v_first, written=in_place,
    )  # fmt: skip
    valid_pool.check_checkpoints(
        checkpoint_states, checkpoint_offsets, checkpoint_indices, q=q, v=v,
        num_sequences=num_sequences, state_v_first=state_v_first,
    )  # fmt: skip
    if workspace is not None:
        needed = get_workspace_size(q.shape[0] * q.shape[1], v.shape[2], num_sequences)
        valid_pool.check_workspace(workspace, needed, q)
    max_seqlen = valid_pool.resolve_max_seqlen(max_seqlen, q, cu_seqlens, cu_seqlens_cpu)
    if _debug.enabled():
        is_promised = safe_gate and not use_gate_in_kernel
        _debug.check_promises(q, g, cu_seqlens, cu_seqlens_cpu, max_seqlen, is_promised)
    valid.check_out(out, v)

    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    options = (
        scale,
        lower_bound,
        use_gate_in_kernel,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    valid.refuse_transforms("chunk_kda", *tensors)
    # What serving systems ask for goes through an operator of its own.
    serving = valid_pool.first_given(
        ssm_state_indices=ssm_state_indices, inplace_final_state=in_place,
        checkpoint_states=checkpoint_states, workspace=workspace,
    )  # fmt: skip
    if valid.requires_grad(*tensors):
        if serving is not None:
            valid_pool.refuse_grad(serving)
        if out is not None:
            raise ValueError(
                "out: expected None when an input requires grad (autograd can't follow a write in "
                "place), got a tensor"
            )
        o, state = _dispatch.chunk_with_grad(
            tensors, cu_seqlens, cu_seqlens_cpu, output_final_state, options, backend
        )
        return o, state if output_final_state else None

    final_state = None
    if in_place:
        final_state = initial_state
    elif output_final_state:
        final_state = _library.empty_final_state(q, v, initial_state, num_sequences, state_v_first)
    if out is None:
        out = _library.new_out(v, cu_seqlens)
    gate_is_bounded = safe_gate if not use_gate_in_kernel else lower_bound is not None
    if serving is not None:
        _dispatch.chunk_pool_out(
            tensors, cu_seqlens, cu_seqlens_cpu,
            (ssm_state_indices, final_state_indices, pad_slot_id, in_place), out, final_state,
            valid_pool.checkpoint_arguments(
                checkpoint_states, checkpoint_offsets, checkpoint_indices
            ),
            workspace, options, gate_is_bounded, max_seqlen, backend,
        )  # fmt: skip
        return out, final_state
    if _dispatch.chunk_out(
        tensors, cu_seqlens, cu_seqlens_cpu, out, final_state, options, gate_is_bounded,
        max_seqlen, backend,
    ):  # fmt: skip
        packed = _native.chunk_options(options, output_final_state, gate_is_bounded)
        _known.remember(flags, packed)
    return out, final_state


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool | None = None,
    ssm_state_indices: Tensor | None = None,
    final_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    pad_slot_id: int | None = None,
    state_is_ready: bool = False,
    out: Tensor | None = None,
    backend: str | None = None,
    transpose_state_layout: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The recurrence of :func:`chunk_kda` token by token, for decoding a few tokens per sequence.

    Arguments not listed are those of :func:`chunk_kda`, dtypes too. Not differentiable. A CUDA
    kernel serves what those of :func:`chunk_kda` serve, for any T; it reads each state once and
    writes it once, or once per token where each has a slot.

    **State pool.** With ``ssm_state_indices``, ``initial_state`` is a pool ``[slots, HV, K, V]``
    with any stride between slots. Indices ``[N]``: sequence n starts from slot ``i[n]`` and its
    final state goes to slot ``final_state_indices[n]``, or back. Indices ``[N, S]``, for
    speculative decoding: it starts from slot ``i[n, 0]``, or ``i[n, num_accepted_tokens[n] - 1]``,
    and the state after token t goes to slot ``i[n, t]``. Sequences may start from one slot
    together; a slot that is written must serve no other sequence. A sequence without tokens leaves
    its slots alone.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]``.
        beta: ``[B, T, HV]``.
        initial_state: ``[N, HV, K, V]`` float32 or bfloat16, or a pool.
        output_final_state: return the final states ``[N, HV, K, V]`` (those of padded sequences are
            zeros). Implied by ``inplace_final_state``.
        inplace_final_state: overwrite ``initial_state``, and return it. Default: True for a pool,
            else False. False with a pool only reads it.
        ssm_state_indices: int32 or int64, ``[N]`` or ``[N, S]`` with S at least the longest
            sequence, any strides.
        final_state_indices: int32 or int64 ``[N]``, with ``ssm_state_indices [N]``: the slots that
            final states go to. Default: those that they came from.
        num_accepted_tokens: int32 or int64 ``[N]``, values in ``[1, S]``.
        pad_slot_id: slots up to this are pads: -1 for SGLang, 0 where slot 0 is the null slot
            (vLLM). A sequence whose slot is a pad is padding: none of its states is read or
            written, its outputs are zeros. With ``final_state_indices`` that slot decides, and a
            sequence that merely starts from a pad starts from zeros. With ``[N, S]`` the slot to
            start from decides, and a state after a token that has a pad is not kept. Default: there
            are no pads. A slot outside the pool that is no pad is an error on the PyTorch path. The
            kernel can't raise: a sequence that would start or end there touches no slot and gets
            NaN outputs, as does a token whose own slot is outside, and a returned final state is
            NaN. Of a sequence without tokens it is no error: its returned final state is NaN.
        state_is_ready: the caller's promise that the kernel just before on the stream does not
            write ``initial_state``, ``ssm_state_indices``, ``final_state_indices``,
            ``num_accepted_tokens``, ``cu_seqlens``, ``A_log`` or ``dt_bias``. The CUDA kernel then
            loads states before that kernel has ended (programmatic dependent launch); with a
            broken promise it may read what was there before. Kernels of this package start only
            once all before the one in front of them have ended; where the kernel in front is
            another's that lets this one start earlier, the promise covers those before it too.
            Inputs per token may be written by the kernel just before. The PyTorch path has no use
            for it.

    Returns:
        As :func:`chunk_kda`; with ``inplace_final_state`` the second is ``initial_state``. A NaN
        spreads to later tokens only.

    Raises:
        NotImplementedError: an input requires grad, use :func:`chunk_kda`; a transform of
            ``torch.func`` or forward mode follows an input.
        ValueError: as :func:`chunk_kda`; on the PyTorch path also a slot outside the pool, a
            written slot that serves two sequences, more tokens than slots, an accepted count
            outside ``[1, S]`` (the kernel: NaN outputs); a state to be overwritten that requires
            grad.
        TypeError: as :func:`chunk_kda`.
        RuntimeError: as :func:`chunk_kda`.

    Example:
        >>> import torch, flashkda
        >>> q, k, v = (torch.randn(2, 1, 4, 64) for _ in range(3))
        >>> g, beta = -torch.rand(2, 1, 4, 64), torch.rand(2, 1, 4)
        >>> pool = torch.zeros(8, 4, 64, 64)
        >>> o, _ = flashkda.fused_recurrent_kda(
        ...     q, k, v, g, beta, initial_state=pool, ssm_state_indices=torch.tensor([5, 2])
        ... )
        >>> [slot for slot in range(8) if pool[slot].any()]
        [2, 5]
    """
    others = (
        k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens,
        ssm_state_indices, final_state_indices, num_accepted_tokens,
    )  # fmt: skip
    flags = (
        "recurrent", A_log is None, dt_bias is None, cu_seqlens is None, initial_state is None,
        ssm_state_indices is None, final_state_indices is None, num_accepted_tokens is None, scale,
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first,
        inplace_final_state, pad_slot_id, state_is_ready, backend, transpose_state_layout,
    )  # fmt: skip
    known = _known.find(q, others, flags) if out is None else None
    if known is not None:
        results = _known.run_recurrent((q, *others), *known)
        if results is not None:
            return results

    valid.require_bool("output_final_state", output_final_state)
    state_v_first = valid.fold_state_v_first(state_v_first, transpose_state_layout)
    lower_bound = valid.resolve_lower_bound(lower_bound)
    q, k, v = valid.autocast(q, k, v)
    _check_inputs(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        use_gate_in_kernel, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel,
        allow_neg_eigval, lower_bound,
    )  # fmt: skip
    scale = valid.resolve_scale(scale, q.shape[3])
    num_sequences = _library.num_sequences(q, cu_seqlens)
    is_pool = ssm_state_indices is not None
    inplace_final_state = valid_pool.resolve_in_place(inplace_final_state, is_pool, initial_state)
    valid_pool.check_slots(
        ssm_state_indices, final_state_indices, num_accepted_tokens, pad_slot_id,
        in_place=inplace_final_state, q=q, num_sequences=num_sequences, slot_per_token=True,
    )  # fmt: skip
    valid.require_bool("state_is_ready", state_is_ready)
    valid.check_states(
        "initial_state", initial_state, q=q, v=v, num_states=None if is_pool else num_sequences,
        state_v_first=state_v_first, written=inplace_final_state,
    )  # fmt: skip
    valid.refuse_transforms("fused_recurrent_kda", q, k, v, g, beta, A_log, dt_bias, initial_state)
    if valid.requires_grad(q, k, v, g, beta, A_log, dt_bias, initial_state):
        raise NotImplementedError(
            "fused_recurrent_kda: expected no input that requires grad (decoding has no backward "
            "pass), got one; use chunk_kda, or torch.no_grad()"
        )
    valid.check_out(out, v)
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    slots = (ssm_state_indices, final_state_indices, num_accepted_tokens, pad_slot_id)
    final_state = None
    if inplace_final_state:
        final_state = initial_state
    elif output_final_state:
        final_state = _library.empty_final_state(q, v, initial_state, num_sequences, state_v_first)
    if out is None:
        out = _library.new_out(v, cu_seqlens)
    options = (
        scale,
        lower_bound,
        use_gate_in_kernel,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    if _dispatch.recurrent_out(
        tensors, cu_seqlens, slots, inplace_final_state, out, final_state,
        options, state_is_ready, backend,
    ):  # fmt: skip
        packed = _native.recurrent_options(
            options, output_final_state, pad_slot_id, inplace_final_state, state_is_ready
        )
        _known.remember(flags, (inplace_final_state, *packed))
    return out, final_state


def explain(*args: Any, **kwargs: Any) -> _backend.Backend:
    """Which implementation a call of :func:`chunk_kda` with these arguments takes, and why.

    Runs no kernel, and checks no shapes: the call is taken to be valid. :func:`fused_recurrent_kda`
    chooses in the same way, by the arguments that both have.

    Returns:
        The name (``"torch"`` or ``"cuda"``) and the reason, a sentence.

    Example:
        >>> import torch, flashkda
        >>> x = torch.randn(1, 4, 2, 32)
        >>> flashkda.explain(x, x, x, -x.abs(), torch.rand(1, 4, 2)).name
        'torch'

    Raises:
        TypeError: the arguments are not those of :func:`chunk_kda`.
        ValueError: ``backend`` names none.
        RuntimeError: ``backend="cuda"`` can't serve the call.
    """
    bound = inspect.signature(chunk_kda).bind(*args, **kwargs)
    bound.apply_defaults()
    call = bound.arguments
    q, k, v, g, beta = (call[name] for name in ("q", "k", "v", "g", "beta"))
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        valid.require_tensor(name, x)
    tensors = (
        *valid.autocast(q, k, v),
        g,
        beta,
        call["A_log"],
        call["dt_bias"],
        call["initial_state"],
    )
    in_place = call["inplace_final_state"]
    serving = ("ssm_state_indices", "checkpoint_states", "workspace")
    if in_place or any(call[name] is not None for name in serving):
        indices = call["ssm_state_indices"]
        in_place = indices is not None if in_place is None else in_place
        return _dispatch.select_chunk_pool(
            tensors, call["cu_seqlens"], (indices, call["final_state_indices"], None, in_place),
            call["initial_state"] if in_place else None, call["checkpoint_states"],
            call["backend"],
        )  # fmt: skip
    return _dispatch.select_chunk(tensors, call["cu_seqlens"], None, call["backend"])
