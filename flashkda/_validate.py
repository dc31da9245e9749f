"""One contract for the arguments of every function and backend.

Each error names the argument, what was expected and what came. Checks look at metadata only
(shapes, dtypes, devices, strides, flags), never at values on a device, and a call whose metadata
passed before is not checked again.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

MAX_HEAD_DIM = 256
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
STATE_DTYPES = (torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
# The strongest bound that chunks of 32 tokens are sized for (csrc/device/record.cuh).
LOWEST_BOUND = -5.0

_MAX_REMEMBERED = 4096
_remembered: set[Any] = set()


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _describe(x: Any) -> str:
    return f"a value of type {type(x).__name__}" if not isinstance(x, str) else repr(x)


def require_tensor(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {_describe(x)}")
    if not _is_dense(x):
        kind = "a nested one" if x.is_nested else f"one of layout {x.layout}"
        raise TypeError(f"{name}: expected a dense torch.Tensor, got {kind}")


def _is_dense(x: Tensor) -> bool:
    """Whether it has strides, and one shape."""
    return x.layout == torch.strided and not x.is_nested


def require_shape(name: str, x: Tensor, letters: str, shape: Sequence[int]) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {letters} = {list(shape)}, got {list(x.shape)}")


def require_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected {_names(dtypes)}, got {_names((x.dtype,))}")


def require_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: expected a tensor on {device} like q, got one on {x.device}")


def require_bool(name: str, x: Any) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected a bool, got {_describe(x)}")


def require_writable(name: str, x: Tensor) -> None:
    """A tensor that is written in place."""
    if x.requires_grad:
        raise ValueError(f"{name}: expected a tensor that does not require grad, got one that does")
    if _may_overlap(x):
        raise ValueError(
            f"{name}: expected elements that do not overlap, got strides {list(x.stride())}"
        )


def _may_overlap(x: Tensor) -> bool:
    """Whether elements share memory, unless dimensions of small strides nest in larger ones."""
    reach = 0  # of all elements in the dimensions before, from the first to the last
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return x.numel() > 0
            reach += (size - 1) * stride
    return False


def require_own_values(name: str, x: Tensor) -> None:
    """A tensor that is written in place: PyTorch writes into no view with the sign turned."""
    if not torch.compiler.is_compiling() and x.is_neg():  # Dynamo can't trace the question
        raise ValueError(
            f"{name}: expected a tensor that holds its values, got a view of their negatives, as "
            "conj().imag is one (is_neg)"
        )


def require_number(name: str, x: Any) -> float:
    # A tuple: Dynamo of torch 2.9 can't trace int | float.
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name}: expected a float, got {_describe(x)}")
    try:
        return float(x)
    except OverflowError:  # an int of any length, which may be too long to be printed
        raise ValueError(
            f"{name}: expected a number in the range of a float, got an int of "
            f"{int(x).bit_length()} bits"
        ) from None


def resolve_scale(scale: Any, key_dim: int) -> float:
    if scale is None:
        return float(key_dim**-0.5)
    number = require_number("scale", scale)
    if not -math.inf < number < math.inf:  # Dynamo can't trace math.isfinite of a variable
        raise ValueError(f"scale: expected a finite number, got {number}")
    return number


def resolve_lower_bound(lower_bound: Any) -> float | None:
    if lower_bound is None:
        return None
    number = require_number("lower_bound", lower_bound)
    if not LOWEST_BOUND <= number < 0:
        raise ValueError(f"lower_bound: expected a value in [{LOWEST_BOUND:g}, 0), got {number}")
    return number


def resolve_state_v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    """Folds the deprecated spelling in; the caller warns."""
    require_bool("state_v_first", state_v_first)
    if transpose_state_layout is None:
        return state_v_first
    require_bool("transpose_state_layout", transpose_state_layout)
    if state_v_first:
        raise ValueError(
            "transpose_state_layout: expected None together with state_v_first, whose deprecated "
            "name it is, got both"
        )
    return transpose_state_layout


def once_per_metadata(check: Callable[..., None]) -> Callable[..., None]:
    """Skips a check whose arguments had the same metadata in an earlier call that passed."""

    def checked(*arguments: Any) -> None:
        if torch.compiler.is_compiling():
            check(*arguments)
            return
        key = (check, *map(_metadata, arguments))
        if key in _remembered:
            return
        check(*arguments)
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        _remembered.add(key)

    return checked


def _metadata(x: Any) -> Any:
    if isinstance(x, Tensor):
        if not _is_dense(x):  # without strides, or even a shape; no check passes it
            return x.layout
        return x.shape, x.dtype, x.device, x.stride(), x.requires_grad
    return type(x), repr(x)


def check_inputs(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any,
    dt_bias: Any,
    cu_seqlens: Any,
    use_gate_in_kernel: Any,
    use_qk_l2norm_in_kernel: Any,
    use_beta_sigmoid_in_kernel: Any,
    allow_neg_eigval: Any,
    lower_bound: float | None,
) -> None:
    """What all functions have in common."""
    inputs = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    for name, x in inputs.items():
        require_tensor(name, x)
    if q.dim() != 4:
        raise ValueError(f"q: expected shape [B, T, H, K], got {list(q.shape)}")
    if v.dim() != 4:
        raise ValueError(f"v: expected shape [B, T, HV, V], got {list(v.shape)}")
    batch, tokens, heads, key_dim = q.shape
    value_heads, value_dim = v.shape[2:]
    require_shape("k", k, "[B, T, H, K]", q.shape)
    require_shape("v", v, "[B, T, HV, V]", (batch, tokens, value_heads, value_dim))
    if heads < 1 or value_heads < 1 or value_heads % heads != 0:
        raise ValueError(
            f"v: expected a number of value heads that is a multiple of q's {heads} heads, got "
            f"{value_heads}"
        )
    for name, letter, size in (("q", "K", key_dim), ("v", "V", value_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: expected a head dimension {letter} of 1 to {MAX_HEAD_DIM}, got {size}"
            )
    require_shape("g", g, "[B, T, HV, K]", (batch, tokens, value_heads, key_dim))
    require_shape("beta", beta, "[B, T, HV]", (batch, tokens, value_heads))

    require_dtype("q", q, INPUT_DTYPES)
    for name in ("k", "v"):
        require_dtype(name, inputs[name], (q.dtype,))
    # Gates may have a dtype of their own; float64 is all or nothing.
    double = q.dtype == torch.float64
    for name in ("g", "beta"):
        require_dtype(name, inputs[name], (torch.float64,) if double else INPUT_DTYPES[:3])
    for name in ("k", "v", "g", "beta"):
        require_device(name, inputs[name], q.device)

    for name, flag in (
        ("use_gate_in_kernel", use_gate_in_kernel),
        ("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
        ("use_beta_sigmoid_in_kernel", use_beta_sigmoid_in_kernel),
        ("allow_neg_eigval", allow_neg_eigval),
    ):
        require_bool(name, flag)
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise ValueError(
            "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True with it (it doubles the "
            "sigmoid), got use_beta_sigmoid_in_kernel=False"
        )
    _check_gate(A_log, dt_bias, use_gate_in_kernel, lower_bound, q.device, value_heads, key_dim)
    if cu_seqlens is not None:
        _check_cu_seqlens(cu_seqlens, q)


def _check_gate(
    A_log: Any,
    dt_bias: Any,
    use_gate_in_kernel: bool,
    lower_bound: float | None,
    device: torch.device,
    value_heads: int,
    key_dim: int,
) -> None:
    if not use_gate_in_kernel:
        for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
            if x is not None:
                raise ValueError(
                    f"{name}: expected None when use_gate_in_kernel is False (g is then the log "
                    "decay itself), got a value"
                )
        return
    if A_log is None:
        if lower_bound is None:
            raise ValueError(
                "A_log: expected a tensor of shape [HV] for the softplus gate (lower_bound is not "
                "given), got None"
            )
    else:
        require_tensor("A_log", A_log)
        require_shape("A_log", A_log, "[HV]", (value_heads,))
        require_dtype("A_log", A_log, INPUT_DTYPES)
        require_device("A_log", A_log, device)
    if dt_bias is not None:
        require_tensor("dt_bias", dt_bias)
        if dt_bias.dim() == 1:
            require_shape("dt_bias", dt_bias, "[HV * K]", (value_heads * key_dim,))
        else:
            require_shape("dt_bias", dt_bias, "[HV, K]", (value_heads, key_dim))
        require_dtype("dt_bias", dt_bias, INPUT_DTYPES)
        require_device("dt_bias", dt_bias, device)


def _check_cu_seqlens(cu_seqlens: Any, q: Tensor) -> None:
    require_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape [N + 1], got {list(cu_seqlens.shape)}")
    require_dtype("cu_seqlens", cu_seqlens, INDEX_DTYPES)
    require_device("cu_seqlens", cu_seqlens, q.device)
    if q.shape[0] != 1:
        raise ValueError(
            f"q: expected a batch of 1 when cu_seqlens is given (sequences are packed along T), "
            f"got {q.shape[0]}"
        )


def check_cu_seqlens_cpu(cu_seqlens_cpu: Any, cu_seqlens: Tensor | None) -> None:
    """The host copy: same count; same values where both can be seen."""
    if cu_seqlens_cpu is None:
        return
    require_tensor("cu_seqlens_cpu", cu_seqlens_cpu)
    if cu_seqlens is None:
        raise ValueError("cu_seqlens_cpu: expected cu_seqlens with it, got None")
    require_dtype("cu_seqlens_cpu", cu_seqlens_cpu, INDEX_DTYPES)
    if cu_seqlens_cpu.device.type != "cpu":
        raise ValueError(
            f"cu_seqlens_cpu: expected a tensor on the CPU, got one on {cu_seqlens_cpu.device}"
        )
    require_shape("cu_seqlens_cpu", cu_seqlens_cpu, "[N + 1]", tuple(cu_seqlens.shape))
    if _is_readable(cu_seqlens) and _is_readable(cu_seqlens_cpu):
        check_host_copy(cu_seqlens_cpu, cu_seqlens)


def _is_readable(x: Tensor) -> bool:
    """Whether there are values to read without waiting for a device or breaking a graph."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def check_host_copy(cu_seqlens_cpu: Tensor, cu_seqlens: Tensor) -> None:
    """Reads both."""
    on_host, values = cu_seqlens_cpu.tolist(), cu_seqlens.tolist()
    if on_host != values:
        raise ValueError(
            f"cu_seqlens_cpu: expected the values of cu_seqlens, {values}, got {on_host}"
        )


