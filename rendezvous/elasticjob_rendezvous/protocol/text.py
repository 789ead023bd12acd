"""User input and foreign text in messages: shortened where long, with a hint at known words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_ECHO = 200
"""Maximum length of a repeated value, which is to be recognized, not read."""
LONGEST_LINE = 1000
"""Maximum length of a line of an error, whatever it was put together from."""


def echoed(value: object) -> str:
    """Return a value in quotes, as Python writes it, shortened if too long.

    An error must stand on one screen, even if the content of a file, a certificate or the output
    of a loop was given in place of a word.
    """
    return shortened(repr(value), LONGEST_ECHO)


def shortened(text: str, most: int) -> str:
    """Return the text; beyond `most` characters, with its middle cut out and its length added."""
    if len(text) <= most:
        return text
    head = 3 * most // 4
    return f"{text[:head]}…{text[head - most :]} ({len(text)} characters)"


def first_line(said: str, most: int) -> str:
    """Return the first line, with the next one if it only announces that; shortened if too long."""
    lines = [" ".join(line.split()) for line in said.splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"


def bounded(message: str) -> str:
    """Return an error's message with no line longer than `LONGEST_LINE`."""
    return "\n".join(shortened(line, LONGEST_LINE) for line in message.split("\n"))


def hint(typed: str, known: Iterable[str]) -> str:
    """Return the nearest of the known words, or all of them where none is near."""
    words = sorted(known)
    near = difflib.get_close_matches(typed[:LONGEST_ECHO], words, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
