"""The README's troubleshooting table: message, cause and cure for each reason of the doctor."""

from __future__ import annotations

import re
from typing import NamedTuple

from documents import README

HEAD = "| message | cause | cure |"


class Row(NamedTuple):
    message: str
    """As the table has it, with … for what differs."""
    cause: str
    cure: str

    def covers(self, reason: str) -> bool:
        """Whether the reason holds the message: what is always the same of it, in its order."""
        parts = (re.escape(x.strip(" ")) for x in self.message.split("…"))
        return re.search(".*".join(parts), reason) is not None


def rows() -> list[Row]:
    """One for each message: a line of the table may have several."""
    start = README.index(HEAD)
    lines = README[start : README.index("\n\n", start)].splitlines()[2:]
    cells = [[x.strip() for x in line.strip("|").split(" | ")] for line in lines]
    return [
        Row(message, cause, cure)
        for messages, cause, cure in cells
        for message in re.findall(r"`([^`]+)`", messages)
    ]


def row_of(reason: str) -> Row:
    """The first that covers a reason."""
    found = [row for row in rows() if row.covers(reason)]
    assert found, f"the README's table has no row for: {reason}"
    return found[0]
