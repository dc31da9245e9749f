#!/usr/bin/env bash
# Builds dist/*.tar.gz, and dist/*.whl from it: a file that the sdist lacks can't be in the wheel.
# Usage: bash ci/build_wheel.sh [PYTHON [OPTION...]]
# PYTHON has torch and the build tools; default: a new venv. Every OPTION goes to `python -m build`:
#   -C cmake.define.FLASHKDA_ARCHS=90a    for one architecture (a third of the time)
#   -C wheel.cmake=false                  without kernels: a pure-Python wheel
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

python=${1:-}
shift $(($# > 0))
if [ -z "$python" ]; then
  make_venv .venv-build
  python=.venv-build/bin/python
  ensure_torch "$python"
  ensure_build_tools "$python"
fi

rm -rf dist  # whoever takes dist/*.whl next must find exactly one
# Its dependency check would miss what CUTLASS asks for and the build does not use.
"$python" -m build --no-isolation --skip-dependency-check --outdir dist "$@" .
