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

ALONE = "alone"
"""File of the claims that exists once the last group, which needs all for itself, has begun.
`make test` waits for it before it begins other tests."""

Claims = Mapping[str, Use]

DISTURBS_ALL: Claims = {CLUSTER: Use.ALONE}
DISTURBS_WORKERS: Claims = {CLUSTER: Use.SHARED, WORKERS: Use.ALONE}
ON_WORKERS: Claims = {CLUSTER: Use.SHARED, WORKERS: Use.SHARED}
ON_CONTROL_PLANE: Claims = {CLUSTER: Use.SHARED}


@dataclass(frozen=True, slots=True)
class Group:
    """Tests that run in this order in one worker: files, or single tests of a file.

    Adjacent groups with the same `sequence` run one after the other in one worker.
    """

    name: str
    claims: Claims
    tests: tuple[str, ...]
    sequence: str = ""


def _file(name: str, claims: Claims) -> Group:
    return Group(name, claims, (f"test_{name}.py",))


def _tests(file: str, *names: str) -> tuple[str, ...]:
    return tuple(f"test_{file}.py::test_{name}" for name in names)


GROUPS = (
    # Node faults begin when the jobs on the worker nodes have ended, so those are first.
    Group(
        "one job on the nodes",
        ON_WORKERS,
        _tests(
            "faults",
            "job_scales_up_during_training",
            "job_scales_down_and_reports_removed_pods",
            "killed_worker_is_charged_one_restart",
            "deleted_pod_leaves_and_is_replaced",
            "leave_is_announced_before_the_grace_period_starts",
        ),
        sequence="faults",
    ),
    Group(
        "node faults",
        DISTURBS_WORKERS,
        (
            *_tests(
                "faults",
                "job_leaves_drained_node",
                "node_with_killed_processes_is_lost",
                "node_without_network_is_lost",
                "status_follows_etcd_within_one_second",
                "node_drain_waits_for_job_at_its_minimum",
            ),
            *_tests("documented_pages", "tutorial_of_spot_nodes"),
        ),
        sequence="faults",
    ),
    Group("tutorial", ON_WORKERS, _tests("documented_pages", "tutorial_of_the_cluster")),
    _file("templates", ON_WORKERS),
    Group("users", ON_WORKERS, ("test_digits.py", "test_dashboard.py")),
    Group(
        "lifecycle",
        ON_CONTROL_PLANE,
        _tests(
            "lifecycle",
            "same_name_in_two_namespaces_gives_two_jobs",
            "recreated_job_inherits_nothing_from_its_predecessor",
            "deleted_job_ends_within_its_grace_period",
            "job_is_suspended_changed_and_resumed",
            "clean_pod_policy_selects_remaining_pods",
            "job_beyond_active_deadline_fails",
            "finished_job_is_deleted_after_its_time_to_live",
        ),
        sequence="lifecycle",
    ),
    # Meanwhile the operator deletes the data of deleted jobs, in up to two minutes.
    Group("training", ON_CONTROL_PLANE, ("test_training.py",), sequence="lifecycle"),
    Group(
        "deleted jobs",
        ON_CONTROL_PLANE,
        _tests("lifecycle", "deleted_jobs_leave_nothing_in_etcd"),
        sequence="lifecycle",
    ),
    _file("backends", ON_CONTROL_PLANE),
    _file("launches", ON_CONTROL_PLANE),
    _file("frameworks", ON_CONTROL_PLANE),
    _file("agents", ON_CONTROL_PLANE),
    _file("failing", ON_CONTROL_PLANE),
    _file("conflicts", ON_CONTROL_PLANE),
    Group(
        "operator",
        DISTURBS_ALL,
        (
            "test_certificates.py",
            "test_restarts.py",
            "test_install.py",
            *_tests("documented_pages", "readme_installs_and_runs_a_job"),
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
    using = [g for g in GROUPS if any(test.partition("::")[0] == file for test in g.tests)]
    return bool(using) and all(group.claims == ON_CONTROL_PLANE for group in using)


class ByGroup(LoadScopeScheduling):
    """Scheduler of pytest-xdist that gives groups and sequences to its workers, in order."""

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid)
        return group.sequence or group.name


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
        if wanted == DISTURBS_ALL:
            (self._folder / ALONE).touch()

    def keep(self, wanted: Claims) -> None:
        """Release the claims that are not among these."""
        for part, (use, stack) in list(self._held.items()):
            if wanted.get(part) != use:
                stack.close()
                del self._held[part]
