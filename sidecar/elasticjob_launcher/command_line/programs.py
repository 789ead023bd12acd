"""Program of a command: the words behind its wrappers, and the launcher that they are."""

from __future__ import annotations

from collections.abc import Sequence

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    file_name,
    is_python,
    line_after,
    python_target,
)
from elasticjob_launcher.command_line.launchers import (
    Launcher,
    launcher_of_module,
    launcher_of_program,
    launcher_of_script,
)
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Unreadable
from elasticjob_launcher.command_line.wrappers import (
    PASSING,
    line_of,
    module_wrapped,
    runs_python,
    split_string,
    wrapped_at,
)

_MAX_DEPTH = 8


def program_words(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the program that a command runs, behind wrappers and shells whose line is
    one command; empty if only the running shell knows it."""
    words = tuple(argv)
    for _ in range(_MAX_DEPTH):
        if not words:
            return ()
        line = line_after(words)
        line = line_of(words) if line is None else line
        if line is not None:
            words = _only_command(line)
        elif (inner := inner_words(words)) is not None:
            words = inner
        else:
            return words
    return ()


def inner_words(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the words of the command that a wrapper runs without a shell; None for a program."""
    if (split := split_string(words)) is not None:
        return split
    if is_python(words[0]) and (run := _module_run(words[1:])) is not None:
        return (words[0], *run)
    if (run := module_wrapped(file_name(words[0]), words[1:])) is not None:
        return ("python", *run)
    if (index := wrapped_at(words)) is not None:
        return ("python", *words[index:]) if runs_python(words, index) else words[index:]
    return None


def launcher_of_words(words: Sequence[str]) -> Launcher | None:
    """Return the launcher that a program is, as a file or as a module of Python; None if it is
    not one."""
    if not words:
        return None
    if not is_python(words[0]):
        return launcher_of_program(words[0], words[1:])
    option, value, arguments = python_target(words[1:]) or ("-c", "", ())
    if option == "-c":
        return None
    return (launcher_of_module if option else launcher_of_script)(value, arguments)


def _module_run(words: Sequence[str]) -> tuple[str, ...] | None:
    """Return the words after Python that its `-m` module runs; None if it runs none."""
    option, module, arguments = python_target(words) or ("", "", ())
    return module_wrapped(module, arguments) if option == "-m" else None


def _only_command(line: str) -> tuple[str, ...]:
    """Return the words of the only command of a shell line; empty for another line."""
    try:
        found = shell.read(line)
    except Unreadable:
        return ()
    if len(found.commands) != 1 or found.compound:
        return ()
    words = list(found.commands[0].words)
    while words and words[0].value in PASSING:
        del words[0]
    if not words or words[0].expands or ASSIGNMENT.fullmatch(words[0].value):
        return ()
    return tuple(word.value for word in words)
