"""What a released wheel must hold, checked without a GPU: python ci/check_wheel.py WHEEL

Its libraries (what they need and export), the kernels in them (architectures, registers, memory,
instructions), its size, and what it says of itself (check_metadata.py). The kernels' resources
must be those of csrc/resources.txt; --update writes that file after a change that is meant. A
pure-Python wheel must hold no library.

Needs pyelftools, cyclonedx-python-lib, c++filt, cuobjdump and nvdisasm (see ci/check_wheel.sh).
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from check_metadata import check_licences, check_origin, check_tag
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

RESOURCES = Path(__file__).parents[1] / "csrc/resources.txt"
SHIPPED = ("sm_90a", "sm_100a", "sm_103a")
MAX_WHEEL_BYTES = 50 * 10**6
MAX_SHARED_BYTES = 228 * 1024  # of a block, what the system takes included

# What the platform tag promises, and the highest symbol versions of its oldest systems.
PLATFORMS = {"EM_X86_64": "manylinux_2_28_x86_64", "EM_AARCH64": "manylinux_2_28_aarch64"}
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-aarch64.so.1"}
# What libraries other than the system's provide: torch's stable ABI, and our own.
FOREIGN = re.compile(r"(aoti_torch|torch|flashkda)_\w+")
# No libcuda, libcudart, libtorch_cuda or libpython: each is missing somewhere.
ALLOWED = {
    "libflashkda_cuda.so": SYSTEM,
    "libflashkda_torch.so": SYSTEM | {"libflashkda_cuda.so", "libtorch.so", "libtorch_cpu.so"},
}
# The copy engine loads and stores tiles and records; the tensor cores multiply.
INSTRUCTIONS = ("UTMALDG", "UTMASTG", "UBLKCP", "HMMA")

problems: list[str] = []


def expect(holds: bool, problem: str) -> None:
    if not holds:
        problems.append(problem)


# --- the libraries -------------------------------------------------------------------------------


class Library:
    """What the dynamic linker reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.needed: set[str] = set()
        self.exported: set[str] = set()
        self.unversioned: set[str] = set()  # taken from libraries other than the system's
        self.versions: dict[str, tuple[int, ...]] = {}  # the highest of each family
        with path.open("rb") as file:
            elf = ELFFile(file)
            self.machine = str(elf["e_machine"])
            versions = elf.get_section_by_name(".gnu.version")
            for section in elf.iter_sections():
                if isinstance(section, DynamicSection):
                    self.needed = {x.needed for x in section.iter_tags("DT_NEEDED")}
                elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                    for i, symbol in enumerate(section.iter_symbols()):
                        self._add_symbol(symbol, versions.get_symbol(i)["ndx"])
                elif isinstance(section, GNUVerNeedSection):
                    for name in (x.name for _, found in section.iter_versions() for x in found):
                        family, _, number = name.rpartition("_")
                        version = tuple(int(x) for x in number.split("."))
                        self.versions[family] = max(self.versions.get(family, ()), version)

    def _add_symbol(self, symbol: Any, version: int | str) -> None:
        if symbol["st_info"]["bind"] == "STB_LOCAL":
            return
        if symbol["st_shndx"] != "SHN_UNDEF":
            self.exported.add(symbol.name)
        elif isinstance(version, str):  # VER_NDX_GLOBAL and so on, where others have a number
            self.unversioned.add(symbol.name)


def check_library(library: Library) -> None:
    name = library.path.name
    needs = [f"{x} {'.'.join(map(str, y))}" for x, y in sorted(library.versions.items())]
    print(f"{name}: {library.machine}, {library.path.stat().st_size / 1e6:.2f} MB")
    print(f"    needs {', '.join([*sorted(library.needed), *needs])}")
    extra = library.needed - ALLOWED[name]
    expect(not extra, f"{name} needs {', '.join(sorted(extra))}")
    for family, version in library.versions.items():
        expect(version <= NEWEST.get(family, ()), f"{name} needs {family} {version}")
    foreign = sorted(x for x in library.unversioned if not FOREIGN.fullmatch(x))
    expect(not foreign, f"{name} takes {', '.join(foreign[:5])} from nowhere known")
    extra = {x for x in library.exported if not x.startswith("flashkda_")}
    expect(not extra, f"{name} exports {', '.join(sorted(extra)[:5])}")
    if name == "libflashkda_cuda.so":
        expect("flashkda_abi" in library.exported, f"{name} exports no flashkda_abi")


# --- the kernels ---------------------------------------------------------------------------------


def tools_path() -> str:
    """PATH with the folder where Python packages of CUDA put their tools."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    return os.pathsep.join([str(packaged), os.environ.get("PATH", "")])


def cuobjdump(library: Path, *options: str) -> str:
    path = tools_path()
    tool = shutil.which("cuobjdump", path=path)
    if tool is None:
        sys.exit("ci/check_wheel.py: no cuobjdump: pip install nvidia-cuda-cuobjdump")
    return subprocess.run(
        [tool, *options, library],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PATH": path},
    ).stdout


def demangled(names: list[str]) -> dict[str, str]:
    """Short names: prepare<Sm90, 16, float> rather than all of its type."""
    lines = subprocess.run(
        ["c++filt"], input="\n".join(names), check=True, capture_output=True, text=True
    ).stdout.splitlines()
    short = {}
    for name, line in zip(names, lines, strict=True):
        line = re.sub(r"^void |flashkda::|cutlass::|\(.*$", "", line)
        short[name] = re.sub(r"_kernel<\w+Config<(.*?)> ?(, \d+ul)?>$", r"<\1>", line)
    return short


def dynamic_shared_bytes(name: str) -> int:
    """What a kernel's name says of the shared memory that its launch asks for, at least."""
    match = re.search(r"ELm(\d+)EE", name)
    return int(match[1]) if match else 0


