#!/usr/bin/env bash
# pip on the sdist, outside a clone and without git: without an nvcc it stops at once and says why, or
# installs the package without kernels where that is asked. --full builds them too: with CUDA_HOME, and
# with PyPI's nvcc.
# Usage: bash ci/test_sdist.sh SDIST [--full]    --full needs an nvcc on PATH, to tell its CUDA_HOME
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
source "$root/ci/env.sh"

sdist=$(realpath "${1:?usage: bash ci/test_sdist.sh SDIST [--full]}")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
make_venv "$scratch/venv"
cd "$scratch"
mkdir path
# What compiles the C++ side, and nothing more: no git, no nvcc.
for tool in sh uname c++ g++ gcc cc as ld collect2 ar ranlib strip; do
  ln -s "$(command -v "$tool")" path/ 2>/dev/null || true
done
pip_install() { env -u CUDACXX -u CUDA_HOME PATH="$scratch/venv/bin:$scratch/path" "$@"; }
# kernels: how those of the installed package were built, or why there are none.
kernels() { "$scratch/venv/bin/python" -c 'from flashkda import _native as n; print(n.build_info() or n._reason)'; }

echo "== without an nvcc"
start=$SECONDS
if pip_install pip install --no-deps "$sdist" >log 2>&1; then
  echo "pip found an nvcc where there is none" >&2
  exit 1
fi
[ "$(grep -c 'flashkda: no nvcc found' log)" = 1 ] || { cat log; exit 1; }
grep 'flashkda: no nvcc' log
seconds=$((SECONDS - start))
echo "pip stopped after $seconds s"
[ $seconds -lt 60 ]

echo "== without kernels"
pip_install pip install --quiet --no-deps --config-settings=wheel.cmake=false "$sdist"
"$scratch/venv/bin/python" -m pip show --files flashkda | grep -c '\.py$'
if "$scratch/venv/bin/python" -m pip show --files flashkda | grep '\.so$'; then exit 1; fi
[ "${2:-}" = --full ] || exit 0

ensure_torch "$scratch/venv/bin/python"
"$scratch/venv/bin/flashkda" doctor | tee log
grep -q '^libraries none (pure Python)$' log
grep -q 'this build of flashkda holds no CUDA kernels' log

echo "== with CUDA_HOME"
home=$(dirname "$(dirname "$(nvcc -v --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#$ _HERE_=//p')/x")")
pip_install CUDA_HOME="$home" pip install --quiet --no-deps --force-reinstall \
  --config-settings=cmake.define.FLASHKDA_ARCHS=90a "$sdist"
kernels | tee log
grep -q "'architectures': '90a'" log

echo "== with PyPI's nvcc"
ensure_build_tools "$scratch/venv/bin/python"
ensure_nvcc "$scratch/venv/bin/python"
pip_install pip uninstall --quiet --yes flashkda
pip_install pip install --quiet --no-deps --no-build-isolation --config-settings=cmake.define.FLASHKDA_ARCHS=90a "$sdist"
kernels | tee log
grep -q "'architectures': '90a'" log
