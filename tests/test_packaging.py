"""What installing and importing the package does, seen from outside it."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import README, reached
from packaging.requirements import Requirement

import flashkda

TREE = Path(__file__).resolve().parents[1]
PACKAGE_FOLDER = Path(flashkda.__file__).resolve().parent


@pytest.fixture(scope="module")
def metadata() -> importlib.metadata.PackageMetadata:
    return importlib.metadata.metadata("flashkda")


def run_fresh(code: str, cwd: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Runs code in a new interpreter that finds the package under test and measures no coverage."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    env["PYTHONPATH"] = str(PACKAGE_FOLDER.parent)
    env |= {name: value for name, value in changes.items() if value is not None}
    for name, value in changes.items():
        if value is None:
            env.pop(name, None)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=120
    )


def test_version_is_the_one_in_pyproject(metadata: importlib.metadata.PackageMetadata) -> None:
    project = (TREE / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^version = "(.+?)"', project, flags=re.MULTILINE)
    assert declared is not None
    assert metadata["Version"] == flashkda.__version__ == declared[1]


def test_recipe_repeats_pyproject() -> None:
    """A recipe can read other files only as an experiment, so it has these facts a second time."""
    project = (TREE / "pyproject.toml").read_text(encoding="utf-8")
    recipe = (TREE / "recipe/recipe.yaml").read_text(encoding="utf-8")
    for key, repeated in {
        "name": "  name: {}",
        "version": '  version: "{}"',
        "description": '  summary: "{}"',
        "license": "  license: {}",
    }.items():
        declared = re.search(rf'^{key} = "(.+?)"', project, flags=re.MULTILINE)
        assert declared is not None
        assert repeated.format(declared[1]) in recipe.splitlines(), key
    requires = re.search(r'^requires-python = ">=(.+?)"', project, flags=re.MULTILINE)
    assert requires is not None
    assert f"        - python >={requires[1]}" in recipe.splitlines()


def test_only_torch_is_required() -> None:
    requirements = [Requirement(line) for line in importlib.metadata.requires("flashkda") or []]
    always = [r for r in requirements if r.marker is None or "extra" not in str(r.marker)]
    assert [r.name for r in always] == ["torch"]
    # Vendor containers ship pre-release builds; refusing them would make pip replace their torch.
    for version in ("2.9.0a0+50eac811a6.nv25.09", "2.9.0", "2.13.0+cpu", "3.0.0"):
        assert always[0].specifier.contains(version, prereleases=True), version
    assert not always[0].specifier.contains("2.8.0")


def test_metadata_names_the_licence(metadata: importlib.metadata.PackageMetadata) -> None:
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.10"


def test_every_step_of_the_workflows_calls_a_script() -> None:
    """So that what runs elsewhere can be run here."""
    steps = [
        line
        for path in (TREE / ".github/workflows").glob("*.yml")
        for line in re.findall(r"\brun:\s*(.*)", path.read_text(encoding="utf-8"))
    ]
    assert steps
    for step in steps:
        script = re.fullmatch(r"bash (ci/\w+\.sh)", step)
        assert script is not None, step
        assert (TREE / script[1]).is_file()


def test_publishing_needs_no_token() -> None:
    """Who may publish is the workflow's affair (OpenID Connect); what it made is attested."""
    workflow = (TREE / ".github/workflows/release.yml").read_text(encoding="utf-8")
    publish = workflow[workflow.index("  publish:") :]
    assert "id-token: write" in publish
    assert "uses: pypa/gh-action-pypi-publish@" in publish
    assert "attestations: true" in publish
    assert "secrets." not in workflow


