"""Prints where this environment holds torch, CUTLASS and nvcc, a line each (empty: not at all)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [Path(x) for x in (spec.submodule_search_locations or [])] if spec else []


def first(candidates: list[Path]) -> str:
    return next((str(x) for x in candidates if x.exists()), "")


print(first(folders("torch")))
print(first([x / "source/include" for x in folders("cutlass_library")]))
print(first([x / "cu13/bin/nvcc" for x in folders("nvidia")]))
