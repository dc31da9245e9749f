"""flash-linear-attention calls flashkda: ``flashkda.integrations.fla.enable()``.

The backend is registered through fla-core's own registry (``fla.backends.register`` from 0.6, the
registry of the kda operations in 0.5), ahead of the ``flash_kda`` one, for ``chunk_kda`` and, from
0.6 on, for ``fused_recurrent_kda_fwd``, which ``fused_recurrent_kda`` calls. What flashkda would
compute differently or more slowly is declined, with a reason in the log and in :func:`status`, and
takes the way it took before:

- CUDA tensors that flashkda's kernels do not serve, gradients among them: Triton is faster there
  than the PyTorch path;
- tensors on other devices than CPU and CUDA, and of tensor subclasses;
- float64 inputs, ``return_intermediate_states``, ``cp_context``, keywords unknown here;
- invalid calls, so that the error is fla's.

On the CPU, where Triton does not run, flashkda serves training too.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _backend, _dispatch, _library, _native, ops
from .. import _validate as valid
from .. import _validate_pool as valid_pool

_logger = logging.getLogger(__name__)

BACKEND_TYPE = "flashkda_kernels"  # fla-core 0.5.1 calls its own backend "flashkda"
ENV_VAR = "FLA_FLASHKDA"  # FLA_FLASHKDA=0 switches the backend off, as fla's own are
_PRIORITY = 2  # lower comes first; flash_kda has 3
_MAX_REASONS = 100  # kept by a function; reasons may hold shapes
_CHUNK_SIZES = (32, 64)  # that fla accepts

Call = dict[str, Any]
Verdict = tuple[bool, str | None]


class Status(NamedTuple):
    """What became of the calls of one function of fla since it was first enabled.

    Example:
        >>> from flashkda.integrations import fla
        >>> fla.Status(served=2, declined={"float64 inputs": 1}).served
        2
    """

    served: int
    """Calls that flashkda ran."""
    declined: dict[str, int]
    """Calls that it left to fla, by reason."""


class _Declined(Exception):
    """A call that is fla's; the message is the reason."""


def _check(asked_for: Any, reason: str) -> None:
    if asked_for:
        raise _Declined(reason)


# --- from fla's arguments to flashkda's ----------------------------------------------------------


def _common(call: Call) -> Call:
    """What both functions mean alike; flags by their truth, as fla takes them."""
    q, v = call["q"], call["v"]
    for name in ("q", "k", "v", "g", "beta"):
        x = call[name]
        _check(
            type(x) not in (Tensor, torch.nn.Parameter),
            f"{name} is a value of type {type(x).__name__}, not a plain tensor",
        )
    _check(
        q.device.type not in ("cpu", "cuda"),
        f"flashkda serves CPU and CUDA tensors here, not {q.device.type}",
    )
    _check(q.dtype == torch.float64, "fla computes float64 inputs in float32, flashkda does not")
    _check(q.dim() != 4 or v.dim() != 4, "q and v are not [B, T, H, D]")
    in_kernel = bool(call["use_gate_in_kernel"])
    sigmoid = bool(call["use_beta_sigmoid_in_kernel"])
    A_log, dt_bias = call.get("A_log"), call.get("dt_bias")
    if not in_kernel:  # fla then looks at none of them
        A_log = dt_bias = None
    value_heads, key_dim = v.shape[2], q.shape[3]
    # Old checkpoints hold [1, 1, HV, 1]; fla reads the elements in their order.
    if A_log is not None and A_log.dim() != 1 and A_log.numel() == value_heads:
        A_log = A_log.reshape(value_heads)
    if dt_bias is not None and dt_bias.dim() > 2 and dt_bias.numel() == value_heads * key_dim:
        dt_bias = dt_bias.reshape(value_heads, key_dim)
    return {
        "q": q, "k": call["k"], "v": v, "g": call["g"], "beta": call["beta"],
        "A_log": A_log, "dt_bias": dt_bias,
        "scale": call["scale"],
        "output_final_state": bool(call["output_final_state"]),
        "use_qk_l2norm_in_kernel": bool(call["use_qk_l2norm_in_kernel"]),
        "use_gate_in_kernel": in_kernel,
        "use_beta_sigmoid_in_kernel": sigmoid,
        "lower_bound": call["lower_bound"] if in_kernel else None,
        "cu_seqlens": call["cu_seqlens"],
    }  # fmt: skip


