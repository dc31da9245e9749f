"""What a call should give, by the token recurrence in float64, and how far a result is from it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashkda._selftest import recurrence, relative_error
from flashkda.bench._cases import Case
from flashkda.bench._inputs import Inputs, activated

GRADIENTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
# Without decay these vanish, and with them the meaning of a relative error.
_OF_THE_GATE = ("g", "A_log", "dt_bias")


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
            out, state = recurrence(
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
