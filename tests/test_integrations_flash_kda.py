"""The module named flash_kda: SGLang's call on the CPU, and who gets which module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import contracts
import pytest
import torch
from contracts import BF, F32

import flashkda
from flashkda.integrations import flash_kda as door

pytestmark = pytest.mark.skipif(
    door.NAME not in sys.modules and importlib.util.find_spec(door.NAME) is not None,
    reason="FlashKDA is installed here",
)


@pytest.fixture
def module() -> Iterator[ModuleType]:
    yield door.install()
    door.uninstall()


def test_importing_the_door_opens_nothing() -> None:
    assert importlib.util.find_spec("flash_kda") is None
    with pytest.raises(ImportError):
        importlib.import_module("flash_kda")


def test_install(module: ModuleType) -> None:
    assert importlib.import_module("flash_kda") is module
    assert importlib.util.find_spec("flash_kda") is not None  # what fla asks
    assert door.install() is module
    door.uninstall()
    door.uninstall()
    assert importlib.util.find_spec("flash_kda") is None


def test_the_order_of_arguments_is_that_of_flash_kda(module: ModuleType) -> None:
    assert " ".join(inspect.signature(module.fwd).parameters) == (
        "q k v g beta scale out A_log dt_bias lower_bound initial_state final_state cu_seqlens"
    )
    assert module.get_workspace_size(8192, 4) == flashkda.get_workspace_size(8192, 4, 1)


def test_one_that_is_installed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_kda.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"install\(replace=True\)"):
        door.install()
    theirs = importlib.import_module("flash_kda")
    with pytest.raises(RuntimeError, match=r"install\(replace=True\)"):
        door.install()
    try:
        assert door.install(replace=True) is not theirs
        assert hasattr(importlib.import_module("flash_kda"), "fwd")
    finally:
        door.uninstall()
        sys.modules.pop("flash_kda", None)


@pytest.mark.parametrize("state_dtype", [F32, BF], ids=str)
@pytest.mark.parametrize("with_state", [True, False], ids=["state", "nostate"])
def test_the_call_of_sglang(module: ModuleType, state_dtype: torch.dtype, with_state: bool) -> None:
    contracts.check_flash_kda(module.fwd, "cpu", state_dtype=state_dtype, with_state=with_state)


def test_parameters_of_a_model_cast_to_bfloat16(module: ModuleType) -> None:
    call = contracts.make(contracts.FLASH_KDA, "cpu")
    changes = {
        "A_log": call["A_log"].to(BF).reshape(1, 1, -1, 1),
        "dt_bias": call["dt_bias"].to(BF).flatten(),
    }
    contracts.check_flash_kda(module.fwd, "cpu", **changes)


def test_a_bound_of_zero_never_forgets(module: ModuleType) -> None:
    contracts.check_flash_kda(module.fwd, "cpu", lower_bound=0.0)


@pytest.mark.parametrize("bound", [-10.0, 1.0])
def test_a_bound_out_of_range_is_refused(module: ModuleType, bound: float) -> None:
    with pytest.raises(ValueError, match="lower_bound"):
        contracts.check_flash_kda(module.fwd, "cpu", lower_bound=bound)


def test_a_kernel_that_fails_leaves_the_pytorch_path(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(door._fwd, "fwd", fail)
    with caplog.at_level(logging.WARNING):
        contracts.check_flash_kda(module.fwd, "cpu")
    assert "the call takes the PyTorch path: no kernel image" in caplog.text


def test_a_gpu_without_kernels_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(door._backend, "backend", lambda: flashkda.Backend("torch", "too old"))
    try:
        with caplog.at_level(logging.WARNING):
            door.install()
    finally:
        door.uninstall()
    assert "flash_kda is on the PyTorch path on this GPU: too old" in caplog.text
