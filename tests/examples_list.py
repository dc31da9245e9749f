"""The examples and what they print, on a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fla_cases import NEEDS_FLA

FOLDER = Path(__file__).parent / "examples"

LAST_LINE = {
    "continuous_batching": "7 requests served on {device}",
    "small_model": "learnt in 60 steps on {device}: ...cts what a state recalls for a key; a ga...",
    "swap_fla": "a prompt and 8 tokens of fla's functions on flashkda, {device}",
}

EXAMPLES = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=NEEDS_FLA if name == "swap_fla" else ()) for name in LAST_LINE],
)


def run(name: str, device: str, **environment: str) -> None:
    """As a user would; the example checks itself."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        capture_output=True, text=True, env=os.environ | environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == LAST_LINE[name].format(device=device) + "\n"
