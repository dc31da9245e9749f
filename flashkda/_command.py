"""What all commands share: integers among their options, and how they end when nobody reads on."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable

BROKEN_PIPE = 141  # what a shell says of a command that SIGPIPE ended: 128 + 13


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option, for argparse: an integer of at least ``least``, at most ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"expected at most {most}, got {value}")
        return value

    return parse


def until_nobody_reads(run: Callable[[], int]) -> int:
    """The status of ``run``; :data:`BROKEN_PIPE` once the reader of its output has gone away."""
    try:
        status = run()
        if sys.stdout is not None:  # closed by the caller: >&-
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _drop_what_is_left()
        return BROKEN_PIPE


def _drop_what_is_left() -> None:
    """Else Python would complain at its end that it can't write what is still in a buffer."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
