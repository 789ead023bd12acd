"""What somebody typed or said, as we repeat it: never whole where it is long, and with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_ECHO = 200
"""So much of a value is repeated; it is to be recognized, not read."""
LONGEST_LINE = 1000
"""So much of a line of an error, whatever it was put together from."""


def echoed(value: object) -> str:
    """A value in quotes, as Python writes it, cut where it is too long.

    What an error says of it should stand on one screen, also where a file's whole content, a
    certificate or a loop's output was given in place of a word.
    """
    return shortened(repr(value), LONGEST_ECHO)


def shortened(text: str, most: int) -> str:
    """A text of which more than `most` characters are cut out, with how long it was."""
    if len(text) <= most:
        return text
    head = 3 * most // 4
    return f"{text[:head]}…{text[head - most :]} ({len(text)} characters)"


def first_line(said: str, most: int) -> str:
    """The first line, or where that only announces the next, both; cut where it is too long."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def bounded(message: str) -> str:
    """An error's message with no line longer than a screen."""
    return "\n".join(shortened(line, LONGEST_LINE) for line in message.split("\n"))


def hint(typed: str, known: Iterable[str]) -> str:
    """The nearest of the known words, or where none is near, all of them."""
    words = sorted(known)
    near = difflib.get_close_matches(typed[:LONGEST_ECHO], words, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
