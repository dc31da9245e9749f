"""flash-linear-attention on flashkda, on the CPU: who ran, what came out, what was left to fla."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import fla_cases
import oracle
import pytest
import torch
from calls import gradients
from cases import KdaCase
from errors import check
from fla_cases import CHUNKED, DECODE, NEEDS_FLA, RECURRENT, FlaCase
from torch import Tensor

import flashkda
from flashkda.integrations import fla as door
from flashkda.integrations import flash_kda as shim

Call = dict[str, Any]


@pytest.fixture
def enabled() -> Iterator[ModuleType]:
    with fla_cases.enabled() as opened:
        yield opened


def small_call(**changes: Any) -> Call:
    call = KdaCase(T=40, H=1, K=8, V=8, dtype=torch.float32, state=False).make()
    return call | changes


# --- fla's own cases -----------------------------------------------------------------------------


@NEEDS_FLA
@pytest.mark.parametrize("x", [x.small() for x in CHUNKED], ids=fla_cases.ids)
def test_chunk_kda(enabled: ModuleType, x: FlaCase) -> None:
    function = fla_cases.fla_kda().chunk_kda
    call = fla_cases.make(x)
    with fla_cases.served(enabled, "chunk_kda", 1), torch.no_grad():
        got = function(**call)
    fla_cases.check_outputs(x, got, fla_cases.want(call))
    if not x.trains:
        return
    limits = fla_cases.limits_of_gradients(x)
    with fla_cases.served(enabled, "chunk_kda", 1):
        grads = gradients(function, call, list(limits))
    reference = {name: y for name, y in call.items() if name in fla_cases.ORACLE}
    want = gradients(lambda **y: oracle.kda(**y), fla_cases.double(reference), list(limits))
    check(grads, want, limits)


@NEEDS_FLA
@pytest.mark.parametrize("x", [x.small() for x in RECURRENT], ids=fla_cases.ids)
def test_fused_recurrent_kda(enabled: ModuleType, x: FlaCase) -> None:
    call = fla_cases.make(x)
    with fla_cases.served(enabled, "fused_recurrent_kda_fwd", 1):
        got = fla_cases.fla_kda().fused_recurrent_kda(**call)
    fla_cases.check_outputs(x, got, fla_cases.want(call))


@NEEDS_FLA
@pytest.mark.parametrize("x", [x.small() for x in DECODE], ids=fla_cases.ids)
def test_decode_in_a_pool(enabled: ModuleType, x: FlaCase) -> None:
    fla_cases.fla_kda()
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    with fla_cases.served(enabled, "fused_recurrent_kda_fwd", 1):
        fla_cases.decode(x, "cpu", fused_recurrent_kda_fwd)


@NEEDS_FLA
def test_arguments_by_position(enabled: ModuleType) -> None:
    x = fla_cases.FLASH_KDA[0].small()
    call = fla_cases.make(x)
    function = fla_cases.fla_kda().chunk_kda
    bound = inspect.signature(function).bind(**call)
    bound.apply_defaults()
    with fla_cases.served(enabled, "chunk_kda", 2), torch.no_grad():
        for got, want in zip(function(*bound.args, **bound.kwargs), function(**call), strict=True):
            assert torch.equal(got, want)


@NEEDS_FLA
def test_the_layers_call_trains(enabled: ModuleType) -> None:
    """A model cast whole to bfloat16: parameters too, which fla's own backend can't take."""
    case = KdaCase(T=70, H=2, K=16, V=16, dtype=torch.bfloat16, state=False, gate="slow")
    call = case.make() | {"safe_gate": True, "state_v_first": True, "output_final_state": False}
    leaves = {
        x: y.to(torch.bfloat16).requires_grad_() for x, y in call.items() if isinstance(y, Tensor)
    }
    with fla_cases.served(enabled, "chunk_kda", 1):
        o, state = fla_cases.fla_kda().chunk_kda(**(call | leaves))
    assert state is None
    o.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.bfloat16 for x in leaves.values())


@NEEDS_FLA
def test_padded_boundaries_of_a_graph(enabled: ModuleType) -> None:
    call = small_call(cu_seqlens=torch.tensor([0, 30, 40, 40, 40]), use_graph=True, max_num_seqs=4)
    with fla_cases.served(enabled, "chunk_kda", 1):
        o, _ = fla_cases.fla_kda().chunk_kda(**call)
    want, _ = flashkda.chunk_kda(**call)
    assert torch.equal(o, want)


@NEEDS_FLA
@pytest.mark.filterwarnings("ignore:.*transpose_state_layout:DeprecationWarning")
def test_the_old_name_of_v_first(enabled: ModuleType) -> None:
    call = KdaCase(T=20, H=1, K=8, V=4, dtype=torch.float32, state=False).make()
    with fla_cases.served(enabled, "chunk_kda", 1):
        _, state = fla_cases.fla_kda().chunk_kda(**call, transpose_state_layout=True)
    assert state.shape == (1, 1, 4, 8)


@NEEDS_FLA
def test_autocast_casts_nothing(enabled: ModuleType) -> None:
    with torch.autocast("cpu"), fla_cases.served(enabled, "chunk_kda", 1):
        o, _ = fla_cases.fla_kda().chunk_kda(**small_call())
    assert o.dtype == torch.float32


# --- what is left to fla -------------------------------------------------------------------------


class Other(Tensor):
    pass


CHUNK_REASONS: list[tuple[str, Callable[[], Call]]] = [
    (r"context parallelism \(cp_context\)", lambda: small_call(cp_context=object())),
    ("return_intermediate_states", lambda: small_call(return_intermediate_states=True)),
    ("float64 inputs", lambda: KdaCase(T=16, state=False).make()),
    ("keywords unknown here: new", lambda: small_call(new=1)),
    ("fla refuses chunk_size 16", lambda: small_call(chunk_size=16)),
    (
        "fla refuses states other than float32",
        lambda: small_call(initial_state=torch.zeros(1, 1, 8, 8, dtype=torch.bfloat16)),
    ),
    (
        "q is a value of type Other",
        lambda: small_call(q=torch.zeros(1, 40, 1, 8).as_subclass(Other)),
    ),
    ("not meta", lambda: {n: y.to("meta") if isinstance(y, Tensor) else y
                          for n, y in small_call().items()}),
    ("lower_bound: expected a value in", lambda: small_call(lower_bound=-10.0)),
    ("fla refuses safe_gate without", lambda: small_call(safe_gate=True, lower_bound=None)),
    ("k: expected shape", lambda: small_call(k=torch.zeros(1, 40, 1, 4))),
    ("q and v are not", lambda: small_call(q=torch.zeros(40, 8))),
    ("fla refuses two names", lambda: small_call(state_v_first=True, transpose_state_layout=True)),
    ("max_num_seqs: expected", lambda: small_call(
        cu_seqlens=torch.tensor([0, 40]), use_graph=True, max_num_seqs=3)),
    ("beta: expected bfloat16", lambda: small_call(beta=torch.zeros(1, 40, 1, dtype=torch.int32))),
]  # fmt: skip


@NEEDS_FLA
@pytest.mark.parametrize(("reason", "make"), CHUNK_REASONS, ids=[x for x, _ in CHUNK_REASONS])
def test_chunk_kda_is_declined(
    enabled: ModuleType,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    make: Callable[[], Call],
) -> None:
    function = enabled._functions["chunk_kda"]
    monkeypatch.setattr(function, "declined", {})
    with caplog.at_level(logging.INFO, logger=door.__name__):
        for _ in range(2):
            accepted, why = function.verify(**make())
            assert not accepted
    assert len(caplog.records) == 1, "a reason is logged once"
    assert caplog.records[0].message == f"chunk_kda is left to fla: {why}"
    assert enabled.status()["chunk_kda"].declined == {why: 2}
    with pytest.raises(AssertionError, match=reason):  # the pattern, with the text in its message
        assert why is None, why


RECURRENT_REASONS: list[tuple[str, Call]] = [
    ("inplace_final_state without a state", {"inplace_final_state": True}),
    ("the softplus gate without A_log", {"A_log": None, "lower_bound": None}),
    (
        "one slot per sequence, but more than one token",
        {
            "initial_state": torch.zeros(3, 1, 8, 8),
            "ssm_state_indices": torch.tensor([1]),
            "inplace_final_state": True,
        },
    ),
    (
        "slots that are not written in place",
        {
            "initial_state": torch.zeros(50, 1, 8, 8),
            "ssm_state_indices": torch.arange(40)[None],
            "output_final_state": False,
        },
    ),
    ("beta: expected shape", {"beta": torch.zeros(1, 40, 1, 8)}),
]


@NEEDS_FLA
@pytest.mark.parametrize(
    ("reason", "changes"), RECURRENT_REASONS, ids=[x for x, _ in RECURRENT_REASONS]
)
def test_fused_recurrent_kda_is_declined(enabled: ModuleType, reason: str, changes: Call) -> None:
    call = small_call(inplace_final_state=False) | changes
    accepted, why = enabled._functions["fused_recurrent_kda_fwd"].verify(**call)
    assert not accepted
    assert reason in str(why)


@NEEDS_FLA
def test_recurrent_states_in_bfloat16_come_back_in_float32(enabled: ModuleType) -> None:
    """As fla's kernel returns them, where they are not overwritten."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    state = torch.randn(1, 1, 8, 8).to(torch.bfloat16)
    call = small_call(initial_state=state, inplace_final_state=False)
    with fla_cases.served(enabled, "fused_recurrent_kda_fwd", 1):
        _, final = fused_recurrent_kda_fwd(**call)
    assert final.dtype == torch.float32


