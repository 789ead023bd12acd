"""Check of the program that is to run once for each worker: it may be a launcher by another name.

The operator decides by the words of a command and cannot see the files of the image. A program
without a suffix may be a shell script, or a console script of Python that starts torchrun, and a
Python program may start torchrun as a process. Such a file would start workers in each worker, so
its command runs once for the node.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from elasticjob_launcher.command_line.environment import (
    clearing,
    deciding_command,
    may_train,
    runs_training,
)
from elasticjob_launcher.command_line.interpreters import file_name, is_python, is_shell
from elasticjob_launcher.command_line.launchers import (
    Launcher,
    launcher_of_module,
    trains_by_function,
)
from elasticjob_launcher.command_line.programs import launcher_of_words, program_words
from elasticjob_launcher.command_line.wrappers import program_at, split_string
from elasticjob_launcher.programs.command_texts import command_texts
from elasticjob_launcher.programs.nested_launches import NestedLaunch, find_nested_launch
from elasticjob_launcher.programs.program_files import MAX_SECONDS, AnalysisTooSlow
from elasticjob_launcher.settings import Settings
from elasticjob_launcher.zygote.command import VERSION_SHIM, ColdStart, parse_command

HEAD_BYTES = 4096
"""Maximum size of a console script."""
_INTERPRETER = re.compile(rb"#!\s*(\S+)[ \t]*([^\n]*)")
_TRAMPOLINE = re.compile(rb"#![^\n]*/sh[ \t]*\r?\n'''exec' [^\n]*py(thon|py)[^\n]*\n' '''")
"""Start of a console script of Python by a shell, as pip, distlib and uv write it for interpreters
with a long path, or with spaces in it."""
_IMPORT = re.compile(
    r"^[ \t]*(?:from|import)[ \t]+([\w.]+)(?:[ \t]+import[ \t]+(\w+))?", re.MULTILINE
)
_OTHER_SHELLS = frozenset({"csh", "tcsh", "fish"})
_FIX = "set spec.launch to PerNode if it does, or to PerWorker if it does not"


class ProgramError(Exception):
    """Program that may start the workers itself; the message names the cause and the fix."""


def node_launch(settings: Settings, environ: Mapping[str, str]) -> str:
    """Return the reason to run the command once for the node: the place that certainly starts a
    launcher. Empty for a command that runs once for each worker.

    The files are read in this process's working folder, not run.

    Raises:
        ProgramError: the program may be a launcher, or is one that does not reach other nodes.
    """
    found = _in_program(settings.program, environ) if settings.program else None
    if found is None and settings.check:
        launcher = launcher_of_words(program_words(settings.argv))
        found = None if launcher is None else (f"the command {settings.argv[0]}", launcher)
    if found is None and settings.check:
        try:
            nested = find_in_command(settings.argv, environ)
        except AnalysisTooSlow:
            raise ProgramError(
                f"the files of {shlex.join(settings.argv)} could not be searched for a launcher "
                f"within {MAX_SECONDS:g} s of processor time, and other nodes may decide "
                f"otherwise: {_FIX}"
            ) from None
        found = None if nested is None else (nested.place, nested.launcher)
        if nested is not None and (reason := trains_besides(nested, settings.several_nodes)):
            raise ProgramError(reason)
    if found is None:
        return ""
    place, launcher = found
    text = f"{place} starts {launcher.name}"
    if not launcher.joins and settings.several_nodes:
        raise ProgramError(
            f"{text}, which does not join the job's rendezvous ({launcher.own}), so each of the "
            "nodes would train alone: let each worker take its ranks from the environment, as "
            "torchrun's workers do, or set spec.maxNodes to 1; set spec.launch to PerWorker if "
            "each worker is to start a job of its own"
        )
    return text


def cleared_environment(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return the note on the part of a command, or of a script that it runs, that takes the job's
    variables from the program; empty if there is none. The files are read, not run.

    Scripts besides a command that runs Python or a launcher itself are preparation or data.
    """
    found = clearing(argv)
    if found is not None:
        return found.text
    words = program_words(argv)
    if words and (first := _first_line(words[0], environ.get("PATH", ""))):
        found = clearing((*first, words[0]))
    ends = found is not None or runs_training(argv)
    scripts = islice(command_texts(argv, environ, Path.cwd()), len(argv), None)
    while not ends and (text := next(scripts, "")):
        command = deciding_command(text)
        found = clearing(command) if may_train(command) else None
        ends = found is not None or runs_training(command)
    return "" if found is None else f"a script of the command: {found.text}"


