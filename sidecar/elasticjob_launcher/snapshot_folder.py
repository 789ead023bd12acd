"""Folder in memory for snapshots of the training state: `elasticjob.train.Snapshots` writes it.

It outlives the workers and the agent, and ends with the launcher. The launcher holds a lock on it,
which the kernel releases when the launcher is killed: then the next launcher of this user on the
machine, the launcher's init process or the supervisor of a local job removes the folder. In a pod
it is in the pod's own `/dev/shm`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

VARIABLE = "ELASTICJOB_SNAPSHOT_FOLDER"
TROUBLE = "ELASTICJOB_SNAPSHOT_TROUBLE"
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "elasticjob-snapshots-"


class SnapshotFolder:
    """Folder of this launcher; `path` is None if there is no place for one.

    The workers get the error of a folder that cannot be created, and report it.
    """

    def __init__(self, parent: Path | None = SHARED_MEMORY) -> None:
        self.path: Path | None = None
        self._held = -1
        self._trouble = ""
        if parent is None:
            return
        remove_abandoned(parent)
        path = parent / f"{PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
        try:
            # Locked under another name first: another launcher removes folders without a lock.
            draft = parent / f".{path.name}"
            draft.mkdir(mode=0o700)
            try:
                self._held = _opened(draft)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.path = draft.rename(path)
            except OSError:
                draft.rmdir()
                raise
        except OSError as error:
            self._trouble = f"{error.errno or 0} {parent}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the workers. They are empty without a folder, and hide inherited ones.

        The second one is the number of the error and the parent, if the folder cannot be created.
        """
        return {VARIABLE: "" if self.path is None else str(self.path), TROUBLE: self._trouble}

    def close(self) -> None:
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
        self.path, self._held = None, -1


def remove_abandoned(parent: Path = SHARED_MEMORY) -> None:
    """Remove the folders of this user whose launchers were killed."""
    with contextlib.suppress(OSError):
        for path in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                held = _opened(path)
                try:
                    if os.fstat(held).st_uid == os.geteuid():
                        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(held)


def _opened(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
