"""Which implementation serves a device or a call, and that it says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import KdaCase

import flashkda


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "meta"], ids=str)
def test_cpu_is_served_by_torch_for_a_stated_reason(device: Any) -> None:
    backend = flashkda.backend(device)
    assert backend.name == "torch"
    assert len(backend.reason.split()) >= 4


def test_backend_is_a_plain_value() -> None:
    assert flashkda.backend("cpu") == flashkda.backend(torch.device("cpu"))
    with pytest.raises(AttributeError):
        flashkda.backend("cpu").name = "cuda"  # type: ignore[misc]


def test_default_device_and_other_spellings() -> None:
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert flashkda.backend() == flashkda.backend(expected)
    assert flashkda.backend(0) == flashkda.backend("cuda")
    choice = flashkda.backend("cpu")
    assert str(choice) == f"{choice.name}: {choice.reason}"
    for nonsense in (True, 1.5, ["cpu"]):
        with pytest.raises(TypeError, match="device: expected"):
            flashkda.backend(nonsense)  # type: ignore[arg-type]


def test_explain_has_the_signature_of_a_call() -> None:
    for case in (KdaCase(T=20), KdaCase(lengths=(3, 0, 4)), KdaCase(T=20, dtype=torch.bfloat16)):
        choice = flashkda.explain(**case.make())
        assert type(choice) is type(flashkda.backend("cpu"))
        assert choice.name == "torch"
        assert len(choice.reason.split()) >= 4


def test_explain_of_a_forced_backend() -> None:
    choice = flashkda.explain(**KdaCase(T=20).make(), backend="torch")
    assert choice.name == "torch"
    assert len(choice.reason.split()) >= 4
    with pytest.raises(RuntimeError, match="cuda"):
        flashkda.explain(**KdaCase(T=20).make(), backend="cuda")


def test_explain_runs_nothing_and_changes_nothing() -> None:
    call = KdaCase(T=20).make()
    before = {x: y.clone() for x, y in call.items() if isinstance(y, torch.Tensor)}
    flashkda.explain(**call)
    assert all(torch.equal(call[x], y) for x, y in before.items())


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_forced_cuda_on_a_cpu_tensor(function: str) -> None:
    call = KdaCase(T=4, dtype=torch.bfloat16).make()
    with pytest.raises(RuntimeError) as caught:
        getattr(flashkda, function)(**call, backend="cuda")
    assert "cuda" in str(caught.value)
    assert len(str(caught.value).split()) >= 6


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
def test_cpu_tensors_warn_about_nothing(function: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(flashkda, function)(**KdaCase(T=4).make())


def test_environment_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    call = KdaCase(T=20).make()
    plain, _ = flashkda.chunk_kda(**call)
    for name in ("FLASHKDA_BACKEND", "FLA_FLASH_KDA", "FLASHKDA_DISABLE", "FLASHKDA_DEBUG"):
        monkeypatch.setenv(name, "1")
    again, _ = flashkda.chunk_kda(**call)
    assert torch.equal(plain, again)
    assert flashkda.backend("cpu").name == "torch"


def test_unknown_device_text() -> None:
    with pytest.raises(ValueError, match="device: expected"):
        flashkda.backend("no-such-device")
