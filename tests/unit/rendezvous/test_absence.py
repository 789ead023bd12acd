"""Members without a key: when they are lost, and when their workers count as stopped."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.core import absence
from elasticjob_rendezvous.core.events import PeerDown, PeerHeard, PeerUp, Probed, Verdict
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, Peers
from elasticjob_rendezvous.core.records import MemberState, RoundState
from elasticjob_rendezvous.core.timers import Timers
from tests.unit.rendezvous.builders import ORPHAN_SECONDS, Job, a_member, identity

WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState
GONE, WORKERS, AGENT, UNKNOWN = (
    Verdict.GONE,
    Verdict.WORKERS_ALIVE,
    Verdict.AGENT_ALIVE,
    Verdict.UNKNOWN,
)
B = identity("b")
LEASE = 5.0
LONG_AGO = 1e6


class Absent:
    """Member b ran round 1 and has no key; round 2 is joinable. One watcher's memory of it."""

    def __init__(self, state: MemberState = RUNNING, round: int = 1, **bounds: Any) -> None:
        self.job = Job("a", "b", **{"keep_alive_seconds": LEASE, **bounds}).sealed("a", "b")
        self.job.change("b", state=state, round=round)
        self.job.view()
        self.job.gone("b").round(2, previous=1)
        self.peers, self.timers = Peers(), Timers()

    def heard(self, ago: float = 0.0) -> Absent:
        self.peers.up(PeerUp(B, "s1"), self.job.now - ago)
        return self

    def answers(self, verdict: Verdict) -> Absent:
        answer = Probed(B, "s1", verdict)
        self.peers.probed(answer, self.job.view(), self.job.now, ORPHAN_SECONDS)
        return self

    def stopped(self, after: float = 0.0) -> bool:
        self.timers.begin_step(self.job.later(after).now)
        view = self.job.view()
        assert view.bounds is not None
        seat = view.rosters[1].seat(B)
        assert seat is not None
        return absence.has_stopped(seat, view, view.bounds.record, self.peers, self.timers)

    def lost(self, after: float = 0.0) -> bool:
        self.timers.begin_step(self.job.later(after).now)
        bounds = self.job.view().bounds
        assert bounds is not None
        return absence.is_lost(B, bounds.record, self.peers, self.timers)

    def took_over(self) -> Absent:
        self.timers.begin_step(self.job.now)
        self.timers.since(absence.TOOK_OVER)
        return self

    @property
    def wakes_in(self) -> float | None:
        return None if self.timers.wake is None else self.timers.wake - self.job.now


# -- is it lost? ----------------------------------------------------------------------


def test_who_vanishes_under_a_settled_coordinator_is_lost_at_once() -> None:
    absent = Absent().took_over()
    assert absent.lost(0.1)


@pytest.mark.parametrize(("lease", "patience"), [(LEASE, 5.0), (2.0, 4.0)])
def test_who_was_absent_at_the_change_of_coordinator_may_register_again(
    lease: float, patience: float
) -> None:
    """For a lease, but never for less than it may live on the proof of links alone."""
    absent = Absent(keep_alive_seconds=lease).took_over()
    assert not absent.lost()
    assert absent.wakes_in == pytest.approx(patience)
    assert not absent.lost(patience - 0.1)
    assert absent.lost(0.1)


def test_who_is_linked_may_register_again() -> None:
    absent = Absent().took_over()
    absent.job.later(60)
    assert not absent.heard().lost()
    for _ in range(4):
        assert not absent.heard().lost(1.2)
    assert absent.heard().lost(0.2)


def test_a_link_that_was_heard_too_long_ago_grants_nothing() -> None:
    assert Absent().took_over().heard(ago=5).lost(0.1)


def test_proof_of_its_end_leaves_no_patience() -> None:
    absent = Absent().took_over().heard()
    assert not absent.lost()
    assert absent.answers(GONE).lost()


@pytest.mark.parametrize("verdict", [WORKERS, AGENT, UNKNOWN])
def test_any_other_answer_is_no_proof(verdict: Verdict) -> None:
    absent = Absent().took_over()
    assert not absent.lost()
    assert not absent.answers(verdict).lost()


def test_who_came_back_begins_anew() -> None:
    absent = Absent().took_over().heard()
    assert not absent.lost()
    absent.timers.begin_step(absent.job.later(100).now)
    absence.ended(B, absent.timers)
    assert not absent.heard().lost()


# -- have its workers stopped? --------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "round", "stopped"),
    [
        (LEAVING, 1, True),
        (DONE, 1, True),
        (WAITING, 1, True),
        (WAITING, 0, False),
        (RUNNING, 1, False),
        (STOPPING, 1, False),
    ],
)
def test_what_it_said_before_it_went(state: MemberState, round: int, stopped: bool) -> None:
    absent = Absent(state, round)
    assert absent.stopped() is stopped
    assert (B in absent.peers.inquiries) is not stopped


@pytest.mark.parametrize(
    ("verdict", "bounds", "after"),
    [
        (GONE, {}, 0.0),
        (WORKERS, {}, ORPHAN_SECONDS),
        (AGENT, {}, LEASE),
        (AGENT, {"keep_alive_seconds": 2.0}, LINK_SILENCE_SECONDS + absence.KILL_SECONDS),
        (AGENT, {"keep_alive_seconds": 20.0}, 20.0),
        (UNKNOWN, {}, absence.KILL_SECONDS),
    ],
)
def test_what_an_answer_is_worth(verdict: Verdict, bounds: dict[str, Any], after: float) -> None:
    """Seconds from the first sight of its absence until its workers count as stopped."""
    absent = Absent(**bounds)
    assert not absent.stopped()
    absent.answers(verdict)
    if after:
        assert not absent.stopped()
        assert absent.wakes_in == pytest.approx(after)
        assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


