"""Builds the conda packages from a wheel, solves, installs and tests: called by build_conda.sh.

Usage: python ci/conda_channel.py WHEEL [--quick]

They go into a local channel, where other packages stand in for conda-forge's. Those that must run
are repackaged from this interpreter and from what its pip installs. Of all else (other platforms,
PyTorch with CUDA) the channel has only what a solver reads. --quick repackages no PyTorch: it
solves, but runs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rattler
from rattler.exceptions import SolverError
from rattler.index import index_fs
from rattler_build import (
    JinjaConfig,
    PlatformConfig,
    RattlerBuildError,
    RenderConfig,
    RenderedVariant,
    Stage0Recipe,
    ToolConfiguration,
    VariantConfig,
    assemble_package,
)

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/conda"
CHANNEL = WORK / "channel"
FIXTURES = WORK / "fixtures"  # kept from run to run
PLATFORMS = ("linux-64", "linux-aarch64")
PYTHON = platform.python_version()
TORCH = "2.13.0"
WHEEL_CUDA = "13.0"
STDLIB = Path(sysconfig.get_path("stdlib"))

Fill = Callable[[Path], None]
metadata: dict[str, dict[str, dict[str, Any]]] = {x: {} for x in (*PLATFORMS, "noarch")}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--quick", action="store_true", help="repackage no PyTorch, run nothing")
    args = parser.parse_args()
    # Nothing is taken from, or left in, the user's caches.
    os.environ["RATTLER_CACHE_DIR"] = str(WORK / "cache")
    shutil.rmtree(CHANNEL, ignore_errors=True)
    # rattler-build takes the tests of a cached package, and the last run's has the same name.
    for stale in (WORK / "cache/pkgs").glob("flashkda-*"):
        shutil.rmtree(stale, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)

    step("stand-ins for the packages of conda-forge")
    add_fixtures(args.quick)
    step("the source recipe")
    add_metadata_of_source_builds()
    step(f"packages from {args.wheel.name}")
    asyncio.run(index(with_metadata=False))
    built = build(args.wheel, args.quick)
    asyncio.run(index(with_metadata=True))
    for path in built:
        print(f"{path.parent.name}/{path.name}: {path.stat().st_size / 1e3:.0f} kB")
    step("what a solver installs")
    wrong = asyncio.run(compare_solves())
    if not args.quick:
        step("an environment without a GPU")
        asyncio.run(install_and_test())
    if wrong:
        print(f"ci/conda_channel.py: {wrong} outcomes are not as expected", file=sys.stderr)
    return 1 if wrong else 0


started = time.monotonic()


def step(name: str) -> None:
    print(f"== {name} ({time.monotonic() - started:.0f} s)", flush=True)


# --- stand-ins for the packages of conda-forge ---------------------------------------------------


def add_metadata(
    name: str, version: str, build: str, subdir: str, depends: list[str], constrains: list[str]
) -> None:
    """Puts a package into the channel that can be solved for, but not installed."""
    metadata[subdir][f"{name}-{version}-{build}.conda"] = {
        "name": name,
        "version": version,
        "build": build,
        "build_number": build_number(build),
        "subdir": subdir,
        "depends": depends,
        "constrains": constrains,
        "sha256": hashlib.sha256(f"{subdir}{name}{version}{build}".encode()).hexdigest(),
        "size": 0,
    }


def add_package(
    name: str, version: str, build: str, fill: Fill, depends: list[str], run_exports: list[str]
) -> None:
    """Puts a package into the channel: what `fill` writes to its prefix. Made once, then kept."""
    recipe = json.dumps([sys.base_prefix, depends, run_exports, "compiled"])
    folder = FIXTURES / hashlib.sha256(recipe.encode()).hexdigest()[:12]
    package = folder / f"{name}-{version}-{build}.conda"
    if not package.exists():
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=WORK) as prefix:
            fill(Path(prefix))
            # As in conda-forge's packages: without it every process of a test compiles PyTorch for
            # 10 s. No check, since PyTorch has files for newer Pythons alone.
            options = ["-qq", "-j", "0", "--invalidation-mode", "unchecked-hash"]
            subprocess.run([sys.executable, "-m", "compileall", *options, prefix], check=False)
            exports = Path(prefix, "info/run_exports.json")
            exports.parent.mkdir()
            exports.write_text(json.dumps({"weak": run_exports}))
            assemble_package(
                name, version, "linux-64", build, folder, files_dir=prefix, depends=depends,
                build_number=build_number(build),
                compression_level=1,  # compressing well takes minutes
                detect_prefix=False,
            )  # fmt: skip
        print(f"{name} {version}: repackaged in {time.monotonic() - start:.0f} s")
    (CHANNEL / "linux-64").mkdir(parents=True, exist_ok=True)
    os.link(package, CHANNEL / "linux-64" / package.name)


def build_number(build: str) -> int:
    return int(build.rpartition("_")[2])


def from_pip(*requirements: str) -> Fill:
    """What pip installs for this interpreter, which is the one in the channel."""

    def fill(prefix: Path) -> None:
        target = prefix / "lib" / STDLIB.name / "site-packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, "--target", target, *requirements], check=True)

    return fill


def this_python(prefix: Path) -> None:
    """This interpreter, without its packages and tests."""
    base = Path(sys.base_prefix)
    if base == Path("/usr"):
        sys.exit(
            "ci/conda_channel.py: a system's Python can't be repackaged; set PYTHON to another"
        )
    (prefix / "bin").mkdir()
    (prefix / "bin/python").symlink_to(STDLIB.name)
    without = shutil.ignore_patterns("__pycache__", "site-packages", "test", "tests", "config-*")
    shutil.copytree(STDLIB, prefix / "lib" / STDLIB.name, symlinks=True, ignore=without)
    (prefix / "lib" / STDLIB.name / "site-packages").mkdir()
    for library in (base / "lib").glob("libpython3*.so*"):
        shutil.copy2(library, prefix / "lib", follow_symlinks=False)
    # It finds the standard library by itself, but libpython where it was installed first.
    binary = (base / "bin" / STDLIB.name).read_bytes()
    before = os.fsencode(base / "lib") + b"\0"
    binary = binary.replace(before, b"$ORIGIN/../lib".ljust(len(before), b"\0"))
    (prefix / "bin" / STDLIB.name).write_bytes(binary)
    (prefix / "bin" / STDLIB.name).chmod(0o755)


def add_fixtures(quick: bool) -> None:
    this_minor = ".".join(PYTHON.split(".")[:2])
    this = f"python {this_minor}.*"
    add_package("python", PYTHON, "0", this_python, [], [])
    for name, version in {"pip": "25.0", "numpy": "2.2.6", "pytest": "8.4.2"}.items():
        if name == "pip" or not quick:
            add_package(name, version, "0", from_pip(f"{name}=={version}"), [this], [])

    # As on conda-forge: PyTorch's CUDA builds are preferred where there is a driver, and any driver
    # of their CUDA's major version serves them.
    for cuda, driver in (("12.9", "12"), ("13.0", "13")):
        add_metadata("cuda-version", cuda, "0", "noarch", [], [f"__cuda >={driver}"])
    for subdir in PLATFORMS:
        for minor in {"3.10", "3.13", this_minor}:
            python = f"python {minor}.*"
            py = "py" + minor.replace(".", "")
            if (subdir, minor) != ("linux-64", this_minor):
                add_metadata("python", f"{minor}.99", "0", subdir, [], [])
            for torch in ("2.8.0", "2.9.1", TORCH):
                for build, cuda in (("cuda129", ">=12.9,<13"), ("cuda130", ">=13.0,<14")):
                    depends = [python, "__cuda", f"cuda-version {cuda}"]
                    add_metadata("pytorch", torch, f"{build}_{py}_200", subdir, depends, [])
                if (subdir, minor, torch, quick) == ("linux-64", this_minor, TORCH, False):
                    fill = from_pip(f"torch=={TORCH}")
                    exports = [f"pytorch {TORCH.rpartition('.')[0]}.*"]
                    add_package("pytorch", torch, f"cpu_{py}_0", fill, [python, "numpy"], exports)
                else:
                    add_metadata("pytorch", torch, f"cpu_{py}_0", subdir, [python], [])


async def index(with_metadata: bool) -> None:
    await index_fs(CHANNEL, write_zst=False, write_shards=False, force=True)
    if not with_metadata:
        return
    for subdir, packages in metadata.items():
        path = CHANNEL / subdir / "repodata.json"
        repodata = json.loads(path.read_text()) if path.exists() else {"info": {"subdir": subdir}}
        have = repodata.setdefault("packages.conda", {})
        have.update(packages)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(repodata))


# --- the packages --------------------------------------------------------------------------------


def render(target: str) -> list[RenderedVariant]:
    platforms = PlatformConfig(
        target_platform=target, build_platform="linux-64", host_platform=target
    )
    variants = VariantConfig.from_conda_build_config(
        ROOT / "recipe/conda_build_config.yaml", JinjaConfig(platforms)
    )
    recipe = Stage0Recipe.from_file(ROOT / "recipe/recipe.yaml")
    return recipe.render(variants, RenderConfig(platforms))


def add_metadata_of_source_builds() -> None:
    """There are no compilers in the channel: what the recipe would build is only solved for."""
    for subdir in PLATFORMS:
        for variant in render(subdir):
            recipe = variant.recipe
            if recipe.package.name != "flashkda":
                continue
            needs = recipe.requirements.to_dict()
            print(f"{subdir:13} {recipe.build.string:25} build: {', '.join(needs['build'])}")
            if (subdir, cuda_of(variant)) != ("linux-64", WHEEL_CUDA):
                add_metadata(
                    "flashkda", recipe.package.version, recipe.build.string, subdir,
                    needs["run"], needs["run_constraints"],
                )  # fmt: skip


def cuda_of(variant: RenderedVariant) -> str:
    return variant.variant.get("cuda_compiler_version", WHEEL_CUDA)


def build(wheel: Path, quick: bool) -> list[Path]:
    os.environ["FLASHKDA_WHEEL"] = os.path.relpath(wheel, ROOT / "recipe")
    output = WORK / "output"
    shutil.rmtree(output, ignore_errors=True)
    built = []
    for variant in render("linux-64"):
        if cuda_of(variant) != WHEEL_CUDA:
            continue
        log = Log()
        try:
            result = variant.run_build(
                ToolConfiguration(test_strategy="skip" if quick else "native"),
                output_dir=output,
                channels=[CHANNEL.as_uri()],
                progress_callback=log,
            )
        except RattlerBuildError:
            print(*log.lines, sep="\n")
            raise
        built += result.packages
    del os.environ["FLASHKDA_WHEEL"]
    for path in set(built):
        (CHANNEL / path.parent.name).mkdir(exist_ok=True)
        shutil.copy(path, CHANNEL / path.parent.name)
    return sorted(set(built))


class Log:
    """What the build prints, kept for when it fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_log(self, event: Any) -> None:
        self.lines.append(event.message)

    def on_build_step(self, event: Any) -> None: ...
    def on_download_start(self, event: Any) -> None: ...
    def on_download_progress(self, event: Any) -> None: ...
    def on_download_complete(self, event: Any) -> None: ...


