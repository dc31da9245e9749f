"""What a wheel with kernels must hold, checked without a GPU: python ci/check_wheel.py WHEEL

Its libraries (what they need and export), the kernels in them (architectures, registers, memory,
instructions), its size. The kernels' resources must be those of csrc/resources.txt; --update writes
that file after a change that is meant.

Needs pyelftools, c++filt, cuobjdump and nvdisasm (PyPI has both: nvidia-cuda-cuobjdump and so on).
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

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

RESOURCES = Path(__file__).parents[1] / "csrc/resources.txt"
SHIPPED = ("sm_90a", "sm_100a", "sm_103a")
MAX_WHEEL_BYTES = 50 * 10**6

SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-aarch64.so.1"}
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


def check_library(path: Path) -> None:
    with path.open("rb") as file:
        elf = ELFFile(file)
        needed, exported, glibc = set(), set(), [(0,)]
        for section in elf.iter_sections():
            if isinstance(section, DynamicSection):
                needed = {x.needed for x in section.iter_tags("DT_NEEDED")}
            elif isinstance(section, SymbolTableSection) and section.name == ".dynsym":
                exported = {x.name for x in section.iter_symbols() if is_exported(x)}
            elif isinstance(section, GNUVerNeedSection):
                names = [x.name for _, versions in section.iter_versions() for x in versions]
                glibc += [
                    tuple(map(int, x[6:].split("."))) for x in names if re.match(r"GLIBC_\d", x)
                ]
    size = path.stat().st_size
    needs = ".".join(map(str, max(glibc)))
    print(f"{path.name}: {size / 1e6:.2f} MB, needs glibc {needs}, {', '.join(sorted(needed))}")
    extra = needed - ALLOWED[path.name]
    expect(not extra, f"{path.name} needs {', '.join(sorted(extra))}")
    foreign = sorted(x for x in exported if not x.startswith("flashkda_"))
    expect(not foreign, f"{path.name} exports {', '.join(foreign[:5])}")
    if path.name == "libflashkda_cuda.so":
        expect("flashkda_abi" in exported, f"{path.name} exports no flashkda_abi")


def is_exported(symbol: object) -> bool:
    info = symbol["st_info"]["bind"]  # type: ignore[index]
    return info != "STB_LOCAL" and symbol["st_shndx"] != "SHN_UNDEF"  # type: ignore[index]


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
        short[name] = re.sub(r"_kernel<\w+Config<(.*)> ?>$", r"<\1>", line)
    return short


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
    lines = [f"{'arch':8} {'kernel':32} registers stack local static-shared"]
    for arch, name, use in sorted(found, key=lambda x: (x[0].zfill(8), short[x[1]])):
        kernel = f"{arch:8} {short[name]:32}"
        expect(use["STACK"] == use["LOCAL"] == 0, f"{kernel.strip()} spills or uses local memory")
        lines.append(
            f"{kernel} {use['REG']:9} {use['STACK']:5} {use['LOCAL']:5} {use['SHARED']:13}"
        )
    return lines


def instructions(library: Path) -> Iterator[tuple[str, Counter[str]]]:
    """How often each of INSTRUCTIONS occurs, by architecture."""
    for code in re.split(r"^\s*code for ", cuobjdump(library, "-sass"), flags=re.MULTILINE)[1:]:
        arch, _, text = code.partition("\n")
        yield arch.strip(), Counter(re.findall(rf"\b({'|'.join(INSTRUCTIONS)})\b", text))


def check_kernels(library: Path, update: bool) -> None:
    cubins = re.findall(r"\.(sm_\w+)\.cubin", cuobjdump(library, "--list-elf"))
    expect(
        sorted(cubins) == sorted(SHIPPED),
        f"expected one cubin for each of {', '.join(SHIPPED)}, found {', '.join(cubins) or 'none'}",
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
        package = Path(folder) / "flashkda"
        found = {x.name for x in package.glob("*.so")}
        expect(found == set(ALLOWED), f"expected {', '.join(ALLOWED)}, found {found or 'none'}")
        for name in sorted(found & set(ALLOWED)):
            check_library(package / name)
        if "libflashkda_cuda.so" in found:
            check_kernels(package / "libflashkda_cuda.so", args.update)
    for problem in problems:
        print(f"ci/check_wheel.py: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
