#!/usr/bin/env bash
# Builds dist/*.tar.gz, and dist/*.whl from it: a file that the sdist lacks can't be in the wheel.
# Usage: bash ci/build_wheel.sh [PYTHON]    (an interpreter that has the build tools; default: a new venv)
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

python=${1:-}
if [ -z "$python" ]; then
  make_venv .venv-build
  python=.venv-build/bin/python
  ensure_build_tools "$python"
fi

rm -rf dist  # whoever takes dist/*.whl next must find exactly one
"$python" -m build --no-isolation --outdir dist .
