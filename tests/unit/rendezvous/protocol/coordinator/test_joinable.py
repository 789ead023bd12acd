"""The watches and the counts of a joinable round: each round has its own."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.events import Verdict
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    RoundState,
    Streak,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest
from tests.unit.rendezvous.builders import Job, identity

JOINABLE, FROZEN, FINAL, CLOSED = RoundState
WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState
LOSS = Cause(CauseKind.LOSS, ("z",))


def ids(names: str) -> tuple[str, ...]:
    return tuple(identity(name) for name in names)


def confirm(job: Job, *names: str) -> Job:
    stored = job.view().round
    assert stored is not None
    for name in names:
        job.change(name, confirmed=stored.modified)
    return job


def stopping(round: int, **bounds: Any) -> Job:
    """The round after this one is joinable; a waits, b has yet to stop its workers."""
    job = Job("a", "b", stop_grace_seconds=10, confirm_seconds=5, **bounds)
    job.sealed("a", "b", number=round).change("a", state=WAITING)
    return job.round(round + 1, cause=LOSS, previous=round)


# -- fences ---------------------------------------------------------------------------


def test_wait_for_old_workers_restarts_in_each_round() -> None:
    job = stopping(1).idle().later(14.5).idle()
    job.change("b", round=2).round(3, cause=LOSS, previous=2).idle().later(14.5).idle()
    job.later(0.5).act()
    assert job.names() == {"a"}


def test_wait_for_old_workers_counts_from_the_opening_of_the_round() -> None:
    """A correction of its cause in between gives them no more time."""
    job = stopping(1).bounds(
        stop_grace_seconds=10,
        confirm_seconds=5,
        marks=(DrainRequest(identity("b"), "evicted", True),),
    )
    job.round(2, cause=Cause(CauseKind.LEAVE, ("b",), "drained"), previous=1)
    assert job.decide() is not None, "the leave was a preemption"
    assert job.later(10).act().cause.kind is CauseKind.PREEMPTION
    job.idle().later(5).act()
    assert job.names() == {"a"}


def test_time_to_obey_a_new_round_begins_with_that_round() -> None:
    """An agent that answers may register again, and has a second from when it is told."""
    job = Job("a", "b", "c", keep_alive_seconds=0.0, expected=3).sealed("a", "b", "c")
    job.change("a", state=WAITING).gone("b").round(2, cause=LOSS, previous=1)
    job.change("c", state=WAITING).idle().answers("b", Verdict.AGENT_ALIVE)
    job.later(3.9).idle()
    job.change("a", round=2).change("c", round=2).round(3, cause=LOSS, previous=1)
    job.idle().later(0.9).idle()
    assert job.later(0.1).act().ids == ids("ac")


@pytest.mark.parametrize(
    ("gang", "done", "seconds"),
    [("a", "", 0.5), ("ab", "", 5.0), ("ab", "b", 5.0)],
    ids=["alone", "of two", "the last of two"],
)
def test_surplus_member_that_takes_over_waits_for_the_links_of_its_predecessor(
    gang: str, done: str, seconds: float
) -> None:
    """The former coordinator `a` is silent. A member that trained alone relied on its lease."""
    job = Job("s", *gang, min_nodes=1, expected=len(gang) - len(done)).sealed(*gang)
    job.coordinator.peers.note_leader_heartbeat(identity("a"), job.now - 60)
    job.change("s", state=WAITING).gone("a").round(2, cause=LOSS, previous=1)
    if "b" in gang:
        job.change("b", state=DONE if done else WAITING)
    job.done(*done)
    job.idle().answers("a", Verdict.UNKNOWN)
    job.later(seconds - 0.1).idle()
    assert job.later(0.1).act().ids


# -- the last call --------------------------------------------------------------------


def test_last_call_restarts_in_each_round() -> None:
    job = Job("a", "b", min_nodes=2, last_call_seconds=30).round(1).idle().later(30)
    assert job.act().state is FROZEN
    confirm(job, "a").idle().later(5)
    assert job.act().number == 2
    job.idle().later(29.9).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_single_member_suffices_for_last_call_if_allowed() -> None:
    job = Job("a", min_nodes=1, last_call_seconds=30).round(1).idle().later(29.9).idle()
    assert job.later(0.1).act().ids == ids("a")


@pytest.mark.parametrize(("expected", "awaited"), [(1, 0), (2, 1), (4, 3)])
def test_member_that_cannot_come_is_not_awaited(expected: int, awaited: int) -> None:
    job = Job("a", min_nodes=2, expected=expected).round(1).idle()
    assert job.coordinator.awaited == awaited


# -- members that did not confirm -----------------------------------------------------


def test_silent_member_is_not_included_if_others_suffice() -> None:
    job = Job("a", "b", expected=2).round(1)
    assert job.act().ids == ids("ab")
    confirm(job, "a").idle().later(5)
    assert job.act().state is FINAL
    job.change("a", confirmed=0, round=1).round(2, cause=LOSS, previous=1)
    assert job.act().ids == ids("a")


def test_recovering_gang_that_needs_its_silent_member_skips_last_call() -> None:
    job = Job("a", "b", min_nodes=2, expected=4, last_call_seconds=30).sealed("a", "b")
    job.change("a", state=WAITING).change("b", state=WAITING).round(2, cause=LOSS, previous=1)
    assert job.act().state is FROZEN
    confirm(job, "a").idle().later(5)
    assert job.act().number == 3
    assert job.act().ids == ids("ab"), "both are survivors of round 1"


# -- pauses and the join timeout ------------------------------------------------------


def test_each_recovery_has_its_own_back_off() -> None:
    job = Job("a", "b", max_nodes=2).sealed("a", "b", number=1)
    for name in "ab":
        job.change(name, state=WAITING)
    failure = Cause(CauseKind.FAILURE, ("b",))
    job.round(2, cause=failure, previous=1, charged=(1,), streak=Streak(2)).idle()
    assert job.later(1).act().state is FROZEN
    job.sealed("a", "b", number=2)
    for name in "ab":
        job.change(name, state=WAITING)
    job.round(3, cause=failure, previous=2, charged=(1, 2), streak=Streak(3)).idle()
    job.later(1.9).idle()
    assert job.later(0.1).act().state is FROZEN


def test_join_timeout_restarts_once_members_can_come_again() -> None:
    def can_come(expected: int) -> None:
        job.bounds(min_nodes=2, expected=expected, join_timeout_seconds=600).idle()

    job = Job("a", min_nodes=2, expected=2, join_timeout_seconds=600).round(1).idle().later(300)
    can_come(1)
    job.later(3600).idle()
    can_come(2)
    job.later(599).idle()
    assert job.later(1).act().state is CLOSED


def test_join_timeout_of_a_later_round_begins_with_it() -> None:
    job = Job("a", "b", min_nodes=2, join_timeout_seconds=600, last_call_seconds=900).round(1)
    job.idle().later(500).idle().member("c").member("d")
    assert job.act().state is FROZEN
    confirm(job, *"abcd").act()
    job.gone("b", "c", "d").change("a", round=1).round(2, cause=LOSS, previous=1)
    for name in "bcd":
        job.answers(name, Verdict.GONE)
    job.idle().later(599).idle()
    assert job.later(1).act().state is CLOSED
