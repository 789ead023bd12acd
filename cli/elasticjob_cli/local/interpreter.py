"""Interpreter named by `--python`: located, checked, and substituted for the job's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticjob_cli.errors import BadInput

PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
"""Pattern of interpreter names."""
OLDEST = (3, 8)
ASK_SECONDS = 30.0
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
