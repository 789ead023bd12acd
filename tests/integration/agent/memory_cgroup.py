"""Cgroup (version 1 or 2) with a memory limit, if this machine permits one."""

from __future__ import annotations

import os
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
LIMIT_BYTES = 96 << 20


class MemoryGroup:
    """Group below the mount; processes enter it by writing 0 to `procs`."""

    def __init__(self, folder: Path, limit: str) -> None:
        self._folder = folder
        folder.mkdir()
        try:
            (folder / limit).write_text(str(LIMIT_BYTES))
            self.procs = folder / "cgroup.procs"
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove the group, which must contain no process."""
        self._folder.rmdir()


def memory_group() -> MemoryGroup | None:
    """Return a new group, None if none can be made, as in most containers."""
    unified = MOUNT / "cgroup.controllers"
    name = f"elasticjob-test-{os.getpid()}"  # other processes may run this test at the same time
    folder, limit = MOUNT / "memory" / name, "memory.limit_in_bytes"
    if unified.exists():
        folder, limit = MOUNT / name, "memory.max"
    try:
        return MemoryGroup(folder, limit)
    except OSError:
        return None


def possible() -> bool:
    """Return True if a group can be made here."""
    group = memory_group()
    if group is not None:
        group.close()
    return group is not None
