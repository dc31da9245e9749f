"""The machine a benchmark ran on, and tables of its results."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import flashkda


def environment() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "flashkda": flashkda.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *(line(row) for row in rows)])
