#!/usr/bin/env bash
# Builds twice in this folder, and compares byte for byte. What differs in another folder, and why: the kernels'
# library, since nvcc derives names in its objects from the paths that it is given; the binding, whose errors name
# PyTorch's headers where they were; and RECORD, which has the hashes of both.
# Usage: bash ci/check_reproducible.sh [PYTHON] [OPTION...]    as ci/build_wheel.sh
set -euo pipefail
cd "$(dirname "$0")/.."

for build in first second; do
  DIST=build/$build bash ci/build_wheel.sh "$@"
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
