"""flashkda itself, as the benchmark calls it; rivals are called in the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import flashkda
from flashkda.bench._cases import Case
from flashkda.bench._inputs import LOWER_BOUND, Inputs
from flashkda.bench._reference import GRADIENTS, Result

IN_KERNEL: dict[str, Any] = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "lower_bound": LOWER_BOUND,
}


@dataclass(frozen=True)
class Call:
    """A call on tensors that are ready.

    Attributes:
        run: does it; whatever it returns is for ``read``.
        read: the result.
        path: which implementation of a system serves it, where it has several.
    """

    run: Callable[[], Any]
    read: Callable[[Any], Result]
    path: str = ""


class System(Protocol):
    """Something that computes KDA."""

    @property
    def name(self) -> str:
        """With its version, and settings if it is there with several."""

    def refusal(self, case: Case) -> str | None:
        """Why it can't do a case; None if it can, "" if that isn't worth saying."""

    def bind(self, inputs: Inputs) -> Call:
        """A call; ``inputs`` stay as they are, states that it overwrites are copies."""


def pool(inputs: Inputs, *, v_first: bool) -> tuple[Tensor, Tensor]:
    """A pool of states in random order, and the slots [N] of the sequences."""
    state = inputs.state if v_first else inputs.state.transpose(-1, -2)
    slots = torch.randperm(len(state)).to(state.device, torch.int32)
    states = torch.empty_like(state, memory_format=torch.contiguous_format)
    states[slots] = state
    return states, slots


def read_pool(out: Tensor, states: Tensor, slots: Tensor, *, v_first: bool) -> Result:
    """The result of a call that left the states in a pool."""
    state = states[slots]
    return Result(out, state if v_first else state.transpose(-1, -2))


def differentiable(inputs: Inputs, forward: Callable[..., Tensor]) -> Call:
    """A call of ``forward`` on all leaves by keyword, and its backward pass."""
    leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in GRADIENTS}

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        # Also where the caller has turned gradients off.
        with torch.inference_mode(False), torch.enable_grad():
            out = forward(**leaves)
            return out, torch.autograd.grad(out, list(leaves.values()), inputs.out_grad)

    def read(got: tuple[Tensor, tuple[Tensor, ...]]) -> Result:
        return Result(got[0].detach(), gradients=dict(zip(GRADIENTS, got[1], strict=True)))

    return Call(run, read)


class FlashKDA:
    """This package: ``fwd``, ``fused_recurrent_kda`` in a pool, ``chunk_kda`` with autograd."""

    @property
    def name(self) -> str:
        """With its version."""
        return f"flashkda {flashkda.__version__}"

    def refusal(self, case: Case) -> str | None:
        """It does every case."""
        return None

    def bind(self, inputs: Inputs) -> Call:
        """A call of the function that serves the group best."""
        if inputs.case.shape.group == "train":
            return self._train(inputs)
        served = flashkda.explain(
            *inputs.tokens,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
            initial_state=inputs.state,
            cu_seqlens=inputs.cu_seqlens,
            state_v_first=True,
            **IN_KERNEL,
        )
        bind = self._decode if inputs.case.shape.group == "decode" else self._prefill
        return bind(inputs, served.name)

    def _prefill(self, x: Inputs, path: str) -> Call:
        out, final = torch.empty_like(x.v), torch.empty_like(x.state)

        def run() -> None:
            flashkda.fwd(
                *x.tokens, x.scale, out, x.A_log, x.dt_bias, LOWER_BOUND,
                x.state, final, x.cu_seqlens,
            )  # fmt: skip

        return Call(run, lambda _: Result(out, final), path)

    def _decode(self, x: Inputs, path: str) -> Call:
        v_first = x.case.shape.v_first
        states, slots = pool(x, v_first=v_first)
        options: dict[str, Any] = IN_KERNEL | {
            "A_log": x.A_log,
            "dt_bias": x.dt_bias,
            "initial_state": states,
            "ssm_state_indices": slots,
            "state_v_first": v_first,
            "state_is_ready": x.case.shape.is_ready,
        }

        def run() -> Tensor:
            return flashkda.fused_recurrent_kda(*x.tokens, **options)[0]

        return Call(run, lambda out: read_pool(out, states, slots, v_first=v_first), path)

    def _train(self, x: Inputs) -> Call:
        options: dict[str, Any] = IN_KERNEL | {"cu_seqlens": x.cu_seqlens}
        q = x.q.detach().requires_grad_()
        with torch.inference_mode(False), torch.enable_grad():
            path = flashkda.explain(
                q, *x.tokens[1:], A_log=x.A_log, dt_bias=x.dt_bias, **options
            ).name

        def forward(**leaves: Tensor) -> Tensor:
            return flashkda.chunk_kda(**(options | leaves), backend=path)[0]

        call = differentiable(x, forward)
        return Call(call.run, call.read, path)
