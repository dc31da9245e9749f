"""Damaged installations and unfit machines: the import works, results come from the PyTorch path,
and the reason names the cause and what helps.

What breaks a process rather than an import can only be seen from outside, so each case is one: a
fork of a process that has imported torch and nothing of flashkda.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from cases import KdaCase
from troubleshooting import row_of

import flashkda
from flashkda import _diagnosis, _native, cli

PACKAGE = Path(flashkda.__file__).resolve().parent
LIBRARIES = ("libflashkda_cuda.so", "libflashkda_torch.so")
needs_library = pytest.mark.skipif(
    not (PACKAGE / LIBRARIES[0]).exists(), reason="this build holds no kernels"
)
CASE = KdaCase(T=5, dtype=torch.float32)

FORKING = """
import json, os, sys
import torch
from cases import KdaCase

torch.set_num_threads(1)
for line in sys.stdin:
    folder, before = json.loads(line)
    child = os.fork()
    if child == 0:
        sys.path.insert(0, folder)
        exec(before)
        import flashkda
        torch.manual_seed(0)
        chosen = flashkda.backend("cuda:0")
        out, _ = flashkda.chunk_kda(**KdaCase(T=5, dtype=torch.float32).make())
        print(json.dumps([flashkda.__file__, *chosen, out.double().sum().item()]), flush=True)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps(status), flush=True)
"""


@pytest.fixture(scope="module")
def forking() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", FORKING],
        cwd="/",  # holds no flashkda
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


Reason = Callable[..., str]


@pytest.fixture
def reason_in(forking: subprocess.Popen[str]) -> Reason:
    """Why an installation takes the PyTorch path; checks that it does, and computes rightly."""

    def ask(installation: Path, before: str = "") -> str:
        assert forking.stdin is not None
        assert forking.stdout is not None
        forking.stdin.write(json.dumps([str(installation.parent), before]) + "\n")
        forking.stdin.flush()
        answer = json.loads(forking.stdout.readline())
        assert isinstance(answer, list), f"the process ended with wait status {answer}"
        where, backend, reason, total = answer
        assert Path(where).parent == installation
        assert backend == "torch"
        torch.manual_seed(0)
        expected, _ = flashkda.chunk_kda(**CASE.make())
        assert total == pytest.approx(expected.double().sum().item(), rel=1e-5)
        assert row_of(reason).cure
        return str(reason)

    return ask


@pytest.fixture
def installation(tmp_path: Path) -> Path:
    """A copy of the package, to be damaged."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "site/flashkda"))


# --- the library ---------------------------------------------------------------------------------


def cut_off(data: bytes) -> bytes:
    return data[: len(data) // 2]


def for_another_machine(data: bytes) -> bytes:
    (other,) = set(_diagnosis.MACHINES.values()) - {int.from_bytes(data[18:20], "little")}
    return data[:18] + other.to_bytes(2, "little") + data[20:]


def without_segments(data: bytes) -> bytes:
    return data[:56] + bytes(2) + data[58:]


def with_newer(version: bytes) -> Callable[[bytes], bytes]:
    """As if it were built for a runtime that is not there."""
    return lambda data: re.sub(version + rb"\d\d\0", version + b"99\0", data)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], list[str]]] = {
    "empty": ("cuda", lambda data: b"", ["no library", "reinstall"]),
    "text": ("torch", lambda data: b"Not Found\n" * 99, ["no library", "reinstall"]),
    "cut-off": ("cuda", cut_off, ["cut off", "reinstall"]),
    "cut-off-binding": ("torch", cut_off, ["cut off", "reinstall"]),
    "no-segments": ("cuda", without_segments, ["failed to load", "reinstall"]),
    "machine": ("cuda", for_another_machine, ["is for", "this is", "install the wheel for"]),
    "libstdc++": ("torch", with_newer(rb"GLIBCXX_3.4."), ["GLIBCXX_", "install a newer libstdc++"]),
    "glibc": ("cuda", with_newer(rb"GLIBC_2."), ["GLIBC_", "from source"]),
    "torch-symbol": (
        "torch",
        lambda data: data.replace(b"aoti_torch_get_strides", b"aoti_torch_got_strides"),
        ["undefined symbol", "install a release of torch"],
    ),
}


@needs_library
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_library(reason_in: Reason, installation: Path, name: str) -> None:
    which, damage, expected = DAMAGE[name]
    library = installation / f"libflashkda_{which}.so"
    before = library.read_bytes()
    library.write_bytes(damage(before))
    assert library.read_bytes() != before
    reason = reason_in(installation)
    assert [x for x in expected if x not in reason] == [], reason


@needs_library
@pytest.mark.parametrize("name", LIBRARIES)
def test_one_library_of_two(reason_in: Reason, installation: Path, name: str) -> None:
    (installation / name).unlink()
    reason = reason_in(installation)
    assert name in reason
    assert "reinstall" in reason


def test_no_library(reason_in: Reason, installation: Path) -> None:
    for name in LIBRARIES:
        (installation / name).unlink(missing_ok=True)
    assert _diagnosis.NO_LIBRARY in reason_in(installation)


