#!/usr/bin/env bash
# Builds dist/*.tar.gz, and dist/*.whl from it: a file that the sdist lacks can't be in the wheel. The
# wheel is the one that is released: linked for glibc 2.28, tagged manylinux_2_28, the same at each build.
# Usage: bash ci/build_wheel.sh [PYTHON] [OPTION...]
# PYTHON has torch and the build tools; default: a new venv. Every OPTION goes to `python -m build`:
#   -C cmake.define.FLASHKDA_ARCHS=90a    for one architecture (a third of the time)
#   -C wheel.cmake=false                  without kernels: a pure-Python wheel
# DIST (default: dist) is where they go; ARCH (default: this machine's) is ci/build_aarch64.sh's affair.
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

python=
[[ ${1:--} == -* ]] || { python=$1; shift; }
build_python "$python"
python=$(realpath -s "$(command -v "$python")")
dist=${DIST:-dist}
arch=${ARCH:-$(uname -m)}

# In a clone, the commit's time; in an unpacked sdist, which has no history, that of the sdist.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)}
export SOURCE_DATE_EPOCH

# build's own check of the environment would miss what CUTLASS asks for and the build does not use.
build() { "$python" -m build --no-isolation --skip-dependency-check --outdir "$dist" "$@"; }

rm -rf "$dist"  # whoever takes dist/*.whl next must find exactly one
build --sdist "$@" .
# Folders of fixed names, since nvcc writes them into its objects.
source=build/$arch
rm -rf "$source"
mkdir -p "$source"
tar -xzf "$dist"/*.tar.gz -C "$source" --strip-components 1
build --wheel -C build-dir=build -C cmake.define.FLASHKDA_GLIBC=$GLIBC "$@" "$source"
for wheel in "$dist"/*-linux_*.whl; do
  [ ! -e "$wheel" ] ||  # a pure one
    "$python" -m wheel tags --remove --platform-tag "manylinux_${GLIBC/./_}_$arch" "$wheel" >/dev/null
done
ls -l "$dist"
