#!/usr/bin/env bash
# Builds twice in this folder, and compares byte for byte. What differs in another folder, or with PyTorch in
# another: the kernels' library, since nvcc derives names in its objects from the paths that it is given, and RECORD,
# which has its hash.
# Usage: bash ci/check_reproducible.sh [PYTHON] [OPTION...]    as ci/build_wheel.sh
# ARCH=aarch64 compares what ci/build_aarch64.sh makes.
set -euo pipefail
cd "$(dirname "$0")/.."

script=ci/build_wheel.sh
[ "${ARCH:-}" != aarch64 ] || script=ci/build_aarch64.sh
for build in first second; do
  DIST=build/$build bash $script "$@"
done
if ! diff -r build/first build/second; then
  for build in first second; do
    rm -rf "build/$build-content"
    python3 -m zipfile -e build/"$build"/*.whl "build/$build-content"
  done
  diff -rq build/first-content build/second-content
  exit 1
fi
sha256sum build/second/*
