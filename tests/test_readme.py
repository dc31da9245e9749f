"""What the README shows runs, its links lead somewhere, and what it lists is complete.

The Python runs as it stands, in the order of the page; every reason of the doctor has its row.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from benching import recorded
from documents import FIGURES, README, TREE, blocks, commands, headings, reached, script
from troubleshooting import rows

from flashkda import _backend, _diagnosis, _native, cli

EXAMPLE = Path(__file__).parent / "examples" / "continuous_batching.py"

# --- code ----------------------------------------------------------------------------------------


def test_examples_run() -> None:
    namespace: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["o"].shape == namespace["whole"].shape
    assert namespace["y_next"].shape == (1, 1, 256)


def test_the_server_is_that_of_the_examples() -> None:
    """One text in two places, short enough to be read in one go."""
    code = EXAMPLE.read_text(encoding="utf-8")
    assert f"```python\n{code}```" in README
    assert len(code.splitlines()) < 80


def member(path: str) -> Any:
    """What a dotted name stands for: a module, or what is in one."""
    module, _, name = path.rpartition(".")
    try:
        return import_module(path)
    except ModuleNotFoundError:
        return getattr(import_module(module), name)


def test_lines_that_a_diff_adds_name_what_there_is() -> None:
    added = re.findall(r"^\+(.+)$", "".join(blocks("diff")), re.MULTILINE)
    assert len(added) == 3
    for line in added:
        (imported, *calls) = ast.parse(line).body
        assert isinstance(imported, ast.ImportFrom)
        names = {x.name: member(f"{imported.module}.{x.name}") for x in imported.names}
        for call in calls:
            module, function = ast.unparse(call).removesuffix("()").split(".")
            assert callable(getattr(names[module], function)), line


def tables() -> list[tuple[list[str], list[str]]]:
    """Of the migration sections: what a table is about, and its cells for flashkda."""
    start, end = README.index("\n## Migrate"), README.index("\n## What calls mean")
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", README[start:end], re.MULTILINE):
        head, _, *lines = table.splitlines()
        cells = [line.strip("|").split(" | ")[-1] for line in lines]
        found.append((re.findall(r"`(flashkda[\w.]+)`", head), cells))
    return found


def parameters(thing: Any) -> set[str]:
    """Of a function, or of all functions of a module."""
    functions = [thing]
    if inspect.ismodule(thing):
        functions = [x for x in vars(thing).values() if inspect.isfunction(x)]
    return {name for x in functions for name in inspect.signature(x).parameters}


def test_migration_tables_name_arguments_that_there_are() -> None:
    assert len(tables()) == 5
    for functions, cells in tables():
        known = set().union(*(parameters(member(x)) for x in functions))
        named = set(re.findall(r"`(\w+)=", " ".join(cells)))
        assert named, functions
        assert named <= known, (functions, named - known)
    for functions, cells in tables()[3:]:
        (module,) = functions
        called = {x for cell in cells for x in re.findall(r"^ ?`(\w+)(?:\(\))?`", cell)}
        assert called, module
        assert [x for x in called if not hasattr(member(module), x)] == []


# --- commands ------------------------------------------------------------------------------------

HERE = "tests/test_readme.py"
# What runs each command of the README. What needs a GPU is run by ci/gpu.sh.
RUN_BY = {
    "bash ci/quickstart.sh": ".github/workflows/ci.yml",
    ".venv/bin/flashkda demo --device cuda --dtype bfloat16": "ci/gpu.sh",
    "flashkda doctor": "ci/quickstart.sh",
    "flashkda selftest": "ci/test_matrix.sh",
    "pip install 'flashkda[bench]'": "ci/test.sh",
    "flashkda bench --shape 1x256xH2 --shape 30+50xH2 --gate slow": HERE,
    "flashkda bench --shape 1x512xH2:backward --no-rivals": HERE,
    "flashkda bench --quick --output quick": "ci/gpu.sh",
    "flashkda bench --output full --budget 450": "ci/gpu.sh",
    "flashkda bench --targets": "ci/gpu.sh",
    "flashkda bench --plot full --figures csrc/figures": HERE,
    "flashkda bench --plot full --against other": HERE,
}
# Where a script has it in other words.
WORDS = {
    ".venv/bin/flashkda demo --device cuda --dtype bfloat16": (
        "flashkda demo --device cuda --dtype bfloat16"
    ),
    "pip install 'flashkda[bench]'": 'pip install --quiet "${wheel}[bench,lint,test]"',
}


def test_every_command_is_run() -> None:
    assert {x.text for x in commands()} == set(RUN_BY)
    assert {x.text for x in commands() if x.needs_gpu} == {
        text for text, path in RUN_BY.items() if path == "ci/gpu.sh"
    }
    workflow = ".github/workflows/ci.yml"
    for text, path in RUN_BY.items():
        assert path in {HERE, workflow, "ci/gpu.sh"} | reached(workflow), path
        assert path == HERE or WORDS.get(text, text) in script(path), text


@pytest.mark.parametrize("text", [text for text, path in RUN_BY.items() if path == HERE])
def test_command(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, where there are two runs of the benchmark."""
    if "--figures" in text:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    # Whatever GPU there is: that way is ci/gpu.sh's.
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for folder in ("full", "other"):
        (tmp_path / folder).mkdir()
        for shape in ("1x512xH32", "1x8192xH32", "128x1xH32"):
            record = recorded(shape, 1e-4, 2e-4)
            (tmp_path / folder / f"{shape}.json").write_text(json.dumps(record))
    command, *arguments = shlex.split(text)
    assert command == "flashkda"
    assert cli.main(arguments) == 0
    if "--figures" in text:
        assert {f"{x}.png" for x in FIGURES} <= {x.name for x in Path("csrc/figures").iterdir()}


# --- links and figures ---------------------------------------------------------------------------


def links(path: str) -> list[str]:
    """The relative ones of a page, images too."""
    found = re.findall(r"\]\(([^)\s]+)\)", (TREE / path).read_text(encoding="utf-8"))
    return [x for x in found if "://" not in x]


@pytest.mark.parametrize("path", ["README.md", "csrc/README.md"])
def test_links_lead_somewhere(path: str) -> None:
    for link in links(path):
        name, _, heading = link.partition("#")
        target = (TREE / path).parent / name if name else TREE / path
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text(encoding="utf-8")), link


def test_figures_are_there_and_shown_or_neither() -> None:
    """They are measured: none is there before."""
    pages = [*links("README.md"), *links("csrc/README.md")]
    shown = {Path(x).stem for x in pages if x.endswith(".png")}
    assert shown == (set(FIGURES) if (TREE / "csrc/figures").exists() else set())


def test_it_says_that_there_is_no_release_yet() -> None:
    unreleased = "## 0.1.0 (unreleased)" in (TREE / "CHANGELOG.md").read_text(encoding="utf-8")
    assert ("0.1.0 is not released yet" in README) == unreleased


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
