"""Parser for a worker's command line that a forked interpreter can replace.

Pure except for the read of a console script's first lines.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elasticjob_launcher.command_line.interpreters import is_shell
from elasticjob_launcher.command_line.launchers import launcher_of_module, launcher_of_program
from elasticjob_launcher.command_line.shell_words import ASSIGNMENT

_INTERPRETER = re.compile(r"python(\d+(\.\d+)?)?t?d?")
# Python options with an argument, attached or as the next word.
_WITH_VALUE = "WX"
_PLAIN = "bBdEIOPqRsSuv"
_FIRST_LINES_BYTES = 4096
_REPORTS_IMPORTS = ("-v", "-Ximporttime")
_REPORTING_VARIABLES = {"PYTHONVERBOSE": ("", "0"), "PYTHONPROFILEIMPORTTIME": ("",)}
"""Variables, each with the values with which Python reports no import."""
VERSION_SHIM = re.compile(
    rb"""
    \#![ \t]*(/usr/bin/env[ ]|/[\w./-]*/)(ba|da|z|k)?sh[ \t]*\n
    ([ \t]*(
        \#[^\n]*\n  # one way to match each line: the time must not grow with each of them
        | (
            set[ ]-e | \[[ ]-n[ ]"\$PYENV_DEBUG"[ ]\][ ]&&[ ]set[ ]-x
            | program="\$\{0\#\#\*/\}" | export[ ]PYENV_ROOT="[^"`$\n]*"
            | SHIM_PATH=\$\{0%/\*\} | if[ ]\[\[[ ]\$SHIM_PATH[ ]!=[ ]"[^"`$\n]*"[ ]\]\];[ ]then
            | export[ ]_PYENV_SHIM_PATH="\$SHIM_PATH"
            # Earlier shims of pyenv name the script's file.
            | if[ ]\[\[[ ]"\$program"[ ]=[ ]"python"\*[ ]\]\];[ ]then | for[ ]arg;[ ]do
            | case[ ]"\$arg"[ ]in | -c\*[ ]\|[ ]--[ ]\)[ ]break[ ];; | \*/\*[ ]\)
            | if[ ]\[[ ]-f[ ]"\$arg"[ ]\];[ ]then | export[ ]PYENV_FILE_ARG="\$arg"
            | export[ ]PYENV_DIR="\$\{arg%/\*\}" | break | ;; | esac | done | fi
        )[ \t]*\n
        | \n
    ))*
    exec[ ]("([^"`$\n]*/)?(pyenv|asdf)"|([\w./~-]*/)?(pyenv|asdf))[ ]
    exec[ ]"(\$program|python[\d.]*)"[ ]"\$@"[ \t]*(\#[^\n]*)?(\n\s*)?\Z
    """,
    re.VERBOSE,
)
"""Script of pyenv or asdf, which starts the program of the same name."""


class ColdStart(Exception):
    """Command whose workers must start cold; the message is the reason."""


class Program(NamedTuple):
    """Python program: `interpreter options (target | -m target) arguments`.

    `command` is the full command line as written, `env` the variables set by a leading `env`.
    `process` is the kernel's name of the process, if it is not that of the interpreter.
    """

    interpreter: str
    options: tuple[str, ...]
    module: bool
    target: str
    arguments: tuple[str, ...]
    command: tuple[str, ...]
    env: Mapping[str, str]
    process: str = ""

    @property
    def key(self) -> str:
        """Key of recorded modules; programs with the same key share them."""
        return "\0".join((self.interpreter, str(self.module), self.target))


def parse_command(argv: Sequence[str], path: str) -> Program:
    """Return the program that a command line runs, or raise Cold. `path` is the workers' PATH."""
    words, env = _without_env(list(argv))
    if not words or not words[0]:
        raise ColdStart("there is no command")
    name = os.path.basename(words[0])  # noqa: PTH119
    if is_shell(name) or name == "busybox":
        raise ColdStart(f"the command is a shell ({words[0]}): give the Python command itself")
    if launcher := launcher_of_program(words[0], words[1:]):
        raise ColdStart(f"{launcher.name} starts the workers itself")
    if _INTERPRETER.fullmatch(name):
        return _python(words[0], words[1:], env)
    return _console_script(words, env, path)


def require_forkable(program: Program, env: Mapping[str, str]) -> None:
    """Raise ColdStart for a program whose start has effects beside those of its interpreter.

    `env` are the variables of the workers.
    """
    reports = [word for word in program.options if word.startswith(_REPORTS_IMPORTS)]
    if not {"-E", "-I"}.intersection(program.options):
        reports += [
            name for name, off in _REPORTING_VARIABLES.items() if env.get(name, "") not in off
        ]
    if reports:
        raise ColdStart(f"{reports[0]} reports the imports of each worker")
    found = shutil.which(program.interpreter, path=env.get("PATH", os.defpath))
    head = _first_lines(found) if found is not None else b""
    if head.startswith(b"#!") and not VERSION_SHIM.match(head):
        raise ColdStart(
            f"{found} is a script that runs for each worker: give the Python command itself"
        )


def _first_lines(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return file.read(_FIRST_LINES_BYTES)
    except OSError:
        return b""  # the start reports it


def _without_env(words: list[str]) -> tuple[list[str], dict[str, str]]:
    if not words or os.path.basename(words[0]) != "env":  # noqa: PTH119
        return words, {}
    env = {}
    rest = words[1:]
    while rest and ASSIGNMENT.fullmatch(rest[0]):
        name, _, value = rest.pop(0).partition("=")
        env[name] = value
    if rest and rest[0].startswith("-"):
        raise ColdStart(f"`env {rest[0]}` changes the environment in a way that is not followed")
    return rest, env


def _python(interpreter: str, words: Sequence[str], env: Mapping[str, str]) -> Program:
    command = (interpreter, *words)
    options = []
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            if word != "--check-hash-based-pycs" or not rest:
                raise ColdStart(f"Python's option {word} runs no program")
            options += [word, rest.pop(0)]
            continue
        for place, letter in enumerate(word[1:], 1):
            if letter in _PLAIN:
                options.append(f"-{letter}")
            elif letter in _WITH_VALUE:
                value = word[place + 1 :] or (rest.pop(0) if rest else "")
                options.append(f"-{letter}{value}")
                break
            elif letter == "m":
                target = word[place + 1 :] or (rest.pop(0) if rest else "")
                if not target:
                    raise ColdStart("-m names no module")
                if launcher_of_module(target, rest):
                    raise ColdStart(f"{target} starts the workers itself")
                return Program(interpreter, tuple(options), True, target, tuple(rest), command, env)
            else:
                raise ColdStart(f"Python's option -{letter} needs an interpreter of its own")
    if not rest or rest[0] == "-":
        raise ColdStart("the program is read from standard input")
    if rest[0].endswith((".pyc", ".pyo")):
        raise ColdStart(f"{rest[0]} is compiled code: give the script itself")
    return Program(interpreter, tuple(options), False, rest[0], tuple(rest[1:]), command, env)


def _console_script(words: Sequence[str], env: Mapping[str, str], path: str) -> Program:
    """Return the program of a file with a `#! python` line, as pip writes for entry points."""
    found = words[0] if "/" in words[0] else shutil.which(words[0], path=path)
    if found is None:
        raise ColdStart(f"{words[0]} was not found")
    if not os.path.isfile(found):  # noqa: PTH113
        raise ColdStart(f"{found} is not a file")
    try:
        with Path(found).open("rb") as file:
            head = file.read(_FIRST_LINES_BYTES)
    except OSError as error:
        raise ColdStart(f"{found} cannot be read: {error.strerror}") from error
    interpreter = _interpreter_of(head)
    if not interpreter:
        raise ColdStart(f"{found} is not a Python program")
    if not os.access(found, os.X_OK):
        raise ColdStart(f"{found} is not executable")
    program = _python(interpreter[0], [*interpreter[1:], found, *words[1:]], env)
    # Else `env` or `sh` executes the interpreter, by its own name.
    direct = head[2:].lstrip().startswith(interpreter[0].encode())
    return program._replace(process=os.path.basename(found)) if direct else program  # noqa: PTH119


def _interpreter_of(head: bytes) -> list[str]:
    """Return the interpreter words of the first line, or of pip's second line if it is too long."""
    lines = head.decode("utf-8", "replace").split("\n")
    if not lines[0].startswith("#!") or "\r" in lines[0]:
        return []  # the kernel takes a carriage return for a part of the interpreter's name
    # The kernel passes everything after the interpreter as one word.
    words = lines[0][2:].strip().split(None, 1)
    name = os.path.basename(words[0]) if words else ""  # noqa: PTH119
    if name == "env" and len(words) == 2:
        words = words[1].split()
        name = os.path.basename(words[0])  # noqa: PTH119
    elif name == "sh" and len(lines) > 1:
        match = re.match(r"'''exec' (\"[^\"]+\"|\S+) \"\$0\" \"\$@\"", lines[1])
        words = [match.group(1).strip('"')] if match else []
        name = os.path.basename(words[0]) if words else ""  # noqa: PTH119
    return words if _INTERPRETER.fullmatch(name) else []
