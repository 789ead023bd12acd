"""Environment of the command line, read by this module alone."""

from __future__ import annotations

import os
import pwd
import sys
import tempfile
from pathlib import Path

from elasticjob_agent.tempdirs import TempDir
from elasticjob_cli.errors import CommandError
from elasticjob_rendezvous.protocol.text import echoed

LOOPBACK = "127.0.0.1"
"""Address of the servers of local jobs and of the dashboard."""
LONGEST_RUN_DIR = 60
"""Maximum length of the run's folder: a unix socket's path below it has at most 107 bytes."""


def state_root() -> Path:
    """Return the folder of all local jobs of this user."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # The XDG specification requires relative paths to be ignored.
    root = Path(base) if base.startswith("/") else _home() / ".local" / "state"
    return root / "elasticjob"


def _home() -> Path:
    """Return HOME, or the account's home folder if HOME is not an absolute path."""
    named = os.environ.get("HOME", "")
    if named.startswith("/"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise CommandError(
            "no home folder for the state of local jobs: HOME is not set and this user "
            f"({os.getuid()}) has no account; set XDG_STATE_HOME or HOME to a folder"
        ) from None


def run_dir() -> TempDir:
    """Return a new folder for one run's sockets and etcd data, which only this user can enter.

    Also removes the folders of runs that were killed together with their supervisor.
    """
    try:
        base = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise CommandError(
            f"there is no room for temporary files: {error.strerror}; set TMPDIR to a folder that "
            "this user can write to"
        ) from error
    return TempDir("run", base if len(os.fsencode(base)) <= LONGEST_RUN_DIR else "/tmp")


def is_cluster_default() -> bool:
    """Return True if ELASTICJOB_PLACE makes the cluster the default place of all verbs."""
    place = os.environ.get("ELASTICJOB_PLACE", "local")
    if place not in ("local", "cluster"):
        raise CommandError(f"ELASTICJOB_PLACE must be local or cluster, not {echoed(place)}")
    return place == "cluster"


def is_worker() -> bool:
    """Return True if this process is a worker of a job."""
    return "ELASTICJOB_ROUND" in os.environ


def base_environment() -> dict[str, str]:
    """Return the inherited environment of a local job's processes.

    Leaves out settings of other servers and jobs.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ELASTICJOB_", "ETCD_", "TORCHELASTIC_"))
    }


def container_environment(python: Path | None) -> dict[str, str]:
    """Return the trainer's inherited environment, with the chosen Python first on PATH.

    An active virtual environment is on PATH already. Without one, the interpreter that runs
    elasticjob takes the image's place: `.venv/bin/elasticjob run` trains with the packages of
    `.venv`.
    """
    environment = base_environment()
    active = environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    if python is not None or not active:
        folder = (python or Path(sys.executable)).absolute().parent
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment
