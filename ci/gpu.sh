#!/usr/bin/env bash
# What needs a CUDA device: GPU tests, sanitizers, timings. Ends with a short table; fails if a part did.
# Usage: bash ci/gpu.sh WHEEL [--quick|--full|PART...]    PARTs: doctor tests memcheck racecheck synccheck
#   initcheck bench shapes; --full (the default) is all of them but shapes, --quick the first three and a short bench.
# PYTHON names an interpreter with a CUDA torch, pip, and for the tests pytest (default: python3).
# Such machines often have no network and a torch that must not be touched, so the wheel goes into a
# folder of its own, without its dependencies; nothing is compiled. Packages that some tests need, and skip
# without, and rivals for the bench may lie in build/rivals:
# pip install --no-deps --target build/rivals fla-core einops packaging
set -euo pipefail

wheel=$(realpath "${1:?usage: bash ci/gpu.sh WHEEL [--quick|--full|PART...]}")
shift
python=$(command -v "${PYTHON:-python3}")
root=$(realpath "$(dirname "$0")/..")
bench_options=()
case ${1:---full} in
  --full) parts=(doctor tests memcheck racecheck synccheck initcheck bench) ;;
  --quick) parts=(doctor tests memcheck bench) bench_options=(--quick) ;;
  *) parts=("$@") ;;
esac

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip install --quiet --no-index --no-deps --no-cache-dir --target "$scratch/site" "$wheel"
rivals=$root/build/rivals
export PYTHONPATH=$scratch/site PYTHONDONTWRITEBYTECODE=1
[ ! -d "$rivals" ] || PYTHONPATH+=:$rivals
mkdir "$scratch/cwd"
cd "$scratch/cwd"  # outside the root: inside it, ./flashkda would shadow the wheel
"$python" -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no CUDA device")'

doctor() {
  "$python" -m flashkda doctor && "$python" -m flashkda selftest &&
    "$python" -m flashkda demo --device cuda --dtype bfloat16
}

tests() {
  if ! "$python" -c 'import pytest' 2>/dev/null; then
    echo "not run: $python has no pytest (pip install pytest)"
    return 77
  fi
  "$python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" -p no:cacheprovider -q -m gpu "$root/tests"
}

# sanitizer TOOL [OPTION...]: without torch's cache of device memory, which would hide its bounds.
sanitizer() {
  local tool=(compute-sanitizer --error-exitcode 1 --tool "$@")
  if ! command -v compute-sanitizer >/dev/null; then
    echo "not run: no compute-sanitizer on PATH (it comes with the CUDA toolkit)"
    return 77
  fi
  if ! "${tool[@]}" "$python" -c 'import torch; torch.ones(1, device="cuda").cpu()' >"$scratch/probe" 2>&1; then
    echo "not run: compute-sanitizer fails here without flashkda: $(tail -n 1 "$scratch/probe")"
    return 77
  fi
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "${tool[@]}" "$python" "$root/tests/gpu/sanitize.py"
}

# Only our kernels are watched, which is many times faster; initcheck must see who wrote the inputs.
memcheck() { sanitizer memcheck --kernel-name kns=flashkda; }
racecheck() { sanitizer racecheck --kernel-name kns=flashkda; }
synccheck() { sanitizer synccheck --kernel-name kns=flashkda; }
initcheck() { sanitizer initcheck; }

# Limits of times first: one that is missed fails the part, with a line that says which. Then rivals, if any.
bench() {
  local code=0
  "$python" -m flashkda bench --targets ${bench_options[@]+"${bench_options[@]}"} || code=$?
  [ ! -d "$rivals" ] || "$python" -m flashkda bench --quick --output quick || code=$?
  return $code
}

# Every shape, with figures, in build/full: in several runs, each of which goes on where the last one stopped.
shapes() {
  mkdir -p "$root/build"
  cd "$root/build"
  "$python" -m flashkda bench --output full --budget 450
}

status=0
table=()
for part in "${parts[@]}"; do
  case $part in
    doctor | tests | memcheck | racecheck | synccheck | initcheck | bench | shapes) ;;
    *) echo "ci/gpu.sh: no part is called $part" >&2; exit 2 ;;
  esac
  echo "== $part"
  start=$SECONDS
  "$part" 2>&1 | tee "$scratch/$part.log" && code=0 || code=$?
  case $code in
    0) result=passed ;;
    77) result=$(tail -n 1 "$scratch/$part.log") ;;
    *) result=FAILED status=1 ;;
  esac
  table+=("$(printf '%-10s %5ds  %s' "$part" $((SECONDS - start)) "$result")")
done
echo "== $(basename "$wheel")"
printf '%s\n' "${table[@]}"
exit $status
