#!/usr/bin/env bash
# Format, lint, types and spelling, with the tools on PATH: pip install -C wheel.cmake=false '.[lint]'.
# .pre-commit-config.yaml runs the same commands on the files of a commit.
set -euo pipefail
cd "$(dirname "$0")/.."

for tool in ruff mypy typos clang-format; do
  command -v "$tool" >/dev/null || { echo "ci/lint.sh: no $tool on PATH: pip install -C wheel.cmake=false '.[lint]'" >&2; exit 1; }
done

# No other run reaches every branch of every script.
for script in ci/*.sh .ci/run; do bash -n "$script"; done

set -x
ruff check .
ruff format --check .
mypy
typos
# find reports a failure of what it executes, and executes nothing when there is no such file.
[ ! -d csrc ] || find csrc -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) \
  -exec clang-format --dry-run -Werror {} +
