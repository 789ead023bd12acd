"""User input and foreign text in messages: printable, shortened where long, with hints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

LONGEST_ECHO = 200
"""Maximum length of a repeated value, which is to be recognized, not read."""
LONGEST_LINE = 1000
"""Maximum length of a line of an error, of any origin."""


_UNSAFE = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f"  # C0, DEL, C1: cursor movement, escape sequences
    "\\u2028\\u2029"  # line and paragraph separators
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u206f"  # bidi marks, overrides, isolates
    "\\xad\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u200b-\\u200d\\u2060-\\u2065"
    "\\u3164\\ufeff\\uffa0\\ufff0-\\ufffb\\U0001bca0-\\U0001bca3\\U0001d173-\\U0001d17a"
    "\\U000e0000-\\U000e0fff"  # without width: two names look the same
    "\\ud800-\\udfff]"  # lone surrogates, which no terminal's encoding has
)
_UNSAFE_IN_LINE = re.compile(f"(?!\\t){_UNSAFE.pattern}")
_UNSAFE_IN_LINES = re.compile(f"(?![\\n\\t]){_UNSAFE.pattern}")
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def printable(text: str) -> str:
    """Return a text of lines with visible escapes in place of all characters that are not text.

    Newlines and tabs stay. Characters that move the cursor, start an escape sequence, reorder or
    hide text or separate lines become `\\x1b`, `\\u202e`: foreign text is then only text, on a
    terminal and in a log.
    """
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE_IN_LINES.sub(_visible, text)


def one_line(text: str) -> str:
    """Return the text as one line: as `printable`, with newlines escaped too."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE_IN_LINE.sub(_visible, text)


def one_cell(text: str) -> str:
    """Return the text as a cell of a table: as `one_line`, with tabs escaped too."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSAFE.sub(_visible, text)


def _visible(found: re.Match[str]) -> str:
    character = found[0]
    code = ord(character)
    if character in _NAMED:
        return _NAMED[character]
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


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


def clipped(text: str, most: int, keeps_end: bool = False) -> str:
    """Return the text cut to `most` bytes of UTF-8, of which an ellipsis takes three.

    Args:
        text: the text.
        most: maximum number of bytes, at least 3.
        keeps_end: True to keep the end of the text instead of its beginning.
    """
    if len(text) <= most and (text.isascii() or len(text.encode(errors="replace")) <= most):
        return text
    room = most - len("…".encode())
    if keeps_end:
        kept = text[-most:].encode(errors="replace")
        return "…" + kept[max(len(kept) - room, 0) :].decode(errors="ignore")
    return text[:most].encode(errors="replace")[:room].decode(errors="ignore") + "…"


def first_line(text: str, most: int) -> str:
    """Return the first line, with the next one if it only announces that; shortened if too long."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


def bounded(message: str) -> str:
    """Return an error's message with no line longer than `LONGEST_LINE`."""
    return "\n".join(shortened(line, LONGEST_LINE) for line in message.split("\n"))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 node`, `2 nodes`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def hint(typed: str, known: Iterable[str]) -> str:
    """Return the nearest of the known words, or all of them where none is near."""
    words = sorted(known)
    near = difflib.get_close_matches(typed[:LONGEST_ECHO], words, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(words)}"
