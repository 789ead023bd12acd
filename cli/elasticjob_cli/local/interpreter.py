"""The Python that `--python` names: found, asked what it is, and put in the place of the job's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticjob_cli.errors import BadInput

PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
"""Names of programs that are interpreters."""
OLDEST = (3, 8)
ASK_SECONDS = 30.0
_QUESTION = "import sys; print('python %d %d' % sys.version_info[:2])"
"""Understood by every Python."""
_ANSWER = re.compile(r"python (\d+) (\d+)\s*")
_NAMES = ("python3", "python")
_WORD = re.compile(r"[\w.]+")


def interpreter(given: str) -> Path:
    """The interpreter that the user named, by its path or as PATH has it; raises `BadInput`."""
    found = shutil.which(given)
    if found is None:
        path = Path(given)
        if path.is_dir():
            problem = f"is a folder; perhaps {path / 'bin' / 'python'} is meant"
        elif path.exists():
            problem = "is no program: it is not executable"
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
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"--python must be a Python interpreter: {error}") from error
    answer = _ANSWER.fullmatch(ran.stdout)
    if answer is None:
        lines = (ran.stderr or ran.stdout).strip().splitlines()
        said = f": {lines[-1]}" if lines else ""
        raise BadInput(
            f"--python must be a Python interpreter: {program} does not run Python code{said}"
        )
    return int(answer[1]), int(answer[2])


def is_python(program: str) -> bool:
    return PYTHON.fullmatch(Path(program).name) is not None


def check_found(python: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """That a command which is none itself, such as a shell's, comes to the same `python`.

    It looks on PATH, where only the interpreter's folder was put first. Raises `BadInput`.
    """
    words = set(_WORD.findall(" ".join(argv)))
    for name in _NAMES:
        found = shutil.which(name, path=env.get("PATH")) if name in words else None
        if found is not None and not _same(Path(found), python):
            raise BadInput(
                f"--python: the job's command is {argv[0]}, for which {name} is {found}, not "
                f"{python}: name an interpreter that its own folder calls {name}, or let the "
                "command begin with python3"
            )


def _same(found: Path, python: Path) -> bool:
    return found.parent == python.parent and found.samefile(python)
