"""Knowledge of a node's workers between their agent's reports and the end of the round."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.crew import Crew
from elasticjob_rendezvous.core.local import Local, Workers
from tests.unit.rendezvous.builders import START, a_failure, a_round

GRACE = 10.0


def local(workers: Workers, round: int = 0, **fields: Any) -> Local:
    return Local(**{"ready": True, "workers": workers, "round": round, **fields})


def told(*words: Local) -> Crew:
    crew = Crew()
    for word in words:
        crew.tell(word)
    return crew


def is_late(crew: Crew, number: int | None, after: float = 0.0) -> tuple[bool, float | None]:
    """Return True if the workers are late at that round, and the seconds until the next look."""
    alarm, at = Alarm(), None if number is None else a_round(number)
    late = crew.is_late(at, GRACE, START + after, alarm)
    return late, None if alarm.at is None else round(alarm.at - START - after, 3)


# -- promises -------------------------------------------------------------------------


@pytest.mark.parametrize("workers", list(Workers))
def test_only_a_node_without_workers_is_idle(workers: Workers) -> None:
    assert told(local(workers)).idle is (workers is Workers.NONE)
    assert Crew().idle


def test_workers_allowed_to_start_count_as_starting() -> None:
    crew = told(local(Workers.NONE, 1, failure=a_failure("a"), done=True, master_port=9))
    crew.promise(2)
    assert crew.local == local(Workers.STARTING, 2, master_port=9)


def test_report_from_before_the_start_permission_keeps_it() -> None:
    crew = told(local(Workers.NONE, 1))
    crew.promise(2)
    crew.tell(local(Workers.NONE, 1, failure=a_failure("a"), done=True))
    assert crew.local == local(Workers.STARTING, 2)


@pytest.mark.parametrize("round", [2, 3])
@pytest.mark.parametrize("workers", list(Workers))
def test_report_of_the_permitted_or_later_round_ends_the_start_permission(
    workers: Workers, round: int
) -> None:
    crew = told(local(Workers.NONE, 1))
    crew.promise(2)
    word = local(workers, round, done=workers is Workers.NONE)
    crew.tell(word)
    assert crew.local == word


def test_running_workers_are_reported_despite_start_permission() -> None:
    crew = told(local(Workers.STOPPING, 1))
    crew.promise(2)
    assert crew.local == local(Workers.STOPPING, 1)


def test_start_permission_of_older_round_is_ignored() -> None:
    crew = told(local(Workers.NONE, 1))
    crew.promise(3)
    crew.promise(2)
    assert crew.local == local(Workers.STARTING, 3)


# -- workers of a round that is over --------------------------------------------------


@pytest.mark.parametrize("number", [None, 1, 2])
def test_workers_of_current_round_are_not_late(number: int | None) -> None:
    crew = told(local(Workers.NONE), local(Workers.RUNNING, 2))
    assert is_late(crew, number, after=60) == (False, None)


def test_node_without_workers_is_not_late() -> None:
    crew = told(local(Workers.NONE, 1))
    assert is_late(crew, 2) == (False, None)
    assert is_late(crew, 2, after=60) == (False, None)


def test_workers_are_late_after_the_grace_since_their_round_ended() -> None:
    crew = told(local(Workers.NONE), local(Workers.RUNNING, 1))
    assert is_late(crew, 1) == (False, None)
    assert is_late(crew, 2, after=5) == (False, GRACE)
    assert is_late(crew, 3, after=14.5) == (False, 0.5)
    assert is_late(crew, 3, after=15) == (True, None)


def test_grace_restarts_with_workers_of_a_later_round() -> None:
    crew = told(local(Workers.NONE), local(Workers.RUNNING, 1))
    assert is_late(crew, 2) == (False, GRACE)
    crew.tell(local(Workers.RUNNING, 2))
    assert is_late(crew, 2, after=3) == (False, None)
    assert is_late(crew, 3, after=50) == (False, GRACE)


def test_workers_found_at_start_are_late_once_their_round_ended() -> None:
    crew = told(local(Workers.RUNNING, 1), local(Workers.STOPPING, 1))
    assert is_late(crew, 2) == (True, None)


def test_workers_found_during_their_round_have_the_grace_when_it_ends() -> None:
    crew = told(local(Workers.RUNNING, 1))
    assert is_late(crew, 1) == (False, None)
    assert is_late(crew, 2) == (False, GRACE)


def test_workers_started_by_this_agent_have_the_grace() -> None:
    crew = told(local(Workers.RUNNING, 1), local(Workers.RUNNING, 2))
    assert is_late(crew, 3) == (False, GRACE)
