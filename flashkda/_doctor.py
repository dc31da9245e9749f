"""What is installed here, what hardware there is, and which backend serves it."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import flashkda
from flashkda import _native
from flashkda._backend import backend


def devices() -> list[torch.device]:
    """The CPU and every accelerator that PyTorch sees."""
    found = [torch.device("cpu")]
    if torch.cuda.is_available():
        found += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    return found


def _describe(device: torch.device) -> dict[str, Any]:
    chosen = backend(device)
    name, capability = platform.processor() or platform.machine(), None
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    return {
        "device": str(device),
        "name": name,
        "capability": capability,
        "backend": chosen.name,
        "reason": chosen.reason,
    }


def _build_facts() -> dict[str, Any]:
    """How this copy of the package was built: its wheel tag and its compiled libraries."""
    root = Path(flashkda.__file__).parent
    tag = None
    try:
        wheel = metadata.distribution("flashkda").read_text("WHEEL") or ""
    except metadata.PackageNotFoundError:
        wheel = ""
    for line in wheel.splitlines():
        if line.startswith("Tag:"):
            tag = line.removeprefix("Tag:").strip()
    libraries = [
        path.name for pattern in ("*.so", "*.pyd", "*.dylib") for path in root.glob(pattern)
    ]
    return {
        "location": str(root),
        "wheel_tag": tag,
        "libraries": sorted(libraries),
        "kernels": _native.build_info(),
    }


def report() -> dict[str, Any]:
    """Everything that the command prints, as plain data."""
    return {
        "flashkda": flashkda.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "build": _build_facts(),
        "devices": [_describe(device) for device in devices()],
        "no_cuda_device": None if torch.cuda.is_available() else backend("cuda").reason,
    }


def main(*, as_json: bool = False) -> int:
    """Prints the report. A device that falls back to PyTorch is healthy: the status is 0."""
    facts = report()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    build = facts["build"]
    print(f"flashkda  {facts['flashkda']}")
    print(f"python    {facts['python']} on {facts['platform']}")
    print(f"torch     {facts['torch']}, CUDA {facts['torch_cuda'] or 'none'}")
    print(f"threads   {facts['threads']}")
    print(f"location  {build['location']}")
    print(f"build     {build['wheel_tag'] or 'not installed from a wheel'}")
    print(f"libraries {', '.join(build['libraries']) or 'none (pure Python)'}")
    kernels = build["kernels"]
    built = (
        "none"
        if kernels is None
        else f"{kernels['version']} for {kernels['architectures']}, "
        f"cudart {kernels['cudart']}, nvcc {kernels['nvcc']}"
    )
    print(f"kernels   {built}")
    for device in facts["devices"]:
        capability = f", capability {device['capability']}" if device["capability"] else ""
        print(f"{device['device']:9} {device['name']}{capability}")
        print(f"{'':9} backend {device['backend']}: {device['reason']}")
    if facts["no_cuda_device"]:
        print(f"cuda      none: {facts['no_cuda_device']}")
    return 0
