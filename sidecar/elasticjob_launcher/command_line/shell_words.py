"""Words and operators of a shell's text: quotes, expansions and their positions.

Covers the grammar common to POSIX shells and bash. Expansions stay as written: nothing is run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_OPERATORS = (
    *("&>>", "<<<", "<<-", ";;&"),
    *("&&", "||", ";;", ";&", "|&", "<<", ">>", "&>", "<&", ">&", ">|", "<>"),
    *("&", ";", "|", "(", ")", "<", ">", "\n"),
)
_OPERATOR_LETTERS = frozenset(operator[0] for operator in _OPERATORS)
_PLAIN = frozenset(" \t\n&;|()<>")
"""Letters that end an unquoted word."""
_NAME = re.compile(r"\$(?:\{[#!]?)?([A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!_-])")
ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
"""Word `NAME=value`, as it also stands before the program of `env` and `sudo`."""


class Unreadable(Exception):
    """Text that is not a complete shell command line."""


class Word(NamedTuple):
    """Word of a command.

    `raw` is the text as written, `value` the text without quotes, in which expansions stay as
    written. `expands` is True if the shell replaces parts of it. `substitutions` are the texts of
    its command substitutions, `start` and `end` its position in the line.
    """

    raw: str
    value: str
    expands: bool
    substitutions: tuple[str, ...]
    start: int
    end: int

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variables in it; nothing for single-quoted text."""
        return tuple(_NAME.findall(_without_single_quotes(self.raw)))


def single_quoted(text: str) -> str:
    """Return the text as one single-quoted word."""
    return "'" + text.replace("'", "'\\''") + "'"


class Scanner:
    """Position in a shell's text, from which the next word or operator is read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    @property
    def is_at_end(self) -> bool:
        """True if nothing is left."""
        return self.at >= len(self.text)

    def begins(self, *texts: str) -> bool:
        """Return True if one of the texts stands here."""
        return self.text.startswith(texts, self.at)

    def skip_blanks(self) -> None:
        """Skip spaces, continued lines and a comment."""
        text = self.text
        while self.at < len(text):
            if text[self.at] in " \t\r":
                self.at += 1
            elif text.startswith("\\\n", self.at):
                self.at += 2
            elif text[self.at] == "#":  # only at the start of a word
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            else:
                return

    def operator(self) -> str:
        """Read the operator that stands here; empty if there is none."""
        if self.text[self.at : self.at + 1] not in _OPERATOR_LETTERS:
            return ""
        found = next(one for one in _OPERATORS if self.text.startswith(one, self.at))
        self.at += len(found)
        return found

    def word(self) -> Word:
        """Read the word that stands here; it may be empty. Raises `Unreadable`."""
        start, expands = self.at, False
        value: list[str] = []
        substitutions: list[str] = []
        text = self.text
        while self.at < len(text) and text[self.at] not in _PLAIN:
            letter = text[self.at]
            if letter == "\\":
                if self.at + 1 < len(text) and text[self.at + 1] != "\n":
                    value.append(text[self.at + 1])
                self.at += 2
            elif letter == "'":
                value.append(self._until("'", self.at + 1))
            elif letter == '"':
                expands |= self._double_quoted(value, substitutions)
            elif letter in "$`":
                expands |= self._expansion(value, substitutions)
            else:
                expands = expands or letter in "*?["
                value.append(letter)
                self.at += 1
        raw = text[start : self.at]
        return Word(raw, "".join(value), expands, tuple(substitutions), start, self.at)

    def _until(self, closing: str, start: int) -> str:
        end = self.text.find(closing, start)
        if end < 0:
            raise Unreadable(f"{closing} is not closed")
        self.at = end + 1
        return self.text[start:end]

    def _double_quoted(self, value: list[str], substitutions: list[str]) -> bool:
        text, expands = self.text, False
        self.at += 1
        while self.at < len(text):
            letter = text[self.at]
            if letter == '"':
                self.at += 1
                return expands
            if letter == "\\" and text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                value.append(text[self.at + 1].replace("\n", ""))
                self.at += 2
            elif letter in "$`":
                expands |= self._expansion(value, substitutions)
            else:
                value.append(letter)
                self.at += 1
        raise Unreadable('" is not closed')

    def _expansion(self, value: list[str], substitutions: list[str]) -> bool:
        text, start = self.text, self.at
        following = text[start + 1 : start + 2]
        if text[start] == "`":
            substitutions.append(self._until("`", start + 1))
        elif following == "(":
            self.at = _closing(text, start + 1)
            inner = text[start + 2 : self.at - 1]
            if not inner.startswith("("):
                substitutions.append(inner)
        elif following == "{":
            self.at = _closing(text, start + 1)
        elif following == "'":
            value.append(self._until("'", start + 2))
            return False
        elif following and (following.isalnum() or following in "_@*#?$!-"):
            self.at += 2
            if following.isalpha() or following == "_":
                while self.at < len(text) and (text[self.at].isalnum() or text[self.at] == "_"):
                    self.at += 1
        else:
            value.append("$")
            self.at += 1
            return False
        value.append(text[start : self.at])
        return True


def _without_single_quotes(raw: str) -> str:
    """Return the word without its single-quoted parts, in which the shell expands nothing."""
    kept: list[str] = []
    index, double = 0, False
    while index < len(raw):
        letter = raw[index]
        if letter == "\\":
            index += 2
            continue
        if letter == "'" and not double:
            closing = raw.find("'", index + 1)
            index = len(raw) if closing < 0 else closing + 1
            continue
        if letter == '"':
            double = not double
        kept.append(letter)
        index += 1
    return "".join(kept)


def _closing(text: str, opening: int) -> int:
    """Return the position after the bracket that closes the one at `opening`."""
    pairs, stack = {"(": ")", "{": "}"}, [text[opening]]
    index = opening + 1
    quoted = ""
    while index < len(text):
        letter = text[index]
        if letter == "\\" and quoted != "'":
            index += 1
        elif quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter in pairs and (letter == "(" or stack[-1] == "{" or text[index - 1] == "$"):
            stack.append(letter)
        elif letter == pairs[stack[-1]]:
            stack.pop()
            if not stack:
                return index + 1
        index += 1
    raise Unreadable(f"{text[opening]} is not closed")
