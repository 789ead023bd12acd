"""Rounds of aborted collectives that are not charged."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.charging import cause_of_absence
from elasticjob_rendezvous.protocol.records.members import (
    ABORTED,
    Cause,
    CauseKind,
    MemberState,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from tests.unit.rendezvous.builders import Job, identity


def gang() -> Job:
    """Return three members of final round 1."""
    return Job("a", "b", "c", max_nodes=3).sealed("a", "b", "c")


def found(job: Job, **bounds: Any) -> Cause | None:
    view = job.view()
    return cause_of_absence(view, view.rosters.get(1), RendezvousParams(1, 3, **bounds))


def test_complete_gang_has_no_uncharged_cause() -> None:
    assert found(gang()) is None


def test_unknown_roster_has_no_uncharged_cause() -> None:
    assert cause_of_absence(gang().view(), None, RendezvousParams(1, 3)) is None


def test_lost_member_after_a_done_one_prevents_the_charge() -> None:
    job = gang().done("a").gone("c")
    assert found(job) == cause_with_reasons(CauseKind.LOSS, ("c",), [ABORTED])


def test_lost_done_member_does_not_prevent_the_charge() -> None:
    assert found(gang().done("c").gone("c")) is None


def test_member_with_a_new_session_was_lost() -> None:
    job = gang()
    job.delete(job.stored("b").key).member("b", session="s2")
    assert found(job) == cause_with_reasons(CauseKind.LOSS, ("b",), [ABORTED])


def test_member_that_was_cut_off_in_that_round_prevents_the_charge() -> None:
    """Its record may arrive after the next round began for the aborts of its peers."""
    job = gang().change("b", state=MemberState.WAITING, round=1, cut_off_round=1)
    assert found(job) == cause_with_reasons(CauseKind.LOSS, ("b",), [ABORTED])
    assert found(gang().change("b", state=MemberState.WAITING, round=1)) is None
    assert found(gang().change("b", round=2, cut_off_round=2)) is None
    job.change("c", state=MemberState.LEAVING, reason="drained")
    found_ = found(job)
    assert found_ is not None
    assert (found_.kind, found_.members) == (CauseKind.LEAVE, ("c",))


def test_rank_assignment_without_a_session_is_not_compared() -> None:
    """Rosters of an earlier release name no session."""
    job = Job("a", "b", max_nodes=3)
    for name in "ab":
        job.delete(job.stored(name).key).member(name, session="")
    job.sealed("a", "b")
    for name in "ab":
        job.delete(job.stored(name).key).member(name, session="s2", state=MemberState.RUNNING)
    assert found(job) is None


@pytest.mark.parametrize("reason", ["drained", ""])
def test_leave_precedes_returned_member(reason: str) -> None:
    job = gang().change("c", state=MemberState.LEAVING, reason=reason)
    job.delete(job.stored("b").key).member("b", session="s2")
    assert found(job) == cause_with_reasons(CauseKind.LEAVE, ("c",), [reason, ABORTED], urgent=True)


def test_lost_member_precedes_a_leave() -> None:
    job = gang().change("c", state=MemberState.LEAVING, reason="drained").gone("b")
    assert found(job) == cause_with_reasons(CauseKind.LOSS, ("b",), [ABORTED])


def test_member_with_drain_request_leaves_for_its_reason() -> None:
    marks = (DrainRequest(identity("b"), "SurplusStraggler"),)
    wanted = cause_with_reasons(CauseKind.LEAVE, ("b",), ["SurplusStraggler", ABORTED], urgent=True)
    assert found(gang(), marks=marks) == wanted