def test_without_an_answer_nothing_counts_as_stopped() -> None:
    absent = Absent()
    assert not absent.stopped()
    assert absent.wakes_in is not None
    assert absent.wakes_in <= 0.02  # the probe is sent by the next step
    assert not absent.stopped(LONG_AGO)


@pytest.mark.parametrize(("ago", "after"), [(0.0, 4.0), (1.5, 2.5), (3.9, 0.1)])
def test_silence_counts_when_it_can_trust_its_link_no_more(ago: float, after: float) -> None:
    """It may run for three seconds after it was heard, and takes one to kill its workers."""
    absent = Absent().heard(ago)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(after - 0.05)
    assert absent.stopped(0.1)


def test_a_silent_member_that_was_fenced_keeps_its_lease_in_its_own_eyes() -> None:
    absent = Absent()
    absent.peers.fenced.add(B)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(LEASE - 0.1)
    assert absent.stopped(0.1)


def test_the_last_answer_counts() -> None:
    absent = Absent()
    assert not absent.stopped()
    assert not absent.answers(WORKERS).stopped(1)
    assert not absent.answers(AGENT).stopped(1)
    assert absent.answers(GONE).stopped()


def test_a_proof_from_before_needs_no_question() -> None:
    absent = Absent().answers(GONE)
    assert absent.stopped()
    assert not absent.peers.inquiries


# -- no round beside them -------------------------------------------------------------


def ids(names: str) -> tuple[str, ...]:
    return tuple(identity(name) for name in names)


def recovering(**bounds: Any) -> Job:
    """Round 2 is joinable: a and b wait, and nobody knows what became of z, which ran round 1."""
    job = Job("a", "b", "z", **bounds).sealed(*"abz")
    job.look()
    job.later(60).gone("z").round(2, previous=1)
    return job.change("a", state=WAITING).change("b", state=WAITING)


@pytest.mark.parametrize(
    ("verdict", "seconds"), [(UNKNOWN, 1.0), (AGENT, LEASE), (WORKERS, ORPHAN_SECONDS)]
)
def test_no_round_is_frozen_before_the_absent_have_stopped(
    verdict: Verdict, seconds: float
) -> None:
    job = recovering(keep_alive_seconds=LEASE).idle().answers("z", verdict)
    job.idle().later(seconds - 0.1).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_an_answer_lets_the_round_begin_at_once() -> None:
    assert recovering().idle().answers("z", GONE).act().ids == ids("ab")


def test_all_of_the_absent_are_asked_at_once() -> None:
    job = Job("a", "y", "z").sealed(*"ayz")
    job.look()
    job.later(60).gone("y", "z").round(2, previous=1).change("a", state=WAITING).idle()
    assert set(job.coordinator.peers.inquiries) == {identity("y"), identity("z")}
    job.answers("y", GONE).idle().answers("z", GONE)
    assert job.act().ids == ids("a")


def test_who_is_done_is_not_asked() -> None:
    job = recovering().done("z")
    assert job.act().ids == ids("ab")
    assert not job.coordinator.peers.inquiries


def test_who_was_seen_leaving_is_not_asked() -> None:
    """Even by a coordinator that read of it only after its key was gone."""
    job = recovering()
    job.coordinator.leavers[identity("z")] = "drained"
    assert job.act().ids == ids("ab")


def test_who_comes_back_is_not_asked_any_more() -> None:
    job = recovering().idle().member("z", session="s2", round=1)
    assert job.act().ids == ids("abz")


def test_a_link_that_broke_is_not_believed_to_have_stopped() -> None:
    job = recovering()
    job.coordinator.peers.up(PeerUp(identity("z"), "s1"), job.now)
    job.coordinator.peers.down(PeerDown(identity("z"), "s1"), job.view(), job.now)
    job.idle().answers("z", UNKNOWN)
    job.later(LINK_SILENCE_SECONDS + absence.KILL_SECONDS - 0.1).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_a_link_that_lives_alone_is_not_believed_to_have_stopped() -> None:
    job = recovering().idle().answers("z", UNKNOWN)
    for _ in range(20):
        job.coordinator.peers.up(PeerHeard(identity("z"), "s1"), job.now)
        job.later(1).idle()


def test_a_fenced_member_is_asked_like_any_other() -> None:
    job = recovering(stop_grace_seconds=10, confirm_seconds=5, keep_alive_seconds=LEASE)
    job.change("b", state=RUNNING).answers("z", GONE).idle().later(15)
    job.act()
    assert job.names() == {"a"}
    job.idle().answers("b", UNKNOWN).later(LEASE - 0.1).idle()
    assert job.later(0.1).act().ids == ids("a")


@pytest.mark.parametrize("name", ["z", "y"])
def test_no_round_is_frozen_while_an_orphans_workers_live(name: str) -> None:
    """Not even those of an older round, y's, whose seat nobody looks at any more."""
    job = recovering()
    job.coordinator.peers.adopt(a_member(name), 2, job.now, ORPHAN_SECONDS)
    job.idle().answers("z", GONE)
    if name == "y":
        job.idle().later(5).idle().answers("y", GONE)
    assert job.act().ids == ids("ab")


def test_a_new_coordinator_asks_anew() -> None:
    job = recovering().idle().answers("z", UNKNOWN)
    job.coordinator.take_over(job.now, ())
    job.idle().later(10).idle()
    assert job.answers("z", UNKNOWN).later(1).act().state is RoundState.FROZEN
