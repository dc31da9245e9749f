"""The Kimi Delta Attention layer and the cache it decodes with.

Parameter names, shapes and initialisation are those of the layer in flash-linear-attention, so a
``state_dict`` loads in either direction.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashkda import _validate as valid
from flashkda._cache import KDACache, LayerState
from flashkda._conv import PackedConvRows, ShortConvolution
from flashkda.ops import chunk_kda, fused_recurrent_kda

__all__ = ["GatedRMSNorm", "KDACache", "KimiDeltaAttention", "LayerState", "ShortConvolution"]

# Time constants of the decay at initialisation: exp(-dt) per token, dt log-uniform in this range.
_DT_MIN, _DT_MAX, _DT_FLOOR = 1e-3, 1e-1, 1e-4
_A_MIN, _A_MAX = 1.0, 16.0
_MAX_HEAD_DIM = 256
_INDEX_DTYPES = (torch.int32, torch.int64)


class GatedRMSNorm(nn.Module):
    """rms_norm(x) * weight * sigmoid(gate) over the last dimension, in float32 at least.

    Args:
        hidden_size: size of the last dimension.
        eps: added to the mean square.
        device: where the weight lives.
        dtype: of the weight.

    Example:
        >>> import torch
        >>> from flashkda.nn import GatedRMSNorm
        >>> norm = GatedRMSNorm(8)
        >>> norm(torch.ones(2, 8), torch.zeros(2, 8))[0, 0].item()  # sigmoid(0)
        0.49999...
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to ones."""
        nn.init.ones_(self.weight)

    def extra_repr(self) -> str:
        """Size and epsilon, for ``repr``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalises, then gates.

        Args:
            x: inputs [..., D].
            gate: logits [..., D].

        Returns:
            Outputs [..., D] in the dtype of ``x``.
        """
        wide = torch.promote_types(x.dtype, torch.float32)
        y = F.rms_norm(x.to(wide), self.weight.shape, self.weight.to(wide), self.eps)
        return (y * gate.to(wide).sigmoid()).to(x.dtype)


class KimiDeltaAttention(nn.Module):
    """Kimi Delta Attention: projections, short convolutions, gate, delta rule, gated norm.

    The layer of arXiv 2510.26692, with the parameters of the one in flash-linear-attention. The
    delta rule is :func:`flashkda.chunk_kda`.

    Args:
        hidden_size: width D of the input and the output.
        expand_v: value head size V over key head size K.
        head_dim: key head size K, at most 256; V = K * expand_v must be a whole number up to 256.
        num_heads: query and key heads H.
        num_v_heads: value heads HV, a multiple of ``num_heads``; None means ``num_heads``.
        mode: ``"chunk"``, or ``"fused_recurrent"`` for the token recurrence wherever no gradient is
            recorded. Single tokens take the recurrence in both modes.
        use_short_conv: short causal convolutions on q, k and v; without them, SiLU alone.
        allow_neg_eigval: beta in (0, 2) instead of (0, 1).
        safe_gate: promises a bounded gate; needs ``lower_bound``.
        lower_bound: log decay in [lower_bound, 0), itself in [-5, 0); None is the softplus gate.
        conv_size: width of the convolutions.
        conv_bias: bias of the convolutions.
        layer_idx: the layer's place in a :class:`KDACache`.
        norm_eps: epsilon of the output norm.
        device: where the parameters live.
        dtype: of the parameters; ``A_log`` and ``dt_bias`` are float32 unless it is float64.

    Raises:
        ValueError: sizes that don't fit each other, or are out of range.
        TypeError: ``expand_v`` or ``lower_bound`` is no number.

    Example:
        >>> import torch
        >>> from flashkda.nn import KimiDeltaAttention
        >>> layer = KimiDeltaAttention(hidden_size=64, num_heads=2, head_dim=32)
        >>> y, _, _ = layer(torch.randn(1, 10, 64))
        >>> y.shape
        torch.Size([1, 10, 64])
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1.0,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        _check_config(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, safe_gate, lower_bound,
            conv_size,
        )  # fmt: skip
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = num_v_heads
        self.mode = mode
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx

        self.head_k_dim = head_dim
        self.head_v_dim = round(head_dim * expand_v)
        self.key_dim = num_heads * self.head_k_dim
        self.value_dim = num_v_heads * self.head_v_dim
        self.gate_dim = num_v_heads * self.head_k_dim

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(hidden_size, self.key_dim)
        self.k_proj = linear(hidden_size, self.key_dim)
        self.v_proj = linear(hidden_size, self.value_dim)
        if use_short_conv:

            def conv(channels: int) -> ShortConvolution:
                return ShortConvolution(channels, conv_size, conv_bias, device=device, dtype=dtype)

            self.q_conv1d = conv(self.key_dim)
            self.k_conv1d = conv(self.key_dim)
            self.v_conv1d = conv(self.value_dim)
        # Both gates go through a bottleneck of one value head.
        self.f_proj = nn.Sequential(
            linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, self.gate_dim)
        )
        self.b_proj = linear(hidden_size, num_v_heads)
        gate_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.A_log = nn.Parameter(torch.empty(num_v_heads, device=device, dtype=gate_dtype))
        self.dt_bias = nn.Parameter(torch.empty(self.gate_dim, device=device, dtype=gate_dtype))
        self._mark_gate_parameters()
        self.g_proj = nn.Sequential(
            linear(hidden_size, self.head_v_dim), linear(self.head_v_dim, self.value_dim, bias=True)
        )
        self.o_norm = GatedRMSNorm(self.head_v_dim, norm_eps, device=device, dtype=dtype)
        self.o_proj = linear(self.value_dim, hidden_size)
        self.reset_gate_parameters()  # the rest drew its own

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as construction does: for a layer from the meta device."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()
        self.reset_gate_parameters()

    @torch.no_grad()
    def reset_gate_parameters(self) -> None:
        """Draws ``A_log`` and ``dt_bias`` anew.

        ``A_log`` is 0 with ``safe_gate``, else log U(1, 16). softplus(``dt_bias``) is log-uniform
        in [0.001, 0.1].
        """
        if self.safe_gate:
            self.A_log.zero_()
        else:
            self.A_log.uniform_(_A_MIN, _A_MAX).log_()
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(_DT_MIN), math.log(_DT_MAX)).exp_()
        dt.clamp_(min=_DT_FLOOR)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus

    def _mark_gate_parameters(self) -> None:
        """The mark that optimisers' parameter grouping looks for."""
        for name in ("A_log", "dt_bias"):
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter._no_weight_decay = True  # type: ignore[attr-defined]

    # Where torch puts a new parameter in place of another one, attributes are lost: in copies,
    # in to_empty and some conversions, in load_state_dict(assign=True).
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark_gate_parameters()

    def _apply(self, *args: Any, **kwargs: Any) -> KimiDeltaAttention:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._mark_gate_parameters()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_gate_parameters()

    def extra_repr(self) -> str:
        """Head counts and sizes, for ``repr``."""
        return (
            f"num_heads={self.num_heads}, num_v_heads={self.num_v_heads}, "
            f"head_k_dim={self.head_k_dim}, head_v_dim={self.head_v_dim}, "
            f"lower_bound={self.lower_bound}, mode={self.mode!r}"
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: KDACache | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, KDACache | None]:
        """Runs the layer over whole sequences, or over the next tokens of cached ones.

        Args:
            hidden_states: inputs [B, T, D].
            attention_mask: 1 (or True) for tokens, 0 for padding [B, T], or [B, seen + T] with a
                cache, of which the last T columns count. A masked position is no token at all: it
                changes no state, and its output is zero. So padding may stand left, right or in
                between, and a sequence's outputs do not depend on the rest of the batch.
            past_key_values: cache to go on from.
            use_cache: write the states after the last token to the cache (a new one if none is
                given) and return it.
            output_attentions: there are no attention weights: True is refused.
            cu_seqlens: boundaries [N + 1] of N sequences packed into a batch of 1. Rows past its
                end are ignored and give zeros.

        Returns:
            Outputs [B, T, D], None in place of attention weights, and the cache: the one that was
            written with ``use_cache``, else ``past_key_values``.

        Raises:
            ValueError: a shape is wrong, a cache without ``layer_idx``, or a mask with
                ``cu_seqlens``.
            TypeError: an argument is no tensor, bool or :class:`KDACache`, or a table has another
                dtype.
            NotImplementedError: ``output_attentions`` is asked for.
        """
        self._check_inputs(
            hidden_states, attention_mask, past_key_values, use_cache, output_attentions, cu_seqlens
        )
        batch, num_positions, _ = hidden_states.shape
        layer_state = None
        if past_key_values is not None and self.layer_idx is not None:
            layer_state = past_key_values.get(self.layer_idx)

        x, order = hidden_states, None
        if attention_mask is not None:
            x, order, cu_seqlens = _unpad(hidden_states, attention_mask)
        if cu_seqlens is not None:
            x = _zero_past_end(x, cu_seqlens)

        q, k, v, conv = self._project(x, layer_state, cu_seqlens)
        decode = self.mode == "fused_recurrent" or num_positions == 1
        o, recurrent = self._attend(
            q, k, v, x, layer_state, cu_seqlens, use_cache, decode and not torch.is_grad_enabled()
        )
        gate = self.g_proj(x).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        out: Tensor = self.o_proj(self.o_norm(o, gate).flatten(-2))
        if order is not None:
            flat = out.new_zeros(batch * num_positions, self.hidden_size)
            out = flat.index_copy(0, order, out[0]).unflatten(0, (batch, num_positions))

        if use_cache and self.layer_idx is not None and recurrent is not None:
            past_key_values = KDACache() if past_key_values is None else past_key_values
            seen = past_key_values.seen_tokens(self.layer_idx) + num_positions
            past_key_values.update(self.layer_idx, LayerState(recurrent, conv, seen))
        return out, None, past_key_values

    def _project(
        self, x: Tensor, layer_state: LayerState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """q, k [B, T, H, K] and v [B, T, HV, V] after their convolutions, and the conv states."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        states: tuple[Tensor, ...] = ()
        if self.use_short_conv:
            rows = None
            if cu_seqlens is not None:
                rows = PackedConvRows.build(cu_seqlens, x.shape[1], self.conv_size)
            before = (None, None, None) if layer_state is None else layer_state.conv
            q, q_state = self.q_conv1d.convolve(q, before[0], rows)
            k, k_state = self.k_conv1d.convolve(k, before[1], rows)
            v, v_state = self.v_conv1d.convolve(v, before[2], rows)
            states = (q_state, k_state, v_state)
        else:
            q, k, v = F.silu(q), F.silu(k), F.silu(v)
        q = q.unflatten(-1, (self.num_heads, self.head_k_dim))
        k = k.unflatten(-1, (self.num_heads, self.head_k_dim))
        v = v.unflatten(-1, (self.num_v_heads, self.head_v_dim))
        return q, k, v, states

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor,
        layer_state: LayerState | None,
        cu_seqlens: Tensor | None,
        output_final_state: bool,
        decode: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The delta rule [B, T, HV, V] and, when asked for, the final state [N, HV, V, K]."""
        g = self.f_proj(x).unflatten(-1, (self.num_v_heads, self.head_k_dim))
        op = fused_recurrent_kda if decode else chunk_kda
        return op(
            q,
            k,
            v,
            g,
            self.b_proj(x),
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            initial_state=None if layer_state is None else layer_state.recurrent,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            allow_neg_eigval=self.allow_neg_eigval,
            lower_bound=self.lower_bound,
            state_v_first=True,
            cu_seqlens=cu_seqlens,
        )

    def _check_inputs(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past_key_values: object,
        use_cache: bool,
        output_attentions: bool,
        cu_seqlens: Tensor | None,
    ) -> None:
        valid.require_tensor("hidden_states", hidden_states)
        for name, x in (("attention_mask", attention_mask), ("cu_seqlens", cu_seqlens)):
            if x is not None:
                valid.require_tensor(name, x)
        valid.require_bool("use_cache", use_cache)
        shape = tuple(hidden_states.shape)
        if len(shape) != 3 or shape[2] != self.hidden_size:
            raise ValueError(f"hidden_states: expected [B, T, {self.hidden_size}], got {shape}")
        if output_attentions:
            raise NotImplementedError(
                "output_attentions: expected False, got True; the delta rule has no weights"
            )
        if past_key_values is not None and not isinstance(past_key_values, KDACache):
            kind = type(past_key_values).__name__
            raise TypeError(f"past_key_values: expected a KDACache or None, got {kind}")
        if (past_key_values is not None or use_cache) and self.layer_idx is None:
            raise ValueError("layer_idx: expected an int in a layer used with a cache, got None")
        num_seqs = shape[0]
        if cu_seqlens is not None:
            if attention_mask is not None:
                raise ValueError("attention_mask: expected None with cu_seqlens, got both")
            _check_cu_seqlens(cu_seqlens, shape)
            num_seqs = cu_seqlens.shape[0] - 1
        state = None
        if past_key_values is not None and self.layer_idx is not None:
            state = past_key_values.get(self.layer_idx)
        if state is not None and state.recurrent.shape[0] != num_seqs:
            raise ValueError(
                f"past_key_values: expected states of {num_seqs} sequences, "
                f"got {state.recurrent.shape[0]}"
            )
        if attention_mask is not None:
            _check_mask(attention_mask, shape, 0 if state is None else state.seen_tokens)


def _check_config(
    hidden_size: int,
    expand_v: float,
    head_dim: int,
    num_heads: int,
    num_v_heads: int,
    mode: str,
    safe_gate: bool,
    lower_bound: float | None,
    conv_size: int,
) -> None:
    sizes = {
        "hidden_size": hidden_size, "head_dim": head_dim, "num_heads": num_heads,
        "num_v_heads": num_v_heads, "conv_size": conv_size,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    if head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"head_dim: expected at most {_MAX_HEAD_DIM}, got {head_dim}")
    if num_v_heads % num_heads:
        raise ValueError(
            f"num_v_heads: expected a multiple of num_heads={num_heads}, got {num_v_heads}"
        )
    value_dim = head_dim * valid.require_number("expand_v", expand_v)
    is_whole = math.isfinite(value_dim) and math.isclose(value_dim, round(value_dim), rel_tol=1e-5)
    if not is_whole or not 1 <= round(value_dim) <= _MAX_HEAD_DIM:
        raise ValueError(
            f"expand_v: expected head_dim * expand_v to be a whole number in 1..{_MAX_HEAD_DIM}, "
            f"got {head_dim} * {expand_v}"
        )
    if mode not in ("chunk", "fused_recurrent"):
        raise ValueError(f"mode: expected 'chunk' or 'fused_recurrent', got {mode!r}")
    if lower_bound is not None and not -5 <= valid.require_number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound: expected None or a value in [-5, 0), got {lower_bound}")
    if safe_gate and lower_bound is None:
        raise ValueError("lower_bound: expected a value in [-5, 0) with safe_gate, got None")


def _check_cu_seqlens(cu_seqlens: Tensor, shape: tuple[int, ...]) -> None:
    if cu_seqlens.dtype not in _INDEX_DTYPES:
        raise TypeError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens: expected [N + 1] with N >= 1, got shape {tuple(cu_seqlens.shape)}"
        )
    if shape[0] != 1:
        raise ValueError(
            f"hidden_states: expected a batch of 1 with cu_seqlens, got a batch of {shape[0]}"
        )
    if _is_readable(cu_seqlens):
        ends = cu_seqlens.tolist()
        rises = all(a <= b for a, b in pairwise(ends))
        if ends[0] != 0 or ends[-1] > shape[1] or not rises:
            raise ValueError(
                f"cu_seqlens: expected 0 first, no value below the one before it and at most "
                f"T={shape[1]} last, got {ends}"
            )


