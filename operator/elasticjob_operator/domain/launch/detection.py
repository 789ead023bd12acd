"""Detection of launchers in a command, by the position of commands in it.

Arguments of a program, comments and here-documents name no launcher. A script file, or a program
whose name the shell computes, may be one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from elasticjob_launcher.launchers import (
    Launcher,
    is_launcher_word,
    launcher_of_module,
    launcher_of_program,
)
from elasticjob_operator.domain.launch import shell
from elasticjob_operator.domain.launch.wrappers import (
    ASSIGNMENT,
    is_entrypoint,
    is_script,
    line_of,
    module_wrapped,
    runs_python,
    split_string,
    wrapped_at,
)

PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)*)?t?d?")
PYTHON_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_MODULE = re.compile(r"-(?:([^-cmWX][^cmWX]*)?m|-module$)(.*)", re.DOTALL)
_CODE = re.compile(r"-([^-cmWX][^cmWX]*)?c(.*)", re.DOTALL)
_IN_CODE = re.compile(
    r"torch\.distributed\.(run|launch)\b|accelerate\.commands|deepspeed\.launcher"
    r"|['\"\s/](torchrun|deepspeed|horovodrun|mpirun)['\"\s]|accelerate['\", ]+launch"
)
_IN_TEXT = re.compile(
    r"(?:^|[\s;&|()'\"`/])(torchrun|deepspeed|mpirun|horovodrun|accelerate(?:\s+|-)launch)"
    r"(?=$|[\s;&|()'\"`])|\b(torch\.distributed\.(?:run|launch))\b"
)
_TEXT_TOOLS = frozenset(
    {"echo", "printf", "grep", "egrep", "rg", "sed", "awk", "cat", "which", "type", "command"}
    | {"pip", "pip3", "apt", "apt-get", "ls", "cp", "mv", "rm", "mkdir", "touch", "chmod", "chown"}
    | {"export", "alias", "unset", "test", "[", ":", "true", "false", "cd", "git", "wget", "curl"}
    | {
        "find",
        "ln",
        "pgrep",
        "pkill",
        "killall",
        "man",
        "hash",
        "set",
        "kill",
        "ps",
        "head",
        "tail",
    }
)
"""Programs that take names of programs as plain text."""
_SCRIPT_RUNNERS = frozenset({"make", "gmake", "just"})
"""Programs that run commands of a file."""
_EVALUATING = frozenset({"eval", "trap"})
_PASSING = frozenset({"exec", "command", "builtin"})
_DECLARING = frozenset({"export", "declare", "readonly", "typeset", "local"})
_SOURCING = frozenset({"source", "."})
_MAX_DEPTH = 8


class FindingKind(StrEnum):
    """Reason for which a command has or may have a launcher."""

    LAUNCHER = "Launcher"
    SCRIPT = "Script"
    COMPUTED = "Computed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Launcher, or a part of the command that may be one.

    Args:
        name: the launcher, the script file or the text of the part.
        inside: program that contains it; empty if it is the command itself.
    """

    kind: FindingKind
    name: str
    launcher: Launcher | None = None
    inside: str = ""


@dataclass(frozen=True, slots=True)
class _Context:
    """Place in a command: variables whose value is known, and the enclosing program."""

    values: Mapping[str, str] = field(default_factory=dict)
    inside: str = ""
    depth: int = 0

    def within(self, program: str) -> _Context:
        return _Context(self.values, self.inside or _name(program), self.depth + 1)


def find(words: Sequence[str], values: Mapping[str, str] | None = None) -> Finding | None:
    """Return the first launcher in a command, otherwise the first part that may be one, or None.

    Args:
        values: variables of the container with a known value.
    """
    found = list(_find(tuple(words), _Context(values or {})))
    certain = [one for one in found if one.kind is FindingKind.LAUNCHER]
    return next(iter((*certain, *found)), None)


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
        for option, pattern in (("-m", _MODULE), ("-c", _CODE)):
            if named := pattern.fullmatch(word):
                value = named[2] or (left.pop(0) if left else "")
                return option, value, tuple(left)
        if word in PYTHON_VALUED and left:
            left.pop(0)
    return None


