"""What somebody typed, as an error repeats it: never whole where it is long, and with a hint."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_ECHO = 80
"""So much of a value is repeated; it is to be recognized, not read."""


def echoed(value: object) -> str:
    """A value in quotes, as Python writes it, cut in the middle where it is too long.

    What an error says of it should stand on one screen, also where a file's whole content, a
    certificate or a loop's output was given in place of a word.
    """
    text = repr(value)
    if len(text) <= LONGEST_ECHO:
        return text
    half = LONGEST_ECHO // 2
    return f"{text[:half]}…{text[-half // 2 :]} ({len(text)} characters)"


def hint(typed: str, known: Iterable[str]) -> str:
    """The nearest of the known words, or where none is near, all of them."""
    words = sorted(known)
    near = difflib.get_close_matches(typed[:LONGEST_ECHO], words, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