def resources(library: Path) -> list[str]:
    """A line for each kernel."""
    found: list[tuple[str, str, dict[str, int]]] = []
    arch = ""
    for line in cuobjdump(library, "-res-usage").splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif "REG:" in line:
            found.append((arch, name, {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}))
    short = demangled([name for _, name, _ in found])
    lines = [f"{'arch':8} {'kernel':34} registers stack local shared"]
    for arch, name, use in sorted(found, key=lambda x: (x[0].zfill(8), short[x[1]])):
        kernel = f"{arch:8} {short[name]:34}"
        expect(use["STACK"] == use["LOCAL"] == 0, f"{kernel.strip()} spills or uses local memory")
        # Of what each block has, 1 KB is the system's.
        shared = use["SHARED"] + dynamic_shared_bytes(name)
        expect(
            shared <= MAX_SHARED_BYTES, f"{kernel.strip()} takes {shared} bytes of shared memory"
        )
        lines.append(f"{kernel} {use['REG']:9} {use['STACK']:5} {use['LOCAL']:5} {shared:6}")
    return lines


def instructions(library: Path) -> Iterator[tuple[str, Counter[str]]]:
    """How often each of INSTRUCTIONS occurs, by architecture."""
    for code in re.split(r"^\s*code for ", cuobjdump(library, "-sass"), flags=re.MULTILINE)[1:]:
        arch, _, text = code.partition("\n")
        yield arch.strip(), Counter(re.findall(rf"\b({'|'.join(INSTRUCTIONS)})\b", text))


def check_kernels(library: Path, update: bool) -> None:
    cubins = re.findall(r"\.(sm_\w+)\.cubin", cuobjdump(library, "--list-elf"))
    number = Counter(cubins)
    expect(
        set(cubins) == set(SHIPPED) and len(set(number.values())) == 1,
        f"expected cubins for each of {', '.join(SHIPPED)}, found {dict(number) or 'none'}",
    )
    ptx = re.findall(r"^PTX file.*", cuobjdump(library, "--list-ptx"), flags=re.MULTILINE)
    expect(not ptx, f"expected no PTX, found {len(ptx)}")

    lines = resources(library)
    print(*lines, sep="\n")
    if update:
        RESOURCES.write_text("\n".join(lines) + "\n")
    committed = RESOURCES.read_text().splitlines() if RESOURCES.exists() else []
    changes = difflib.unified_diff(
        committed, lines, "csrc/resources.txt", "this wheel", "", "", 0, ""
    )
    difference = "\n".join(changes)
    expect(
        not difference,
        f"the kernels' resources changed (if that is meant: ci/check_wheel.sh WHEEL --update)\n"
        f"{difference}",
    )

    counts: dict[str, Counter[str]] = {}
    for arch, counter in instructions(library):
        counts.setdefault(arch, Counter()).update(counter)
    for arch, counter in counts.items():
        print(f"{arch:8} " + ", ".join(f"{counter[x]} {x}" for x in INSTRUCTIONS))
        missing = [x for x in INSTRUCTIONS if not counter[x]]
        expect(not missing, f"{arch}: no {', '.join(missing)}")
    expect(set(counts) == set(cubins), "a cubin could not be disassembled")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--update", action="store_true", help="write csrc/resources.txt")
    args = parser.parse_args()
    size = args.wheel.stat().st_size
    print(f"{args.wheel.name}: {size / 1e6:.2f} MB")
    expect(size < MAX_WHEEL_BYTES, f"the wheel has {size} bytes, above {MAX_WHEEL_BYTES}")
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(args.wheel) as archive:
            archive.extractall(folder)
        check_contents(args.wheel, Path(folder), args.update)
    for problem in problems:
        print(f"ci/check_wheel.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


def check_contents(wheel: Path, folder: Path, update: bool) -> None:
    (dist_info,) = folder.glob("*.dist-info")
    found = {x.name: x for x in (folder / "flashkda").glob("*.so")}
    if wheel.name.endswith("-any.whl"):
        expect(not found, f"a wheel for every platform holds {', '.join(found)}")
        check_tag(wheel, dist_info, "any", expect)
        check_licences(dist_info, [], expect)
        return
    if set(found) != set(ALLOWED):
        expect(False, f"expected {', '.join(ALLOWED)}, found {', '.join(found) or 'none'}")
        return
    libraries = [Library(found[name]) for name in sorted(found)]
    for library in libraries:
        check_library(library)
    machines = {x.machine for x in libraries}
    expect(len(machines) == 1, f"its libraries are for {', '.join(sorted(machines))}")
    check_tag(wheel, dist_info, PLATFORMS.get(machines.pop(), "no known platform"), expect)
    check_origin(dist_info, found["libflashkda_cuda.so"], SHIPPED, expect)
    check_kernels(found["libflashkda_cuda.so"], update)


if __name__ == "__main__":
    sys.exit(main())
