"""The short convolution of the layer, over packed sequences and with a state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _silu(x: Tensor) -> Tensor:
    # F.silu on the CPU computes what is left after the last whole vector by another exponential,
    # so its bits depend on the length; torch.exp does not.
    if x.device.type != "cpu":
        return F.silu(x)
    decay = torch.exp(-x.abs())
    return x * torch.where(x > 0, 1.0, decay) / (1 + decay)


@dataclass(frozen=True)
class PackedConvRows:
    """Row numbers that turn a packed batch into one long sequence with room for the state.

    Every sequence is preceded by W - 1 rows of state (zeros without one). A last block of W - 1
    rows does the same for the rows past ``cu_seqlens[-1]``, which belong to no sequence. All of it
    is computed on the device of ``cu_seqlens``, which is never read on the host.
    """

    num_seqs: int  # N
    extended: Tensor  # [(N + 1) * (W - 1) + T]: where each row of (states, padding, tokens) goes
    outputs: Tensor  # [T]: the output row of each token, counted from the first full window
    states: Tensor  # [N * (W - 1)]: the last W - 1 rows of every extended sequence

    @staticmethod
    def build(cu_seqlens: Tensor, num_tokens: int, width: int) -> PackedConvRows:
        cu = cu_seqlens.long()
        num_seqs, history = cu.shape[0] - 1, width - 1
        token = torch.arange(num_tokens, device=cu.device)
        lag = torch.arange(history, device=cu.device)
        # Number of the sequence that each token belongs to; num_seqs for rows past the end.
        seq = torch.searchsorted(cu[1:].contiguous(), token, right=True)
        state_block = torch.arange(num_seqs + 1, device=cu.device) * history
        return PackedConvRows(
            num_seqs=num_seqs,
            extended=torch.cat(
                [((cu + state_block)[:, None] + lag).flatten(), token + (seq + 1) * history]
            ),
            outputs=token + seq * history,
            states=((cu[1:] + state_block[:-1])[:, None] + lag).flatten(),
        )


class ShortConvolution(nn.Module):
    """Depthwise causal convolution over tokens, then SiLU.

    y_t = silu(bias + sum_i weight_i x_{t - W + 1 + i}), accumulated in float32 at least. It is the
    same sum in the same order for any cut of a sequence, so prefill, chunked prefill and decode
    agree to the bit.

    Args:
        hidden_size: number of channels D.
        kernel_size: width W >= 1.
        bias: whether there is a bias per channel.
        device: where the parameters live.
        dtype: of the parameters.

    Example:
        >>> import torch
        >>> from flashkda.nn import ShortConvolution
        >>> conv = ShortConvolution(8, kernel_size=4)
        >>> y, state = conv(torch.randn(2, 5, 8))
        >>> y.shape, state.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 3, 8]))
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.kernel_size = kernel_size
        self.weight = nn.Parameter(
            torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype)
        )
        self.bias = (
            nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(W), as torch's own convolutions."""
        bound = 1 / math.sqrt(self.kernel_size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Sizes, for ``repr``."""
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, bias={self.bias is not None}"

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolves each sequence, starting from its state.

        Args:
            x: inputs [B, T, D]; B is 1 with ``cu_seqlens``.
            state: the W - 1 inputs before the first token [N, W - 1, D]; None means zeros.
            cu_seqlens: boundaries of packed sequences [N + 1].

        Returns:
            Outputs [B, T, D] and the new state [N, W - 1, D]. With ``cu_seqlens``, outputs of rows
            past its end mean nothing.

        Raises:
            ValueError: the state has another shape.
        """
        rows = None
        if cu_seqlens is not None:
            rows = PackedConvRows.build(cu_seqlens, x.shape[1], self.kernel_size)
        return self.convolve(x, state, rows)

    def convolve(
        self, x: Tensor, state: Tensor | None, rows: PackedConvRows | None
    ) -> tuple[Tensor, Tensor]:
        """As a call, with the row numbers of ``cu_seqlens`` made already (None: a dense batch)."""
        batch, num_tokens, channels = x.shape
        history = self.kernel_size - 1
        num_seqs = batch if rows is None else rows.num_seqs
        if state is None:
            state = x.new_zeros(num_seqs, history, channels)
        elif tuple(state.shape) != (num_seqs, history, channels):
            raise ValueError(
                f"state: expected shape {(num_seqs, history, channels)}, got {tuple(state.shape)}"
            )
        state = state.to(x.dtype)
        if rows is None:
            extended = torch.cat([state, x], dim=1)
            # A copy, so that the state does not keep the whole sequence in memory.
            return self._windows(extended), extended[:, num_tokens:].clone()
        padding = x.new_zeros(history, channels)
        source = torch.cat([state.flatten(0, 1), padding, x[0]])
        extended = torch.empty_like(source).index_copy(0, rows.extended, source)
        y = self._windows(extended[None])[0].index_select(0, rows.outputs)
        return y[None], extended.index_select(0, rows.states).unflatten(0, (num_seqs, history))

    def _windows(self, extended: Tensor) -> Tensor:
        # [B, W - 1 + L, D] -> [B, L, D]. Shifted sums: on the CPU several times faster than
        # conv1d in bfloat16 and for short inputs, and they never depend on the length.
        length = extended.shape[1] - self.kernel_size + 1
        wide = torch.promote_types(extended.dtype, torch.float32)
        weight, xs = self.weight.to(wide), extended.to(wide)
        y = xs[:, :length] * weight[:, 0, 0]
        for i in range(1, self.kernel_size):
            y = torch.addcmul(y, xs[:, i : i + length], weight[:, 0, i])
        if self.bias is not None:
            y = y + self.bias
        return _silu(y).to(extended.dtype)
