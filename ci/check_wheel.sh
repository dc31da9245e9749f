#!/usr/bin/env bash
# What a released wheel must hold, checked without a GPU (see check_wheel.py).
# Usage: bash ci/check_wheel.sh WHEEL [--update]
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
source "$root/ci/env.sh"

venv=$root/.venv-check
make_venv "$venv"
"$venv/bin/python" -m pip install --quiet 'pyelftools>=0.32' 'cyclonedx-python-lib[json-validation]>=11' \
  'nvidia-cuda-cuobjdump>=13,<14' 'nvidia-cuda-nvdisasm>=13,<14'
"$venv/bin/python" "$root/ci/check_wheel.py" "$@"
