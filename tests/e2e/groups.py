"""Groups of end-to-end tests, and the claims that keep apart tests that disturb each other.

All workers of pytest use one cluster. The tests of a group run in order in one worker. Tests of
different groups run at the same time unless one of them needs for itself what the other uses.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path, PurePath

from xdist.scheduler import LoadScopeScheduling


class Use(IntEnum):
    """Use of a part of the cluster; the values are those of `flock`."""

    SHARED = fcntl.LOCK_SH
    ALONE = fcntl.LOCK_EX


CLUSTER = "cluster"
"""Operator, etcd and chart, which each test needs."""
WORKERS = "workers"
"""Worker nodes. Jobs that do not need them run on the control plane, which no test removes."""
PARTS = (CLUSTER, WORKERS)
"""Parts of the cluster in the order in which they are claimed, so that no two processes wait for
each other."""

Claims = Mapping[str, Use]

DISTURBS_ALL: Claims = {CLUSTER: Use.ALONE}
DISTURBS_WORKERS: Claims = {CLUSTER: Use.SHARED, WORKERS: Use.ALONE}
ON_WORKERS: Claims = {CLUSTER: Use.SHARED, WORKERS: Use.SHARED}
ON_CONTROL_PLANE: Claims = {CLUSTER: Use.SHARED}


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that run in this order in one worker: files, or single tests of a file."""

    name: str
    claims: Claims
    tests: tuple[str, ...]


def _file(name: str, claims: Claims) -> Group:
    return Group(name, claims, (f"test_{name}.py",))


GROUPS = (
    Group(
        "node faults",
        DISTURBS_WORKERS,
        ("test_faults.py", "test_documented_pages.py::test_tutorial_of_spot_nodes"),
    ),
    _file("backends", ON_CONTROL_PLANE),
    _file("lifecycle", ON_CONTROL_PLANE),
    _file("training", ON_CONTROL_PLANE),
    _file("agents", ON_CONTROL_PLANE),
    _file("frameworks", ON_CONTROL_PLANE),
    _file("launches", ON_CONTROL_PLANE),
    _file("failing", ON_CONTROL_PLANE),
    _file("conflicts", ON_CONTROL_PLANE),
    _file("templates", ON_WORKERS),
    _file("digits", ON_WORKERS),
    _file("dashboard", ON_WORKERS),
    Group("tutorial", ON_WORKERS, ("test_documented_pages.py::test_tutorial_of_the_cluster",)),
    Group(
        "operator",
        DISTURBS_ALL,
        (
            "test_certificates.py",
            "test_restarts.py",
            "test_install.py",
            "test_documented_pages.py::test_readme_installs_and_runs_a_job",
        ),
    ),
)
"""Groups in the order of their start: long ones early; last, the one that needs all for itself."""


def place_of(nodeid: str) -> tuple[int, int]:
    """Return the position of a test's group, and of the test in the group."""
    name = PurePath(nodeid.partition("[")[0]).name
    for number, group in enumerate(GROUPS):
        for position, prefix in enumerate(group.tests):
            if name == prefix or name.startswith(f"{prefix}::"):
                return number, position
    raise ValueError(f"tests/e2e/groups.py must name {name} in a group")


def group_of(nodeid: str) -> Group:
    return GROUPS[place_of(nodeid)[0]]


def is_pinned(file: str) -> bool:
    """Return True if the jobs of all tests of this file run on the control plane."""
    return any(file in group.tests for group in GROUPS if group.claims == ON_CONTROL_PLANE)


class ByGroup(LoadScopeScheduling):
    """Scheduler of pytest-xdist that gives whole groups to its workers, in order."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid).name


class Claimed:
    """Claims of one process, as locks on files in a folder that all processes of the run share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, tuple[Use, ExitStack]] = {}

    def hold(self, wanted: Claims) -> None:
        """Wait until these claims are granted; release all others first."""
        self.keep(wanted)
        for part in PARTS:
            if part in wanted and part not in self._held:
                self._folder.mkdir(parents=True, exist_ok=True)
                stack = ExitStack()
                file = stack.enter_context((self._folder / part).open("w"))
                fcntl.flock(file, wanted[part])
                self._held[part] = (wanted[part], stack)

    def keep(self, wanted: Claims) -> None:
        """Release the claims that are not among these."""
        for part, (use, stack) in list(self._held.items()):
            if wanted.get(part) != use:
                stack.close()
                del self._held[part]
