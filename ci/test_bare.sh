#!/usr/bin/env bash
# From a bare Debian, without a compiler, to a first right answer in less than a minute: pip installs the
# wheel and a CPU PyTorch, then `flashkda selftest` runs. Downloads come first and are not counted.
# Usage: bash ci/test_bare.sh WHEEL    needs root or sudo
set -euo pipefail
root=$(realpath "$(dirname "$0")/..")
source "$root/ci/env.sh"

wheel=$(realpath "${1:?usage: bash ci/test_bare.sh WHEEL}")
ensure_command mmdebstrap mmdebstrap
bare=$(mktemp -d)
trap 'as_root rm -rf "$bare"' EXIT

PYTHON=python3.11 make_venv "$bare/outside"  # the version that is in the root, too
"$bare/outside/bin/python" -m pip download --quiet --no-cache-dir --dest "$bare/wheels" torch==2.13.0 numpy "$wheel"
as_root mmdebstrap --quiet --variant=minbase --include=python3,python3-venv bookworm "$bare/root"
as_root cp -r "$bare/wheels" "$bare/root/wheels"

# inside COMMAND...: in the root, without a network.
inside() {
  as_root unshare --mount --net --pid --fork --mount-proc="$bare/root/proc" \
    chroot "$bare/root" env -i HOME=/root PATH=/venv/bin:/usr/bin:/bin "$@"
}
for tool in cc g++ nvcc git; do
  if inside sh -c "command -v $tool"; then
    echo "there is $tool in a bare Debian" >&2
    exit 1
  fi
done

start=$SECONDS
inside python3 -m venv /venv
inside pip install --quiet --no-index --find-links /wheels flashkda numpy
echo "installed after $((SECONDS - start)) s"
inside flashkda selftest | tail -n 1
seconds=$((SECONDS - start))
echo "first right answers after $seconds s"
inside flashkda doctor
inside python -X importtime -c 'import torch, flashkda' 2>&1 | grep -E '\| (torch|flashkda)$'
[ $seconds -lt 60 ]
