"""The only place where the command line reads the environment."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from pathlib import Path

from elasticjob_agent.scratch import ScratchFolder
from elasticjob_cli.errors import CommandError

LONGEST_RUN_DIR = 60
"""Sockets live below the run's folder, and a unix socket's path has at most 107 bytes."""


def state_root() -> Path:
    """The folder of all local jobs of this user."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The specification of these variables says that a relative path is to be ignored.
    root = Path(base) if base.startswith("/") else _home() / ".local" / "state"
    return root / "elasticjob"


def _home() -> Path:
    """HOME, or the account's own where that is no folder's full path."""
    named = os.environ.get("HOME", "")
    if named.startswith("/"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise CommandError(
            "there is no home folder to keep local jobs in: HOME is not set and this user "
            f"({os.getuid()}) has no account; set XDG_STATE_HOME or HOME to a folder"
        ) from None


def run_dir() -> ScratchFolder:
    """A new folder for one run's sockets and etcd data, which only this user can enter.

    What runs have left that were killed with all that guarded them is cleared away.
    """
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise CommandError(
            f"there is no room for temporary files: {error.strerror}; set TMPDIR to a folder in "
            "which this user can write"
        ) from error
    return ScratchFolder("run", base if len(os.fsencode(base)) <= LONGEST_RUN_DIR else "/tmp")


def base_environment() -> dict[str, str]:
    """What the processes of a local job inherit: all but another server's or job's settings."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ELASTICJOB_", "ETCD_", "TORCHELASTIC_"))
    }


def container_environment(python: Path | None) -> dict[str, str]:
    """What the trainer inherits: ours, with the wanted Python first on PATH.

    An active environment is on PATH already. Without one, the interpreter that runs us stands for
    the image's: `.venv/bin/elasticjob run` then trains with what is installed in `.venv`.
    """
    environment = base_environment()
    active = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    if python is not None or not active:
        folder = (python or Path(sys.executable)).absolute().parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment
