"""What tests do with a call: gradients of it, pieces of it, its inputs before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
PER_TOKEN = ("q", "k", "v", "g", "beta")

Function = Callable[..., tuple[Tensor, Tensor | None]]


def double(call: dict[str, Any]) -> dict[str, Any]:
    """The same call with every floating tensor in float64 (for reference gradients)."""
    return {
        name: x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in call.items()
    }


def differentiable(call: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in DIFFERENTIABLE if call.get(name) is not None)


def gradients(
    function: Function,
    call: dict[str, Any],
    names: Sequence[str] | None = None,
    *,
    through_o: bool = True,
    through_state: bool = True,
    seed: int = 1,
) -> dict[str, Tensor]:
    """Gradients of a fixed random linear form of the outputs with respect to the named inputs."""
    names = differentiable(call) if names is None else names
    leaves = {name: call[name].detach().clone().requires_grad_() for name in names}
    o, state = function(**(call | leaves))
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros((), dtype=torch.float64)
    for used, value in ((through_o, o), (through_state, state)):
        if used:
            assert value is not None
            weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            loss = loss + (value.to("cpu", torch.float64) * weight).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    result = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None, f"{name} received no gradient"
        assert leaf.grad.dtype == leaf.dtype, f"{name}: gradient in {leaf.grad.dtype}"
        result[name] = leaf.grad
    return result


def tokens(call: dict[str, Any], lo: int, hi: int) -> dict[str, Any]:
    """The call on tokens lo..hi-1 only; whatever else it holds is kept."""
    return call | {name: call[name][:, lo:hi] for name in PER_TOKEN}


def sequence(call: dict[str, Any], n: int) -> dict[str, Any]:
    """The n-th sequence of a varlen call, as a call of its own without `cu_seqlens`."""
    lo, hi = call["cu_seqlens"][n : n + 2].tolist()
    alone = tokens(call, lo, hi)
    del alone["cu_seqlens"]
    if call.get("initial_state") is not None:
        alone["initial_state"] = call["initial_state"][n : n + 1]
    return alone


def _bits(x: Tensor) -> Tensor:
    """Compare bit patterns: NaN equals itself and -0.0 differs from 0.0."""
    if x.device.type == "meta":
        return torch.empty(0)
    if x.layout != torch.strided:
        x = x.to_dense()
    return x.detach().reshape(-1).clone().view(torch.uint8)


@contextmanager
def unmodified(call: dict[str, Any], *, but: Sequence[str] = ()) -> Iterator[None]:
    """Assert that no tensor of the call is changed inside the block, to the bit."""
    before = {
        name: _bits(x) for name, x in call.items() if isinstance(x, Tensor) and name not in but
    }
    try:
        yield
    finally:
        changed = [name for name, x in before.items() if not torch.equal(_bits(call[name]), x)]
    assert not changed, f"modified: {', '.join(changed)}"


Recorded = list[tuple[Any, tuple[Any, ...], dict[str, Any]]]


class Recorder(TorchDispatchMode):
    """Keeps the calls of flashkda's operators, with their inputs as they were before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Recorded = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "flashkda":
            saved = [x.detach().clone() if isinstance(x, Tensor) else x for x in args]
            self.calls.append((func, tuple(saved), dict(kwargs)))
        return func(*args, **kwargs)


def record(function: Callable[[], Any]) -> Recorded:
    recorder = Recorder()
    with recorder:
        function()
    return recorder.calls
