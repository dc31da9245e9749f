"""Other implementations of KDA that may be installed, each called as it is fastest.

None is a dependency: what is missing, or does not import, is a reason in the report.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from flashkda._selftest import recurrence
from flashkda.bench._cases import Case
from flashkda.bench._inputs import LOWER_BOUND, Inputs, activated
from flashkda.bench._reference import Result
from flashkda.bench._systems import IN_KERNEL, Call, System, differentiable, pool, read_pool

_V_FIRST_ONLY = "it takes [V, K] states only"
_NO_PROMISE = "state_is_ready is a promise to flashkda"


def _int64(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.long()


@dataclass(frozen=True)
class Fla:
    """fla-core: ``chunk_kda``, and ``fused_recurrent_kda`` in a pool.

    Its own kernels: backends that other packages register with it are passed by.

    Attributes:
        version: of fla-core.
        module: ``fla.ops.kda``.
        recurrent: ``fla.ops.kda.fused_recurrent``.
        v_first: layout of states in decode, where [K, V] and [V, K] are two kernels.
        recompute: in backward passes, to save memory; else it keeps what it computed.
    """

    version: str
    module: Any
    recurrent: Any
    v_first: bool = True
    recompute: bool = True

    @property
    def name(self) -> str:
        """With its version, and what is not its default."""
        settings = ("" if self.v_first else " [K, V]") + (
            "" if self.recompute else " disable_recompute"
        )
        return f"fla-core {self.version}{settings}"

    def refusal(self, case: Case) -> str | None:
        """It does all; settings that make no difference to a case are not measured twice."""
        shape = case.shape
        if not self.v_first and (shape.group != "decode" or not shape.v_first):
            return ""
        if not self.recompute and shape.group != "train":
            return ""
        return _NO_PROMISE if shape.is_ready else None

    def bind(self, inputs: Inputs) -> Call:
        """A call of the function for the group."""
        group = inputs.case.shape.group
        if group == "decode":
            return self._decode(inputs)
        chunk_kda = inspect.unwrap(self.module.chunk_kda)
        options: dict[str, Any] = IN_KERNEL | {
            "safe_gate": True,
            "cu_seqlens": _int64(inputs.cu_seqlens),
        }
        if group == "train":
            options["disable_recompute"] = not self.recompute
            return differentiable(inputs, lambda **leaves: chunk_kda(**leaves, **options)[0])
        options |= {
            "A_log": inputs.A_log,
            "dt_bias": inputs.dt_bias,
            "initial_state": inputs.state,
            "output_final_state": True,
            "state_v_first": True,
        }
        return Call(lambda: chunk_kda(*inputs.tokens, **options), lambda got: Result(*got[:2]))

    def _decode(self, x: Inputs) -> Call:
        v_first = self.v_first and x.case.shape.v_first
        options: dict[str, Any] = IN_KERNEL | {
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            "state_v_first": v_first,
        }
        if x.case.shape.lengths[0] == 1:
            states, slots = pool(x, v_first=v_first)
            options |= {"initial_state": states, "ssm_state_indices": slots}
            in_place = inspect.unwrap(self.recurrent.fused_recurrent_kda_fwd)
            return Call(
                lambda: in_place(*x.tokens, **options, inplace_final_state=True)[0],
                lambda out: read_pool(out, states, slots, v_first=v_first),
            )
        # In a pool it wants a slot for every token then.
        state = x.state if v_first else x.state.transpose(-1, -2).contiguous()
        function = self.module.fused_recurrent_kda

        def read(got: tuple[Tensor, Tensor]) -> Result:
            return Result(got[0], got[1] if v_first else got[1].transpose(-1, -2))

        return Call(
            lambda: function(
                *x.tokens, **options, initial_state=state, output_final_state=True
            ),
            read,
        )  # fmt: skip


@dataclass(frozen=True)
class MoonshotFlashKDA:
    """Moonshot's ``flash_kda.fwd``; it has neither decode kernel nor backward pass."""

    version: str
    module: Any

    @property
    def name(self) -> str:
        """With its version."""
        return f"flash_kda {self.version}"

    def refusal(self, case: Case) -> str | None:
        """Forward passes alone."""
        if case.shape.group == "train":
            return "it has no backward pass"
        if not case.shape.v_first:
            return _V_FIRST_ONLY
        return _NO_PROMISE if case.shape.is_ready else None

    def bind(self, inputs: Inputs) -> Call:
        """A call into tensors that are there."""
        x = inputs
        out, final, ends = torch.empty_like(x.v), torch.empty_like(x.state), _int64(x.cu_seqlens)

        def run() -> None:
            self.module.fwd(
                *x.tokens, x.scale, out, x.A_log, x.dt_bias, LOWER_BOUND,
                initial_state=x.state, final_state=final, cu_seqlens=ends,
            )  # fmt: skip

        return Call(run, lambda _: Result(out, final))