def check_states(
    name: str,
    state: Any,
    *,
    q: Tensor,
    v: Tensor,
    num_states: int | None,
    state_v_first: bool,
    written: bool = False,
) -> None:
    """A state tensor ``[N, HV, K, V]`` or ``[N, HV, V, K]``; any N when ``num_states`` is None."""
    if state is None:
        return
    require_tensor(name, state)
    dims = ("V", "K") if state_v_first else ("K", "V")
    sizes = {"K": q.shape[3], "V": v.shape[3]}
    first = "slots" if num_states is None else "N"
    if num_states is None:
        num_states = state.shape[0] if state.dim() == 4 else 0
    require_shape(
        name,
        state,
        f"[{first}, HV, {dims[0]}, {dims[1]}]",
        (num_states, v.shape[2], sizes[dims[0]], sizes[dims[1]]),
    )
    require_dtype(name, state, (torch.float64,) if q.dtype == torch.float64 else STATE_DTYPES)
    require_device(name, state, q.device)
    if written:
        require_own_values(name, state)
        require_writable(name, state)


def check_out(out: Any, v: Tensor) -> None:
    if out is None:
        return
    require_tensor("out", out)
    require_shape("out", out, "[B, T, HV, V]", v.shape)
    require_dtype("out", out, (v.dtype,))
    require_device("out", out, v.device)
    require_own_values("out", out)
    require_writable("out", out)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd has to follow a call with these inputs."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def refuse(name: str, asked_for: bool, what: str) -> None:
    if asked_for:
        raise NotImplementedError(f"{name}: {what} is not offered by flashkda yet")


