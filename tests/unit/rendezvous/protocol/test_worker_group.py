"""Knowledge of a node's workers between their agent's reports and the end of the round."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.worker_group import Local, WorkerGroup, Workers
from tests.unit.rendezvous.builders import START, a_failure, a_round

GRACE = 10.0


def local(workers: Workers, round: int = 0, **fields: Any) -> Local:
    return Local(**{"ready": True, "workers": workers, "round": round, **fields})


def told(*words: Local) -> WorkerGroup:
    worker_group = WorkerGroup()
    for word in words:
        worker_group.report(word)
    return worker_group


def is_late(
    worker_group: WorkerGroup, number: int | None, after: float = 0.0
) -> tuple[bool, float | None]:
    """Return True if the workers are late at that round, and the seconds until the next look."""
    alarm, at = Alarm(), None if number is None else a_round(number)
    late = worker_group.is_late(at, GRACE, START + after, alarm)
    return late, None if alarm.at is None else round(alarm.at - START - after, 3)


# -- promises -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", list(Workers))
def test_only_a_node_without_workers_is_idle(workers: Workers) -> None:
    assert told(local(workers)).idle is (workers is Workers.NONE)
    assert WorkerGroup().idle


def test_workers_allowed_to_start_count_as_starting() -> None:
    worker_group = told(local(Workers.NONE, 1, failure=a_failure("a"), done=True, master_port=9))
    worker_group.count_as_starting(2)
    assert worker_group.local == local(Workers.STARTING, 2, master_port=9)


def test_report_from_before_the_start_permission_keeps_it() -> None:
    worker_group = told(local(Workers.NONE, 1))
    worker_group.count_as_starting(2)
    worker_group.report(local(Workers.NONE, 1, failure=a_failure("a"), done=True))
    assert worker_group.local == local(Workers.STARTING, 2)


@pytest.mark.parametrize("round", [2, 3])
@pytest.mark.parametrize("workers", list(Workers))
def test_report_of_the_permitted_or_later_round_ends_the_start_permission(
    workers: Workers, round: int
) -> None:
    worker_group = told(local(Workers.NONE, 1))
    worker_group.count_as_starting(2)
    word = local(workers, round, done=workers is Workers.NONE)
    worker_group.report(word)
    assert worker_group.local == word


def test_running_workers_are_reported_despite_start_permission() -> None:
    worker_group = told(local(Workers.STOPPING, 1))
    worker_group.count_as_starting(2)
    assert worker_group.local == local(Workers.STOPPING, 1)


def test_start_permission_of_older_round_is_ignored() -> None:
    worker_group = told(local(Workers.NONE, 1))
    worker_group.count_as_starting(3)
    worker_group.count_as_starting(2)
    assert worker_group.local == local(Workers.STARTING, 3)


# -- workers of a round that is over --------------------------------------------------


@pytest.mark.parametrize("number", [None, 1, 2])
def test_workers_of_current_round_are_not_late(number: int | None) -> None:
    worker_group = told(local(Workers.NONE), local(Workers.RUNNING, 2))
    assert is_late(worker_group, number, after=60) == (False, None)


def test_node_without_workers_is_not_late() -> None:
    worker_group = told(local(Workers.NONE, 1))
    assert is_late(worker_group, 2) == (False, None)
    assert is_late(worker_group, 2, after=60) == (False, None)


def test_workers_are_late_after_the_grace_since_their_round_ended() -> None:
    worker_group = told(local(Workers.NONE), local(Workers.RUNNING, 1))
    assert is_late(worker_group, 1) == (False, None)
    assert is_late(worker_group, 2, after=5) == (False, GRACE)
    assert is_late(worker_group, 3, after=14.5) == (False, 0.5)
    assert is_late(worker_group, 3, after=15) == (True, None)


def test_grace_restarts_with_workers_of_a_later_round() -> None:
    worker_group = told(local(Workers.NONE), local(Workers.RUNNING, 1))
    assert is_late(worker_group, 2) == (False, GRACE)
    worker_group.report(local(Workers.RUNNING, 2))
    assert is_late(worker_group, 2, after=3) == (False, None)
    assert is_late(worker_group, 3, after=50) == (False, GRACE)


def test_workers_found_at_start_are_late_once_their_round_ended() -> None:
    worker_group = told(local(Workers.RUNNING, 1), local(Workers.STOPPING, 1))
    assert is_late(worker_group, 2) == (True, None)


def test_workers_found_during_their_round_have_the_grace_when_it_ends() -> None:
    worker_group = told(local(Workers.RUNNING, 1))
    assert is_late(worker_group, 1) == (False, None)
    assert is_late(worker_group, 2) == (False, GRACE)


def test_workers_started_by_this_agent_have_the_grace() -> None:
    worker_group = told(local(Workers.RUNNING, 1), local(Workers.RUNNING, 2))
    assert is_late(worker_group, 3) == (False, GRACE)