def test_readme_says_what_ci_runs() -> None:
    """Of each script that builds or checks something."""
    here, github = reached("ci/test.sh"), reached(".github/workflows/ci.yml")
    where = {
        script: "on GitHub" if script in github - here else "yes" if script in here else "no"
        for script in (f"ci/{x.name}" for x in (TREE / "ci").glob("*.sh"))
        if re.match(r"ci/(build|check|test)_", script)
    }
    rows = re.findall(r"^\| .*?`(?:bash )?(ci/\w+\.sh)\b(?! -C).*\| (.+) \|$", README, re.MULTILINE)
    said = {"before a release": "no", "without": "yes", "one row; all for a release": "yes"}
    assert {script: said.get(cell, cell) for script, cell in rows if script in where} == where


def test_apptainer_definition_is_the_image() -> None:
    """What it does not say, environment and command, it takes from the Containerfile's image."""
    definition = (TREE / "ci/flashkda.def").read_text(encoding="utf-8")
    assert re.findall(r"^%(\w+)", definition, flags=re.MULTILINE) == ["test"]
    (image,) = re.findall(r"^From: build/image/(.+)", definition, flags=re.MULTILINE)
    script = (TREE / "ci/build_image.sh").read_text(encoding="utf-8")
    assert "build --quiet --pull=never --file ci/Containerfile " in script
    assert f'"oci:$work/{image}"' in script


def test_wheel_fits_every_python() -> None:
    tags = importlib.metadata.distribution("flashkda").read_text("WHEEL") or ""
    found = re.findall(r"^Tag: (\S+)", tags, flags=re.MULTILINE)
    assert found
    assert all(tag.startswith("py3-none-") for tag in found), found


def test_package_says_it_is_typed() -> None:
    assert (importlib.resources.files("flashkda") / "py.typed").is_file()


def test_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="flashkda")
    assert command.value == "flashkda.cli:main"


def test_code_and_metadata_are_of_one_installation() -> None:
    """From inside the root ./flashkda shadows the wheel: the tests would say nothing about it."""
    installed = importlib.metadata.distribution("flashkda").locate_file("flashkda")
    assert Path(str(installed)).resolve() == PACKAGE_FOLDER


def test_public_names_exist() -> None:
    for name in flashkda.__all__:
        assert hasattr(flashkda, name), name


def test_import_costs_little_above_torch(tmp_path: Path) -> None:
    code = """
import time, torch
start = time.perf_counter()
import flashkda
print(time.perf_counter() - start)
"""
    # The best of several: the first also writes byte code, and other work adds noise.
    seconds = [float(run_fresh(code, tmp_path).stdout) for _ in range(3)]
    assert min(seconds) < 0.050, seconds


def test_import_leaves_the_layer_for_later(tmp_path: Path) -> None:
    code = "import sys, flashkda; print('flashkda.nn' in sys.modules, flashkda.nn.__name__)"
    assert run_fresh(code, tmp_path).stdout.split() == ["False", "flashkda.nn"]


def test_first_call_starts_no_program_and_writes_nothing(tmp_path: Path) -> None:
    """No compiler, no cache: from the import to a result."""
    code = """
import sys, torch
seen = []
def watch(event, args):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"):
        seen.append((event, str(args)))
    elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        seen.append((event, str(args)))
    elif event == "import" and args[0] in ("triton", "torch._inductor", "torch._dynamo"):
        seen.append((event, args[0]))
sys.addaudithook(watch)
import flashkda
x = torch.randn(1, 40, 2, 8)
o, _ = flashkda.chunk_kda(x, x, x, -x.abs(), x[..., 0].sigmoid())
assert o.isfinite().all()
flashkda.fused_recurrent_kda(x, x, x, -x.abs(), x[..., 0].sigmoid())
print(seen)
"""
    done = run_fresh(code, tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    "changes",
    [{"HOME": None, "USER": None}, {"HOME": "/nonexistent"}, {"CUDA_VISIBLE_DEVICES": ""}],
    ids=["no-home", "missing-home", "no-gpu"],
)
def test_import_needs_nothing_of_its_surroundings(
    tmp_path: Path, changes: dict[str, str | None]
) -> None:
    tmp_path.chmod(0o555)
    done = run_fresh("import flashkda", tmp_path, **changes)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
