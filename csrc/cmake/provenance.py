"""Writes what a wheel says of its origin: licences of the code linked in, and a bill of materials.

Usage: provenance.py OUT NAME=VALUE...    with a NAME for each of version, target, torch, cutlass,
cudart, cudart_version, nvcc_version, cxx_version, and zig_version where zig links. torch, cutlass
and cudart are paths inside installed packages, whose licence texts are copied.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path


def metadata_folder(inside: Path, package: str) -> Path | None:
    """The dist-info of the package that a file came with: a wheel's, or one that a toolkit kept."""
    for parent in inside.parents:
        for folder in (parent, parent / "dist-info"):
            for found in folder.glob(f"{package}-*.dist-info"):
                return found
    return None


def licence(inside: Path, package: str, other_name: str = "") -> Path | None:
    """Its licence text; a toolkit or a checkout without a dist-info has it beside its folders."""
    folder = metadata_folder(inside, package)
    texts = list((folder / "licenses").rglob("[Ll][Ii][Cc][Ee]*")) if folder is not None else []
    texts = [x for x in texts if x.is_file()]
    if texts:
        return min(texts, key=lambda x: len(x.parts))  # the deeper ones are of what it contains
    others = [x / other_name for x in inside.parents]
    return next((x for x in others if x.is_file()), None)


def version(inside: Path, package: str, otherwise: str) -> str:
    folder = metadata_folder(inside, package)
    return otherwise if folder is None else folder.name[len(package) + 1 : -len(".dist-info")]


def cutlass_version(include: Path) -> str:
    text = (include / "cutlass/version.h").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", text, re.MULTILINE))


def component(kind: str, package: str, version: str, licence: dict[str, str], **more: str) -> dict:
    return {
        "type": kind,
        "bom-ref": package,
        "name": package,
        "version": version,
        "licenses": [{"license": licence}],
        **more,
    }


def on_pypi(package: str, version: str) -> str:
    return f"pkg:pypi/{package}@{version.replace('+', '%2B')}"


def main() -> None:
    out = Path(sys.argv[1])
    facts = dict(x.split("=", 1) for x in sys.argv[2:])
    cutlass, cudart, torch = (Path(facts[x]) for x in ("cutlass", "cudart", "torch"))
    ziglang = Path(sysconfig.get_path("purelib")) / "ziglang/zig"
    texts = {
        "CUTLASS": licence(cutlass, "nvidia_cutlass", "LICENSE.txt"),
        "CUDA-runtime": licence(cudart, "nvidia_cuda_runtime", "EULA.txt"),
        "PyTorch": licence(torch, "torch"),
    }
    bsd, eula = {"id": "BSD-3-Clause"}, {"name": "NVIDIA CUDA Toolkit EULA"}
    cudart_version = version(cudart, "nvidia_cuda_runtime", facts["cudart_version"])
    torch_version = version(torch, "torch", "unknown")
    nvcc, gcc = facts["nvcc_version"], {"name": "GPL-3.0-or-later WITH GCC-exception-3.1"}
    # "excluded" is CycloneDX's word for what built it but is not in it.
    parts = [
        component("library", "nvidia-cutlass", cutlass_version(cutlass), bsd),
        component("library", "nvidia-cuda-runtime", cudart_version, eula,
                  purl=on_pypi("nvidia-cuda-runtime", cudart_version)),
        component("library", "torch", torch_version, bsd, purl=on_pypi("torch", torch_version),
                  description="headers of its stable ABI; the library itself is not included"),
        component("application", "nvidia-cuda-nvcc", nvcc, eula, scope="excluded",
                  purl=on_pypi("nvidia-cuda-nvcc", nvcc)),
        component("application", "g++", facts["cxx_version"], gcc, scope="excluded"),
    ]  # fmt: skip
    if "zig_version" in facts:
        texts["zig"] = licence(ziglang, "ziglang")
        zig = facts["zig_version"]
        parts.append(
            component("application", "ziglang", zig, {"id": "MIT"}, purl=on_pypi("ziglang", zig),
                      description="the linker; its compiler-rt and start files are included")
        )  # fmt: skip

    (out / "licenses").mkdir(parents=True, exist_ok=True)
    for name, path in texts.items():
        if path is None:
            print(f"flashkda: no licence text of {name} found: do not pass the built wheel on")
        else:
            (out / f"licenses/{name}.txt").write_bytes(path.read_bytes())
    own = facts["version"]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": "flashkda",
                "name": "flashkda",
                "version": own,
                "purl": on_pypi("flashkda", own),
                "licenses": [{"license": {"id": "MIT"}}],
                "properties": [{"name": "flashkda:target", "value": facts["target"]}],
            }
        },
        "components": parts,
        "dependencies": [
            {"ref": "flashkda", "dependsOn": [x["bom-ref"] for x in parts if "scope" not in x]}
        ],
    }  # no time and no serial number: the same build writes the same file
    (out / "sboms").mkdir(exist_ok=True)
    path = out / "sboms/flashkda.cdx.json"
    path.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")


main()
