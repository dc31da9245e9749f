"""Which implementation serves a device, and why not the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import _native


class Backend(NamedTuple):
    """An implementation and a sentence that says why it, and not the other, is used.

    Example:
        >>> import flashkda
        >>> print(flashkda.Backend("torch", "the call asks for it"))
        torch: the call asks for it
    """

    name: str
    """``"cuda"`` (the native kernels) or ``"torch"`` (the PyTorch path)."""
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


BACKENDS = ("torch", "cuda")


def backend(device: torch.device | str | int | None = None) -> Backend:
    """Says which implementation serves a device.

    Args:
        device: a device, its name or a CUDA index. Default: the current CUDA device where there is
            one, else the CPU.

    Returns:
        The name (``"torch"`` or ``"cuda"``) and the reason, a sentence. Never raises for a device
        that is merely absent or too old: that is a reason.

    Raises:
        TypeError: ``device`` is none of the accepted kinds.
        ValueError: ``device`` is a string that names no device type.

    Example:
        >>> import flashkda
        >>> flashkda.backend("cpu").name
        'torch'
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(
            f"device: expected a torch.device, a string or an int, got {type(device).__name__}"
        )
    if not isinstance(device, torch.device):
        try:
            named = ("cuda", device) if isinstance(device, int) else (device,)
            device = torch.device(*named)
        except RuntimeError as error:
            raise ValueError(f"device: expected the name of a device, got {device!r}") from error
    return _probe(device)


_served: dict[torch.device, Backend] = {}


def _probe(device: torch.device) -> Backend:
    """The best implementation on a device, whatever the call."""
    served = _served.get(device)
    if served is not None:
        return served
    if device.type != "cuda":
        return Backend("torch", f"the CUDA kernels do not serve {device.type} tensors")
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    variant, reason = _native.probe(index)
    if variant is None:
        return Backend("torch", reason)
    result = Backend("cuda", f"the {variant} kernels of this build serve cuda:{index}")
    if device.index is not None:
        _served[device] = result
    return result


def check_forced(forced: str | None) -> None:
    """The ``backend`` argument of a call."""
    if forced is None:
        return
    if not isinstance(forced, str):
        raise TypeError(
            f"backend: expected a string or None, got a value of type {type(forced).__name__}"
        )
    if forced not in BACKENDS:
        raise ValueError(f"backend: expected 'torch', 'cuda' or None, got {forced!r}")


def select(device: torch.device, forced: str | None, refusal: Callable[[], str | None]) -> Backend:
    """The implementation for one call, which the kernels may refuse for a reason of its own.

    Raises:
        TypeError: ``forced`` is no string.
        ValueError: ``forced`` is no backend.
        RuntimeError: ``forced`` is ``"cuda"`` and it can't serve the call.
    """
    check_forced(forced)
    if forced == "torch":
        return Backend("torch", "the call asks for it")
    chosen = _probe(device)
    if chosen.name == "cuda":
        reason = refusal()
        if reason is None:
            return chosen
        chosen = Backend("torch", reason)
    # A call without tokens is no failure of anyone: the PyTorch path fills in its results.
    if forced == "cuda" and chosen.reason != _native.NOTHING_TO_COMPUTE:
        raise RuntimeError(f"backend: 'cuda' can't serve this call: {chosen.reason}")
    return chosen


_warned: set[str] = set()


def warn_of_fallback(
    chosen: Backend, device: torch.device, forced: str | None, stacklevel: int = 3
) -> None:
    """Warns, once for each reason, when CUDA tensors take the PyTorch path unasked."""
    if chosen.name != "torch" or device.type != "cuda" or forced is not None:
        return
    if chosen.reason not in _warned and chosen.reason != _native.NOTHING_TO_COMPUTE:
        _warned.add(chosen.reason)
        warnings.warn(
            f"flashkda runs its slower PyTorch path on CUDA tensors: {chosen.reason}. "
            "Pass backend='torch' to ask for it without this warning.",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