def _check_mask(mask: Tensor, shape: tuple[int, ...], seen_tokens: int) -> None:
    batch, num_positions, _ = shape
    widths = sorted({num_positions, seen_tokens + num_positions})
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] not in widths:
        wanted = " or ".join(f"[{batch}, {width}]" for width in widths)
        raise ValueError(f"attention_mask: expected {wanted}, got {list(mask.shape)}")
    # An additive mask (0 and -inf) would be read as its opposite.
    if _is_readable(mask) and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask: expected 0 for padding and 1 for tokens, got others")


def _is_readable(x: Tensor) -> bool:
    """Whether there are values to read without waiting for a device or breaking a graph."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.device.type == "cpu"


def _unpad(hidden_states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packs the tokens of a padded batch.

    Returns:
        Packed tokens [1, M, D], their places in the flattened batch [M], and cu_seqlens [B + 1].
        On the CPU padding is dropped. Elsewhere (and while compiling) M is B * T and padding is
        moved past cu_seqlens[-1], so that nothing has to be read on the host.
    """
    num_positions = hidden_states.shape[1]
    valid = mask[:, mask.shape[1] - num_positions :] != 0
    cu_seqlens = F.pad(valid.sum(1).cumsum(0), (1, 0))
    order = torch.argsort(valid.flatten().logical_not(), stable=True)
    if _is_readable(mask):
        order = order[: int(cu_seqlens[-1])]
    return hidden_states.flatten(0, 1).index_select(0, order)[None], order, cu_seqlens


def _zero_past_end(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Clears the rows [1, T, D] that belong to no sequence: whatever stands there stays there."""
    past_end = torch.arange(x.shape[1], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(past_end[:, None], 0)
