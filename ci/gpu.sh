#!/usr/bin/env bash
# What needs a CUDA device: GPU tests, and compute-sanitizer over them.
# Usage: bash ci/gpu.sh WHEEL [PYTHON]    (an interpreter with a CUDA torch, pip and pytest)
# Such machines often have no network and a torch that must not be touched, so the wheel goes into a
# folder of its own, without its dependencies. Ends with what was not run, and fails if a test did.
set -euo pipefail

wheel=$(realpath "${1:?usage: bash ci/gpu.sh WHEEL [PYTHON]}")
python=$(command -v "${2:-python3}")
root=$(realpath "$(dirname "$0")/..")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
not_run=()

"$python" -m pip install --quiet --no-index --no-deps --target "$scratch/site" "$wheel"
export PYTHONPATH=$scratch/site
mkdir "$scratch/cwd"
cd "$scratch/cwd"  # outside the root: inside it, ./flashkda would shadow the wheel

"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no CUDA device")'
"$python" -m flashkda doctor
"$python" -m flashkda selftest

pytest=("$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -m gpu "$root/tests/gpu")
"${pytest[@]}"

# A few of them: under the tool each takes many times as long.
sanitizer=(compute-sanitizer --tool memcheck --error-exitcode 1)
if ! command -v compute-sanitizer >/dev/null; then
  not_run+=("compute-sanitizer: not on PATH")
elif ! "${sanitizer[@]}" "$python" -c 'import torch; torch.ones(1, device="cuda").cpu()' >"$scratch/probe" 2>&1; then
  not_run+=("compute-sanitizer: fails on this machine without flashkda: $(tail -n 1 "$scratch/probe")")
else
  "${sanitizer[@]}" "${pytest[@]}" -k "float32 or pool"
fi

not_run+=("benchmark: flashkda.bench has no GPU part while there are no CUDA kernels")

[ ${#not_run[@]} -eq 0 ] || printf 'NOT RUN: %s\n' "${not_run[@]}"
echo "ci/gpu.sh: done"
