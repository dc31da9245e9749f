"""What tests read in README.md and the scripts: commands, links, figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).resolve().parents[1]
README = (TREE / "README.md").read_text(encoding="utf-8")
FIGURES = ("accuracy-prefill-out", "time-against-tokens-H32", "roofline-prefill", "roofline-decode")
"""Those of ``flashkda bench`` that the README shows, once they are measured."""


def blocks(language: str) -> list[str]:
    """The fenced pieces of the README in a language, in their order."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert {name for name, _ in fences} <= {"bash", "diff", "python"}
    return [text for name, text in fences if name == language]


class Command(NamedTuple):
    text: str
    needs_gpu: bool
    """By its comment, which begins with GPU."""


def commands() -> list[Command]:
    """Every command of the README's code blocks."""
    lines = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
    parts = [line.partition(" # ") for line in lines]
    return [Command(text.strip(), comment.startswith("GPU")) for text, _, comment in parts]


def script(path: str) -> str:
    """A script without comments; whatever Python it takes, ``flashkda`` is the command."""
    text = (TREE / path).read_text(encoding="utf-8")
    text = re.sub(r"(^|\s)#.*", "", text, flags=re.MULTILINE)
    return re.sub(r'"\$python" -m flashkda|"\$venv/bin/flashkda"', "flashkda", text)


def reached(path: str) -> set[str]:
    """The scripts in ci/ that a file runs, directly or through others."""
    found: set[str] = set()
    new = {path}
    while new:
        new |= set(re.findall(r"bash (ci/\w+\.sh)", script(new.pop()))) - found
        found |= new
    return found


def headings(text: str) -> set[str]:
    """What links in a page can name."""
    names = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in names}