@NEEDS_FLA
def test_declined_calls_reach_fla(enabled: ModuleType) -> None:
    """Their error, not ours."""
    with pytest.raises(ValueError, match="`chunk_size` must be either 32 or 64"):
        fla_cases.fla_kda().chunk_kda(**small_call(chunk_size=16))


@NEEDS_FLA
def test_a_failure_is_left_to_fla(
    enabled: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised out of the backend, whatever happens in it."""

    def fail(**_: Any) -> None:
        raise RuntimeError("out of luck")

    function = enabled._functions["chunk_kda"]
    monkeypatch.setattr(function, "run", fail)
    monkeypatch.setattr(function, "original", lambda **call: ("fla", call["scale"]))
    monkeypatch.setattr(function.original, "__name__", "chunk_kda", raising=False)
    with caplog.at_level(logging.WARNING):
        assert fla_cases.fla_kda().chunk_kda(**small_call(scale=0.5)) == ("fla", 0.5)
    assert "chunk_kda failed here, and is left to fla: out of luck" in caplog.text
    assert enabled.status()["chunk_kda"].declined["out of luck"] == 1


def test_cuda_calls_that_the_kernels_do_not_serve_are_tritons() -> None:
    """Triton is faster there than the PyTorch path; where nothing is computed, neither is."""
    cuda: Any = SimpleNamespace(is_cuda=True)
    served = flashkda.Backend("cuda", "served")
    slower = flashkda.Backend("torch", "the CUDA kernels take bfloat16")
    empty = flashkda.Backend("torch", door._native.NOTHING_TO_COMPUTE)
    cpu: Any = SimpleNamespace(is_cuda=False)
    for q, chosen in ((cuda, served), (cuda, empty), (cpu, slower)):
        door._check_choice(q, chosen)
    with pytest.raises(door._Declined, match="the CUDA kernels take bfloat16"):
        door._check_choice(cuda, slower)


# --- on and off ----------------------------------------------------------------------------------


@NEEDS_FLA
def test_disable_and_the_environment(enabled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_kda = fla_cases.fla_kda().chunk_kda
    enabled.enable()  # twice is once
    with fla_cases.served(enabled, "chunk_kda", 1):
        chunk_kda(**small_call())
    monkeypatch.setenv(door.ENV_VAR, "0")
    assert not enabled._enabled()
    monkeypatch.delenv(door.ENV_VAR)
    enabled.disable()
    with fla_cases.served(enabled, "chunk_kda", 0), pytest.raises(Exception):  # noqa: B017, PT011
        chunk_kda(**small_call())  # Triton has no CPU
    enabled.enable()
    with fla_cases.served(enabled, "chunk_kda", 1):
        chunk_kda(**small_call())


@NEEDS_FLA
def test_ahead_of_the_flash_kda_backend(enabled: ModuleType) -> None:
    x = fla_cases.FLASH_KDA[0].small()
    if shim.NAME not in sys.modules:
        shim.install()
    try:
        with fla_cases.served(enabled, "chunk_kda", 1), torch.inference_mode():
            fla_cases.fla_kda().chunk_kda(**fla_cases.make(x))
    finally:
        shim.uninstall()


@NEEDS_FLA
def test_other_functions_of_the_registry_are_not_touched(enabled: ModuleType) -> None:
    """fused_recurrent_kda_fwd shares a registry with stages that are fla's."""
    registry = sys.modules["fla.backends"]._operation_registries["kda"]
    (ours,) = [x for x in registry._backends.values() if x.backend_type == door.BACKEND_TYPE]
    assert ours.get_implementation("kda_gate_fwd") is None


class _OldRegistry:
    def __init__(self) -> None:
        self.backends: list[Any] = []

    def register(self, backend: Any) -> None:
        self.backends.append(backend)


def _old_fla(monkeypatch: pytest.MonkeyPatch) -> _OldRegistry:
    """fla-core 0.5: a registry of the kda operations, and no fla.backends."""

    def chunk_kda(q: Any, k: Any, **kwargs: Any) -> None: ...

    registry = _OldRegistry()
    for name, members in {
        "fla": {},
        "fla.ops": {},
        "fla.ops.kda": {"chunk_kda": chunk_kda},
        "fla.ops.backends": {"BaseBackend": object, "_DISPATCH_DISABLED": False},
        "fla.ops.kda.backends": {"kda_registry": registry},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(members, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "fla.backends", None)
    monkeypatch.setattr(door, "_functions", {})
    monkeypatch.setattr(door, "_is_enabled", False)
    return registry


def test_the_registry_of_fla_0_5(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = _old_fla(monkeypatch)
    door.enable()
    door.enable()
    (backend,) = registry.backends
    assert backend.priority < 3
    assert backend.is_enabled()
    assert callable(backend.chunk_kda)
    assert list(door.status()) == ["chunk_kda"]


def test_a_registry_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    _old_fla(monkeypatch)
    monkeypatch.setattr(sys.modules["fla.ops.backends"], "_DISPATCH_DISABLED", True)
    with pytest.raises(RuntimeError, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        door.enable()
    assert door.status() == {}


@pytest.mark.parametrize("missing", ["fla.ops.backends", "fla.ops.kda"])
def test_an_fla_that_is_too_old_or_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    _old_fla(monkeypatch)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"expected fla-core 0\.5\.1 or newer"):
        door.enable()


def test_reasons_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _old_fla(monkeypatch)
    door.enable()
    function = door._functions["chunk_kda"]
    for number in range(door._MAX_REASONS + 5):
        function.decline(f"reason {number}")
    assert len(function.declined) == door._MAX_REASONS + 1
    assert function.declined["other reasons"] == 5


@NEEDS_FLA
def test_flas_own_backend_runs_on_the_shim() -> None:
    fla_cases.run_through_the_shim("cpu")
