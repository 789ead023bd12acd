"""Commands that Python code writes out, for processes that it starts; the code is not run.

A command is a list of words or a text for a shell. Values known only at run time become
`UNKNOWN`, which may be any program, such as `sys.executable`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import invocation, is_shell, python_target
from elasticjob_launcher.command_line.launchers import (
    Launcher,
    launcher_of_module,
    launcher_of_program,
)
from elasticjob_launcher.command_line.programs import launcher_of_words, program_words
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT, Unreadable
from elasticjob_launcher.command_line.wrappers import PASSING, program_at

UNKNOWN = "\0"
_MAX_DEPTH = 8
_TESTS = frozenset({"test", "[", "command", "which", "type", "hash", "grep", "pgrep"})
"""Commands whose result is a condition for the command after `&&`."""
_QUESTIONS = frozenset({"--version", "-V", "--help", "-h"})
_FIRST = ("run", "call", "check_call", "check_output", "Popen", "getoutput", "getstatusoutput")
_STARTERS: Mapping[str, int] = {
    **{f"subprocess.{name}": 0 for name in _FIRST},
    **{f"os.{name}": 0 for name in ("system", "popen")},
    **{f"os.{name}": 1 for name in ("execv", "execve", "execvp", "execvpe")},
    **{f"os.{name}": 1 for name in ("posix_spawn", "posix_spawnp")},
    **{f"os.{name}": 2 for name in ("spawnv", "spawnve", "spawnvp", "spawnvpe")},
    "asyncio.create_subprocess_shell": 0,
    "pexpect.spawn": 0,
    "pexpect.run": 0,
    "pty.spawn": 0,
}
"""Functions that start a process, with the index of the argument that is the command."""
_LISTED: Mapping[str, int] = {
    **{f"os.{name}": 1 for name in ("execl", "execle", "execlp", "execlpe")},
    **{f"os.{name}": 2 for name in ("spawnl", "spawnle", "spawnlp", "spawnlpe")},
    "asyncio.create_subprocess_exec": 0,
}
"""Functions whose arguments from this index on are the words of the command."""


_TEXT_METHODS = frozenset({"format", "strip", "replace", "encode", "lstrip"})
"""Methods of a text whose result begins with the words of the text."""


class Written(NamedTuple):
    """Command with the line where it is written; `words` of a text are split at spaces."""

    words: tuple[str, ...]
    line: int
    is_text: bool = False


class Names:
    """Commands by the values of names.

    Args:
        values: returns the values that a name such as `cmd` or `self.cmd` may have.
        returned: returns the commands that a call of the program's own function may return.
        spend: called for each expression; raises an exception if the analysis takes too long.
    """

    def __init__(
        self,
        values: Callable[[Any], Sequence[Any]],
        returned: Callable[[ast.Call, int], Iterable[Written]],
        spend: Callable[[], object],
    ) -> None:
        self._values = values
        self._returned = returned
        self._spend = spend

    def commands(self, node: Any, depth: int = 0) -> Iterator[Written]:
        """Yield the commands that an expression may be, one of which is certain."""
        self._spend()
        if depth > _MAX_DEPTH or node is None:
            return
        if isinstance(node, Written):
            yield node
        elif isinstance(node, (ast.List, ast.Tuple)):
            yield Written(tuple(self._words(node, depth)), node.lineno)
        elif isinstance(node, ast.IfExp):
            yield from self._one_of((node.body, node.orelse), depth)
        elif reference(node):
            yield from self._one_of(self._values(node), depth)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and self._is_list(node):
            yield Written(tuple(self._words(node, depth)), node.lineno)
        elif (split := _split(node)) is not None:
            text = self._text(split, depth)
            yield Written(tuple(text.split()), node.lineno)
        elif isinstance(node, ast.Call) and reference(node.func) and not _makes_text(node):
            yield from self._returned(node, depth)
        elif not isinstance(node, ast.Constant) or isinstance(node.value, str):
            text = self._text(node, depth)
            if text.strip(UNKNOWN):
                yield Written(tuple(text.split(" ")), node.lineno, True)

    def _one_of(self, values: Sequence[Any], depth: int) -> Iterator[Written]:
        for value in values:
            found = list(self.commands(value, depth + 1))
            if not found and len(values) > 1 and not _is_nothing(value):
                found.append(Written((UNKNOWN,), 0))
            yield from found

    def _is_list(self, node: Any) -> bool:
        while isinstance(node, ast.BinOp):
            self._spend()
            node = node.left if not isinstance(node.right, (ast.List, ast.Tuple)) else node.right
        if isinstance(node, (ast.List, ast.Tuple)):
            return True
        return any(isinstance(one, (ast.List, ast.Tuple)) for one in self._values(node))

    def _words(self, node: Any, depth: int) -> list[str]:
        """Return the words of a list; an unknown list is one unknown word."""
        self._spend()
        if depth > _MAX_DEPTH:
            return [UNKNOWN]
        if isinstance(node, Written):
            return list(node.words)
        if isinstance(node, (ast.List, ast.Tuple)):
            found: list[str] = []
            for each in node.elts:
                if isinstance(each, ast.Starred):
                    found += self._words(each.value, depth + 1)
                else:
                    found.append(self._text(each, depth + 1))
            return found
        if isinstance(node, ast.BinOp):
            return self._words(node.left, depth + 1) + self._words(node.right, depth + 1)
        if (split := _split(node)) is not None:
            return self._text(split, depth + 1).split()
        values = self._values(node)
        return self._words(values[0], depth + 1) if len(values) == 1 else [UNKNOWN]

    def _text(self, node: Any, depth: int) -> str:
        """Return a text with unknown parts."""
        self._spend()
        if depth > _MAX_DEPTH:
            return UNKNOWN
        if isinstance(node, Written):
            return " ".join(node.words)
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self._text(each, depth + 1) for each in node.values)
        if isinstance(node, ast.FormattedValue):
            return self._text(node.value, depth + 1)
        if isinstance(node, ast.BinOp):
            left = self._text(node.left, depth + 1)
            return (
                left + self._text(node.right, depth + 1) if isinstance(node.op, ast.Add) else left
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "join" and len(node.args) == 1:
                return " ".join(self._words(node.args[0], depth + 1))
            if node.func.attr in _TEXT_METHODS:
                return self._text(node.func.value, depth + 1)
        if isinstance(node, ast.Call) and reference(node.func) in ("str", "dedent") and node.args:
            return self._text(node.args[0], depth + 1)
        values = self._values(node)
        return self._text(values[0], depth + 1) if len(values) == 1 else UNKNOWN


def reference(node: Any) -> str:
    """Return the last part of a name such as `cmd` or `self.cmd`; empty for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""