def _from_chunk_kda(call: Call) -> Call:
    """Keywords of :func:`flashkda.chunk_kda` for a call of fla's; raises :class:`_Declined`."""
    _check(call.get("cp_context") is not None, "context parallelism (cp_context)")
    _check(call["return_intermediate_states"], "return_intermediate_states")
    chunk_size = call.get("chunk_size", 64)
    _check(chunk_size not in _CHUNK_SIZES, f"fla refuses chunk_size {chunk_size!r}")
    v_first = call.get("state_v_first", False)
    old_name = call.get("transpose_state_layout")
    _check(v_first and "transpose_state_layout" in call, "fla refuses two names of one argument")
    state, boundaries = call["initial_state"], call["cu_seqlens"]
    _check(
        state is not None and state.dtype != torch.float32, "fla refuses states other than float32"
    )
    use_graph = bool(call.get("use_graph", False))
    result = _common(call)
    result |= {
        "initial_state": state,
        "allow_neg_eigval": bool(call.get("allow_neg_eigval", False)),
        "safe_gate": bool(call["safe_gate"]),
        "disable_recompute": bool(call["disable_recompute"]),
        "state_v_first": bool(v_first),
        "cu_seqlens_cpu": None if boundaries is None else call["cu_seqlens_cpu"],
        "use_graph": use_graph,
        "max_num_seqs": call.get("max_num_seqs") if use_graph else None,
    }
    if "transpose_state_layout" in call:
        result["transpose_state_layout"] = bool(old_name)  # chunk_kda warns, as fla does
    return result


def _check_chunk_kda(call: Call) -> None:
    """Everything that chunk_kda checks, and that it is the better choice; raises otherwise."""
    q, v, state = call["q"], call["v"], call["initial_state"]
    lower_bound = valid.resolve_lower_bound(call["lower_bound"])
    _check(
        call["safe_gate"] and call["use_gate_in_kernel"] and lower_bound is None,
        "fla refuses safe_gate without lower_bound",
    )
    _check_tensors(call, lower_bound)
    valid.check_cu_seqlens_cpu(call["cu_seqlens_cpu"], call["cu_seqlens"])
    num_sequences = _library.num_sequences(q, call["cu_seqlens"])
    valid.check_graph(call["use_graph"], call["max_num_seqs"], call["cu_seqlens"], num_sequences)
    valid.check_states(
        "initial_state", state, q=q, v=v, num_states=num_sequences,
        state_v_first=call["state_v_first"] or call.get("transpose_state_layout", False),
    )  # fmt: skip
    _check_choice(q, _dispatch.select_chunk(_tensors(call), call["cu_seqlens"], None, None))


def _from_recurrent(call: Call) -> Call:
    """Keywords of :func:`flashkda.fused_recurrent_kda`; raises :class:`_Declined`."""
    result = _common(call)
    q, state, indices = result["q"], call["initial_state"], call.get("ssm_state_indices")
    in_place = bool(call["inplace_final_state"])
    _check(in_place and state is None, "inplace_final_state without a state")
    _check(
        result["use_gate_in_kernel"] and result["A_log"] is None and result["lower_bound"] is None,
        "the softplus gate without A_log",
    )
    if indices is not None:
        one_each = q.shape[1] == (1 if result["cu_seqlens"] is None else len(indices))
        _check(
            not one_each and indices.dim() == 1,
            "one slot per sequence, but more than one token: fla takes a slot for each token",
        )
        _check(
            not in_place and not (indices.dim() == 1 and result["output_final_state"]),
            "slots that are not written in place",
        )
    if state is not None and not in_place and state.dtype == torch.bfloat16:
        state = state.float()  # fla returns float32 states, whatever it starts from
    result |= {
        "initial_state": state,
        "allow_neg_eigval": bool(call.get("allow_neg_eigval", False))
        and result["use_beta_sigmoid_in_kernel"],
        "state_v_first": bool(call["state_v_first"]),
        "inplace_final_state": in_place,
        "ssm_state_indices": indices,
        "num_accepted_tokens": call.get("num_accepted_tokens"),
        "out": call.get("out"),
    }
    return result


