#!/usr/bin/env bash
# Builds the wheel for aarch64 (GH200, GB200) on x86_64, and asks its library under emulation what it is.
# Usage: bash ci/build_aarch64.sh [PYTHON] [OPTION...]    as ci/build_wheel.sh
# DIST (default: dist/aarch64) is where it goes.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

dist=${DIST:-dist/aarch64}
python=
[[ ${1:--} == -* ]] || { python=$1; shift; }
build_python "$python"
ensure_command aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
ensure_command qemu-aarch64-static qemu-user-static

# nvcc of this machine compiles for both; only the CUDA runtime, which is linked in, must be of the target.
cuda=$PWD/build/aarch64-cuda
rm -rf "$cuda"
"$python" -m pip download --quiet --no-deps --only-binary :all: --platform manylinux2014_aarch64 --dest "$cuda" \
  'nvidia-cuda-runtime==13.0.*'
"$python" -m zipfile -e "$cuda"/*.whl "$cuda"

DIST=$dist ARCH=aarch64 bash ci/build_wheel.sh "$python" \
  -C cmake.define.CMAKE_SYSTEM_NAME=Linux -C cmake.define.CMAKE_SYSTEM_PROCESSOR=aarch64 \
  -C cmake.define.CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
  -C cmake.define.FLASHKDA_CUDART_STATIC="$cuda/nvidia/cu13/lib/libcudart_static.a" "$@"

emulated=build/aarch64-probe
rm -rf "$emulated"
"$python" -m zipfile -e "$dist"/*.whl "$emulated"
aarch64-linux-gnu-gcc -Wall -Werror ci/probe_library.c -o "$emulated/probe" -ldl
qemu-aarch64-static -L /usr/aarch64-linux-gnu "$emulated/probe" "$emulated/flashkda/libflashkda_cuda.so" | tee "$emulated/log"
grep -q 'driver' "$emulated/log"  # the reason why it serves nothing here