def launcher_of_command(command: Written) -> Launcher | None:
    """Return the first launcher that a command starts, or None."""
    if not command.is_text:
        words = list(command.words)
        if len(words) == 1:
            return _in_text(words[0])
        return _of_words(words)
    return _in_text(" ".join(command.words))


def _in_text(text: str) -> Launcher | None:
    """Return the launcher that a shell's text starts without a condition."""
    try:
        commands = shell.read(text).commands
    except Unreadable:
        return _of_words(text.split())
    doubt, before, end = False, "", 0
    for command in commands:
        if command.joined not in ("&&", "||", "|", "|&"):
            doubt = False
        tested = before in _TESTS or "]]" in text[end : command.start]
        doubt = doubt or command.joined == "||" or (command.joined == "&&" and tested)
        launcher = None if command.chosen or doubt else _of_words(command.values)
        if launcher is not None:
            return launcher
        before, end = "".join(command.values[:1]), command.end
    return None


def _of_words(words: Sequence[str]) -> Launcher | None:
    while words and (ASSIGNMENT.fullmatch(words[0]) or words[0] in PASSING):
        words = words[1:]
    words = words[program_at(words) :]
    if words and is_shell(words[0]):
        line = invocation(words).line_at
        return None if line is None else _in_text(" ".join(words[line:]))
    words = program_words(words)
    arguments = words[1:]
    if not words or (len(arguments) < 4 and arguments[-1:] and arguments[-1] in _QUESTIONS):
        return None
    if UNKNOWN not in words[0]:
        return launcher_of_words(words)
    option, module, rest = python_target(arguments) or ("", "", ())
    return launcher_of_module(module, rest) if option == "-m" else None


def _is_nothing(node: Any) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _split(node: Any) -> Any:
    """Return the text that `text.split()` or `shlex.split(text)` makes a list of; None for other
    expressions."""
    if not isinstance(node, ast.Call) or reference(node.func) != "split":
        return None
    if node.args and reference(getattr(node.func, "value", None)) == "shlex":
        return node.args[0]
    return node.func.value if isinstance(node.func, ast.Attribute) and not node.args else None


def _makes_text(node: ast.Call) -> bool:
    name = reference(node.func)
    return name in _TEXT_METHODS or name in ("join", "str", "dedent")


def commands_of_call(
    name: str, call: ast.Call, commands: Callable[[Any], Iterable[Written]]
) -> Iterator[Written]:
    """Yield the commands that a call of this function may start, one of which is certain."""
    if name.startswith("sh.") and launcher_of_program(name[len("sh.") :], ("run", "launch")):
        yield Written((name[len("sh.") :], *_constants(call.args)), call.lineno)
    elif name == "runpy.run_module" and call.args:
        yield Written(("python", "-m", *_constants(call.args[:1])), call.lineno)
    elif name in _LISTED:
        words = ast.Tuple(elts=call.args[_LISTED[name] :], ctx=ast.Load())
        words.lineno = call.lineno
        yield from commands(words)
    elif name in _STARTERS:
        at = _STARTERS[name]
        given = [one.value for one in call.keywords if one.arg in ("args", "cmd", "command")]
        if len(call.args) > at:
            given.insert(0, call.args[at])
        yield from commands(given[0] if given else None)


def _constants(nodes: Sequence[Any]) -> Iterator[str]:
    for node in nodes:
        yield str(node.value) if isinstance(node, ast.Constant) else ""
