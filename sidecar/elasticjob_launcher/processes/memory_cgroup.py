"""Memory cgroup of the launcher and its workers: kills by the kernel, and the limit.

A worker killed by the kernel for memory ends by SIGKILL like any other; only the counters of
its cgroup distinguish it. In a container the cgroup's files are at the root of the mount,
independent of the path that the kernel reports for the process; outside, they are below that path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterator, NamedTuple

CGROUP_MOUNT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
UNLIMITED = 1 << 60
"""Threshold for no limit: cgroup version 1 then reports a value slightly below 2**63."""


class _CgroupFiles(NamedTuple):
    events: Path
    limit: Path


class MemoryCgroup:
    """Cgroup that limits the memory of this process and its workers, from its construction on."""

    def __init__(self, mount: Path = CGROUP_MOUNT, own: Path = OWN_CGROUP) -> None:
        self._files = next((f for f in _cgroup_candidates(mount, own) if f.events.is_file()), None)
        self._explained = self.kills()

    def kills(self) -> int | None:
        """Return the number of processes that the kernel has killed for memory; None if unknown.

        The count only grows and includes processes in child cgroups.
        """
        content = _read_file(self._files.events) if self._files else ""
        found = _KILLS.search(content)
        return int(found.group(1)) if found else None

    def explains_exit(self) -> bool:
        """Return True if the kernel has killed a process since; each kill explains one exit."""
        known, kills = self._explained, self.kills()
        if known is None or kills is None or kills <= known:
            return False
        self._explained = known + 1
        return True

    def limit_text(self) -> str:
        """Return the memory limit, such as `512 MiB`; empty if there is none."""
        content = _read_file(self._files.limit).strip() if self._files else ""
        if not (content.isascii() and content.isdigit()) or int(content) >= UNLIMITED:
            return ""
        return f"{int(content) / (1 << 20):.0f} MiB"


def _cgroup_candidates(mount: Path, own: Path) -> Iterator[_CgroupFiles]:
    for line in _read_file(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        places = (path.lstrip("/"), "")
        if not controllers:
            for place in places:
                yield _CgroupFiles(mount / place / "memory.events", mount / place / "memory.max")
        elif "memory" in controllers.split(","):
            for place in places:
                folder = mount / "memory" / place
                yield _CgroupFiles(folder / "memory.oom_control", folder / "memory.limit_in_bytes")


def _read_file(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
