"""Error measure and budgets. The figures are demands, not observations: none may be raised to pass.

All are norm-relative, |got - want| / |want|, against the float64 token recurrence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOAT64 = 1e-12
FLOAT32 = 1e-5

# (output, final state) for bf16 inputs, by kind of input.
BF16: dict[str, tuple[float, float]] = {
    "fast": (4.5e-3, 2.5e-3),
    "slow": (4.5e-3, 4e-3),
    "mixed": (4.5e-3, 4e-3),
    "none": (4.5e-3, 4e-3),
    "saturated": (4.5e-3, 2.5e-3),
    "repeated4": (4e-3, 3.5e-3),
}

# Gradients for bf16 inputs: what training frameworks ask of this operator.
BF16_GRADIENTS: dict[str, float] = {
    "q": 8e-3,
    "k": 8e-3,
    "v": 8e-3,
    "g": 2e-2,
    "beta": 2e-2,
    "A_log": 3e-3,
    "dt_bias": 8e-3,
    "initial_state": 8e-3,
}


def norm_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|; |got| if `want` is zero; inf if either is not finite."""
    got, want = got.detach().to(torch.float64), want.detach().to(torch.float64)
    if got.device != want.device:
        got, want = got.cpu(), want.cpu()
    if not (bool(torch.isfinite(got).all()) and bool(torch.isfinite(want).all())):
        return float("inf")
    size = float(want.norm())
    return float((got - want).norm()) / (size if size > 0 else 1.0)


def check(
    got: Mapping[str, Tensor | None],
    want: Mapping[str, Tensor | None],
    limit: float | Mapping[str, float],
) -> None:
    """Assert that every named tensor is within its limit; the message lists all of them."""
    assert got.keys() == want.keys(), f"{sorted(got)} against {sorted(want)}"
    lines, failed = [], False
    for name, expected in want.items():
        value = got[name]
        assert value is not None, f"{name}: missing"
        assert expected is not None, f"{name}: the reference is missing"
        assert value.shape == expected.shape, f"{name}: {value.shape} against {expected.shape}"
        allowed = limit if isinstance(limit, float) else limit[name]
        error = norm_error(value, expected)
        bad = not error <= allowed
        failed |= bad
        lines.append(f"{name}: error {error:.2e}, allowed {allowed:.2e}{'  <--' if bad else ''}")
    assert not failed, "\n" + "\n".join(lines)


def check_pair(
    got: tuple[Tensor, Tensor | None],
    want: tuple[Tensor, Tensor],
    limit: float | tuple[float, float],
) -> None:
    """`check` for (output, final state)."""
    out_limit, state_limit = (limit, limit) if isinstance(limit, float) else limit
    check(
        {"o": got[0], "final_state": got[1]},
        {"o": want[0], "final_state": want[1]},
        {"o": out_limit, "final_state": state_limit},
    )
