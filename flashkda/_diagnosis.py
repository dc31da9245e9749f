"""Why the CUDA kernels are not there, or their library does not load, and what helps.

The README's troubleshooting table has a row for each of these reasons.
"""

from __future__ import annotations

import os
import platform
import re
import struct
import sys
from pathlib import Path

import torch

OLDEST_TORCH = (2, 9)  # of the stable ABI that csrc/torch is built for
OLDEST_GLIBC = (2, 28)  # of the wheels with kernels: GLIBC in ci/env.sh
MACHINES = {"x86_64": 62, "aarch64": 183}  # e_machine in an ELF header

NO_LIBRARY = "this build of flashkda holds no CUDA kernels, so the PyTorch path serves every device"
FAILED = "the library of the CUDA kernels failed to load"
REINSTALL = "reinstall it: pip install --force-reinstall --no-deps flashkda"

# What the dynamic linker says, and what that means.
_MEANINGS = (
    (
        r"GLIBCXX_|CXXABI_|GCC_\d",
        "the C++ runtime found first is older than the kernels need: install a newer libstdc++, "
        "or put the folder of one first in LD_LIBRARY_PATH",
    ),
    (
        r"GLIBC_\d",
        "this system's glibc is older than the kernels need: build flashkda from source here",
    ),
    (
        r"undefined symbol",
        f"this torch lacks what the kernels need from it: install a release of torch from "
        f"{OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} on",
    ),
    (
        r"libtorch\w*\.so",
        "this torch has no shared libraries of the usual names: install a release of torch",
    ),
    (
        r"failed to map segment|Operation not permitted",
        "its folder may not hold programs (a file system mounted noexec): install elsewhere",
    ),
    (r"Permission denied", "its file may not be read by this user: correct its permissions"),
    (r"", REINSTALL),
)


def no_library() -> str:
    """The reason where no library is installed: whether there is one for this system."""
    if sys.platform != "linux":
        why = "there are none for this system, only for Linux"
    elif platform.machine() not in MACHINES:
        why = f"there are none for {platform.machine()}, only for {' and '.join(MACHINES)}"
    elif _glibc() < OLDEST_GLIBC:
        oldest = ".".join(map(str, OLDEST_GLIBC))
        why = f"wheels with kernels need glibc {oldest} or newer: build from source, with an nvcc"
    else:
        why = (
            f"install the wheel for manylinux_{OLDEST_GLIBC[0]}_{OLDEST_GLIBC[1]}"
            f"_{platform.machine()}, or build from source, with an nvcc"
        )
    return f"{NO_LIBRARY}: {why}"


def _glibc() -> tuple[int, ...]:
    """Its version; (0,) with another C library."""
    try:
        name, _, number = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        return (0,)
    return _numbers(number) if name == "glibc" else (0,)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2]) or (0,)


def old_torch() -> str | None:
    """The reason where torch is older than the binding: loading would end in a riddle."""
    if _numbers(str(torch.__version__)) >= OLDEST_TORCH:
        return None
    oldest = ".".join(map(str, OLDEST_TORCH))
    return (
        f"the CUDA kernels need torch {oldest} or newer, this is {torch.__version__}: "
        f"pip install 'torch>={oldest}'"
    )


def no_device() -> str:
    """The reason where torch has no CUDA device to offer."""
    if torch.version.cuda is None:
        return (
            "torch finds no CUDA device: this torch is built without CUDA; for a GPU, install a "
            "torch that is built with it"
        )
    return (
        "torch finds no CUDA device (torch.cuda.is_available() is False): there is no GPU or no "
        f"driver, the driver is too old for torch's CUDA {torch.version.cuda}, or "
        "CUDA_VISIBLE_DEVICES hides the GPU; nvidia-smi shows which"
    )


def bad_file(path: Path) -> str | None:
    """The reason that a file shows by itself.

    Looked at before the dynamic linker does: a file that was cut off ends the process there, and
    one for another machine is reported as not found.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
        size = path.stat().st_size
    except OSError as error:
        return failure(f"{path.name}: {error.strerror}")
    if len(head) < 64 or head[:6] != b"\x7fELF\x02\x01":
        return failure(f"{path.name} is no library")
    (machine,) = struct.unpack_from("<H", head, 18)
    if machine != MACHINES.get(platform.machine(), machine):
        names = {number: name for name, number in MACHINES.items()}
        return (
            f"{FAILED}: {path.name} is for {names.get(machine, 'another machine')}, this is "
            f"{platform.machine()}: install the wheel for {platform.machine()}"
        )
    # The table of sections is the last thing in the file.
    (sections,) = struct.unpack_from("<Q", head, 40)
    entry_size, entries = struct.unpack_from("<HH", head, 58)
    if sections + entry_size * entries > size:
        return failure(f"{path.name} is cut off")
    return None


def failure(cause: object) -> str:
    """The reason for an error of the dynamic linker, with what helps."""
    text = str(cause)
    return f"{FAILED}: {text}; " + next(x for pattern, x in _MEANINGS if re.search(pattern, text))
