"""The README's Python runs as it stands, in the order of the page; no reason lacks a row there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

from troubleshooting import README, rows

from flashkda import _backend, _diagnosis, _native

TREE = Path(__file__).resolve().parents[1]
EXAMPLE = Path(__file__).parent / "examples" / "continuous_batching.py"


def test_examples_run() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["o"].shape == namespace["whole"].shape
    assert namespace["y_next"].shape == (1, 1, 256)


def test_the_server_is_that_of_the_examples() -> None:
    """One text in two places, short enough to be read in one go."""
    code = EXAMPLE.read_text(encoding="utf-8")
    assert f"```python\n{code}```" in README
    assert len(code.splitlines()) < 80


# --- reasons -------------------------------------------------------------------------------------

# Each is followed by another, which has a row.
INTRODUCTIONS = {_diagnosis.NO_LIBRARY, _diagnosis.FAILED}


def sentence(node: ast.expr) -> str:
    """A string in a piece of Python, with … for what is filled in; "" if it is no prose."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    values = [x.value if isinstance(x, ast.Constant) else "…" for x in parts]
    text = "".join(x for x in values if isinstance(x, str))
    return text if len(text.split()) >= 3 and "|" not in text else ""


def sentences(code: object) -> set[str]:
    tree = ast.parse(inspect.getsource(code))  # type: ignore[arg-type]
    skipped = {
        id(x)
        for node in ast.walk(tree)
        for x in ast.iter_child_nodes(node)
        if isinstance(node, ast.Expr | ast.JoinedStr)  # documentation; parts of a sentence
    }
    strings = (x for x in ast.walk(tree) if isinstance(x, ast.Constant | ast.JoinedStr))
    return {sentence(x) for x in strings if id(x) not in skipped} - {""}


def reasons() -> set[str]:
    """Every sentence that the reason for a device can consist of."""
    found: set[str] = set()
    for code in (_diagnosis, _native._load, _native.probe, _backend._probe):
        found |= sentences(code)
    entry = (TREE / "csrc/entry.cpp").read_text(encoding="utf-8")
    probe = entry[entry.index("Probe probe_now") : entry.index("Probe probe(")]
    probe = re.sub(r'" \+.*?\+\s+"', "…", probe, flags=re.DOTALL)
    return found | set(re.findall(r'"(\w.*?)"', probe))


def endings() -> list[str]:
    """Each sentence as the end of a reason."""
    return [f"{_diagnosis.FAILED}: …; {x}" for x in sorted(reasons() - INTRODUCTIONS)]


def test_every_reason_has_a_row() -> None:
    assert len(endings()) > 20
    assert [x for x in endings() if not any(row.covers(x) for row in rows())] == []


def test_every_row_is_a_reason() -> None:
    assert [row.message for row in rows() if not any(row.covers(x) for x in endings())] == []


def test_every_row_has_a_cause_and_a_cure() -> None:
    serving, *table = rows()  # the first row is for when nothing is wrong
    assert serving.cause.startswith("none")
    assert [row.message for row in table if not (row.cause and row.cure)] == []
