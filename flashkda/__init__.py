"""Kimi Delta Attention: prefill, decode and training on any device.

See :func:`chunk_kda` for the equations; ``python -m flashkda doctor`` says what runs here.
"""

from importlib.metadata import PackageNotFoundError as _NotInstalled
from importlib.metadata import version as _version

from ._backend import Backend, backend
from ._debug import debug_checks
from .ops import chunk_kda, explain, fused_recurrent_kda, fwd, get_workspace_size

try:
    __version__ = _version("flashkda")
except _NotInstalled:  # a source tree on the path: it imports all the same
    __version__ = "0+unknown"

__all__ = [
    "Backend",
    "__version__",
    "backend",
    "chunk_kda",
    "debug_checks",
    "explain",
    "fused_recurrent_kda",
    "fwd",
    "get_workspace_size",
]


def __getattr__(name: str) -> object:
    """Imports ``flashkda.nn`` when it is first asked for: operators alone don't need the layer."""
    if name == "nn":
        from importlib import import_module

        return import_module(".nn", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
