"""The README's Python runs as it stands, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[1] / "README.md"
EXAMPLE = Path(__file__).parent / "examples" / "continuous_batching.py"


def test_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["o"].shape == namespace["whole"].shape
    assert namespace["y_next"].shape == (1, 1, 256)


def test_the_server_is_that_of_the_examples() -> None:
    """One text in two places, short enough to be read in one go."""
    code = EXAMPLE.read_text(encoding="utf-8")
    assert f"```python\n{code}```" in README.read_text(encoding="utf-8")
    assert len(code.splitlines()) < 80
