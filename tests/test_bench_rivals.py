"""Rivals of the benchmark: missing, broken, and called as they want to be."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest
from benching import make_case

import flashkda
from flashkda.bench import _devices, _measure, _rivals
from flashkda.bench._systems import FlashKDA


def test_rivals_that_are_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    def broken(name: str) -> Any:
        raise OSError("libcuda is missing\nat all")

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(_rivals, "import_module", broken)
    monkeypatch.setattr(_rivals, "find_spec", lambda name: object())
    found, reasons = _rivals.find("cuda")
    assert found == []
    assert reasons == {
        "fla-core": "not installed",
        "flash_kda": "does not import: OSError: libcuda is missing",
        "nvidia-cudnn-frontend": "not installed",
    }
    monkeypatch.setattr(_rivals, "find_spec", lambda name: None)
    assert _rivals.find("cuda")[1]["flash_kda"] == "not installed"


# Stand-ins with the signatures of the real functions: each computes what the real one would.


def chunk_kda(q, k, v, g, beta, *, safe_gate, disable_recompute=False, **options):
    assert safe_gate
    return flashkda.chunk_kda(q, k, v, g, beta, **options)


def fused_recurrent_kda_fwd(q, k, v, g, beta, *, inplace_final_state, **options):
    assert inplace_final_state
    return flashkda.fused_recurrent_kda(q, k, v, g, beta, **options)


def kimi_delta_attention(q, k, v, g, beta, cu_seqlens, *, gate_lower_bound, a_log, **options):
    assert options.pop("safe_gate")
    options["use_gate_in_kernel"] = True
    o, state = flashkda.chunk_kda(
        *(x[None] for x in (q, k, v, g, beta)),
        **options,
        A_log=a_log,
        lower_bound=gate_lower_bound,
        cu_seqlens=cu_seqlens,
        state_v_first=True,
    )
    return o[0], state


def naive(q, k, v, g, beta, scale, initial_state, output_final_state):
    return flashkda.chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state=output_final_state
    )


MODULES = {
    "fla.ops.kda": SimpleNamespace(
        chunk_kda=chunk_kda, fused_recurrent_kda=flashkda.fused_recurrent_kda
    ),
    "fla.ops.kda.fused_recurrent": SimpleNamespace(fused_recurrent_kda_fwd=fused_recurrent_kda_fwd),
    "fla.ops.kda.naive": SimpleNamespace(naive_recurrent_kda=naive, naive_chunk_kda=naive),
    "flash_kda": SimpleNamespace(fwd=flashkda.fwd),
    "cudnn.linear_attention": SimpleNamespace(kimi_delta_attention=kimi_delta_attention),
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_every_rival_is_called_right(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "1")
    monkeypatch.setattr(_rivals, "import_module", MODULES.__getitem__)
    monkeypatch.setattr(_rivals, "find_spec", lambda name: object())
    rivals, missing = _rivals.find(device_type)
    assert missing == {}
    timed: dict[str, set[str]] = {}
    shapes = ["1x20xH2", "5+12xH2", "2x1xH2", "2x1xH2:kv", "2x3xH2", "2x1xH2:ready",
              "1x18xH2:backward", "5+12xH1:backward"]  # fmt: skip
    for text in shapes:
        record = _measure.measure(
            make_case(text, "fast"), [FlashKDA(), *rivals], _devices.Cpu(), repeats=1, dim=16
        )
        for row in record.rows:
            if row.seconds is None:
                assert row.note, row
                assert not row.note.startswith(("wrong", "failed")), row
            else:
                timed.setdefault(row.system, set()).add(text)
    for system in rivals:
        assert timed[system.name]
    if device_type == "cuda":
        assert timed["fla-core 1"] == set(shapes) - {"2x1xH2:ready"}
        assert timed["fla-core 1 [K, V]"] == {"2x1xH2", "2x3xH2"}
        assert timed["fla-core 1 disable_recompute"] == {x for x in shapes if "back" in x}
        assert timed["nvidia-cudnn-frontend 1"] == {"1x20xH2", "5+12xH2"}
