"""Products of all token pairs of a chunk, each with the decay between the two tokens.

For rows ``x_i`` (keys or queries), columns ``k_j`` and ``G`` the running sum of the log decay::

    score_ij = sum_d x_id k_jd exp(G_id - G_jd)        j < i

Splitting the exponential into ``exp(G_i) exp(-G_j)`` overflows as soon as a chunk forgets more than
e^88, and taking differences of ``G`` loses the digits of a small decay that follows a large one.
Here the chunk is halved again and again: of every block of ``2m`` tokens, the rows of the second
half meet the columns of the first half at the boundary between them::

    row factor      product of exp(g) from the boundary to i, inclusive
    column factor   product of exp(g) after j, to the boundary

Both are at most 1 (no overflow) and come without a subtraction (no cancellation), for any gate;
underflow happens only where the product itself is negligible. All levels together cost as much as
the lower triangle of one product. The running products are built from the bottom up.

The derivative follows the same tree from the top down. It adds, for each token, exactly the pairs
whose decay passes over it, so that a strongly decayed channel keeps a correct small gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decays:
    """Decay factors of a batch of chunks, all in [0, 1] for log decays of at most 0."""

    rows: tuple[Tensor, ...]  # per level m = 1, 2, 4, ...: [M, C / 2m, m, K] boundary to row
    columns: tuple[Tensor, ...]  # per level: [M, C / 2m, m, K] column to boundary
    from_start: Tensor  # [M, C, K] chunk start to token, inclusive
    to_end: Tensor  # [M, C, K] after the token to chunk end

    whole: Tensor  # [M, K] over the whole chunk


def _halves(x: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """Views of the first and second halves, ``[M, C / 2m, m, ...]``, of all blocks of ``2m``."""
    blocks: Tensor = x.unflatten(1, (-1, 2, m))
    return blocks[:, :, 0], blocks[:, :, 1]


def _corner(scores: Tensor, m: int) -> Tensor:
    """View ``[X, M, C / 2m, m, m]`` of ``[X, M, C, C]``: second-half rows, first-half columns."""
    blocks: Tensor = scores.unflatten(3, (-1, 2, m)).unflatten(2, (-1, 2, m))
    return blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).movedim(-1, 2)


def decays_of(log_decay: Tensor) -> Decays:
    """Decay factors from the log decay ``[M, C, K]``; C is a power of two."""
    chunk_size = log_decay.shape[1]
    prefix = log_decay.exp()  # block start to token, inclusive
    suffix = torch.ones_like(log_decay)  # after the token to block end
    rows, columns = [], []
    m = 1
    while m < chunk_size:
        prefix_first, prefix_second = _halves(prefix, m)
        suffix_first, _ = _halves(suffix, m)
        rows.append(prefix_second.clone())
        columns.append(suffix_first.clone())
        suffix_first *= prefix_second[:, :, -1:]
        prefix_second *= prefix_first[:, :, -1:]
        m *= 2
    # The state passes through many chunks. From the sum, so that the rounding of exp(g) at a tiny
    # g does not pile up over a long sequence.
    whole = log_decay.sum(1).exp_()
    return Decays(tuple(rows), tuple(columns), prefix, suffix, whole)


def decayed_products(left: Tensor, k: Tensor, decays: Decays) -> Tensor:
    """Scores ``[X, M, C, C]`` below the diagonal (zero elsewhere) of ``left [M, C, X, K]`` with k.

    The X rows of a token share its decay: keys alone, or keys and queries in one product.
    """
    num_chunks, chunk_size, variants, _ = left.shape
    scores = left.new_zeros(variants, num_chunks, chunk_size, chunk_size)
    for level, (row, column) in enumerate(zip(decays.rows, decays.columns, strict=True)):
        m = 1 << level
        left_rows = _halves(left, m)[1] * row.unsqueeze(-2)  # [M, C / 2m, m, X, K]
        k_columns = _halves(k, m)[0] * column  # [M, C / 2m, m, K]
        products = torch.bmm(
            left_rows.flatten(2, 3).flatten(0, 1), k_columns.flatten(0, 1).transpose(1, 2)
        )  # [M * C / 2m, m * X, m]
        products = products.view(num_chunks, -1, m, variants, m)
        _corner(scores, m).copy_(products.movedim(3, 0))
    return scores


def decayed_products_backward(
    left: Tensor,
    k: Tensor,
    decays: Decays,
    grad_scores: Tensor,
    grad_from_start: Tensor,
    grad_to_end: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``left [M, C, X, K]``, ``k`` and the log decay (both ``[M, C, K]``).

    Args:
        left: as given to :func:`decayed_products`.
        k: as given to :func:`decayed_products`.
        decays: as given to :func:`decayed_products`.
        grad_scores: ``[X, M, C, C]``; only entries below the diagonal count.
        grad_from_start: ``[M, C, K]`` gradient of the *logarithm* of ``decays.from_start``.
            Overwritten.
        grad_to_end: ``[M, C, K]`` the same of ``decays.to_end``. Overwritten.
    """
    grad_left = torch.zeros_like(left)
    grad_k = torch.zeros_like(k)
    grad_prefix, grad_suffix = grad_from_start, grad_to_end
    for level in reversed(range(len(decays.rows))):
        m = 1 << level
        row, column = decays.rows[level], decays.columns[level]
        left_rows = _halves(left, m)[1] * row.unsqueeze(-2)
        k_columns = _halves(k, m)[0] * column
        grad_products = _corner(grad_scores, m).movedim(0, 3)  # [M, C / 2m, m, X, m]
        grad_products = grad_products.flatten(2, 3).flatten(0, 1)
        grad_rows = torch.bmm(grad_products, k_columns.flatten(0, 1)).view_as(left_rows)
        grad_columns = torch.bmm(
            grad_products.transpose(1, 2), left_rows.flatten(2, 3).flatten(0, 1)
        ).view_as(k_columns)

        prefix_first, prefix_second = _halves(grad_prefix, m)
        suffix_first, _ = _halves(grad_suffix, m)
        prefix_first[:, :, -1] += prefix_second.sum(2)
        prefix_second[:, :, -1] += suffix_first.sum(2)
        prefix_second += (grad_rows * left_rows).sum(-2)
        suffix_first += grad_columns * k_columns
        _halves(grad_left, m)[1].addcmul_(grad_rows, row.unsqueeze(-2))
        _halves(grad_k, m)[0].addcmul_(grad_columns, column)
    return grad_left, grad_k, grad_prefix
