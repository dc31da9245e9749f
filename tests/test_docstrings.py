"""Public docstrings: their examples run, and what a caller must know is there."""

from __future__ import annotations

import builtins
import doctest
import inspect
import re
from importlib import import_module
from typing import Any

import pytest
from fla_cases import NEEDS_FLA, fla_kda

import flashkda
from flashkda import nn

DOORS = {
    "fla": ("Status", "disable", "enable", "status"),
    "flash_kda": ("fwd", "get_workspace_size", "install", "uninstall"),
    "sglang": ("decode", "extend", "verify"),
    "vllm": (
        "fwd", "get_workspace_size", "packed_decode", "prefill", "register", "speculative_decode",
    ),
}  # fmt: skip
PUBLIC = {
    **{f"flashkda.{x}": getattr(flashkda, x) for x in flashkda.__all__ if x != "__version__"},
    **{f"flashkda.nn.{x}": getattr(nn, x) for x in nn.__all__},
    **{
        f"flashkda.integrations.{door}.{x}": getattr(
            import_module(f"flashkda.integrations.{door}"), x
        )
        for door, names in DOORS.items()
        for x in names
    },
}
FUNCTIONS = {name: x for name, x in PUBLIC.items() if inspect.isfunction(x)}
METHODS = {
    f"flashkda.nn.{kind.__name__}.forward": kind.forward
    for kind in (nn.GatedRMSNorm, nn.KimiDeltaAttention, nn.ShortConvolution)
}
# What computes attention: each names the paper, or the function that does.
OPERATORS = [
    name
    for name, x in FUNCTIONS.items()
    if {"q", "mixed_qkv"} & set(inspect.signature(x).parameters)
]
# Where arguments that are not listed are those of another function, which the docstring says.
REFERS = {"flashkda.fused_recurrent_kda": "flashkda.chunk_kda"}
REFUSED = {"retrieve_parent_token"}  # any tensor is
RAISE_NOTHING = {
    f"flashkda.integrations.{x}" for x in ("fla.disable", "fla.status", "flash_kda.uninstall")
}


def doc(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def arguments(thing: Any) -> dict[str, str]:
    """What a docstring says of each argument."""
    match = re.search(r"^Args:\n((?:    .*\n|\n)+)", doc(thing) + "\n", re.MULTILINE)
    entries = re.split(r"^    (\w+): ", match[1] if match else "", flags=re.MULTILINE)
    return dict(zip(entries[1::2], entries[2::2], strict=True))


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=NEEDS_FLA if ".fla." in x else ()) for x in PUBLIC]
)
def test_examples(name: str) -> None:
    if ".fla." in name:
        fla_kda()  # which warns where there is no GPU
    (test,) = doctest.DocTestFinder(recurse=False).find(PUBLIC[name], name, globs={})
    assert test.examples
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert results.failed == 0, "".join(report)


def test_doors_are_public_functions_of_their_modules() -> None:
    for door, names in DOORS.items():
        module = import_module(f"flashkda.integrations.{door}")
        there = {
            x
            for x, thing in vars(module).items()
            if not x.startswith("_")
            and getattr(thing, "__module__", "").startswith("flashkda")
            and (inspect.isfunction(thing) or inspect.isclass(thing))
        }
        assert there == set(names)


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_every_argument_is_described(name: str) -> None:
    function = (FUNCTIONS | METHODS)[name]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    wanted = {
        x.name for x in inspect.signature(function).parameters.values() if x.kind not in kinds
    }
    wanted.discard("self")
    said = set(arguments(function))
    assert said <= wanted
    if name in REFERS:
        assert "Arguments not listed are those of :func:`chunk_kda`" in " ".join(
            doc(function).split()
        )
        said |= set(arguments(PUBLIC[REFERS[name]]))
    assert wanted <= said


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_have_shapes_and_dtypes(name: str) -> None:
    function = FUNCTIONS[name]
    annotations = inspect.get_annotations(function)
    tensors = {x for x in arguments(function) if "Tensor" in annotations[x]} - REFUSED
    assert tensors
    shaped = r"\[|in the shape of|in the same shape|the same for final states|^uint8"
    without = [x for x in tensors if not re.search(shaped, arguments(function)[x])]
    assert without == []
    assert re.search(r"bfloat16|dtypes? ", doc(function))


@pytest.mark.parametrize("name", OPERATORS)
def test_formulas_have_a_source(name: str) -> None:
    text, seen = doc(FUNCTIONS[name]), {name}
    while "arXiv" not in text:
        references = re.findall(r":func:`(?:flashkda\.)?(\w+)`", text)
        ahead = [f"flashkda.{x}" for x in references if x in flashkda.__all__]
        new = [x for x in ahead if x not in seen]
        assert new, name
        seen.add(new[0])
        text = doc(PUBLIC[new[0]])


@pytest.mark.parametrize("name", [x for x in FUNCTIONS if x not in RAISE_NOTHING])
def test_errors_are_listed(name: str) -> None:
    raised = re.findall(
        r"^    (\w+): ", doc(FUNCTIONS[name]).partition("Raises:\n")[2], re.MULTILINE
    )
    assert raised
    assert all(issubclass(getattr(builtins, x), Exception) for x in raised)