def in_transform() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation may follow this call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(name: str, *tensors: Tensor | None) -> None:
    """Operators that write in place have no derivative, which some transforms take for zero.

    Raises:
        NotImplementedError: a tensor is followed; under torch.compile, which hides it, any call.
    """
    if in_transform():
        followed = torch.compiler.is_compiling() or any(map(_is_followed, tensors))
        what = "a call under torch.func (grad, jvp, vmap, ...) or in forward mode"
        refuse(name, followed, what)


def _is_followed(x: Tensor | None) -> bool:
    if x is None:
        return False
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return is_wrapped or forward_ad.unpack_dual(x).tangent is not None


def fold_state_v_first(state_v_first: bool, transpose_state_layout: bool | None) -> bool:
    if transpose_state_layout is not None:
        warnings.warn(
            "transpose_state_layout is the deprecated name of state_v_first",
            DeprecationWarning,
            stacklevel=3,
        )
    return resolve_state_v_first(state_v_first, transpose_state_layout)


def check_graph(
    use_graph: bool, max_num_seqs: Any, cu_seqlens: Tensor | None, num_sequences: int
) -> None:
    if max_num_seqs is None:
        return
    if isinstance(max_num_seqs, bool) or not isinstance(max_num_seqs, int):
        raise TypeError(
            "max_num_seqs: expected an int or None, got a value of type "
            f"{type(max_num_seqs).__name__}"
        )
    if use_graph and cu_seqlens is not None and num_sequences != max_num_seqs:
        raise ValueError(
            f"max_num_seqs: expected the {num_sequences} sequences of cu_seqlens (padded with "
            f"empty ones), got {max_num_seqs}"
        )


def check_chunk_size(chunk_size: Any) -> None:
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int)):
        raise TypeError(
            f"chunk_size: expected an int or None, got a value of type {type(chunk_size).__name__}"
        )
    if chunk_size not in (None, 16, 32, 64):
        raise ValueError(f"chunk_size: expected 16, 32, 64 or None, got {chunk_size!r}")


# Asked once, at import: Dynamo of torch 2.9 can't trace the question.
_AUTOCASTS = frozenset(
    x for x in ("cpu", "cuda", "mps", "xpu", "hpu", "xla") if torch.amp.is_autocast_available(x)
)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each float32 tensor in the dtype of autocast, where that is on; others as they are."""
    if not all(isinstance(x, Tensor) for x in tensors):
        return tensors  # the checks have the words for it
    device_type = tensors[0].device.type
    if device_type not in _AUTOCASTS or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)
