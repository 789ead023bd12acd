"""Trainer container as a process on this machine: command, environment and working folder.

The interpreter that `--python` names is located, checked, and substituted for the job's.
Files are only read: errors at start are detected before anything is started.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob_cli.errors import BadInput, no_answer
from elasticjob_launcher.programs.nested_launches import NestedLaunch
from elasticjob_launcher.programs.program_check import find_in_command, trains_besides
from elasticjob_launcher.programs.program_files import AnalysisTooSlow
from elasticjob_operator.domain.launch.variables import expanded
from elasticjob_operator.domain.manifests.job_command import command_for
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused
from elasticjob_operator.domain.manifests.trainer_command import (
    ACCELERATORS,
    TrainerCommand,
    node_workers,
)
from elasticjob_operator.model import ElasticJob, Launch
from elasticjob_operator.model.job import NESTED_ANNOTATION
from elasticjob_rendezvous.protocol.text import echoed

PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
"""Pattern of interpreter names."""
OLDEST = (3, 8)
VERSION_SECONDS = 30.0
_QUESTION = "import sys; print('python %d %d' % sys.version_info[:2])"
"""Program that prints the version; valid in every Python."""
_ANSWER = re.compile(r"python (\d+) (\d+)\s*")
_NAMES = ("python3", "python")
_WORD = re.compile(r"[\w.]+")


def interpreter(given: str) -> Path:
    """Return the interpreter given by path or by name on PATH; raises `BadInput`."""
    found = shutil.which(given)
    if found is None:
        path = Path(given)
        if path.is_dir():
            problem = f"is a folder; did you mean {path / 'bin' / 'python'}?"
        elif path.exists():
            problem = "is not executable"
        else:
            problem = "does not exist" if "/" in given else "is not on PATH"
        raise BadInput(f"--python must be a Python interpreter: {given} {problem}")
    version = _version(found)
    if version < OLDEST:
        least, is_now = (".".join(map(str, one)) for one in (OLDEST, version))
        raise BadInput(f"--python must be Python {least} or later: {found} is {is_now}")
    return Path(found).absolute()


def _version(program: str) -> tuple[int, ...]:
    try:
        ran = subprocess.run(
            [program, "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(
            f"--python must be a Python interpreter: {program}: {no_answer(error)}"
        ) from error
    answer = _ANSWER.fullmatch(ran.stdout)
    if answer is None:
        lines = (ran.stderr or ran.stdout).strip().splitlines()
        reason = f": {lines[-1]}" if lines else ""
        raise BadInput(
            f"--python must be a Python interpreter: {program} does not run Python code{reason}"
        )
    return int(answer[1]), int(answer[2])


def is_python(program: str) -> bool:
    return PYTHON.fullmatch(Path(program).name) is not None


def check_found(python: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Check that a command such as a shell's finds the same `python` on PATH.

    Only the interpreter's folder was put first on PATH. Raises `BadInput`.
    """
    words = set(_WORD.findall(" ".join(argv)))
    for name in _NAMES:
        found = shutil.which(name, path=env.get("PATH")) if name in words else None
        if found is not None and not _same(Path(found), python):
            raise BadInput(
                f"--python: the job's command is {argv[0]}, for which {name} is {found}, not "
                f"{python}: give an interpreter whose file name is {name}, or start the command "
                "with python3"
            )


def _same(found: Path, python: Path) -> bool:
    return found.parent == python.parent and found.samefile(python)


