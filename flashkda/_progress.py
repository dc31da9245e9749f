"""A progress report on stderr for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_BAR_WIDTH = 30


class Progress:
    """Counts steps. On a terminal it draws a bar, elsewhere it writes a line now and then.

    Args:
        label: what is going on.
        total: number of steps.
        delay: seconds before anything is shown.
        stream: where to; stderr if None.
    """

    def __init__(
        self, label: str, total: int, *, delay: float = 2.0, stream: TextIO | None = None
    ) -> None:
        self._label = label
        self._total = total
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._interval = 0.1 if self._is_terminal else 10.0
        self._start = time.monotonic()
        self._next_report = self._start + delay
        self._done = 0
        self._drawn = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._drawn and self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def advance(self, steps: int = 1) -> None:
        """Counts ``steps`` more as done."""
        self._done += steps
        now = time.monotonic()
        if now < self._next_report or self._done >= self._total:
            return
        self._next_report = now + self._interval
        self._drawn = True
        fraction = self._done / self._total
        elapsed = now - self._start
        left = elapsed * (1 - fraction) / fraction if fraction > 0 else 0.0
        text = f"{self._label} {self._done}/{self._total}, {elapsed:.0f} s, about {left:.0f} s left"
        if self._is_terminal:
            bar = ("#" * round(_BAR_WIDTH * fraction)).ljust(_BAR_WIDTH, ".")
            self._stream.write(f"\r[{bar}] {text}\x1b[K")
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