# --- what a solver makes of them -----------------------------------------------------------------

# Host, what is asked for, and the builds of flashkda and pytorch installed, or who is in the way.
HOSTS = {
    "no GPU": ("linux-64", None),
    "glibc 2.17": ("linux-64", None),
    "driver 11.8": ("linux-64", "11.8"),
    "driver 12.4": ("linux-64", "12.4"),
    "driver 12.9": ("linux-64", "12.9"),
    "driver 13.0": ("linux-64", "13.0"),
    "aarch64, no GPU": ("linux-aarch64", None),
    "aarch64, driver 12.9": ("linux-aarch64", "12.9"),
    "aarch64, driver 13.0": ("linux-aarch64", "13.0"),
}
CPU = "flashkda, pytorch * cpu*"
EXPECTED = [
    ("no GPU", "flashkda", "cuda130 cpu"),
    ("no GPU", "flashkda-gpu", "no: __cuda"),
    ("no GPU", CPU, "cuda130 cpu"),
    ("glibc 2.17", "flashkda", "no: __glibc"),
    ("driver 11.8", "flashkda", "no: __cuda"),
    ("driver 11.8", "flashkda-gpu", "no: __cuda"),
    ("driver 11.8", CPU, "no: __cuda"),
    ("driver 12.4", "flashkda", "cuda129 cuda129"),
    ("driver 12.4", "flashkda-gpu", "cuda129 cuda129"),
    ("driver 12.4", CPU, "cuda129 cpu"),
    ("driver 12.9", "flashkda", "cuda129 cuda129"),
    ("driver 12.9", "flashkda-gpu", "cuda129 cuda129"),
    ("driver 12.9", CPU, "cuda129 cpu"),
    ("driver 13.0", "flashkda", "cuda130 cuda130"),
    ("driver 13.0", "flashkda-gpu", "cuda130 cuda130"),
    ("driver 13.0", CPU, "cuda130 cpu"),
    ("aarch64, no GPU", "flashkda", "cuda130 cpu"),
    ("aarch64, no GPU", "flashkda-gpu", "no: __cuda"),
    ("aarch64, driver 12.9", "flashkda-gpu", "cuda129 cuda129"),
    ("aarch64, driver 13.0", "flashkda-gpu", "cuda130 cuda130"),
    # One build for every Python and PyTorch, whatever CUDA that was built with.
    ("no GPU", "flashkda, python 3.10.*", "cuda130 cpu"),
    ("driver 13.0", "flashkda, python 3.13.*", "cuda130 cuda130"),
    ("driver 13.0", "flashkda, pytorch 2.9.*", "cuda130 cuda130"),
    ("driver 13.0", "flashkda, pytorch * cuda129*", "cuda130 cuda129"),
    ("driver 13.0", "flashkda, pytorch 2.8.*", "no: pytorch"),
]


