"""Command of the trainer container: the launcher, which runs the user's command per local rank.

`$(NAME)` is kept in both `command` and `args`: the kubelet expands it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from elasticjob_operator.domain.manifests.names import LAUNCHER_PATH
from elasticjob_operator.domain.manifests.torchrun import (
    LAUNCH,
    LAUNCHERS,
    MODULES,
    TORCHRUN,
    CannotUnwrap,
    Launcher,
    Unwrapped,
    unwrap,
)

DEFAULT_PYTHON = "python3"
_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "ksh", "zsh"})
_STARTERS = frozenset(
    {"conda", "dumb-init", "ionice", "nice", "nohup", "nsys", "numactl", "pipenv", "poetry"}
    | {"stdbuf", "time", "timeout", "tini", "uv", "xvfb-run"}
)
"""Programs that run their remaining arguments as a command."""
_LAUNCHER_WORD = re.compile(
    r"(?:^|[\s;&|()'\"`/])(torchrun|accelerate(?:\s+|-)launch)(?=$|[\s;&|()'\"`])"
    r"|\b(torch\.distributed\.(?:run|launch))\b"
)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_PYTHON_MODULE = re.compile(r"-([^cmWX-]*)m(.*)")
"""Pattern of `-m`, alone or after other letters, with the module if it is in the same word."""
_PYTHON_CODE = re.compile(r"-|-[^cmWX-]*c.*", re.DOTALL)
_PYTHON_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_ENV_FLAGS = frozenset({"-", "-i", "--ignore-environment", "--"})
_ENV_VALUED = frozenset({"-u", "--unset", "-C", "--chdir"})


@dataclass(frozen=True, slots=True)
class TrainerCommand:
    """Command and arguments of the trainer container, with the removed launcher, its ignored
    options, and the number of workers per node that its options name; see `node_workers`."""

    command: tuple[str, ...]
    args: tuple[str, ...]
    launcher: Launcher | None = None
    dropped: tuple[str, ...] = ()
    workers: str = ""

    @property
    def note(self) -> str:
        """Text that names the removed launcher; empty if there was none."""
        return self.note_with("not used")

    def note_with(self, ignored: str) -> str:
        """Return the note with a heading for the ignored options."""
        if self.launcher is None:
            return ""
        note = f"{self.launcher.name} was taken out: the job itself starts the workers"
        if self.dropped:
            note += f"; {ignored}: {', '.join(self.dropped)}"
        return f"{note}; {self.launcher.note}" if self.launcher.note else note

    @property
    def unwrapped(self) -> tuple[str, ...]:
        """Command without the launcher prefix and without `args`."""
        return self.command[len(_with_launcher("", ())) :]


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


ACCELERATORS = "accelerators"
"""Word for one worker for each accelerator, or one worker without any."""
TORCHRUN_VARIABLE = "PET_NPROC_PER_NODE"
"""Variable that torchrun reads in place of its option."""


def node_workers(
    given: int | str | None, command: TrainerCommand, variables: Collection[str] = ()
) -> str:
    """Return the number of workers per node, or the word by which the launcher counts them.

    spec.nprocPerNode (`given`) takes precedence over the options of a removed launcher, and those
    over torchrun's variable, if it is one of the container's `variables`.
    """
    if given is not None or command.workers:
        return str(given or command.workers)
    if command.launcher in (TORCHRUN, LAUNCH) and TORCHRUN_VARIABLE in variables:
        return f"$({TORCHRUN_VARIABLE})"
    return ACCELERATORS


def trainer_command(
    command: Sequence[str], args: Sequence[str], workers: int | str | None = None
) -> TrainerCommand:
    """Return the command behind the launcher, with a nested launcher (torchrun, …) removed.

    Args:
        workers: spec.nprocPerNode; None if it is absent.

    Raises:
        CannotUnwrap: a nested launcher cannot be removed.
    """
    words = (*command, *args)
    read = _parse(words)
    launcher, rest = _launcher(read)
    if launcher is None:
        _check_hidden(read)
        return TrainerCommand(_with_launcher(_interpreter(read), command), tuple(args))
    taken = unwrap(launcher, rest, workers)
    python = read.python or (_python_beside(read.rest[0]),)
    started = (*_env_prefix(read, taken.env), *_program(python, taken))
    command = _with_launcher(python[0], started)
    return TrainerCommand(command, (), launcher, taken.dropped, taken.workers)


def _with_launcher(python: str, command: Sequence[str]) -> tuple[str, ...]:
    return (python, LAUNCHER_PATH, "--", *command)


def _interpreter(read: _ParsedCommand) -> str:
    return read.python[0] if read.python else DEFAULT_PYTHON


def _parse(words: Sequence[str]) -> _ParsedCommand:
    before, rest = _without_env(words)
    if not rest or not _PYTHON.fullmatch(_name(rest[0])):
        return _ParsedCommand(before, (), "", rest)
    python, left = [rest[0]], list(rest[1:])
    while left and left[0].startswith("-") and not _PYTHON_CODE.fullmatch(left[0]):
        word = left.pop(0)
        if named := _PYTHON_MODULE.fullmatch(word):
            python += [f"-{named[1]}"] if named[1] else []
            module = named[2] or (left.pop(0) if left else "")
            return _ParsedCommand(before, tuple(python), module, tuple(left))
        python.append(word)
        if word in _PYTHON_VALUED and left:
            python.append(left.pop(0))
    return _ParsedCommand(before, tuple(python), "", tuple(left))


def _without_env(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split `env A=B program …` into two parts; treat an unknown form of `env` as a program."""
    if not words or _name(words[0]) != "env":
        return (), tuple(words)
    at = 1
    while at < len(words):
        if words[at] in _ENV_VALUED:
            at += 2
        elif words[at] in _ENV_FLAGS or _ASSIGNMENT.fullmatch(words[at]):
            at += 1
        else:
            break
    if at >= len(words) or words[at].startswith("-"):
        return (), tuple(words)
    return tuple(words[:at]), tuple(words[at:])


