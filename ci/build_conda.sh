#!/usr/bin/env bash
# Renders the conda recipe, builds its packages from a wheel, solves for a table of machines, installs
# and tests, all against a local channel (see conda_channel.py). Everything is left in build/conda.
# Usage: bash ci/build_conda.sh [WHEEL] [--quick]    default: the wheel in dist; --quick: without PyTorch,
#   so nothing of the package is run
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

wheel=
[[ ${1:-} != *.whl ]] || { wheel=$1; shift; }
[ -n "$wheel" ] || wheel=$(built_wheel)

make_venv .venv-conda
.venv-conda/bin/python -m pip install --quiet py-rattler-build==0.73.0 py-rattler==0.28.0
.venv-conda/bin/python ci/conda_channel.py "$wheel" "$@"
