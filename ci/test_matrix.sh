#!/usr/bin/env bash
# The one wheel in clean environments: several Pythons and PyTorches, each as a user without rights, with
# nothing but the environment on PATH (no compiler, no nvcc), without HOME and with one that is read-only.
# Usage: bash ci/test_matrix.sh [WHEEL] [--quick | ROW...]    default: the wheel in dist, every row
#   a ROW is PYTHON:TORCH, two versions, as 3.12:2.9.1; TORCH may be newest. --quick: a part of the tests
#   in one row. A row with a CUDA build of PyTorch downloads and deletes gigabytes.
# Needs root or sudo, to become another user.
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
source "$root/ci/env.sh"

wheel=
[[ ${1:-} != *.whl ]] || { wheel=$(realpath "$1"); shift; }
[ -n "$wheel" ] || wheel=$root/$(cd "$root" && built_wheel)
options=()
case ${1:-} in
  --quick)
    options=(-k "packaging or tampering or readme or native or backend")
    set -- 3.11:2.13.0
    ;;
  "") set -- 3.10:2.9.1 3.11:2.13.0 3.12:newest 3.13:newest ;;
esac

# find_python VERSION: an interpreter of it, on PATH or among pyenv's.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    "$candidate" -c 'import ensurepip, sys; print(sys.executable)' 2>/dev/null && return
  done
  echo "ci/test_matrix.sh: no Python $1" >&2
  return 1
}

nobody=(setpriv --reuid=nobody --regid=nogroup --clear-groups)

# as_nobody ENV... COMMAND...: as a user who owns nothing, with an environment of these variables alone.
as_nobody() {
  as_root "${nobody[@]}" env -i -C "$room/cwd" PATH="$room/venv/bin" LD_LIBRARY_PATH="$room/python/lib" OMP_NUM_THREADS=1 "$@"
}

empty_room() { [ -z "${room:-}" ] || as_root rm -rf "$room"; }
trap empty_room EXIT

# install ROW: into $room, everything that the row needs.
install() {
  local python torch prefix before
  python=$(find_python "${1%:*}")
  torch=${1#*:}
  mkdir -p "$room/python" "$room/cwd" "$room/source"
  if ! as_root "${nobody[@]}" test -x "$python"; then
    # Others can't read a home folder: a copy, without the packages that were installed into it. It
    # may look for its libpython where it came from, hence LD_LIBRARY_PATH.
    prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
    tar -C "$prefix" -c --exclude=site-packages --exclude='lib/python3.*/test' --exclude=__pycache__ bin include lib |
      tar -C "$room/python" -x
    python=$room/python/bin/python${1%:*}
  fi
  "$python" -m venv "$room/venv"
  python=$room/venv/bin/python
  [ "$torch" = newest ] && torch=torch || torch=torch==$torch
  "$python" -m pip install --quiet --no-cache-dir "$torch" numpy
  before=$(torch_version "$python")
  "$python" -m pip install --quiet --no-cache-dir "$wheel[test]"
  [ "$(torch_version "$python")" = "$before" ] || { echo "the wheel replaced torch $before" >&2; return 1; }
  cp -r "$root"/{pyproject.toml,README.md,CHANGELOG.md,LICENSE,.github,csrc,ci,recipe,tests} "$room/source"  # without flashkda
  mkdir -m 555 "$room/home"
  mkdir -m 777 "$room/tmp"
  chmod -R a+rX "$room"
}

check() {
  as_nobody flashkda doctor
  as_nobody flashkda selftest | tail -n 1
  as_nobody HOME="$room/home" TMPDIR="$room/tmp" python -m pytest -c "$room/source/pyproject.toml" \
    --rootdir "$room/source" -p no:cacheprovider -q -m "not gpu" --timeout 600 ${options[@]+"${options[@]}"} "$room/source/tests"
  [ -z "$(find "$room" -user nobody -not -path "$room/tmp/*")" ] || { echo "files were written" >&2; return 1; }
}

table=()
for row in "$@"; do
  echo "== Python ${row%:*}, torch ${row#*:}"
  start=$SECONDS
  room=$(mktemp -d)
  install "$row"
  check 2>&1 | tee "$room/log"
  table+=("Python ${row%:*}, torch $(torch_version "$room/venv/bin/python"): $(tail -n 1 "$room/log"), $((SECONDS - start)) s in all")
  empty_room
done
echo "== $(basename "$wheel")"
printf '%s\n' "${table[@]}"