@dataclass(frozen=True)
class Cudnn:
    """``kimi_delta_attention`` of nvidia-cudnn-frontend, with gate and beta in float32.

    Its kernel wants those: with bfloat16 every call would begin with casts.
    """

    version: str
    function: Callable[..., tuple[Tensor, Tensor]]

    @property
    def name(self) -> str:
        """With its version."""
        return f"nvidia-cudnn-frontend {self.version}"

    def refusal(self, case: Case) -> str | None:
        """Prefill alone."""
        if case.shape.group == "train":
            return "its backward pass takes inputs that are activated already"
        return "it has no kernel for decoding" if case.shape.group == "decode" else None

    def bind(self, inputs: Inputs) -> Call:
        """A call on packed sequences, the layout that it has."""
        q, k, v, g, beta = (x.flatten(0, 1) for x in inputs.tokens)
        ends = inputs.cu_seqlens
        if ends is None:
            batch, length = inputs.case.shape.batch
            ends = length * torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        options = {
            "scale": inputs.scale,
            "initial_state": inputs.state,
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "safe_gate": True,
            "gate_lower_bound": LOWER_BOUND,
            "a_log": inputs.A_log,
            "dt_bias": inputs.dt_bias,
        }
        g, beta = g.float(), beta.float()
        return Call(
            lambda: self.function(q, k, v, g, beta, ends, **options),
            lambda got: Result(got[0].view_as(inputs.v), got[1]),
        )


@dataclass(frozen=True)
class Activated:
    """A function of activated inputs that gives outputs and [K, V] states; forward, in PyTorch."""

    name: str
    function: Callable[..., tuple[Tensor, Tensor]]

    def refusal(self, case: Case) -> str | None:
        """Forward passes over sequences of one length."""
        if case.shape.group == "train":
            return "it is a reference for forward passes"
        return "it takes no packed sequences" if case.shape.packed else None

    def bind(self, inputs: Inputs) -> Call:
        """A call on inputs of the same dtype, activated beforehand."""
        tokens = tuple(x.to(inputs.q.dtype) for x in activated(inputs))
        state = inputs.state.transpose(-1, -2).to(inputs.q.dtype).contiguous()
        return Call(
            lambda: self.function(*tokens, scale=inputs.scale, initial_state=state),
            lambda got: Result(got[0], got[1].transpose(-1, -2)),
        )


def _load(module: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla-core warns on machines without a GPU
        return import_module(module)


def _fla() -> list[System]:
    version = metadata.version("fla-core")
    module, recurrent = _load("fla.ops.kda"), _load("fla.ops.kda.fused_recurrent")
    return [
        Fla(version, module, recurrent),
        Fla(version, module, recurrent, v_first=False),
        Fla(version, module, recurrent, recompute=False),
    ]


def _fla_naive() -> list[System]:
    version, module = metadata.version("fla-core"), _load("fla.ops.kda.naive")

    def with_state(function: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
        return lambda *tokens, **options: function(*tokens, **options, output_final_state=True)

    return [
        Activated(f"fla-core {version} {name}", with_state(getattr(module, name)))
        for name in ("naive_recurrent_kda", "naive_chunk_kda")
    ]


def _moonshot() -> list[System]:
    if find_spec("flash_kda") is None:  # it may be on the path without metadata
        raise metadata.PackageNotFoundError("flash_kda")
    module = _load("flash_kda")
    names = metadata.packages_distributions().get("flash_kda", [])
    return [MoonshotFlashKDA(metadata.version(names[0]) if names else "", module)]


def _cudnn() -> list[System]:
    version = metadata.version("nvidia-cudnn-frontend")
    return [Cudnn(version, _load("cudnn.linear_attention").kimi_delta_attention)]


def _recurrence() -> list[System]:
    return [Activated("token recurrence, float64", recurrence)]


_ON_CUDA = {"fla-core": _fla, "flash_kda": _moonshot, "nvidia-cudnn-frontend": _cudnn}
_ON_CPU = {"token recurrence": _recurrence, "fla-core": _fla_naive}


def find(device_type: str) -> tuple[list[System], dict[str, str]]:
    """The rivals that are installed here, and why the others are not measured."""
    found: list[System] = []
    missing = {}
    for name, load in (_ON_CUDA if device_type == "cuda" else _ON_CPU).items():
        try:
            found += load()
        except metadata.PackageNotFoundError:
            missing[name] = "not installed"
        except Exception as error:  # whatever other people's modules do at import
            text = (str(error).strip().splitlines() or [""])[0]
            missing[name] = f"does not import: {type(error).__name__}: {text}"
    return found, missing
