"""Commands among the arguments of a program that no rule knows.

`my-wrapper torchrun t.py` and `retry 3 "torchrun t.py"` run a command, `train --launcher torchrun`
does not. The words behind an argument distinguish them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import is_python, is_shell, line_after
from elasticjob_launcher.command_line.launchers import (
    is_launcher_word,
    launcher_of_module,
    launcher_of_program,
)
from elasticjob_launcher.command_line.shell_words import Unreadable
from elasticjob_launcher.command_line.wrappers import is_script, wrapped_at

_EXECUTING = frozenset({"--", "-exec", "-execdir", "-ok", "-okdir", "--exec", "-e"})
"""Words after which a program's arguments are a command."""
_NAMING = re.compile(
    r"--?[\w.-]*(launcher|backend|engine|runner|mode|method|type|strategy|accelerator|plugin|name"
    r"|env|tag|key|note|title|label|comment|message|prompt|desc\w*)s?"
)
"""Options whose value names a launcher and runs none."""
_LAUNCHER_ARGUMENT = re.compile(r"--(n?nproc|nnodes|standalone|rdzv)[-_\w]*(=.*)?|.*\.py")
"""Argument of a launcher, unlike one of another program."""
MAX_ARGUMENTS = 5000
"""Number of arguments of an unknown program among which a command is searched; each of them may
begin one, which has all words behind it."""
_CONFIG_FILE = re.compile(r".*\.ya?ml")


class InnerCommand(NamedTuple):
    """Command that arguments may be.

    `is_last` is True if it is the only one that counts; otherwise it counts if it has a launcher.
    """

    words: tuple[str, ...]
    is_last: bool


def inner_commands(words: tuple[str, ...]) -> Iterator[InnerCommand]:
    """Yield the commands that the arguments of a program may be: a launcher, a Python program, a
    shell or a script that is not the value of an option, or a text that begins with one."""
    words = words[:MAX_ARGUMENTS]
    for index in range(1, len(words)):
        before, rest = words[index - 1], words[index:]
        is_value = index > 1 and before.startswith("-") and before not in _EXECUTING
        option = before if is_value else ""
        if launched := _launched(rest, option):
            yield InnerCommand(launched, True)
            return
        if " " in rest[0].strip():
            yield from (InnerCommand(inner, False) for inner in _written(rest[0], option))
            continue
        if line_after(rest) is not None or (not is_value and is_python(rest[0])):
            yield InnerCommand(rest, True)
            return
        runs = is_shell(rest[0]) or is_script(rest[0]) or wrapped_at(rest) is not None
        if not is_value and runs and (len(rest) > 1 or is_script(rest[0])):
            yield InnerCommand(rest, True)
            return


def _launched(words: tuple[str, ...], option: str) -> tuple[str, ...]:
    """Return the command of a launcher if words, of which the first may be the value of an option,
    begin with one and its arguments."""
    launcher, command = launcher_of_program(words[0], words[1:]), words
    if launcher is None and words[0] and is_launcher_word(words[0]):
        launcher, command = launcher_of_module(words[0], words[1:]), ("python", "-m", *words)
    if launcher is None or len(words) < 2:
        return ()
    names = option and (_NAMING.fullmatch(option) or not _begins(_own_arguments(words)))
    return () if names else command


def _own_arguments(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a launcher behind its subcommand."""
    alone = launcher_of_program(words[0], ()) or launcher_of_module(words[0], ())
    return words[1:] if alone else words[2:]


def _begins(arguments: tuple[str, ...]) -> bool:
    """Return True if arguments begin as those of a launcher, unlike those of another program."""
    if arguments[:1] == ("-m",):
        return "." in "".join(arguments[1:2])
    return any(map(_LAUNCHER_ARGUMENT.fullmatch, arguments[:1]))


def _written(text: str, option: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a launcher or of Python in a text, which may be a shell line and the
    value of an option."""
    if _NAMING.fullmatch(option):
        return
    try:
        line = shell.read(text)
    except Unreadable:
        return
    for command in line.commands:
        words = tuple(command.values)
        while words and (index := wrapped_at(words)) is not None:
            words = words[index:]
        if not words:
            continue
        if launcher_of_program(words[0], words[1:]):
            if not option or _is_written_out(_own_arguments(words)):
                yield words
        elif is_python(words[0]):
            yield words


def _is_written_out(arguments: tuple[str, ...]) -> bool:
    """Return True if a text's words after a launcher are its arguments, and not a sentence."""
    if _begins(arguments) or any(map(_CONFIG_FILE.fullmatch, arguments[:1])):
        return True
    options = "".join(arguments[:1]).startswith("-")
    return options and any(map(_LAUNCHER_ARGUMENT.fullmatch, arguments))
