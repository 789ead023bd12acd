"""The trainer container as a process on this machine: its command, environment and folder.

Pure but for looking at files: what would fail at start is said before anything is started.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticjob_cli.errors import BadInput
from elasticjob_operator.model import ElasticJob

PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_REFERENCE = re.compile(r"\$(\$|\(([-._A-Za-z0-9]+)\))")
_NO_SCRIPT = re.compile(r"-[a-zA-Z]*[mc]")
"""A module or a command stands where the script would, as in `-m` or `-um`."""
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True)
class Trainer:
    """What a pod of this job runs.

    `unresolved` names variables with `valueFrom`, which only a cluster can look up.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    interpreter: str
    unresolved: tuple[str, ...] = ()


def trainer(job: ElasticJob, base: Path, environment: Mapping[str, str], own: str) -> Trainer:
    """The job's trainer container, run in `base` (its manifest's folder) or its workingDir.

    `own` is the interpreter that runs the launcher when the command names none. Raises `BadInput`
    for a command, script or folder that does not exist here.
    """
    container = job.trainer()
    env = dict(environment)
    unresolved = []
    for variable in container.env or ():
        if variable.value is None and (variable.model_extra or {}).get("valueFrom"):
            if variable.name not in env:
                unresolved.append(variable.name)
        else:
            env[variable.name] = expanded(variable.value or "", env)
    words = [*(container.command or ()), *(container.args or ())]
    argv = tuple(expanded(word, env) for word in words)
    cwd = (base / container.working_dir).resolve() if container.working_dir else base
    where = f'container "{container.name}" of {job.metadata.name}'
    if not cwd.is_dir():
        raise BadInput(f"{where}: workingDir must exist on this machine: {cwd} does not")
    _check_words(argv, env, where)
    program = _program(argv, env, cwd, where)
    _check_script(argv, cwd, where)
    is_python = PYTHON.fullmatch(Path(argv[0]).name) is not None
    return Trainer(argv, env, cwd, program if is_python else own, tuple(unresolved))


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as Kubernetes does: unknown names stay, `$$` is a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return env.get(match[2], match[0])

    return _REFERENCE.sub(value, text)


def _check_words(argv: tuple[str, ...], env: Mapping[str, str], where: str) -> None:
    """No process can be started with a NUL in a word, and none has a variable called `A=B`."""
    for name in env:
        if not name or "=" in name:
            raise BadInput(f"{where}: env: a name must not be empty nor hold '=': {name!r}")
    words = [*(("command", word) for word in argv), *((f"env {n}", v) for n, v in env.items())]
    for what, word in words:
        try:
            legal = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            legal = False
        if not legal:
            raise BadInput(f"{where}: {what} must hold no NUL and no half of a surrogate pair")


def _program(argv: tuple[str, ...], env: Mapping[str, str], cwd: Path, where: str) -> str:
    """The path of the command's program."""
    name = argv[0]
    if "/" in name:
        found = shutil.which(str(cwd / name))
        if found is None:
            exists = (cwd / name).exists()
            problem = "is not executable: run `chmod +x` on it" if exists else "does not exist"
            raise BadInput(f"{where}: command must be a program: {cwd / name} {problem}")
        return found
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        raise BadInput(
            f"{where}: command must be a program on this machine: {name!r} is not on PATH; "
            "install it, or give its full path"
        )
    return found


def _check_script(argv: tuple[str, ...], cwd: Path, where: str) -> None:
    """A Python command's script must be there: else every worker would fail, one by one."""
    if not PYTHON.fullmatch(Path(argv[0]).name):
        return
    words = iter(argv[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word.startswith("-"):
            if word == "-" or _NO_SCRIPT.match(word):
                return
        else:
            if not (cwd / word).exists():
                raise BadInput(
                    f"{where}: the script {word!r} does not exist in {cwd}; the command runs in "
                    "the manifest's folder unless workingDir says otherwise"
                )
            return
