#!/usr/bin/env bash
# From a fresh clone to a first result: environment, dependencies, build, install, demo.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

venv=.venv
make_venv "$venv"
ensure_torch "$venv/bin/python"
ensure_build_tools "$venv/bin/python"
bash ci/build_wheel.sh "$venv/bin/python"
# Its dependency is there already; --no-deps makes sure that pip agrees.
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall dist/*.whl

"$venv/bin/flashkda" doctor
"$venv/bin/flashkda" demo
if "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  "$venv/bin/flashkda" demo --device cuda --dtype bfloat16
fi
echo "flashkda is installed in $venv: source $venv/bin/activate"
