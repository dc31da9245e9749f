"""The examples on a GPU, with the asserts that they have on a CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support import GPU

pytestmark = GPU

EXAMPLE = Path(__file__).parents[1] / "examples" / "continuous_batching.py"


def test_continuous_batching_on_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "7 requests served on cuda\n"
