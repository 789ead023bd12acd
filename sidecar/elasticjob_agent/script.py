"""Command of an agent's workers, from the script, module or program that the user names."""

from __future__ import annotations

import importlib.machinery
import shutil
import sys
from pathlib import Path

from elasticjob_agent.settings import SettingsError
from elasticjob_rendezvous.core.typed import bounded, echoed


def worker_command(words: tuple[str, ...], module: bool, no_python: bool) -> tuple[str, ...]:
    """Return the command of each worker. Raises `SettingsError` if it cannot be run."""
    here = _current_folder()
    if not words or not words[0]:
        raise SettingsError(
            "no command: give a script, -m and a module, or --no-python and a program"
        )
    if module and no_python:
        raise SettingsError("-m and --no-python must not be given together")
    program, *arguments = words
    if no_python:
        if shutil.which(program) is None:
            raise SettingsError(f"{echoed(program)} is not a program that can be run")
        return (program, *arguments)
    if module:
        top = program.partition(".")[0]
        if importlib.machinery.PathFinder.find_spec(top, [str(here), *sys.path]) is None:
            raise SettingsError(
                f"-m {bounded(program)}: there is no module {echoed(top)} here or installed"
            )
        return (sys.executable, "-u", "-m", program, *arguments)
    path = Path(program)
    if not path.exists():
        raise SettingsError(f"the script {echoed(program)} does not exist (looked in {here})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise SettingsError(f"{echoed(program)} is a folder without a __main__.py, not a script")
    return (sys.executable, "-u", program, *arguments)


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:  # programs fail in confusing ways in a removed folder
        raise SettingsError("the current folder was removed: change to another one") from error
