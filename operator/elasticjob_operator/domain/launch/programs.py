"""Findings in the words of one program: Python's module, script or code, options, and texts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from elasticjob_launcher.command_line import shell
from elasticjob_launcher.command_line.interpreters import file_name, is_python, python_target
from elasticjob_launcher.command_line.launchers import (
    launcher_of_module,
    launcher_of_program,
    launcher_of_script,
    numbers_node,
    starts_processes,
)
from elasticjob_launcher.command_line.wrappers import module_runs_task, module_wrapped
from elasticjob_operator.domain.launch.findings import Finding, FindingKind
from elasticjob_operator.domain.launch.tools import is_tool
from elasticjob_operator.domain.launch.variables import Variables

_IN_CODE = re.compile(
    r"torch\.distributed\.(run|launch)\b|accelerate\.commands|deepspeed\.launcher"
    r"|['\"\s/](torchrun|deepspeed|horovodrun|mpirun)['\"\s]|accelerate['\", ]+launch"
)
_TEXT_WORD = re.compile(r"[^\s;&|()'\"`$<>{}]+")
_MAX_OPTIONS = 100
"""Number of words in a text among which the subcommand of a launcher is searched."""
_OFF = frozenset({"false", "no", "off", "none"})
"""Values of an option that is turned off."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place in a command.

    Args:
        known: variables whose value is known at least in part.
        inside: program that contains the place.
        followed: True if other programs than tools run after it.
        branches: False if assignments below a condition count as made.
    """

    known: Variables = field(default_factory=Variables)
    inside: str = ""
    depth: int = 0
    followed: bool = False
    branches: bool = True

    def within(self, program: str) -> Place:
        """Return the place inside of a program."""
        return replace(self, inside=self.inside or file_name(program), depth=self.depth + 1)


def in_python(words: tuple[str, ...], at: Place) -> list[Finding]:
    """Return the findings of a Python command's words after the interpreter."""
    target = python_target(words)
    if target is None:
        return []
    option, value, arguments = target
    if option == "-c":
        found = _IN_CODE.search(value)
        return [_in_code(found[0], "python -c")] if found else []
    if option == "-m":
        if launcher := launcher_of_module(value, arguments):
            return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
        if module_runs_task(value, arguments):
            return [Finding(FindingKind.SCRIPT, value, None, at.inside)]
        run = module_wrapped(value, arguments)
        if run is None:
            return in_options(value, arguments, at)
        return in_python(run, at.within(value))
    if launcher := launcher_of_script(value, arguments):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    named = in_text(value, at, arguments) if re.search(r"[$`]", value) else []
    return named or in_options(value, arguments, at)


def _in_code(named: str, program: str) -> Finding:
    """Return the finding of a launcher that the code of a Python program names."""
    return Finding(FindingKind.LAUNCHER, named.strip(" '\"/\t\n"), None, program)


def in_options(program: str, arguments: tuple[str, ...], at: Place) -> list[Finding]:
    """Return a finding for each option that makes a program without a rule start or number the
    processes of a node, those that start processes first."""
    if is_tool(program):
        return []
    found: list[Finding] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        value = value if equals else following
        if numbers_node(name) or (starts_processes(name) and value.lower() not in _OFF):
            text = f"{program} {name}"
            found.append(Finding(FindingKind.OPTION, text, None, at.inside, guessed=True))
    return sorted(found, key=lambda one: one.numbers)


def in_text(text: str, at: Place, arguments: tuple[str, ...] = ()) -> list[Finding]:
    """Return the first launcher that a text names anywhere; `arguments` stand behind the text, as
    in `python $(which accelerate) launch t.py`."""
    words = [*_TEXT_WORD.findall(text), *arguments]
    for index, word in enumerate(words[: len(words) - len(arguments)]):
        following = words[index + 1 : index + 1 + _MAX_OPTIONS]
        launcher = launcher_of_program(word, following) or launcher_of_module(word, following)
        if launcher is not None:
            return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    return []


def in_document(command: shell.Simple, text: str) -> list[Finding]:
    """Return the launcher that a line's text names, if a command of it is Python that reads its
    program from a here-document."""
    words = command.values
    given = any(
        redirection.operator in ("<<", "<<-", "<<<") for redirection in command.redirections
    )
    if not given or not words or not is_python(words[0]) or python_target(words[1:]) is not None:
        return []
    found = _IN_CODE.search(text)
    return [_in_code(found[0], "python")] if found else []
