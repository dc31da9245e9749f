"""Calls that must be refused, as data: what changes in a good call, and the error that names it.

Every message reads `<argument>: expected <...>, got <...>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import unmodified

META = torch.device("meta")
NAN = float("nan")

Change = Callable[[dict[str, Any]], dict[str, Any]]
Bad = tuple[str, type[Exception], str, Change]


def put(**values: Any) -> Change:
    return lambda call: values


def cut(name: str, dim: int) -> Change:
    """One too few along a dimension."""
    return lambda call: {name: call[name].narrow(dim, 0, call[name].shape[dim] - 1)}


def grow(name: str, dim: int) -> Change:
    return lambda call: {name: torch.cat([call[name], call[name].narrow(dim, 0, 1)], dim)}


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda call: {name: call[name].to(dtype)}


def flat(name: str) -> Change:
    return lambda call: {name: call[name].flatten(0, 1)}


def away(name: str) -> Change:
    return lambda call: {name: call[name].to(META)}


V, Ty, N = ValueError, TypeError, NotImplementedError


def refused(
    function: Callable[..., Any], call: dict[str, Any], error: type[Exception], name: str
) -> str:
    """Assert the exception, its form, and that no argument changed."""
    with unmodified(call), pytest.raises(error) as caught:
        function(**call)
    assert type(caught.value) is error
    message = str(caught.value)
    subject, _, rest = message.partition(": ")
    assert subject == name, message
    if error in (ValueError, TypeError):
        assert rest.startswith("expected "), message
        assert ", got " in rest, message
    return message


def table(rows: list[Bad]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("error", "name", "change"), [x[1:] for x in rows], ids=[x[0] for x in rows]
    )
