"""What a call should give, by the token recurrence in float64, and how far a result is from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from flashkda._selftest import recurrence, relative_error
from flashkda.bench._cases import Case
from flashkda.bench._inputs import Inputs, activated

GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
# Without decay these vanish, and with them the meaning of a relative error.
_OF_THE_GATE = ("g", "A_log", "dt_bias")
PIECE = 256  # tokens of one graph


@dataclass(frozen=True)
class Result:
    """What a call gave.

    Attributes:
        out: [B, T, H, V].
        state: final states [N, H, V, K], or None.
        gradients: by the names of :data:`GRADIENTS`, or none.
    """

    out: Tensor
    state: Tensor | None = None
    gradients: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Reference:
    """The right result of some heads."""

    heads: list[int]
    result: Result
    gate: str

    def errors(self, got: Result) -> dict[str, float]:
        """Relative errors in norm of "out", and of "state" or "gradients" (their worst).

        Of :attr:`heads`; of the others every output and state must at least be finite.
        """
        found = {"out": _error(got.out, got.out[:, :, self.heads], self.result.out)}
        if self.result.state is not None:
            state = got.state
            found["state"] = float("inf")
            if state is not None:
                found["state"] = _error(state, state[:, self.heads], self.result.state)
        if self.result.gradients is not None:
            given = got.gradients or {}
            errors = [float("inf")] if not given else []
            for name, want in self.result.gradients.items():
                if name in given and not (self.gate == "none" and name in _OF_THE_GATE):
                    errors.append(relative_error(_of_heads(name, given[name], self.heads), want))
            found["gradients"] = max(errors)
        return found


def _error(whole: Tensor, part: Tensor, want: Tensor) -> float:
    return relative_error(part, want) if bool(torch.isfinite(whole).all()) else float("inf")


def _of_heads(name: str, x: Tensor, heads: list[int]) -> Tensor:
    return x[heads] if name in ("A_log", "dt_bias") else x[:, :, heads]


def checked_heads(case: Case) -> list[int]:
    """First, middle and last; for a backward pass, whose states all stay in memory, the last."""
    last = case.shape.heads - 1
    return [last] if case.shape.group == "train" else sorted({0, last // 2, last})


def reference(inputs: Inputs) -> Reference:
    """Runs the recurrence over every token of the checked heads."""
    heads = checked_heads(inputs.case)
    part = inputs.of_heads(heads)
    boundaries = inputs.boundaries
    if inputs.out_grad is None:
        with torch.inference_mode():
            run = recurrence_in_graphs if inputs.q.is_cuda else recurrence
            out, state = run(
                *activated(part),
                scale=inputs.scale,
                initial_state=part.state.transpose(-1, -2),
                cu_seqlens=boundaries,
            )
        return Reference(heads, Result(out, state.transpose(-1, -2)), inputs.case.gate)
    assert part.out_grad is not None
    leaves = {name: getattr(part, name).double().requires_grad_() for name in GRADIENTS}
    with torch.enable_grad():
        out, _ = recurrence(
            *activated(replace(part, **leaves)), scale=inputs.scale, cu_seqlens=boundaries
        )
        grads = torch.autograd.grad(out, list(leaves.values()), part.out_grad.double())
    gradients = dict(zip(leaves, grads, strict=True))
    return Reference(heads, Result(out.detach(), gradients=gradients), inputs.case.gate)


class _Piece:
    """The recurrence over :data:`PIECE` tokens as a graph, from ``state`` to ``state``."""

    def __init__(self, tokens: Sequence[Tensor], scale: float, state: Tensor) -> None:
        self._tokens = [x[:, :PIECE].clone() for x in tokens]
        self.state = torch.empty_like(state, dtype=torch.float64)  # never the caller's own
        recurrence(*(x[:, :1] for x in tokens), scale=scale)  # libraries set themselves up
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out, final = recurrence(*self._tokens, scale=scale, initial_state=self.state)
            self.state.copy_(final)

    def run(self, tokens: Sequence[Tensor]) -> Tensor:
        for own, x in zip(self._tokens, tokens, strict=True):
            own.copy_(x)
        self._graph.replay()
        return self._out.clone()


def recurrence_in_graphs(
    *tokens: Tensor, scale: float, initial_state: Tensor, cu_seqlens: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The same by CUDA graphs of many tokens: its operations take less time than their launch."""
    length = tokens[0].shape[1]
    packed = cu_seqlens is not None
    spans = list(pairwise(cu_seqlens)) if cu_seqlens is not None else [(0, length)]
    states = list(initial_state.split(1 if packed else len(initial_state)))
    piece = _Piece(tokens, scale, states[0]) if length >= PIECE else None
    outs: list[Tensor] = []
    for n, (start, end) in enumerate(spans):
        if piece is not None and end - start >= PIECE:
            piece.state.copy_(states[n])
            while end - start >= PIECE:
                outs.append(piece.run([x[:, start : start + PIECE] for x in tokens]))
                start += PIECE
            states[n] = piece.state
        rest = [x[:, start:end] for x in tokens]
        out, states[n] = recurrence(*rest, scale=scale, initial_state=states[n])
        outs.append(out)
    return torch.cat(outs, dim=1), torch.cat(states)
