#!/usr/bin/env bash
# Builds ci/Containerfile on a bare Debian root, with a CPU PyTorch, and tries it as clusters use images.
# Usage: bash ci/build_image.sh [WHEEL]    default: the wheel in dist
# build/image gets the image (an OCI layout); downloads are kept there. Needs root, and of Debian:
# mmdebstrap buildah skopeo bubblewrap.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh
root=$PWD

wheel=${1:-$(built_wheel)}
wheel=$(realpath -e "$wheel")
[ "$(id -u)" = 0 ] || { echo "ci/build_image.sh needs root: sudo bash ci/build_image.sh" >&2; exit 1; }
for tool in mmdebstrap buildah skopeo bwrap:bubblewrap; do ensure_command "${tool%:*}" "${tool#*:}"; done

work=$root/build/image
context=$work/context
mkdir -p "$context" "$work/pytest"
# Without a daemon, and without the namespaces and cgroups that a machine may not give.
export BUILDAH_ISOLATION=chroot
buildah=(buildah --storage-driver vfs --root "$work/store" --runroot "$work/run")

step() { echo "== $* (${SECONDS} s)"; }
fail() { echo "ci/build_image.sh: $*" >&2; exit 1; }

step "a Debian root"
if [ ! -e "$work/debian.tar" ]; then
  mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/new.tar"
  mv "$work/new.tar" "$work/debian.tar"
fi
rm -f "$context"/flashkda-*.whl
cp "$wheel" "$context"
make_venv "$work/venv"
# For Debian's Python, whatever runs this script.
for_debian=(--quiet --only-binary :all: --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64)
ls "$context"/torch-*.whl >/dev/null 2>&1 ||
  "$work/venv/bin/python" -m pip download "${for_debian[@]}" --dest "$context" torch==2.13.0 numpy
[ -d "$work/pytest/pytest" ] ||
  "$work/venv/bin/python" -m pip install "${for_debian[@]}" --target "$work/pytest" pytest packaging

step "the image"
rm -rf "$work/store" "$work/run" "$work/oci"
base=$("${buildah[@]}" from scratch)
"${buildah[@]}" add --quiet "$base" "$work/debian.tar" / >/dev/null
"${buildah[@]}" commit --quiet --rm "$base" localhost/debian >/dev/null
"${buildah[@]}" build --quiet --pull=never --file ci/Containerfile --tag localhost/flashkda --build-arg BASE=localhost/debian \
  --build-arg TORCH=torch==2.13.0 --build-arg PIP_OPTIONS="--no-index --quiet" "$context" >/dev/null
"${buildah[@]}" push --quiet localhost/flashkda "oci:$work/oci:latest"
skopeo inspect --config "oci:$work/oci:latest" | python3 -c '
import json, sys
config = json.load(sys.stdin)["config"]
print(config["User"], " ".join(config["Cmd"]), *config["Env"], sep="\n")' | tee "$work/config.txt"
du -sh "$work/oci" | sed "s|$work/oci|image, compressed|"

# --- as clusters use it ----------------------------------------------------------------------------

container=$("${buildah[@]}" from --pull-never localhost/flashkda)
image=$("${buildah[@]}" mount "$container")
du -sh "$image" | sed "s|$image|unpacked|"

{ IFS=: read -r uid gid; read -r command; mapfile -t variables; } <"$work/config.txt"
environment=(--clearenv --setenv OMP_NUM_THREADS 1)
for variable in "${variables[@]}"; do environment+=(--setenv "${variable%%=*}" "${variable#*=}"); done

# inside BIND OPTION... COMMAND: no network, no device, the image alone with its environment.
inside() {
  local bind=$1
  shift
  bwrap "$bind" "$image" / --proc /proc --dev /dev --unshare-net --unshare-pid --unshare-ipc --unshare-uts \
    --die-with-parent --chdir / "${environment[@]}" "$@"
}
# strictly [OPTION...] -- COMMAND: as the image's user, who has no name and no home, on a file system that is
# read-only.
strictly() {
  local options=()
  while [ "$1" != -- ]; do options+=("$1"); shift; done
  shift
  inside --ro-bind --cap-add CAP_SETUID --cap-add CAP_SETGID "${options[@]}" \
    setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs "$@"
}

step "no compiler, no driver and no stub of it"
for name in cc gcc g++ nvcc; do
  if inside --ro-bind sh -c "command -v $name"; then fail "the image has $name"; fi
done
found=$(find "$image" -xdev \( -name 'libcuda.so*' -o -name 'libnvidia-ml.so*' \))
[ -z "$found" ] || fail "the image has $found"

step "read-only, non-root, air-gapped, no driver: the command and the test of the Apptainer definition"
[ "$(strictly -- id -u)" != 0 ] || fail "the user is root"
for folder in / /tmp /opt/flashkda; do
  if strictly -- touch "$folder/x" 2>/dev/null; then fail "$folder can be written to"; fi
done
interfaces=$(strictly -- python3 -c 'import socket; print(*(name for _, name in socket.if_nameindex()))')
[ "$interfaces" = lo ] || fail "there is a network: $interfaces"
# shellcheck disable=SC2086
strictly -- $command | tee "$work/doctor.txt"
grep -q '^libraries libflashkda_cuda.so, libflashkda_torch.so' "$work/doctor.txt" || fail "the kernels are not there"
strictly -- sh -euc "$(sed '1,/^%test/d' ci/flashkda.def)" >"$work/test.txt" || { cat "$work/test.txt"; fail "it failed"; }
tail -n 1 "$work/test.txt"

step "32 processes at once, as root, where they can write"
# The time of a folder also tells of files that are gone again.
listing() { find "$image" -xdev -printf '%P %s %T@ %C@\n' | sort; }
rank='
import torch, flashkda
x = torch.ones(1, 8, 2, 16)
o, _ = flashkda.chunk_kda(x, x, x, -x, torch.ones(1, 8, 2))
assert o.isfinite().all()'
listing >"$work/before.txt"
start=$SECONDS
inside --bind --setenv HOME /root --setenv RANK "$rank" bash -euc '
  for i in {1..32}; do python3 -c "$RANK" & pids[i]=$!; done
  for pid in "${pids[@]}"; do wait "$pid"; done'
echo "imported and called in $((SECONDS - start)) s"
listing >"$work/after.txt"
diff "$work/before.txt" "$work/after.txt" >"$work/written.txt" ||
  { head -n 20 "$work/written.txt"; fail "$(grep -c '^>' "$work/written.txt") files and folders were written"; }
# The comparison does see a file that came and went.
inside --bind sh -c 'touch /tmp/x && rm /tmp/x'
if listing | cmp -s "$work/before.txt" -; then fail "the comparison sees no writes"; fi

step "tests"
strictly --ro-bind "$root" /mnt --ro-bind "$work/pytest" /srv --perms 1777 --tmpfs /tmp --setenv PYTHONPATH /srv -- \
  python3 -m pytest -c /mnt/pyproject.toml --rootdir /mnt -p no:cacheprovider -q -m "not gpu" \
  /mnt/tests/test_packaging.py /mnt/tests/test_state.py /mnt/tests/test_decode.py
"${buildah[@]}" rm "$container" >/dev/null
step done
