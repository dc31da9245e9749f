# Sourced by the other scripts: one place for how an environment is made.
# shellcheck shell=bash

# The oldest glibc that a released wheel runs with: its tag says so, ci/check_wheel.py checks it.
GLIBC=2.28

# make_venv DIR: a virtual environment, kept when it already works.
# PYTHON names the interpreter it is made from.
make_venv() {
  local base=${PYTHON:-python3}
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "flashkda needs Python 3.10 or newer; set PYTHON to one (this is $("$base" -V 2>&1))" >&2; return 1; }
  "$1/bin/python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$1"
}

# torch_version PYTHON: the installed version, nothing when there is none.
torch_version() {
  "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true
}

# ensure_torch PYTHON: a torch that the package can be built with is left alone. Otherwise one fixed version,
# since the newest is another one every month; TORCH asks for a different one. numpy only keeps torch
# from warning at every start that it is missing.
ensure_torch() {
  local have
  have=$(torch_version "$1")
  if [ -n "${TORCH:-}" ] ||
    ! "$1" -c 'import sys; sys.exit(tuple(map(int, sys.argv[1].split(".")[:2])) < (2, 10))' "${have:-0.0}"; then
    "$1" -m pip install --quiet "torch==${TORCH:-2.13.0}" numpy
  fi
  echo "torch $(torch_version "$1")"
}

# ensure_build_tools PYTHON: what an isolated build would download, installed once instead.
ensure_build_tools() {
  command -v "${CXX:-g++}" >/dev/null || { echo "no ${CXX:-g++} on PATH: apt-get install g++, or set CXX" >&2; return 1; }
  "$1" -m pip install --quiet 'build>=1.2' 'scikit-build-core>=0.11' 'cmake>=3.24' 'ninja>=1.10' 'wheel>=0.46' \
    'ziglang==0.17.*'
  # Its headers are all that is used: not the Python packages that it asks for.
  "$1" -m pip install --quiet --no-deps nvidia-cutlass==4.2.0.0
  has_nvcc || ensure_nvcc "$1"
}

# built_wheel: the one that ci/build_wheel.sh left in dist, or ci/build_release.sh in dist/release.
built_wheel() {
  local wheel
  for wheel in dist/flashkda-*linux*_x86_64.whl dist/release/flashkda-*linux*_x86_64.whl; do
    [ ! -e "$wheel" ] || { echo "$wheel"; return; }
  done
  echo "no wheel in dist: bash ci/build_wheel.sh" >&2
  return 1
}

# build_python [PYTHON]: sets python to it, or to a venv with torch and the build tools.
build_python() {
  python=${1:-}
  if [ -z "$python" ]; then
    make_venv .venv-build
    python=.venv-build/bin/python
    ensure_torch "$python"
    ensure_build_tools "$python"
  fi
}

# as_root COMMAND...
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# ensure_command COMMAND PACKAGE: a program of Debian's.
ensure_command() {
  command -v "$1" >/dev/null && return
  { as_root apt-get -qq update && as_root apt-get -qq install --no-install-recommends "$2"; } >/dev/null ||
    { echo "no $1 on PATH: apt-get install $2" >&2; return 1; }
}

# has_nvcc: whether an nvcc that CMake takes is there (12.9 or newer).
has_nvcc() {
  local nvcc
  for nvcc in "${CUDACXX:-}" "${CUDA_HOME:-}/bin/nvcc" nvcc; do
    "$nvcc" --version 2>/dev/null | grep -Eq ', V(12\.9|1[3-9]|[2-9][0-9])' && return
  done
  return 1
}

# ensure_nvcc PYTHON: the CUDA compiler from Python packages, where CMake finds it.
ensure_nvcc() {
  "$1" -m pip install --quiet --no-deps nvidia-cuda-nvcc==13.0.* nvidia-nvvm==13.0.* nvidia-cuda-crt==13.0.* \
    nvidia-cuda-cccl==13.0.* nvidia-cuda-runtime==13.0.*
}
