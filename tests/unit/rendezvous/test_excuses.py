"""Causes that excuse a round of aborted collectives."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.core.bounds import Bounds, Mark
from elasticjob_rendezvous.core.excuses import excuse
from elasticjob_rendezvous.core.records import ABORTED, Cause, CauseKind, MemberState, because
from tests.unit.rendezvous.builders import Job, identity


def gang() -> Job:
    """Return three members of final round 1."""
    return Job("a", "b", "c", max_nodes=3).sealed("a", "b", "c")


def found(job: Job, **bounds: Any) -> Cause | None:
    view = job.view()
    return excuse(view, view.rosters.get(1), Bounds(1, 3, **bounds))


def test_a_whole_gang_has_no_excuse() -> None:
    assert found(gang()) is None


def test_an_unknown_roster_has_no_excuse() -> None:
    assert excuse(gang().view(), None, Bounds(1, 3)) is None


def test_a_lost_member_behind_a_done_one_excuses_the_round() -> None:
    job = gang().done("a").gone("c")
    assert found(job) == because(CauseKind.LOSS, ("c",), [ABORTED])


def test_a_lost_member_that_was_done_excuses_nothing() -> None:
    assert found(gang().done("c").gone("c")) is None


def test_a_member_with_a_new_session_was_lost() -> None:
    job = gang()
    job.delete(job.stored("b").key).member("b", session="s2")
    assert found(job) == because(CauseKind.LOSS, ("b",), [ABORTED])


def test_a_seat_without_a_session_is_not_compared() -> None:
    """Rosters of an earlier release name no session."""
    job = Job("a", "b", max_nodes=3)
    for name in "ab":
        job.delete(job.stored(name).key).member(name, session="")
    job.sealed("a", "b")
    for name in "ab":
        job.delete(job.stored(name).key).member(name, session="s2", state=MemberState.RUNNING)
    assert found(job) is None


@pytest.mark.parametrize("reason", ["drained", ""])
def test_a_leave_is_told_before_a_returned_member(reason: str) -> None:
    job = gang().change("c", state=MemberState.LEAVING, reason=reason)
    job.delete(job.stored("b").key).member("b", session="s2")
    assert found(job) == because(CauseKind.LEAVE, ("c",), [reason, ABORTED], urgent=True)


def test_a_lost_member_is_told_before_a_leave() -> None:
    job = gang().change("c", state=MemberState.LEAVING, reason="drained").gone("b")
    assert found(job) == because(CauseKind.LOSS, ("b",), [ABORTED])


def test_a_marked_member_leaves_for_the_reason_of_its_mark() -> None:
    marks = (Mark(identity("b"), "SurplusStraggler"),)
    wanted = because(CauseKind.LEAVE, ("b",), ["SurplusStraggler", ABORTED], urgent=True)
    assert found(gang(), marks=marks) == wanted