def is_python(program: str) -> bool:
    """Return True if a program is a Python interpreter by its name."""
    return PYTHON.fullmatch(_name(program)) is not None


def _find(words: tuple[str, ...], at: _Context) -> list[Finding]:
    if not words or at.depth > _MAX_DEPTH:
        return []
    program, name = words[0], _name(words[0])
    if computed := _computed(words, at):
        return computed
    if launcher := launcher_of_program(program, words[1:]):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    if is_python(program):
        return _in_python(words[1:], at)
    if name in shell.SHELLS:
        return _in_shell(words, at)
    if split := split_string(words):
        return _find(split, at.within(program))
    if (line := line_of(words)) is not None:
        return _in_line(line, (), at.within(program))
    if (run := module_wrapped(name, words[1:])) is not None:
        return _in_python(run, at.within(program))
    index = wrapped_at(words)
    if index is not None:
        if runs_python(words, index):
            return _in_python(words[index:], at.within(program))
        return _find(words[index:], at.within(program))
    if is_script(program) or is_entrypoint(program) or name in _SCRIPT_RUNNERS:
        return [Finding(FindingKind.SCRIPT, program, None, at.inside)]
    return _in_arguments(words, at)


def _computed(words: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return a finding for a program whose name the kubelet computes from an unknown variable."""
    if not re.search(r"\$\(", words[0]):
        return []
    if PYTHON.fullmatch(_name(words[0])):
        return []
    if launcher_of_program(words[0], words[1:]):
        return []
    if words[0].rpartition("/")[2] and "$(" not in _name(words[0]):
        return []
    return [Finding(FindingKind.COMPUTED, words[0], None, at.inside)]


def _in_python(words: tuple[str, ...], at: _Context) -> list[Finding]:
    target = python_target(words)
    if target is None:
        return []
    option, value, arguments = target
    if option == "-c":
        found = _IN_CODE.search(value)
        return [Finding(FindingKind.LAUNCHER, found[0].strip(), None, "python -c")] if found else []
    if option == "-m":
        if launcher := launcher_of_module(value, arguments):
            return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
        run = module_wrapped(value, arguments)
        return [] if run is None else _in_python(run, at.within(value))
    if launcher := launcher_of_program(value, arguments):
        return [Finding(FindingKind.LAUNCHER, launcher.name, launcher, at.inside)]
    if found := re.search(r"[$`]", value) and _IN_TEXT.search(value):
        return [_named(found[1] or found[2], at)]
    return []


def _in_shell(words: tuple[str, ...], at: _Context) -> list[Finding]:
    call = shell.invocation(words)
    if call.line_at is None:
        return [Finding(FindingKind.SCRIPT, call.script, None, at.inside)] if call.script else []
    return _in_line(words[call.line_at], words[call.line_at + 1 :], at.within(words[0]))


def _in_line(text: str, positional: tuple[str, ...], at: _Context) -> list[Finding]:
    if at.depth > _MAX_DEPTH:
        return []
    try:
        line = shell.read(text)
    except shell.Unreadable:
        found = _IN_TEXT.search(text)
        name = (found[1] or found[2]) if found else ""
        return [_named(name, at)] if name else []
    values = dict(at.values)
    values.update({str(number): word for number, word in enumerate(positional)})
    findings: list[Finding] = []
    for command in line.commands:
        for word in _assigned(command):
            name, _, value = word.value.partition("=")
            if not word.expands:
                values[name.rstrip("+")] = value
            else:
                values.pop(name.rstrip("+"), None)
        inner = _Context(values, at.inside, at.depth + 1)
        findings += _in_simple(command, positional, inner)
        for word in command.parts:
            for text in word.substitutions:
                findings += [
                    one
                    for one in _in_line(text, positional, inner)
                    if one.kind is FindingKind.LAUNCHER
                ]
    return findings


def _assigned(command: shell.Simple) -> list[shell.Word]:
    """Return the assignments that a command makes in its shell."""
    if command.words and command.words[0].value in _DECLARING:
        return [word for word in command.words[1:] if ASSIGNMENT.fullmatch(word.value)]
    return [] if command.words else command.assignments


def _in_simple(command: shell.Simple, positional: tuple[str, ...], at: _Context) -> list[Finding]:
    words = [word.value for word in command.words]
    raw = list(command.words)
    while words and words[0] in _PASSING:
        if words[0] == "command" and len(words) > 1 and words[1] in ("-v", "-V"):
            return []
        del words[0], raw[0]
        while words and words[0].startswith("-"):  # exec -a NAME, command -p
            count = 2 if words[0] == "-a" else 1
            del words[:count], raw[:count]
    if not words:
        return []
    if words[0] in _EVALUATING:
        return _in_line(" ".join(words[1:]), positional, at.within(words[0]))
    if words[0] == "alias":
        values = [word.partition("=")[2] for word in words[1:]]
        return [one for value in values for one in _in_line(value, (), at.within("alias"))]
    if words[0] in _SOURCING:
        return []
    if raw[0].expands:
        return _in_expanded(words, raw, positional, at)
    return _find(tuple(words), at)


def _in_expanded(
    words: list[str], raw: list[shell.Word], positional: tuple[str, ...], at: _Context
) -> list[Finding]:
    """Return the findings of a command whose program the shell computes."""
    if raw[0].raw.strip('"') in ("$@", "$*", "${@}", "${*}"):
        return _find(tuple(positional[1:]), at) if positional[1:] else []
    known = resolved(words[0], at.values)
    if known is not None:
        head = known.split() if '"' not in raw[0].raw else [known]
        return _find((*head, *words[1:]), at)
    if found := _IN_TEXT.search(words[0]):
        return [_named(found[1] or found[2], at)]
    ending = _name(words[0])
    if "$" not in ending and "`" not in ending and "*" not in ending:
        return _find((ending, *words[1:]), at)  # ${VENV}/bin/python
    return [Finding(FindingKind.COMPUTED, raw[0].raw, None, at.inside)]


_REFERENCE = re.compile(
    r"\$(?:([A-Za-z_][A-Za-z0-9_]*|[0-9])|\{([A-Za-z_][A-Za-z0-9_]*)(?::?[-=]([^{}$`]*))?\})"
)


def resolved(text: str, values: Mapping[str, str]) -> str | None:
    """Return a word with its variables replaced by known values or defaults; None if one of them
    is unknown."""
    unknown = False

    def value(match: re.Match[str]) -> str:
        nonlocal unknown
        known = values.get(match[1] or match[2])
        if known is None and match[3] is not None:
            return match[3].strip("'\"")
        unknown |= known is None
        return known or ""

    found = _REFERENCE.sub(value, text)
    return None if unknown or "$" in found or "`" in found else found


def _in_arguments(words: tuple[str, ...], at: _Context) -> list[Finding]:
    """Return the launcher that an unknown program runs, judging from its arguments: words after
    `--`, or a launcher with arguments of its own that is no value of an option."""
    if _name(words[0]) in _TEXT_TOOLS or ASSIGNMENT.fullmatch(words[0]):
        return []
    if "--" in words:
        rest = words[words.index("--") + 1 :]
        if rest and (is_python(rest[0]) or _name(rest[0]) in shell.SHELLS or wrapped_at(rest)):
            return _find(rest, at.within(words[0]))
    for index in range(1, len(words) - 1):
        before, word = words[index - 1], words[index]
        is_value = before.startswith("-") and before != "--" and index > 1
        if not is_value and (
            is_launcher_word(word) or launcher_of_program(word, words[index + 1 :])
        ):
            launcher = launcher_of_program(word, words[index + 1 :]) or launcher_of_module(
                word, words[index + 1 :]
            )
            name = launcher.name if launcher else word
            return [Finding(FindingKind.LAUNCHER, name, launcher, at.inside or _name(words[0]))]
        if is_python(word) and not is_value:
            return _in_python(words[index + 1 :], at.within(words[0]))
    return []


def _named(name: str, at: _Context) -> Finding:
    launcher = launcher_of_program(*_program(name)) or launcher_of_module(name, ())
    shown = launcher.name if launcher else name
    return Finding(FindingKind.LAUNCHER, shown, launcher, at.inside)


def _program(name: str) -> tuple[str, tuple[str, ...]]:
    program, *arguments = name.split() or [""]
    return program, tuple(arguments)


def _name(program: str) -> str:
    return program.rpartition("/")[2]