def _launcher(read: _ParsedCommand) -> tuple[Launcher | None, tuple[str, ...]]:
    """Return the launcher that the command runs, or None, and its arguments."""
    if read.module:
        return LAUNCHERS.get(MODULES.get(read.module, "")), read.rest
    name = _name(read.rest[0]) if read.rest else ""
    match name:
        case "torchrun":
            return LAUNCHERS["torchrun"], read.rest[1:]
        case "accelerate-launch":
            return LAUNCHERS["accelerate launch"], read.rest[1:]
        case "accelerate" if read.rest[1:2] == ("launch",):
            return LAUNCHERS["accelerate launch"], read.rest[2:]
    return None, ()


def _check_hidden(read: _ParsedCommand) -> None:
    """Raise `CannotUnwrap` for a launcher inside of another program, such as a shell: it is
    detected there but cannot be removed."""
    if read.python or not read.rest:
        return
    name = _name(read.rest[0])
    found = None
    if name in _SHELLS:
        found = _LAUNCHER_WORD.search(" ".join(_shell_text(read.rest[1:])))
    elif name in _STARTERS or name == "env":
        found = _LAUNCHER_WORD.search(" ".join(read.rest[1:]))
    if found is not None:
        launcher = found[1] or found[2]
        raise CannotUnwrap(
            f"{launcher} is inside of {name} and cannot be taken out there: the job starts this "
            f"command once for each worker, so write `python3 script.py …` in place of {launcher}"
        )


def _shell_text(words: Sequence[str]) -> Sequence[str]:
    """Return the command after a shell's `-c`; a script file is not read."""
    for index, word in enumerate(words):
        if not word.startswith("-"):
            return ()
        if not word.startswith("--") and "c" in word:
            return words[index + 1 :]
    return ()


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


def _name(program: str) -> str:
    return program.rpartition("/")[2]
