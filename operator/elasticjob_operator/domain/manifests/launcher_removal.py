"""Removal of a launcher at the beginning of a command: the job starts the workers in its place.

`torchrun --nnodes=2 train.py` becomes `python3 -u train.py`. A launcher with options that would be
lost, or that starts another launcher, stays.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticjob_launcher.command_line.interpreters import (
    CODE,
    MODULE,
    PYTHON_VALUED,
    file_name,
    is_python,
)
from elasticjob_launcher.command_line.launchers import launcher_of_module, launcher_of_program
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT
from elasticjob_operator.domain.launch.detection import find
from elasticjob_operator.domain.launch.findings import Finding, FindingKind
from elasticjob_operator.domain.launch.variables import expanded
from elasticjob_operator.domain.manifests.torchrun import (
    LAUNCHERS,
    Launcher,
    LosesOption,
    Unwrapped,
    unwrap,
)

DEFAULT_PYTHON = "python3"
_CLEARING = frozenset({"-", "-i", "--ignore-environment"})
"""Options of env that would take the worker's variables from a script without its launcher."""
_ENV_VALUED = frozenset({"-u", "--unset", "-C", "--chdir"})


@dataclass(frozen=True, slots=True)
class Removed:
    """Command without its launcher.

    Args:
        python: interpreter of the command.
        words: command of each worker.
        unwrapped: the launcher's own words, as far as they matter to the job.
    """

    python: str
    words: tuple[str, ...]
    launcher: Launcher
    unwrapped: Unwrapped


@dataclass(frozen=True, slots=True)
class _ParsedCommand:
    """Parsed command.

    Args:
        before: `env` and its words.
        python: the interpreter and its options, if the program is Python.
        module: the module that `-m` names.
        rest: the script and its arguments, the module's arguments, or the program and its own.
    """

    before: tuple[str, ...]
    python: tuple[str, ...]
    module: str
    rest: tuple[str, ...]


def without_launcher(
    words: tuple[str, ...], workers: int | str | None, values: Mapping[str, str], guesses: bool
) -> Removed | None:
    """Return the command without the launcher that it begins with; None if there is none.

    Args:
        workers: spec.nprocPerNode; None if it is absent.
        values: variables of the container with a known value.
        guesses: False ignores launchers that only the arguments of unknown programs show.

    Raises:
        LosesOption: the launcher has to stay.
        CannotUnwrap: the command is wrong, or contradicts the job.
    """
    read = _parse(words)
    launcher, rest = _launcher(read)
    if launcher is None or not _CLEARING.isdisjoint(read.before):
        return None
    taken = unwrap(launcher, rest, workers)
    script = expanded(taken.words[0], values)
    if re.match(r"\$\(|-(?!m$)", script):
        raise LosesOption(
            f"{taken.words[0]} may be options of {launcher.name}, which only the container knows"
        )
    python = read.python or (_python_beside(read.rest[0]),)
    started = (*_env_prefix(read, taken.env), *_program(python, taken))
    inner = find(tuple(expanded(word, values) for word in started), values, guesses, _is_option)
    if inner is not None:
        raise LosesOption(
            f"{launcher.name} starts {inner.name}, which may start workers itself: start only one "
            "of them"
        )
    return Removed(python[0], started, launcher, taken)


def _is_option(found: Finding) -> bool:
    return found.kind is FindingKind.OPTION


def interpreter(words: Sequence[str]) -> str:
    """Return the Python that a command names, otherwise the default one."""
    return "".join(_parse(words).python[:1]) or DEFAULT_PYTHON


def _parse(words: Sequence[str]) -> _ParsedCommand:
    before, rest = _without_env(words)
    if not rest or not is_python(rest[0]) or file_name(rest[0]).startswith("pypy"):
        return _ParsedCommand(before, (), "", rest)
    python, left = [rest[0]], list(rest[1:])
    while left and left[0].startswith("-") and not _reads_code(left[0]):
        word = left.pop(0)
        if named := MODULE.fullmatch(word):
            python += [f"-{named[1]}"] if named[1] else []
            module = named[2] or (left.pop(0) if left else "")
            return _ParsedCommand(before, tuple(python), module, tuple(left))
        python.append(word)
        if word in PYTHON_VALUED and left:
            python.append(left.pop(0))
    return _ParsedCommand(before, tuple(python), "", tuple(left))


def _reads_code(word: str) -> bool:
    return word == "-" or CODE.fullmatch(word) is not None


def _without_env(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `env A=B program …` into two parts; treat an unknown form of `env` as a program."""
    if not words or file_name(words[0]) != "env":
        return (), tuple(words)
    at = 1
    while at < len(words):
        if words[at] in _ENV_VALUED:
            at += 2
        elif words[at] in _CLEARING | {"--"} or ASSIGNMENT.fullmatch(words[at]):
            at += 1
        else:
            break
    if at >= len(words) or words[at].startswith("-"):
        return (), tuple(words)
    return tuple(words[:at]), tuple(words[at:])


def _launcher(read: _ParsedCommand) -> tuple[Launcher | None, tuple[str, ...]]:
    """Return the launcher that the command begins with and that can be removed, and its arguments;
    None if there is none."""
    if read.module:
        known = launcher_of_module(read.module, read.rest)
        rest = read.rest
    elif read.rest:
        known = launcher_of_program(read.rest[0], read.rest[1:])
        rest = read.rest[1:]
    else:
        return None, ()
    launcher = LAUNCHERS.get(known.name) if known else None
    if launcher is not None and _has_subcommand(read):
        rest = rest[1:]
    return launcher, rest


def _has_subcommand(read: _ParsedCommand) -> bool:
    name = read.module.rpartition(".")[2] or file_name(read.rest[0])
    return name in ("accelerate", "accelerate_cli")


def _env_prefix(read: _ParsedCommand, env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the `env` prefix, extended by the variables a launcher would have set."""
    added = tuple(f"{name}={value}" for name, value in env.items())
    return (*(read.before or ("env",)), *added) if added else read.before


def _program(python: Sequence[str], taken: Unwrapped) -> tuple[str, ...]:
    if not taken.python:
        return taken.words
    unbuffered = () if "-u" in python else ("-u",)
    return (*python, *unbuffered, *taken.words)


def _python_beside(program: str) -> str:
    """Return the interpreter for a console script: the one in the same folder if that is the
    `bin` of a virtual environment."""
    folder, slash, _ = program.rpartition("/")
    own = slash and folder.endswith("/bin") and not folder.startswith(("/usr/", "/bin"))
    return f"{folder}/python" if own and "/.local/" not in program else DEFAULT_PYTHON
