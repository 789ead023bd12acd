"""Programs of a line that train nothing and start no launcher, and the program that remains."""

from __future__ import annotations

from collections.abc import Sequence

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import (
    file_name,
    is_python,
    is_shell,
    line_after,
)
from elasticjob_launcher.command_line.shell_words import Unreadable
from elasticjob_launcher.command_line.wrappers import (
    PASSING,
    may_be_task,
    runs_python,
    split_string,
    wrapped_at,
)

TEXT_TOOLS = frozenset(
    {"echo", "printf", "grep", "egrep", "rg", "sed", "awk", "cat", "which", "type", "command"}
    | {"pip", "pip3", "apt", "apt-get", "ls", "cp", "mv", "rm", "mkdir", "touch", "chmod", "chown"}
    | {"export", "alias", "unset", "test", "[", ":", "true", "false", "cd", "git", "wget", "curl"}
    | {"ln", "pgrep", "pkill", "killall", "man", "hash", "set", "kill", "ps", "head", "tail"}
)
"""Programs that take names of programs as plain text."""
_IDLE = frozenset(
    {"exit", "wait", "return", "read", "tee", "sleep", "date", "sort", "uniq", "wc", "cut", "tr"}
)
"""Other programs and builtins that run no program."""
_MAX_DEPTH = 8


def is_tool(program: str) -> bool:
    """Return True if a program runs no other program."""
    return file_name(program) in TEXT_TOOLS | _IDLE


def runs_nothing(command: shell.Simple) -> bool:
    """Return True if a command runs no program but tools."""
    return not command.words or command.words[0].value in TEXT_TOOLS | _IDLE


def program_file(words: Sequence[str]) -> str:
    """Return the program that a command runs, behind its wrappers and a shell that runs nothing
    else; empty if it is Python, or known only when it runs."""
    left, expands = list(words), False
    for _ in range(_MAX_DEPTH):
        while left and left[0] in PASSING:
            del left[0]
        if not left or is_python(left[0]) or split_string(left) or expands:
            return ""
        if is_shell(left[0]):
            try:
                line = shell.read(line_after(left) or "")
            except Unreadable:
                return ""
            if len(line.commands) != 1 or line.compound or not line.commands[0].words:
                return ""
            expands = line.commands[0].words[0].expands
            left = line.commands[0].values
        elif (index := wrapped_at(left)) is not None:
            if runs_python(left, index) or may_be_task(left, index):
                return ""
            del left[:index]
        else:
            known = left[0].startswith("-") or left[0] in TEXT_TOOLS or "$" in left[0]
            return "" if known or left[0].endswith(".py") else left[0]
    return ""
