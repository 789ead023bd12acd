"""Command lines of Python and of shells: the program that the interpreter is given."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?d?")
PYTHON_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of Python whose value is the next word."""
MODULE = re.compile(r"-(?:([^-cmWX][^cmWX]*)?m|-module$)(.*)", re.DOTALL)
CODE = re.compile(r"-([^-cmWX][^cmWX]*)?c(.*)", re.DOTALL)
"""Options `-m` and `-c`, alone or after other letters, with a value in the same word."""
SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "rbash"})
"""Shells whose lines `shell.read` understands."""
FOREIGN_SHELLS = frozenset(
    {"csh", "tcsh", "fish", "xonsh", "nu", "pwsh", "rc", "elvish"}
    | {"perl", "ruby", "node", "tclsh", "expect"}
)
"""Shells and script interpreters with a grammar of their own."""
_SHELL_VALUED = frozenset({"--rcfile", "--init-file"})
_FOREIGN_LINE = re.compile(r"-\w*[ce]|-Command")


def file_name(program: str) -> str:
    """Return the last part of a program's path."""
    return program.rpartition("/")[2]


def is_python(program: str) -> bool:
    """Return True if a program is a Python interpreter by its name."""
    return _PYTHON.fullmatch(file_name(program)) is not None


def is_shell(program: str) -> bool:
    """Return True if a program is a shell of the common grammar by its name."""
    return file_name(program) in SHELLS


def python_target(words: Sequence[str]) -> tuple[str, str, tuple[str, ...]] | None:
    """Return module, script or code, and the arguments of a Python command's words after the
    interpreter; the first is `-m`, `-c` or empty for a script. None if there is no program."""
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "-":
            return None
        if not word.startswith("-"):
            return "", word, tuple(left)
        for option, pattern in (("-m", MODULE), ("-c", CODE)):
            named = pattern.fullmatch(word)
            if named is not None:
                value = named[2] or (left.pop(0) if left else "")
                return option, value, tuple(left)
        if word in PYTHON_VALUED and left:
            left.pop(0)
    return None


class Invocation(NamedTuple):
    """Command line of a shell.

    `line_at` is the index of the text after `-c` among the words; None for a script or standard
    input. `script` is the script file; empty for standard input.
    """

    line_at: int | None
    script: str = ""


def invocation(words: Sequence[str]) -> Invocation:
    """Return the parts of a shell's command line; `words` begin with the shell."""
    at, has_line, reads_input = 1, False, False
    while at < len(words):
        word = words[at]
        if word in ("--", "-"):
            at += 1
            break
        if word.startswith("--"):
            at += 2 if word in _SHELL_VALUED else 1
        elif word[:1] in "-+" and len(word) > 1:
            has_line |= word[0] == "-" and "c" in word
            reads_input |= word[0] == "-" and "s" in word
            at += 1 + word.count("o") + word.count("O")
        else:
            break
    if at >= len(words):
        return Invocation(None)
    if has_line:
        return Invocation(at)
    return Invocation(None, "" if reads_input else words[at])


def line_after(words: Sequence[str]) -> str | None:
    """Return the line that a shell command runs; None for a script, standard input or a program
    that is not a shell."""
    if not words or not is_shell(words[0]):
        return None
    at = invocation(words).line_at
    return None if at is None else words[at]


def foreign_line(words: Sequence[str]) -> str:
    """Return the text after `-c`, `-e` or `-Command` of a foreign shell; empty if there is none."""
    for option, text in zip(words[1:], words[2:]):
        if not option.startswith("-"):
            break
        if _FOREIGN_LINE.fullmatch(option):
            return text
    return ""
