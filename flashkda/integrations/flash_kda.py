"""A module called ``flash_kda``, for code that imports Moonshot's FlashKDA: :func:`install`.

SGLang's ``flashkda`` choice and flash-linear-attention's ``flash_kda`` backend both
``import flash_kda`` and call ``fwd``, with up to all of its arguments by position, and
``get_workspace_size``. What their kernels would have refused with an exception (a GPU without
kernels, parameters in bfloat16, states of two dtypes) is computed; calls that mean nothing (a bound
outside [-5, 0], wrong shapes) raise as in :func:`flashkda.fwd`.

The module is there only after :func:`install`, since finding it is what turns fla's backend on,
also where Triton would be faster than the PyTorch path. :func:`flashkda.integrations.fla.enable`
is the better door to fla: it leaves such calls to Triton.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import Tensor

from .. import _backend, _fwd, ops
from . import _serving

_logger = logging.getLogger(__name__)

NAME = "flash_kda"


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> None:
    """``flash_kda.fwd``: :func:`flashkda.fwd`, and the PyTorch path where a kernel fails.

    Args:
        q: ``[B, T, H, K]``; with k, v, g, beta and scale as for :func:`flashkda.fwd`.
        k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]``, gate logits.
        beta: ``[B, T, HV]``, logits.
        scale: factor on the outputs.
        out: ``[B, T, HV, V]``, written.
        A_log: ``[HV]`` in any shape, any floating dtype.
        dt_bias: ``[HV, K]`` or ``[HV * K]``, any floating dtype.
        lower_bound: in [-5, 0]. At 0 nothing decays.
        initial_state: ``[N, HV, V, K]`` float32 or bfloat16. Default: zeros.
        final_state: ``[N, HV, V, K]``, written; of a dtype of its own.
        cu_seqlens: ``[N + 1]`` int32 or int64 on q's device, with B = 1.

    Raises:
        ValueError: as :func:`flashkda.fwd`.
        TypeError: as :func:`flashkda.fwd`.

    Example:
        >>> import torch
        >>> from flashkda.integrations import flash_kda
        >>> x = torch.randn(1, 20, 2, 32, dtype=torch.bfloat16)
        >>> out = torch.empty_like(x)
        >>> A_log, dt_bias = torch.zeros(2), torch.zeros(2, 32)
        >>> flash_kda.fwd(x, x, x, x, x[..., 0], 32**-0.5, out, A_log, dt_bias, -5.0)
        >>> bool(out.isfinite().all())
        True
    """
    where = _serving.parameters(A_log, dt_bias)
    if lower_bound == 0:  # FlashKDA allows it: the gate is 0 * sigmoid(...)
        # A bound too small to be told from 0 even over 2^20 tokens in float32.
        lower_bound = -1e-30
    try:
        _fwd.fwd(
            q, k, v, g, beta, scale, out, where["A_log"], where["dt_bias"], lower_bound,
            initial_state, final_state, cu_seqlens,
        )  # fmt: skip
        return
    except RuntimeError as error:
        _logger.warning("a kernel failed, the call takes the PyTorch path: %s", error)
    _, state = ops.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state=final_state is not None,
        lower_bound=lower_bound, cu_seqlens=cu_seqlens, out=out, backend="torch",
        **where, **_serving.RAW,
    )  # fmt: skip
    if final_state is not None and state is not None:
        final_state.copy_(state)


get_workspace_size = _fwd.get_workspace_size

_installed: ModuleType | None = None


def _is_elsewhere() -> bool:
    """Whether there is a ``flash_kda`` that is not ours."""
    if NAME in sys.modules:
        return sys.modules[NAME] is not _installed
    return importlib.util.find_spec(NAME) is not None


def install(*, replace: bool = False) -> ModuleType:
    """Makes ``import flash_kda`` give flashkda, in this process; a second call changes nothing.

    Call it before fla is asked for a kernel: fla looks for the module once.

    Args:
        replace: take the place of a FlashKDA that is installed.

    Returns:
        The module: ``fwd`` and ``get_workspace_size``.

    Raises:
        RuntimeError: there is a ``flash_kda`` already, and ``replace`` is False.

    Example:
        >>> from flashkda.integrations import flash_kda as door
        >>> module = door.install()
        >>> import flash_kda
        >>> flash_kda.get_workspace_size(8192, 4)
        30527488
        >>> door.uninstall()
    """
    global _installed
    if _installed is not None and sys.modules.get(NAME) is _installed:
        return _installed
    if _is_elsewhere() and not replace:
        raise RuntimeError(
            "flash_kda: expected no module of this name, got one that is installed; "
            "install(replace=True) takes its place"
        )
    module = ModuleType(NAME, "flashkda in the place of FlashKDA.")
    # Code that only asks whether it is there looks for the spec.
    module.__spec__ = ModuleSpec(NAME, loader=None, origin=__file__)
    module.__file__ = __file__
    module.__dict__.update(fwd=fwd, get_workspace_size=get_workspace_size)
    served = _backend.backend()
    if served.name != "cuda" and torch.cuda.is_available():
        _logger.warning("flash_kda is on the PyTorch path on this GPU: %s", served.reason)
    sys.modules[NAME] = _installed = module
    return module


def uninstall() -> None:
    """Takes the module away again, if it is still ours.

    Example:
        >>> from flashkda.integrations import flash_kda
        >>> flash_kda.uninstall()  # does nothing where there is none
    """
    global _installed
    if _installed is not None and sys.modules.get(NAME) is _installed:
        del sys.modules[NAME]
    _installed = None
