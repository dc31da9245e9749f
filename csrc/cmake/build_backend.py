"""The build backend: scikit-build-core, which asks for torch and CUTLASS only for kernels.

A list in pyproject.toml would have gigabytes downloaded before anyone notices that nvcc is missing.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as scikit_build
from scikit_build_core.build import *  # noqa: F403  # the hooks that stay as they are

# Headers of 2.10 define what the binding is built with; what is built loads in 2.9 too.
REQUIRED = ["torch>=2.10.0a0", "nvidia-cutlass==4.2.0.0"]
NO_NVCC = (
    "flashkda: no nvcc found through CUDACXX, CUDA_HOME or PATH, so there is nothing to build the "
    "CUDA kernels with: install the wheel (pip install --only-binary flashkda flashkda), set "
    "CUDA_HOME to a CUDA toolkit of 12.9 or newer, use PyPI's nvcc (README.md, From source), or do "
    "without kernels: pip install --config-settings=wheel.cmake=false"
)
NO_COMPILER = (
    "flashkda: no C++ compiler found through CXX or PATH (c++, g++, clang++), and the kernels need "
    "one beside nvcc: install one that knows C++20 (Debian: g++), or the wheel (pip install "
    "--only-binary flashkda flashkda), or do without kernels: pip install "
    "--config-settings=wheel.cmake=false"
)
Settings = dict[str, Any] | None


def builds_kernels(settings: Settings) -> bool:
    off = {"false", "off", "0", "no"}
    asked = {"wheel.cmake": "true", "cmake.define.FLASHKDA_CUDA": "on"} | (settings or {})
    return sys.platform == "linux" and not any(
        str(asked[x]).lower() in off for x in ("wheel.cmake", "cmake.define.FLASHKDA_CUDA")
    )


def has_nvcc() -> bool:
    """Whether there is an nvcc at all; requirements.cmake knows which are new enough."""
    packaged = Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin/nvcc")
    home = os.environ.get("CUDA_HOME")
    named = [os.environ.get("CUDACXX"), f"{home}/bin/nvcc" if home else None, "nvcc", str(packaged)]
    return any(name is not None and shutil.which(name) for name in named)


def has_compiler() -> bool:
    named = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    return any(name and shutil.which(name.split()[0]) for name in named)


def requirements(settings: Settings, usual: list[str]) -> list[str]:
    if not builds_kernels(settings):
        return usual
    if not has_nvcc():
        raise SystemExit(NO_NVCC)
    if not has_compiler():
        raise SystemExit(NO_COMPILER)
    return [*usual, *REQUIRED]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return requirements(config_settings, scikit_build.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return requirements(
        config_settings, scikit_build.get_requires_for_build_editable(config_settings)
    )
