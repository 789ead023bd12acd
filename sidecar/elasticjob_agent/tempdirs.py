"""Temporary folders of agents and local runs, removed even if their process was killed.

A process holds a lock on its folder as long as it lives. A process that creates a folder removes
those without a lock holder: the kernel releases a dead process's locks. (systemd-tmpfiles respects
the locks too.)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger("elasticjob.agent")

_LOCKED = "elasticjob-agent-"
"""Name prefix of folders that were locked before they got this name."""
_UNLOCKED = "elasticjob-new-"
NAMED_SECONDS = 3600.0
"""Age after which a folder with the unlocked prefix is abandoned: its process was killed before it
locked the folder."""


class TempDir:
    """Temporary folder of this process, named after its use. Raises OSError.

    `parent` is the folder to create it in; None for the system's temporary folder.
    """

    def __init__(self, use: str, parent: str | None = None) -> None:
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
        self._held = _opened(made)
        self.path = made
        # On a file system without locks the folder keeps the unlocked prefix: `remove_abandoned`
        # removes such a folder only when it is empty.
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = made.rename(
                made.with_name(f"{_LOCKED}{use}-{made.name.removeprefix(_UNLOCKED)}")
            )
        remove_abandoned(made.parent)

    def close(self) -> None:
        """Remove the folder and release its lock."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def remove_abandoned(parent: Path) -> None:
    """Remove the folders that dead processes of this user left in `parent`."""
    for path in _abandoned(parent, _LOCKED):
        log.info("removing %s, whose process was killed", path)
        shutil.rmtree(path, ignore_errors=True)
    # Folders of processes killed before they locked them. Without file locks, folders in use have
    # this prefix too, but they are not empty, so rmdir fails.
    for path in _abandoned(parent, _UNLOCKED):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > NAMED_SECONDS:
                path.rmdir()


def _abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Yield the abandoned folders; each stays locked until the next one is requested."""
    with contextlib.suppress(OSError):
        for path in sorted(parent.glob(f"{prefix}*")):
            with contextlib.suppress(OSError):
                held = _opened(path)
                try:
                    if os.fstat(held).st_uid == os.geteuid() and _is_free(held):
                        yield path
                finally:
                    os.close(held)


def _opened(folder: Path) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(folder, flags)


def _is_free(held: int) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