def _check_recurrent(call: Call) -> None:
    q, v, indices, in_place = (
        call[x] for x in ("q", "v", "ssm_state_indices", "inplace_final_state")
    )
    _check_tensors(call, valid.resolve_lower_bound(call["lower_bound"]))
    num_sequences = _library.num_sequences(q, call["cu_seqlens"])
    valid_pool.check_slots(
        indices, None, call["num_accepted_tokens"], None, in_place=in_place, q=q,
        num_sequences=num_sequences, slot_per_token=True,
    )  # fmt: skip
    state = call["initial_state"]
    valid.check_states(
        "initial_state", state, q=q, v=v,
        num_states=None if indices is not None else num_sequences,
        state_v_first=call["state_v_first"], written=in_place,
    )  # fmt: skip
    valid.check_out(call["out"], v)
    chosen = _dispatch.select_recurrent(
        _tensors(call), call["cu_seqlens"], indices, in_place, state if in_place else None, None
    )
    _check_choice(q, chosen)


_check_inputs = valid.once_per_metadata(valid.check_inputs)


def _check_tensors(call: Call, lower_bound: float | None) -> None:
    _check_inputs(
        *(call[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens")),
        call["use_gate_in_kernel"], call["use_qk_l2norm_in_kernel"],
        call["use_beta_sigmoid_in_kernel"], call["allow_neg_eigval"], lower_bound,
    )  # fmt: skip
    valid.resolve_scale(call["scale"], call["q"].shape[3])


def _tensors(call: Call) -> Any:
    return tuple(call[x] for x in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"))


def _check_choice(q: Tensor, chosen: _backend.Backend) -> None:
    slower = q.is_cuda and chosen.name != "cuda" and chosen.reason != _native.NOTHING_TO_COMPUTE
    _check(slower, chosen.reason)


# --- the backend ---------------------------------------------------------------------------------


class _Function:
    """One function of fla, and how flashkda serves it."""

    def __init__(
        self,
        original: Callable[..., Any],
        translate: Callable[[Call], Call],
        check: Callable[[Call], None],
        run: Callable[..., Any],
        keywords: tuple[str, ...],
    ) -> None:
        self.original = original
        self.translate = translate
        self.check = check
        self.run = run
        self.served = 0
        self.declined: dict[str, int] = {}
        parameters = inspect.signature(original).parameters.values()
        named = [x for x in parameters if x.kind is not x.VAR_KEYWORD]
        self.names = [x.name for x in named]
        self.defaults = {x.name: x.default for x in named if x.default is not x.empty}
        self.known = {*self.names, *keywords}

    def bind(self, args: tuple[Any, ...], kwargs: Call) -> Call:
        """fla's arguments by name, by the signature that the installed version has."""
        given = dict(zip(self.names, args, strict=False))
        _check(len(args) > len(self.names) or given.keys() & kwargs.keys(), "fla refuses the call")
        given |= kwargs
        unknown = given.keys() - self.known
        _check(unknown, f"keywords unknown here: {', '.join(sorted(unknown))}")
        return self.defaults | given

    def verify(self, *args: Any, **kwargs: Any) -> Verdict:
        try:
            self.check(self.translate(self.bind(args, kwargs)))
        except Exception as error:  # whatever it is, fla's own way is still there
            reason = str(error) or type(error).__name__
            self.decline(reason)
            return False, reason
        return True, None

    def decline(self, reason: str) -> None:
        if reason not in self.declined:
            _logger.info("%s is left to fla: %s", self.original.__name__, reason)
            if len(self.declined) >= _MAX_REASONS:
                reason = "other reasons"
        self.declined[reason] = self.declined.get(reason, 0) + 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            call = self.translate(self.bind(args, kwargs))
            device = call["q"].device.type
            # fla casts nothing under autocast.
            with torch.autocast(device, enabled=False):
                result = self.run(**call)
        except Exception as error:
            _logger.warning("%s failed here, and is left to fla: %s", self.original.__name__, error)
            self.decline(str(error) or type(error).__name__)
            return self.original(*args, **kwargs)
        if self.served == 0:
            _logger.info("%s runs on flashkda", self.original.__name__)
        self.served += 1
        return result


def _run_recurrent(**call: Any) -> tuple[Tensor, Tensor | None]:
    with torch.no_grad():  # fla's outputs have no gradient either, and it does not refuse
        return ops.fused_recurrent_kda(**call)


_functions: dict[str, _Function] = {}
_is_enabled = False


def _enabled(*_: Any) -> bool:
    return _is_enabled and os.environ.get(ENV_VAR, "1") != "0"


def _backend_class(base: type, name: str, function: _Function) -> type:
    """A backend of fla's for one function, which its dispatch looks up by name."""
    members = {
        "__doc__": "flashkda, for fla.",
        "backend_type": BACKEND_TYPE,
        "priority": _PRIORITY,
        "is_enabled": classmethod(_enabled),
        name: staticmethod(function),
        f"{name}_verifier": staticmethod(function.verify),
    }
    return type("FlashKDAKernelsBackend", (base,), members)


def _import_fla() -> ModuleType:
    try:
        return import_module("fla.ops.kda")
    except Exception as error:  # also what Triton raises when it does not fit this fla
        raise ImportError(
            f"flashkda.integrations.fla: expected fla-core 0.5.1 or newer (pip install fla-core), "
            f"got {error}"
        ) from error


def _register() -> None:
    kda = _import_fla()
    try:
        registry: Any = import_module("fla.backends")
        is_new = True
    except ImportError:
        try:
            registry = import_module("fla.ops.backends")
            kda_registry = import_module("fla.ops.kda.backends").kda_registry
        except (ImportError, AttributeError) as error:
            raise ImportError(
                "flashkda.integrations.fla: expected fla-core 0.5.1 or newer, which has a registry "
                f"of backends, got {error}"
            ) from error
        is_new = False
    if getattr(registry, "_DISPATCH_DISABLED", False):
        raise RuntimeError(
            "flashkda.integrations.fla: expected fla's dispatch to be on, got "
            "FLA_DISABLE_BACKEND_DISPATCH=1 when fla was imported"
        )
    chunk = _Function(
        inspect.unwrap(kda.chunk_kda), _from_chunk_kda, _check_chunk_kda, ops.chunk_kda,
        ("A_log", "dt_bias", "chunk_size", "transpose_state_layout"),
    )  # fmt: skip
    chunk_class = _backend_class(registry.BaseBackend, "chunk_kda", chunk)
    if not is_new:
        kda_registry.register(chunk_class())
        _functions["chunk_kda"] = chunk
        return
    module = import_module("fla.ops.kda.fused_recurrent")
    recurrent = _Function(
        inspect.unwrap(module.fused_recurrent_kda_fwd), _from_recurrent, _check_recurrent,
        _run_recurrent, (),
    )  # fmt: skip
    registry.register(kda.chunk_kda)(chunk_class)
    recurrent_class = _backend_class(registry.BaseBackend, "fused_recurrent_kda_fwd", recurrent)
    registry.register("kda")(recurrent_class)
    _functions.update(chunk_kda=chunk, fused_recurrent_kda_fwd=recurrent)


def enable() -> None:
    """Makes ``fla.ops.kda`` call flashkda wherever that means the same and is not slower.

    Functions that were imported from fla before are switched too. A second call changes nothing.
    Reasons of declined calls are logged once each, at INFO by the logger
    ``flashkda.integrations.fla``; ``FLA_FLASHKDA=0`` in the environment switches the backend off.

    fla-core 0.5 dispatches ``chunk_kda`` only, so ``fused_recurrent_kda`` stays Triton's there.

    Raises:
        ImportError: fla-core is not installed, does not import, or is older than 0.5.1.
        RuntimeError: fla was imported with ``FLA_DISABLE_BACKEND_DISPATCH=1``.

    Example:
        >>> import torch
        >>> from flashkda.integrations import fla
        >>> fla.enable()
        >>> from fla.ops.kda import chunk_kda
        >>> before = fla.status()["chunk_kda"].served
        >>> x = torch.randn(1, 20, 2, 32)
        >>> o, _ = chunk_kda(x, x, x, -x.abs(), x[..., 0].sigmoid())
        >>> fla.status()["chunk_kda"].served - before
        1
        >>> fla.disable()
    """
    global _is_enabled
    if not _functions:
        _register()
    _is_enabled = True


def disable() -> None:
    """Lets fla choose among its own backends again; :func:`enable` undoes it.

    Example:
        >>> from flashkda.integrations import fla
        >>> fla.enable()
        >>> fla.disable()
    """
    global _is_enabled
    _is_enabled = False


def status() -> dict[str, Status]:
    """Calls served and declined, by the name of fla's function; empty before :func:`enable`.

    Example:
        >>> from flashkda.integrations import fla
        >>> fla.enable()
        >>> sorted(fla.status())
        ['chunk_kda', 'fused_recurrent_kda_fwd']
        >>> fla.disable()
    """
    return {name: Status(x.served, dict(x.declined)) for name, x in _functions.items()}
