"""Temporary folders of agents and local runs, cleared away even if whoever made one was killed.

Whoever makes one holds a lock on it for as long as it lives, and first removes those on which
nobody does: the kernel lets go of a dead process's locks. (systemd-tmpfiles heeds them too.)
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
"""What is called so was locked before it got its name."""
_UNLOCKED = "elasticjob-new-"
NAMED_SECONDS = 3600.0
"""What is still called so after this time has nobody who would lock it."""


class ScratchFolder:
    """A folder of this process alone, named after its use. Raises OSError.

    `parent` is where, if not where temporary files belong.
    """

    def __init__(self, use: str, parent: str | None = None) -> None:
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
        self._held = _opened(made)
        self.path = made
        # A file system without locks: it keeps a name under which nobody removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = made.rename(
                made.with_name(f"{_LOCKED}{use}-{made.name.removeprefix(_UNLOCKED)}")
            )
        clear(made.parent)

    def close(self) -> None:
        """Remove it."""
        if self._held >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._held)
            self._held = -1


def clear(parent: Path) -> None:
    """Remove what dead processes of this user have left there."""
    for path in _abandoned(parent, _LOCKED):
        log.info("removing %s, whose process was killed", path)
        shutil.rmtree(path, ignore_errors=True)
    # Of who was killed before it had locked it; where there are no locks others have content.
    for path in _abandoned(parent, _UNLOCKED):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > NAMED_SECONDS:
                path.rmdir()


def _abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """Each is locked by us until the next is asked for."""
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
