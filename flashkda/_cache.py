"""What layers keep between calls: recurrent states and the last inputs of the convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from . import _validate as valid


@dataclass
class LayerState:
    """What one layer keeps between calls, one row per sequence.

    Attributes:
        recurrent: state of the recurrence [N, HV, V, K], float32 (float64 for float64 inputs).
        conv: the last W - 1 inputs of the three convolutions, for q, k and v [N, W - 1, channels];
            empty without short convolutions.
        seen_tokens: positions consumed so far, padding included.

    Example:
        >>> import torch
        >>> from flashkda.nn import LayerState
        >>> LayerState(torch.zeros(1, 2, 32, 32), conv=(), seen_tokens=0).recurrent.dtype
        torch.float32
    """

    recurrent: Tensor
    conv: tuple[Tensor, ...]
    seen_tokens: int


class KDACache:
    """States of every layer of a model, kept by ``layer_idx``, for prefill and decode.

    The size does not depend on the number of tokens. States computed while gradients are recorded
    stay attached to the graph; :meth:`detach_` cuts them off.

    Example:
        >>> import torch
        >>> from flashkda.nn import KDACache, KimiDeltaAttention
        >>> layer = KimiDeltaAttention(hidden_size=32, num_heads=2, head_dim=16, layer_idx=0)
        >>> with torch.no_grad():
        ...     _, _, cache = layer(torch.randn(3, 5, 32), None, KDACache(), use_cache=True)
        >>> cache
        KDACache(seen_tokens={0: 5})
        >>> cache.select(torch.tensor([2, 2])).get(0).recurrent.shape  # a fork of one sequence
        torch.Size([2, 2, 16, 16])
    """

    def __init__(self) -> None:
        self._layers: dict[int, LayerState] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        seen = {idx: state.seen_tokens for idx, state in sorted(self._layers.items())}
        return f"KDACache(seen_tokens={seen})"

    def get(self, layer_idx: int) -> LayerState | None:
        """Returns the state of a layer, or None before its first call."""
        return self._layers.get(layer_idx)

    def update(self, layer_idx: int, state: LayerState) -> None:
        """Replaces the state of a layer."""
        self._layers[layer_idx] = state

    def seen_tokens(self, layer_idx: int = 0) -> int:
        """Number of positions a layer has consumed, padding included; 0 before its first call."""
        state = self._layers.get(layer_idx)
        return 0 if state is None else state.seen_tokens

    def select(self, indices: Tensor) -> KDACache:
        """Returns a new cache with the sequences at ``indices`` [M], in that order.

        A copy: for beam search, to fork a prefix, or to drop finished sequences.

        Args:
            indices: int32 or int64 [M], on any device.

        Raises:
            TypeError: ``indices`` is no tensor, or has another dtype (as a mask has).
            ValueError: it has another number of dimensions.
        """
        valid.require_tensor("indices", indices)
        valid.require_dtype("indices", indices, valid.INDEX_DTYPES)
        if indices.dim() != 1:
            raise ValueError(f"indices: expected shape [M], got {list(indices.shape)}")
        out = KDACache()
        for idx, state in self._layers.items():
            rows = indices.to(state.recurrent.device)
            out.update(
                idx,
                LayerState(
                    recurrent=state.recurrent.index_select(0, rows),
                    conv=tuple(c.index_select(0, rows) for c in state.conv),
                    seen_tokens=state.seen_tokens,
                ),
            )
        return out

    def clone(self) -> KDACache:
        """Returns a copy that later calls do not change."""
        out = KDACache()
        for idx, state in self._layers.items():
            conv = tuple(c.clone() for c in state.conv)
            out.update(idx, LayerState(state.recurrent.clone(), conv, state.seen_tokens))
        return out

    def detach_(self) -> KDACache:
        """Cuts the states off the autograd graph (truncated backpropagation through time)."""
        for state in self._layers.values():
            state.recurrent = state.recurrent.detach()
            state.conv = tuple(c.detach() for c in state.conv)
        return self

    def reset(self) -> None:
        """Forgets everything."""
        self._layers.clear()