@needs_library
def test_old_torch(reason_in: Reason, installation: Path) -> None:
    reason = reason_in(installation, 'torch.__version__ = "2.8.0+cu126"')
    assert "need torch 2.9 or newer, this is 2.8.0+cu126" in reason
    assert "pip install 'torch>=2.9'" in reason


@needs_library
def test_library_of_another_version(reason_in: Reason, installation: Path) -> None:
    source = installation / "_native.py"
    text = source.read_text(encoding="utf-8")
    changed = text.replace(f"_ABI = {_native._ABI}", "_ABI = 99")
    assert changed != text
    source.write_text(changed, encoding="utf-8")
    reason = reason_in(installation)
    assert "another version" in reason
    assert "reinstall" in reason


# --- the machine ---------------------------------------------------------------------------------

# A driver of CUDA 12.4, as far as the CUDA runtime looks before it gives up: its version.
OLD_DRIVER = r"""
#include <string.h>
typedef int (*function)(void);
static int nothing(void) { return 0; }
static int no_table(void) { return 1; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int cuGetProcAddress_v2(char const* name, function* found, int version,
                        unsigned long long flags, int* status) {
  *found = nothing;
  if (strcmp(name, "cuDriverGetVersion") == 0) *found = (function)cuDriverGetVersion;
  if (strncmp(name, "cuGetProcAddress", 16) == 0) *found = (function)cuGetProcAddress_v2;
  if (strcmp(name, "cuGetExportTable") == 0) *found = no_table;
  if (status) *status = 0;
  return 0;
}
"""
PRETEND = "torch.cuda.is_available = lambda: True\n"


@needs_library
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_old_driver(reason_in: Reason, installation: Path, tmp_path: Path) -> None:
    """The CUDA runtime's own error 35, from a driver that says it is of CUDA 12.4."""
    source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(OLD_DRIVER)
    soname = "-Wl,-soname,libcuda.so.1"  # found by name once it is loaded
    subprocess.run(["cc", "-shared", "-fPIC", soname, "-o", driver, source], check=True, timeout=60)
    reason = reason_in(installation, f"{PRETEND}import ctypes; ctypes.CDLL({str(driver)!r})")
    assert "driver is too old" in reason
    assert "it offers CUDA 12.4, they need" in reason
    assert "update the driver" in reason


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a driver")
def test_no_driver(reason_in: Reason, installation: Path) -> None:
    assert "there is no CUDA driver: install one" in reason_in(installation, PRETEND)


@pytest.mark.parametrize(
    ("capability", "cure"),
    [("8.0", "there are no kernels for it"), ("12.1", "there are no kernels for it")],
)
def test_other_capabilities(
    reason_in: Reason, installation: Path, capability: str, cure: str
) -> None:
    """As the library answers on such a device, whose texts are those of csrc/entry.cpp."""
    answer = f"compute capability {capability} is not among those of this build (9.0): {cure}"
    before = f"""{PRETEND}
import flashkda._native as native
class Library:
    def flashkda_probe(self, device, message, size):
        message.value = {answer!r}.encode()
native._library = Library()
"""
    reason = reason_in(installation, before)
    assert f"can't serve cuda:0: {answer}" in reason
    entry = (Path(__file__).parents[1] / "csrc/entry.cpp").read_text(encoding="utf-8")
    assert all(
        x in entry for x in ("compute capability ", "is not among those of this build", cure)
    )


# --- what is not installed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sys.platform": "darwin"}, "there are none for this system, only for Linux"),
        ({"platform.machine": lambda: "riscv64"}, "there are none for riscv64"),
        ({"os.confstr": lambda name: "glibc 2.17"}, "need glibc 2.28 or newer"),
        ({"os.confstr": lambda name: None}, "need glibc 2.28 or newer"),
        ({}, "install the wheel for manylinux_2_28_"),
    ],
    ids=["macos", "riscv64", "old-glibc", "no-glibc", "linux"],
)
def test_reasons_of_a_pure_wheel(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], expected: str
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(name, value)
    reason = _diagnosis.no_library()
    assert reason.startswith(_diagnosis.NO_LIBRARY)
    assert expected in reason
    assert row_of(reason).cure


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_doctor_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_native, "_library", None)
    monkeypatch.setattr(_native, "_reason", _diagnosis.no_library())
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "kernels   none" in out
    assert f"cuda      none: {_diagnosis.no_library()}" in out


@pytest.mark.parametrize(
    ("cause", "cure"),
    [
        ("failed to map segment from shared object", "noexec"),
        ("libflashkda_cuda.so: Permission denied", "permissions"),
        ("libtorch.so: cannot open shared object file", "install a release of torch"),
        ("anything else", "reinstall"),
    ],
)
def test_what_helps_against_other_failures(cause: str, cure: str) -> None:
    reason = _diagnosis.failure(cause)
    assert cause in reason
    assert cure in reason
    assert row_of(reason).cure


def test_a_torch_without_cuda_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in row_of(_diagnosis.no_device()).message
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "torch's CUDA 12.8" in _diagnosis.no_device()
    assert "is_available() is False" in row_of(_diagnosis.no_device()).message
