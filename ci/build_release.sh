#!/usr/bin/env bash
# Everything that is released, checked: dist/release/*.whl and *.tar.gz, and dist/SHA256SUMS.
# Usage: bash ci/build_release.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

build_python
bash ci/build_wheel.sh "$python"  # first, since it empties dist
bash ci/build_aarch64.sh "$python"
DIST=dist/pure bash ci/build_wheel.sh "$python" -C wheel.cmake=false

mkdir dist/release
for wheel in dist/*.whl dist/aarch64/*.whl dist/pure/*.whl; do
  bash ci/check_wheel.sh "$wheel"
  mv "$wheel" dist/release
done
cmp dist/*.tar.gz dist/aarch64/*.tar.gz
cmp dist/*.tar.gz dist/pure/*.tar.gz
mv dist/*.tar.gz dist/release
bash ci/test_sdist.sh dist/release/*.tar.gz

"$python" -m pip install --quiet 'twine>=6.1' 'cibuildwheel>=4'
"$python" -m twine check --strict dist/release/*
# Its table in pyproject.toml, for machines with containers: one build for each processor.
builds=$("$python" -m cibuildwheel --print-build-identifiers --platform linux --archs x86_64,aarch64 . | sort | xargs)
echo "cibuildwheel would build $builds"
[ "$builds" = "cp311-manylinux_aarch64 cp311-manylinux_x86_64" ]
(cd dist/release && sha256sum -- *) | tee dist/SHA256SUMS
