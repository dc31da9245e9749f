#!/usr/bin/env bash
# Everything that needs no GPU: build, install, lint, types, tests with coverage; the sdist, the conda packages,
# and the wheel in one clean environment. Arguments go to pytest, and only that runs then: bash ci/test.sh -k decode
# (a part of the tests can miss the coverage limit).
set -euo pipefail
cd "$(dirname "$0")/.."
source ci/env.sh

root=$PWD
venv=$root/.venv-test
make_venv "$venv"
ensure_torch "$venv/bin/python"
ensure_build_tools "$venv/bin/python"
bash ci/build_wheel.sh "$venv/bin/python"

wheel=$(echo dist/*.whl)
bash ci/check_wheel.sh "$wheel"
before=$(torch_version "$venv/bin/python")
"$venv/bin/python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
# Again with its dependencies and extras: pip must find the torch that is there good enough.
"$venv/bin/python" -m pip install --quiet "${wheel}[bench,lint,test]"
# CUTLASS is here without the Python packages that it asks for (see ci/env.sh).
if "$venv/bin/python" -m pip check | grep -v -e '^nvidia-cutlass ' -e '^No broken requirements'; then exit 1; fi
[ "$(torch_version "$venv/bin/python")" = "$before" ] || { echo "installing the wheel replaced torch $before" >&2; exit 1; }

PATH=$venv/bin:$PATH bash ci/lint.sh
if [ $# = 0 ]; then
  bash ci/test_sdist.sh dist/*.tar.gz
  bash ci/test_matrix.sh "$wheel" --quick
  if "$venv/bin/python" -c 'import sys; sys.exit(sys.base_prefix == "/usr")'; then
    bash ci/build_conda.sh "$wheel"
  else
    echo "not run: ci/build_conda.sh, which can't make a conda package of a system's Python; set PYTHON to another"
  fi
fi

# From a folder outside the root: inside it, ./flashkda would shadow the installed package.
outside=$(mktemp -d)
trap 'rm -rf "$outside"' EXIT
cd "$outside"
unset PYTHONPATH
"$venv/bin/python" -m pytest -c "$root/pyproject.toml" --rootdir "$root" \
  -m "not gpu" --timeout 600 --durations 10 --cov flashkda --cov-config "$root/pyproject.toml" "$root/tests" "$@"