_NO_SCRIPT = re.compile(r"-[a-zA-Z]*[mc]")
"""Interpreter options that take a module or a command instead of a script, as `-m` or `-um`."""
_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True, slots=True)
class Trainer:
    """Process that a pod of this job runs.

    Args:
        interpreter: Python interpreter of the launcher.
        unresolved: names of variables with `valueFrom`, which only a cluster can resolve.
        note: launch of the command, and the parts removed from it.
        options: options of the launcher.
        launch: PerWorker or PerNode.
        workers: number of workers of a pod, or the word by which its launcher counts them.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    interpreter: str
    unresolved: tuple[str, ...] = ()
    note: str = ""
    options: tuple[str, ...] = ()
    launch: Launch = Launch.PER_WORKER
    workers: str = ACCELERATORS


def nested_launch(
    job: ElasticJob, base: Path, environment: Mapping[str, str]
) -> NestedLaunch | None:
    """Return the place where the job's Python program, if it is on this machine, starts a launcher
    in each worker; None if there is none, or if spec.launch is explicit."""
    if job.spec.launch is not Launch.AUTO:
        return None
    try:
        command = command_for(job)
    except TemplateRefused:
        return None
    if command.mode is not Launch.PER_WORKER:
        return None
    env, _ = _environment(job, environment)
    argv = [expanded(word, env) for word in (*command.words, *command.args)]
    try:
        return find_in_command(argv, env, str((base / (job.trainer().working_dir or "")).resolve()))
    except (OSError, ValueError, AnalysisTooSlow):  # an impossible path, which the start reports
        return None


def with_nested_launch(job: ElasticJob, base: Path, environment: Mapping[str, str]) -> ElasticJob:
    """Return the job for a launch once for each pod, if its program starts a launcher itself and
    does nothing else; one that may train besides is left to its pods.

    Raises:
        BadInput: that launcher does not reach the job's other nodes.
    """
    found = nested_launch(job, base, environment)
    if found is None or trains_besides(found, job.spec.max_nodes > 1):
        return job
    text = f"{found.place} starts {found.launcher.name}"
    if not found.launcher.joins and job.spec.max_nodes > 1:
        raise BadInput(
            f"{text}, which does not join the job's rendezvous ({found.launcher.own}), so each of "
            "the nodes would train alone: let each worker take its ranks from the environment, as "
            "torchrun's workers do, or run one node; spec.launch decides if this is not so"
        )
    annotations = {**(job.metadata.annotations or {}), NESTED_ANNOTATION: text}
    metadata = job.metadata.model_copy(update={"annotations": annotations})
    return job.model_copy(update={"metadata": metadata})


def trainer(
    job: ElasticJob,
    base: Path,
    environment: Mapping[str, str],
    own: str,
    python: Path | None = None,
) -> Trainer:
    """Return the job's trainer, run in `base` (its manifest's folder) or its workingDir.

    As in a pod, a launcher such as torchrun is removed from its command.

    Args:
        own: interpreter of the launcher if the command names none.
        python: replacement for the interpreter that the command names.

    Raises:
        BadInput: a command, script or folder does not exist here.
    """
    container = job.trainer()
    env, unresolved = _environment(job, environment)
    where = f'container "{container.name}" of {job.metadata.name}'
    command = _command(job, where)
    argv = tuple(expanded(word, env) for word in (*command.words, *command.args))
    options = tuple(expanded(word, env) for word in command.options)
    cwd = (base / container.working_dir).resolve() if container.working_dir else base
    if not cwd.is_dir():
        problem = "is not a folder" if cwd.exists() else "does not"
        raise BadInput(f"{where}: workingDir must exist on this machine: {cwd} {problem}")
    _check_words(argv, env, where)
    runs_python = is_python(argv[0])
    if python is not None and runs_python:
        argv = (str(python), *argv[1:])
    elif python is not None:
        check_found(python, argv, env)
    program = _program(argv, env, cwd, where)
    if runs_python:
        _check_script(argv, cwd, where)
    if job.spec.setup:
        # The options begin with --setup and the number of its words.
        _program((*options[2:3],), env, cwd, f"{where}: setup")
    return Trainer(
        argv,
        env,
        cwd,
        program if runs_python else own,
        unresolved,
        f"launch {command.mode}: {command.message}",
        options,
        command.mode,
        expanded(node_workers(job.spec.nproc_per_node, command, env), env),
    )


def _environment(
    job: ElasticJob, inherited: Mapping[str, str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the container's variables, and the names of those only a cluster can resolve."""
    env = dict(inherited)
    unresolved = []
    for variable in job.trainer().env or ():
        if variable.value is None and (variable.model_extra or {}).get("valueFrom"):
            if variable.name not in env:
                unresolved.append(variable.name)
        else:
            env[variable.name] = expanded(variable.value or "", env)
    return env, tuple(unresolved)


def _command(job: ElasticJob, where: str) -> TrainerCommand:
    try:
        return command_for(job)
    except TemplateRefused as error:
        raise BadInput(f"{where}: {error}") from error


def _check_words(argv: tuple[str, ...], env: Mapping[str, str], where: str) -> None:
    """Raise `BadInput` for a NUL in a word or a `=` in a variable's name."""
    for name in env:
        if not name or "=" in name:
            raise BadInput(f"{where}: env: a name must not be empty or contain '=': {echoed(name)}")
    words = [*(("command", word) for word in argv), *((f"env {n}", v) for n, v in env.items())]
    for what, word in words:
        try:
            legal = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            legal = False
        if not legal:
            raise BadInput(f"{where}: {what} {_fault_of(word)}")


def _fault_of(word: str) -> str:
    if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
        return "must not contain NUL or an unpaired surrogate"
    encoding = sys.getfilesystemencoding()
    return f"has characters that this machine's encoding ({encoding}) lacks: set LC_ALL=C.UTF-8"


def _program(argv: tuple[str, ...], env: Mapping[str, str], cwd: Path, where: str) -> str:
    """Return the path of the command's program."""
    name = argv[0]
    if "/" in name:
        found = shutil.which(str(cwd / name))
        if found is None:
            problem = "does not exist"
            if (cwd / name).exists():
                problem = "is not executable: run `chmod +x` on it"
            if (cwd / name).is_dir():
                problem = "is a folder"
            hint = "; choose an interpreter with --python" if is_python(name) else ""
            raise BadInput(f"{where}: command must be a program: {cwd / name} {problem}{hint}")
        return found
    found = shutil.which(name, path=env.get("PATH"))
    if found is None:
        hint = "install it, or give its full path"
        if is_python(name):
            hint = "choose an interpreter with --python"
        raise BadInput(
            f"{where}: command must be a program on this machine: {echoed(name)} is not on PATH; "
            f"{hint}"
        )
    return found


def _check_script(argv: tuple[str, ...], cwd: Path, where: str) -> None:
    """Raise `BadInput` if a Python command's script is missing: every worker would fail."""
    words = iter(argv[1:])
    for word in words:
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif word.startswith("-"):
            if word == "-" or _NO_SCRIPT.match(word):
                return
        else:
            script = cwd / word
            if not script.exists():
                raise BadInput(
                    f"{where}: the script {echoed(word)} does not exist in {cwd}; the command runs "
                    "in the manifest's folder unless workingDir is set"
                )
            if script.is_dir() and not (script / "__main__.py").exists():
                raise BadInput(
                    f"{where}: {echoed(word)} is a folder without a __main__.py, not a script"
                )
            return
