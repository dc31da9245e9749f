"""What a wheel says of itself: tag, versions, licences, bill of materials (for check_wheel.py).

Needs cyclonedx-python-lib with its JSON schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

Expect = Callable[[bool, str], None]

# The text for each component, and words of it: a file of the right name alone would prove nothing.
LICENCES = {
    "flashkda": ("LICENSE", "flashkda authors"),
    "nvidia-cutlass": ("CUTLASS.txt", "Redistribution and use in source and binary forms"),
    # These stand in its list of what may be passed on.
    "nvidia-cuda-runtime": ("CUDA-runtime.txt", "libcudart_static.a"),
    "torch": ("PyTorch.txt", "Redistribution and use in source and binary forms"),
    "ziglang": ("zig.txt", "Zig contributors"),
}


def check_tag(wheel: Path, dist_info: Path, platform: str, expect: Expect) -> None:
    tags = re.findall(r"^Tag: (.+)", (dist_info / "WHEEL").read_text(), re.MULTILINE)
    expect(tags == [f"py3-none-{platform}"], f"its WHEEL file says {tags}, not {platform}")
    expect(wheel.name.endswith(f"-py3-none-{platform}.whl"), f"{wheel.name} is not for {platform}")


def check_licences(dist_info: Path, parts: Iterable[str], expect: Expect) -> None:
    for part in ["flashkda", *parts]:
        if part in LICENCES:
            name, words = LICENCES[part]
            path = dist_info / "licenses" / name
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            expect(words in text, f"licenses/{name} is missing, or another text")


def build_info(library: Path) -> tuple[str, str, str, str] | None:
    """version, architectures, cudart and nvcc as flashkda_build_info() says, without running it."""
    pattern = rb"\0([^\0;]+);([0-9a-f ]+);(\d+\.\d+);(\d+\.\d+\.\d+)\0"
    found = set(re.findall(pattern, library.read_bytes()))
    if len(found) != 1:
        return None
    version, architectures, cudart, nvcc = (x.decode() for x in found.pop())
    return version, architectures, cudart, nvcc


def read_bill(dist_info: Path, version: str, expect: Expect) -> dict[str, str]:
    """The components in the bill of materials and their versions."""
    text = (dist_info / "sboms/flashkda.cdx.json").read_text(encoding="utf-8")
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    expect(error is None, f"the bill of materials is no CycloneDX: {error}")
    bill = json.loads(text)
    stamp = bill["metadata"]["component"]["version"]
    expect(stamp == version, f"the bill of materials is of version {stamp}")
    return {x["name"]: x["version"] for x in bill["components"]}


def check_origin(dist_info: Path, library: Path, shipped: tuple[str, ...], expect: Expect) -> None:
    """Licences, and one version in the wheel's name, metadata, library and bill of materials."""
    version = dist_info.name.split("-")[1].removesuffix(".dist")
    metadata = (dist_info / "METADATA").read_text(encoding="utf-8")
    expect(f"\nVersion: {version}\n" in metadata, f"METADATA has another version than {version}")
    parts = read_bill(dist_info, version, expect)
    check_licences(dist_info, parts, expect)
    info = build_info(library)
    if info is None:
        expect(False, f"{library.name} does not say how it was built")
        return
    stamp, architectures, cudart, nvcc = info
    print(f"{library.name}: {'; '.join(info)}")
    print("built of " + ", ".join(f"{name} {number}" for name, number in parts.items()))
    expect(stamp == version, f"the library is of version {stamp}, the wheel of {version}")
    expect(
        [f"sm_{x}" for x in architectures.split()] == list(shipped),
        f"the library says that it serves {architectures}",
    )
    for name, expected in {
        "nvidia-cutlass": r"4\.2\.0",
        "nvidia-cuda-runtime": re.escape(cudart) + r"(\.\d+)?",
        "nvidia-cuda-nvcc": re.escape(nvcc),
        "torch": r"[\d.]+(\+\w+)?",
        "g++": r"[\d.]+",
    }.items():
        number = parts.get(name, "missing")
        fits = re.fullmatch(expected, number) is not None
        expect(fits, f"{name} in the bill of materials: {number}")
