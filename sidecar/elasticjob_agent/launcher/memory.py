"""Out-of-memory kill count and memory limit of this process's cgroup.

A worker killed by the kernel for memory ends by SIGKILL like any other; only these counters
distinguish it. In a container the cgroup's files are at the root of the mount, whatever path the
kernel reports for the process; outside, they are below that path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator, NamedTuple

MOUNT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
UNLIMITED = 1 << 60
"""Threshold for no limit: cgroup version 1 then reports a value slightly below 2**63."""


class _Files(NamedTuple):
    events: Path
    limit: Path


class MemoryGroup:
    """Cgroup that limits the memory of this process and its workers."""

    def __init__(self, mount: Path = MOUNT, own: Path = OWN) -> None:
        self._files = next((f for f in _candidates(mount, own) if f.events.is_file()), None)

    def kills(self) -> int | None:
        """Return the number of processes that the kernel has killed for memory; None if unknown.

        The count only grows and includes processes in child cgroups.
        """
        said = _read(self._files.events) if self._files else ""
        found = _KILLS.search(said)
        return int(found.group(1)) if found else None

    def limit_text(self) -> str:
        """Return the memory limit, such as `512 MiB`; empty if there is none."""
        said = _read(self._files.limit).strip() if self._files else ""
        if not said.isdigit() or int(said) >= UNLIMITED:
            return ""
        return f"{int(said) / (1 << 20):.0f} MiB"


def _candidates(mount: Path, own: Path) -> Iterator[_Files]:
    for line in _read(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        places = (path.lstrip("/"), "")
        if not controllers:
            for place in places:
                yield _Files(mount / place / "memory.events", mount / place / "memory.max")
        elif "memory" in controllers.split(","):
            for place in places:
                folder = mount / "memory" / place
                yield _Files(folder / "memory.oom_control", folder / "memory.limit_in_bytes")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