def _first_line(program: str, search: str) -> list[str]:
    """Return the interpreter of a script with its arguments; empty for any other file."""
    path = program if "/" in program else shutil.which(program, path=search)
    try:
        if not path or not os.path.isfile(path):  # noqa: PTH113
            return []
        with Path(path).open("rb") as file:
            found = _INTERPRETER.match(file.read(HEAD_BYTES))
    except OSError:
        return []
    if found is None:
        return []
    return [os.fsdecode(found[1]), *filter(None, [os.fsdecode(found[2]).strip()])]


def trains_besides(launch: NestedLaunch, several_nodes: bool) -> str:
    """Return the reason for which it is not certain that a program is to run once for the node: it
    may train itself, and start a launcher for something else. Empty if it is certain.

    Processes of the program's own function are its training, which on one node loses nothing.
    """
    if launch.alone or (trains_by_function(launch.launcher) and not several_nodes):
        return ""
    if several_nodes and not launch.launcher.joins:
        return ""  # refused for its rendezvous
    return (
        f"{launch.place} starts {launch.launcher.name}, and the program may train besides, alone "
        "on each node if it ran once for each of them: set spec.launch to PerNode if the launcher "
        "starts the training, or to PerWorker if each worker is to train and then start it"
    )


def _in_program(program: str, environ: Mapping[str, str]) -> tuple[str, Launcher] | None:
    """Return the path of a program's file and the launcher that it starts; None if there is none.

    A file that cannot be found or read is not judged: its start reports the error.

    Raises:
        ProgramError: the file is a shell script.
    """
    path = program if "/" in program else shutil.which(program, path=environ.get("PATH", ""))
    if not path or not os.path.isfile(path):  # noqa: PTH113
        return None  # such as a pipe, which would be waited for
    try:
        with Path(path).open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None
    found = _INTERPRETER.match(head)
    if found is None:
        return None
    interpreter = "python" if _TRAMPOLINE.match(head) else _interpreter(found[1], found[2])
    if (is_shell(interpreter) or interpreter in _OTHER_SHELLS) and not VERSION_SHIM.match(head):
        raise ProgramError(
            f"{path} is a shell script, which may start the workers itself and would run once for "
            f"each worker: {_FIX}"
        )
    launcher = _launcher_in(head) if interpreter.startswith("python") else None
    return None if launcher is None else (path, launcher)


def find_in_command(
    argv: Sequence[str], environ: Mapping[str, str], folder: str = ""
) -> NestedLaunch | None:
    """Return the place where a Python command's program starts a launcher; None if there is none.

    Args:
        folder: working folder of the command; empty for this process's own.
    """
    words = _python_words(argv)
    try:
        program = parse_command(words, environ.get("PATH", ""))
    except ColdStart:
        return None
    given = [part for part in environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    search = [str(Path(folder, part)) for part in given]
    if program.module:
        return find_nested_launch(program.target, True, [folder, *search])
    target = str(Path(folder, program.target)) if folder else program.target
    found = find_nested_launch(target, False, search)
    if found is None or not folder:
        return found
    return found._replace(path=os.path.relpath(found.path, folder))


def _python_words(argv: Sequence[str]) -> Sequence[str]:
    """Return a command from its Python interpreter on; the command itself if there is none."""
    words = program_words(argv)
    starts = (index for index, word in enumerate(words) if is_python(word))
    return words[next(starts, 0) :]


def _interpreter(program: bytes, rest: bytes) -> str:
    """Return the name of the interpreter in the first line of a script; `env` names it last."""
    words: Sequence[str] = [os.fsdecode(program), *os.fsdecode(rest).split()]
    words = split_string(words) or words
    return file_name(words[program_at(words)])


def _launcher_in(head: bytes) -> Launcher | None:
    """Return the launcher whose `main` or module a console script imports; None if there is none.

    A package such as deepspeed is also a library: its import alone starts nothing. Longer files
    are programs of their own, which are not read.
    """
    if len(head) == HEAD_BYTES:
        return None
    for module, name in _IMPORT.findall(head.decode("utf-8", "replace")):
        for candidate in (module, f"{module}.{name}"):
            launcher = launcher_of_module(candidate, ())
            if launcher is None:
                continue
            if name == "main" or candidate != module or (not name and "." in module):
                return launcher
    return None
