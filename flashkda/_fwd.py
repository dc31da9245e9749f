"""The functions of Moonshot's FlashKDA: results go into tensors of the caller."""

from __future__ import annotations

from torch import Tensor

from . import _dispatch, _known, _library
from . import _validate as valid
from . import _validate_pool as valid_pool

_check_inputs = valid.once_per_metadata(valid.check_inputs)


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    workspace: Tensor | None = None,
    checkpoint_states: Tensor | None = None,
    checkpoint_offsets: Tensor | int | None = None,
    checkpoint_indices: Tensor | None = None,
) -> None:
    """:func:`flashkda.chunk_kda` into the caller's tensors, in the order of Moonshot's ``fwd``.

    Formulas, and the calls that CUDA kernels serve, are those of :func:`flashkda.chunk_kda`. Gate,
    normalisation and sigmoid are on: g are raw gate logits, beta logits. The kernels take T up to
    16 token by token, more in chunks. Inputs are not cast under autocast. Nothing is returned.

    Args:
        q: ``[B, T, H, K]``, bfloat16, float16, float32 or float64; K up to 256; any strides.
        k: ``[B, T, H, K]`` of q's dtype.
        v: ``[B, T, HV, V]`` of q's dtype; V up to 256; HV a multiple of H.
        g: ``[B, T, HV, K]``, any of the 16- and 32-bit dtypes (float64 with float64 inputs).
        beta: ``[B, T, HV]``, dtypes as for g.
        scale: factor on the outputs.
        out: ``[B, T, HV, V]`` of v's dtype, written; rows past ``cu_seqlens[-1]`` stay untouched.
            Must overlap no input.
        A_log: ``[HV]``, any floating dtype; None only with ``lower_bound``.
        dt_bias: ``[HV, K]`` or ``[HV * K]``, any floating dtype; None for zeros.
        lower_bound: in [-5, 0), or None for the softplus gate.
        initial_state: ``[N, HV, V, K]`` float32 or bfloat16 (float64 with float64 inputs). Default:
            zeros.
        final_state: ``[N, HV, V, K]``, written; of a dtype of its own; may be ``initial_state``.
        cu_seqlens: ``[N + 1]`` int32 or int64 on q's device, with B = 1.
        workspace: uint8 scratch memory ``[bytes]``, as for :func:`flashkda.chunk_kda`.
        checkpoint_states: ``[M, HV, V, K]``, written: states inside the sequences, as for
            :func:`flashkda.chunk_kda`; so are the next two.
        checkpoint_offsets: ``[N]`` or ``[N, P]``, or an int: tokens from the start of a sequence,
            multiples of 16; 0 is none.
        checkpoint_indices: slots of ``checkpoint_states``, in the shape of the offsets.

    Raises:
        ValueError: as :func:`flashkda.chunk_kda`; also when an input requires grad.
        TypeError: as :func:`flashkda.chunk_kda`.
        NotImplementedError: a transform of ``torch.func`` or forward mode follows an input.
        RuntimeError: the launch of a kernel fails.

    Example:
        >>> import torch, flashkda
        >>> q, k, v, g = (torch.randn(1, 20, 2, 32) for _ in range(4))
        >>> out, state = torch.empty_like(v), torch.empty(1, 2, 32, 32)
        >>> A_log, dt_bias = torch.zeros(2), torch.zeros(2, 32)
        >>> flashkda.fwd(
        ...     q, k, v, g, torch.randn(1, 20, 2), 32**-0.5, out, A_log, dt_bias, -5.0,
        ...     final_state=state,
        ... )
        >>> bool(out.isfinite().all()), bool(state.isfinite().all())
        (True, True)
    """
    others = (k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
    flags = ("fwd", A_log is None, dt_bias is None, scale, lower_bound)
    is_plain = (
        workspace is None and checkpoint_states is None and checkpoint_offsets is None
        and checkpoint_indices is None
    )  # fmt: skip
    known = _known.find(q, (*others, out, final_state), flags) if is_plain else None
    if known is not None and _known.run_into(out, final_state, (q, *others), *known):
        return
    lower_bound = valid.resolve_lower_bound(lower_bound)
    _check_inputs(
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens,
        True, True, True,
        False, lower_bound,
    )  # fmt: skip
    scale = valid.resolve_scale(scale, q.shape[3])
    num_sequences = _library.num_sequences(q, cu_seqlens)
    for name, state in (("initial_state", initial_state), ("final_state", final_state)):
        valid.check_states(
            name, state, q=q, v=v, num_states=num_sequences, state_v_first=True,
            written=name == "final_state",
        )  # fmt: skip
    valid_pool.check_checkpoints(
        checkpoint_states, checkpoint_offsets, checkpoint_indices, q=q, v=v,
        num_sequences=num_sequences, state_v_first=True,
    )  # fmt: skip
    if workspace is not None:
        needed = get_workspace_size(q.shape[0] * q.shape[1], v.shape[2], num_sequences)
        valid_pool.check_workspace(workspace, needed, q)
    valid.require_tensor("out", out)
    valid.check_out(out, v)
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    valid.refuse_transforms("fwd", *tensors)
    if valid.requires_grad(*tensors):
        raise ValueError(
            "out: expected inputs that do not require grad (autograd can't follow a write in "
            "place), got one that does; use chunk_kda, or torch.no_grad()"
        )
    options = (scale, lower_bound, True, True, True, False, True)
    bounded = lower_bound is not None
    if not is_plain:
        _dispatch.chunk_pool_out(
            tensors, cu_seqlens, None, (None, None, None, False), out, final_state,
            valid_pool.checkpoint_arguments(
                checkpoint_states, checkpoint_offsets, checkpoint_indices
            ),
            workspace, options, bounded, None, None,
        )  # fmt: skip
        return
    if _dispatch.chunk_out(
        tensors, cu_seqlens, None, out, final_state, options, bounded, None, None
    ):
        _known.remember(flags, (*options, bounded))


_RECORDS = {32: 29696, 16: 14080}  # tokens in a chunk: bytes of its record (csrc/device/record.cuh)


def get_workspace_size(T_total: int, H: int, N: int = 1) -> int:
    """Bytes that the ``workspace`` of :func:`flashkda.chunk_kda` needs.

    Enough for any call of that size, whatever its gate: about 930 bytes per token and 30 kB per
    sequence, for each value head. Without a workspace, and in :func:`fwd`, torch's allocator gives
    the kernels their scratch memory, as it always does for checkpoints inside a chunk.

    Args:
        T_total: tokens of all sequences, rows past the last one included: ``B * T``.
        H: value heads.
        N: sequences, empty ones included.

    Raises:
        TypeError: an argument is no int.
        ValueError: an argument is negative.

    Example:
        >>> import flashkda
        >>> flashkda.get_workspace_size(8192, 4)
        30527488
    """
    for name, x in (("T_total", T_total), ("H", H), ("N", N)):
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"{name}: expected an int, got a value of type {type(x).__name__}")
        if x < 0:
            raise ValueError(f"{name}: expected at least 0, got {x}")
    return H * max((T_total // chunk + N) * record for chunk, record in _RECORDS.items())