async def solve(host: str, specs: str) -> list[rattler.RepoDataRecord]:
    subdir, driver = HOSTS[host]
    glibc = host.removeprefix("glibc ") if host.startswith("glibc") else "2.36"
    machine = {"__unix": "0", "__linux": "6.1", "__glibc": glibc}
    if driver:
        machine["__cuda"] = driver
    return await rattler.solve(
        [rattler.Channel(CHANNEL.as_uri())],
        specs.split(", "),
        platforms=[subdir, "noarch"],
        virtual_packages=[
            rattler.GenericVirtualPackage(
                rattler.PackageName(name), rattler.Version(version), rattler.BuildString("0")
            )
            for name, version in machine.items()
        ],
    )


async def outcome(host: str, specs: str) -> str:
    try:
        records = await solve(host, specs)
    except SolverError as error:
        text = str(error)
        return "no: " + next((x for x in ("__cuda", "__glibc", "pytorch") if x in text), text)
    builds = {x.name.normalized: str(x.build).partition("_")[0] for x in records}
    return f"{builds['flashkda']} {builds['pytorch']}"


async def compare_solves() -> int:
    wrong = 0
    print(f"{'host':21} {'asked for':29} flashkda, pytorch")
    for host, specs, expected in EXPECTED:
        found = await outcome(host, specs)
        wrong += found != expected
        remark = "" if found == expected else f"   EXPECTED {expected}"
        print(f"{host:21} {specs:29} {found}{remark}")
    return wrong


async def install_and_test() -> None:
    """Besides the tests of the recipe, which have run in an environment of rattler-build's."""
    prefix = WORK / "prefix"
    shutil.rmtree(prefix, ignore_errors=True)
    # Of this version there is more than metadata.
    records = await solve("no GPU", f"flashkda, python =={PYTHON}")
    start = time.monotonic()
    await rattler.install(records, prefix, cache_dir=WORK / "cache/pkgs", show_progress=False)
    print(f"{len(records)} packages installed in {time.monotonic() - start:.0f} s")
    environment = {"PATH": f"{prefix}/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=WORK, env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        print(done.stdout, end="", flush=True)
        return done.stdout

    # The tests would pass without kernels too.
    if "libflashkda_torch.so" not in run("flashkda", "doctor"):
        sys.exit("ci/conda_channel.py: the installed package has no kernels")
    run("flashkda", "selftest")


if __name__ == "__main__":
    sys.exit(main())
