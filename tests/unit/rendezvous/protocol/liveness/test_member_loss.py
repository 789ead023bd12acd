"""Members without a key: the times at which they count as lost and their workers as stopped."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.effects import Probe
from elasticjob_rendezvous.protocol.events import PeerDown, PeerHeartbeat, PeerUp, Probed, Verdict
from elasticjob_rendezvous.protocol.liveness import detector_upkeep, member_loss
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    RELAY_SECONDS,
    TRUST_SECONDS,
    FailureDetector,
)
from elasticjob_rendezvous.protocol.liveness.leader_link import HANDOVER_SECONDS
from elasticjob_rendezvous.protocol.liveness.peer_state import PeerState
from elasticjob_rendezvous.protocol.liveness.probes import PROBE_INTERVAL_SECONDS
from elasticjob_rendezvous.protocol.records.members import CauseKind, MemberState, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment
from elasticjob_rendezvous.protocol.replica import View
from tests.unit.rendezvous.builders import KEYS, ORPHAN_SECONDS, Job, a_member, identity, inquiries

WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState
GONE, WORKERS, AGENT, BOTH, UNKNOWN = (
    Verdict.GONE,
    Verdict.WORKERS_ALIVE,
    Verdict.AGENT_ALIVE,
    Verdict.BOTH_ALIVE,
    Verdict.UNKNOWN,
)
B = identity("b")
LEASE = 5.0
LONG_AGO = 1e6


class Absent:
    """Coordinator's memory of b, which ran round 1 and has no key; round 2 is joinable.

    `said` holds the last content of b's key, if it differs from the content while b ran.
    """

    def __init__(self, said: dict[str, Any] | None = None, **bounds: Any) -> None:
        self.job = Job("a", "b", **{"keep_alive_seconds": LEASE, **bounds}).sealed("a", "b")
        self.job.change("b", **(said or {}))
        self.job.view()
        self.job.gone("b").round(2, previous=1)
        self.peers, self.timers = FailureDetector(orphan_seconds=ORPHAN_SECONDS), Timers()
        self.opened = self.job.now
        self.outside = False

    def heartbeat(self, ago: float = 0.0) -> Absent:
        self.peers.up(PeerUp(B, "s1"), self.job.now - ago)
        return self

    def answers(
        self, verdict: Verdict, session: str = "s1", live_seconds: float | None = None
    ) -> Absent:
        answer = Probed(B, session, verdict, live_seconds)
        self.peers.probed(answer, self.job.view(), self.job.now, ORPHAN_SECONDS)
        return self

    def came_and_went(self, session: str) -> Absent:
        """Register the member for a while under another session."""
        self.job.member("b", session=session, state=RUNNING, round=1).view()
        self.job.gone("b")
        return self

    def stopped(self, after: float = 0.0) -> bool:
        self.timers.begin_step(self.job.later(after).now)
        assignment, view, bounds = self._seen()
        check = member_loss.StopCheck(
            view, bounds, self.peers, self.timers, self.opened, self.outside
        )
        return check.has_stopped(assignment)

    def lost(self, after: float = 0.0) -> bool:
        self.timers.begin_step(self.job.later(after).now)
        assignment, view, bounds = self._seen()
        return member_loss.is_lost(assignment, view, bounds, self.peers, self.timers)

    def opens(self, after: float = 0.0) -> Absent:
        """Open round 2 only now."""
        self.opened = self.job.later(after).now
        return self

    def probe(self) -> Absent:
        """Send the inquiry."""
        self.precedes_stop()
        return self

    def precedes_stop(self) -> list[str]:
        """Return the members probed now."""
        effects, _ = detector_upkeep.maintain(
            self.peers, self.job.view(), identity("a"), self.job.now, 1.0
        )
        return [effect.member for effect in effects if isinstance(effect, Probe)]

    def _seen(self) -> tuple[RankAssignment, View, RendezvousParams]:
        view = self.job.view()
        assert view.bounds is not None
        assignment = view.rosters[1].assignment(B)
        assert assignment is not None
        return assignment, view, view.bounds.record

    def took_over(self) -> Absent:
        self.timers.begin_step(self.job.now)
        self.timers.since(member_loss.TOOK_OVER)
        return self

    @property
    def wakes_in(self) -> float | None:
        return None if self.timers.wake is None else self.timers.wake - self.job.now


# -- lost members ---------------------------------------------------------------------


def test_member_that_vanishes_under_settled_coordinator_is_lost_at_once() -> None:
    absent = Absent().took_over()
    assert absent.lost(0.1)


@pytest.mark.parametrize(("lease", "patience"), [(LEASE, 5.0), (2.0, 4.0)])
def test_member_absent_at_coordinator_change_may_register_again(
    lease: float, patience: float
) -> None:
    """The member has a lease's time, and at least the time that evidence from links lasts."""
    absent = Absent(keep_alive_seconds=lease).took_over()
    assert not absent.lost()
    assert not absent.lost(PROBE_INTERVAL_SECONDS)
    assert not absent.probe().lost(patience - PROBE_INTERVAL_SECONDS - 0.1)
    assert absent.wakes_in == pytest.approx(0.1)
    assert absent.lost(0.1)


def test_member_absent_at_coordinator_change_is_probed_after_a_delay() -> None:
    """Nearly all members have registered by then after an outage of etcd."""
    absent = Absent().took_over()
    assert not absent.lost()
    assert absent.wakes_in == pytest.approx(PROBE_INTERVAL_SECONDS)
    assert not absent.lost(PROBE_INTERVAL_SECONDS)
    assert absent.precedes_stop() == [B]
    assert not absent.answers(BOTH).lost()


@pytest.mark.parametrize("led", [False, True], ids=["a member", "our predecessor"])
def test_member_without_link_and_launcher_answer_is_lost(led: bool) -> None:
    """A member that only lost its lease would answer: after an outage of etcd a gang is healthy."""
    absent = Absent().took_over()
    if led:
        absent.peers.note_leader_heartbeat(B, absent.job.now - 2.0)
    else:
        absent.heartbeat(2.0)
        absent.peers.down(PeerDown(B, "s1"), absent.job.view(), absent.job.now)
    assert not absent.lost()
    assert not absent.lost(PROBE_INTERVAL_SECONDS)
    assert not absent.probe().answers(UNKNOWN).lost(0.4)
    assert absent.wakes_in == pytest.approx(0.1)
    assert absent.lost(0.1)


def test_member_without_answer_and_without_any_link_is_lost() -> None:
    absent = Absent().took_over()
    assert not absent.lost()
    assert absent.answers(UNKNOWN).lost()


def test_live_link_is_trusted_without_launcher_answer() -> None:
    absent = Absent().took_over()
    assert not absent.lost()
    assert not absent.heartbeat().answers(UNKNOWN).lost()


def test_linked_member_may_register_again() -> None:
    absent = Absent().took_over()
    absent.job.later(60)
    assert not absent.heartbeat().lost()
    for _ in range(4):
        assert not absent.heartbeat().lost(1.2)
    assert absent.heartbeat().lost(0.2)


def test_stale_link_grants_no_time() -> None:
    assert Absent().took_over().heartbeat(ago=5).lost(0.1)


def test_proof_of_end_makes_member_lost_at_once() -> None:
    absent = Absent().took_over().heartbeat()
    assert not absent.lost()
    assert absent.answers(GONE).lost()


def test_proof_of_end_does_not_apply_to_later_session() -> None:
    """The member's containers came back, and then only its lease expired."""
    absent = Absent().answers(GONE).came_and_went("s2").took_over().heartbeat()
    assert not absent.lost()
    assert absent.answers(GONE, "s2").lost()


def test_proof_for_assigned_session_suffices_without_a_key() -> None:
    absent = Absent()
    absent.job.view().departed.clear()
    assert absent.took_over().answers(GONE).lost()
    assert absent.stopped()
    assert not inquiries(absent.peers)


@pytest.mark.parametrize("verdict", [WORKERS, AGENT, BOTH])
def test_other_probe_results_are_no_proof(verdict: Verdict) -> None:
    absent = Absent().took_over()
    assert not absent.lost()
    assert not absent.answers(verdict).lost()


def test_returned_member_starts_with_fresh_timers() -> None:
    absent = Absent().took_over().heartbeat()
    assert not absent.lost()
    absent.timers.begin_step(absent.job.later(100).now)
    member_loss.ended(B, absent.timers)
    assert not absent.heartbeat().lost()


# -- stopped workers ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "stopped"),
    [
        ({"state": LEAVING, "stopped": True}, True),
        ({"state": LEAVING}, False),
        ({"state": DONE}, True),
        ({"state": WAITING, "round": 1}, True),
        ({"state": WAITING, "round": 0}, False),
        ({"state": RUNNING}, False),
        ({"state": STOPPING}, False),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_reported_stop_before_leaving_counts(said: dict[str, Any], stopped: bool) -> None:
    """A leaver counts once it reported stopped workers: its key may go by its lease or a fence."""
    absent = Absent(said)
    assert absent.stopped() is stopped
    assert (B in inquiries(absent.peers)) is not stopped


@pytest.mark.parametrize(
    ("verdict", "bounds", "after"),
    [
        (GONE, {}, 0.0),
        (WORKERS, {}, ORPHAN_SECONDS),
        (BOTH, {}, ORPHAN_SECONDS),
        (AGENT, {}, LEASE),
        (AGENT, {"keep_alive_seconds": 2.0}, TRUST_SECONDS + member_loss.KILL_SECONDS),
        (AGENT, {"keep_alive_seconds": 20.0}, 20.0),
        (UNKNOWN, {}, member_loss.KILL_SECONDS),
    ],
)
def test_probe_result_determines_when_workers_count_as_stopped(
    verdict: Verdict, bounds: dict[str, Any], after: float
) -> None:
    """Seconds from the first sight of its absence until its workers count as stopped."""
    absent = Absent(**bounds)
    assert not absent.stopped()
    absent.answers(verdict)
    if after:
        assert not absent.stopped()
        assert absent.wakes_in == pytest.approx(after)
        assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


def test_without_answer_no_workers_count_as_stopped() -> None:
    absent = Absent()
    assert not absent.stopped()
    assert not absent.probe().stopped(LONG_AGO)


def test_probe_wakes_once_and_then_waits_for_its_answer() -> None:
    """An answer is an event of its own; repeated checks would be expensive in a large job."""
    absent = Absent()
    assert not absent.stopped()
    assert absent.wakes_in == pytest.approx(member_loss.PROBE_SOON_SECONDS)
    absent.probe()
    for _ in range(3):
        assert not absent.stopped(0.1)
        assert absent.wakes_in is None
        absent.probe()


@pytest.mark.parametrize(
    ("verdict", "after"),
    [
        (GONE, 0.0),
        (UNKNOWN, 0.0),
        (AGENT, member_loss.REACTION_SECONDS),
        (BOTH, ORPHAN_SECONDS),
        (WORKERS, ORPHAN_SECONDS),
    ],
)
def test_long_absent_member_learns_of_new_round_only_when_it_opens(
    verdict: Verdict, after: float
) -> None:
    """The member's patience may be over by then, but its kill has only begun."""
    absent = Absent()
    assert not absent.stopped()
    absent.opens(60).answers(verdict)
    if after:
        assert not absent.stopped()
        assert absent.wakes_in == pytest.approx(after)
        assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


def test_orphans_are_waited_for_as_long_as_launchers_keep_them() -> None:
    absent = Absent()
    absent.peers.orphan_seconds = 120.0
    assert not absent.stopped()
    assert not absent.answers(WORKERS).stopped(119.9)
    assert absent.stopped(0.1)


@pytest.mark.parametrize(("ago", "after"), [(0.0, 4.0), (1.5, 2.5), (3.5, 0.5)])
def test_silent_member_counts_as_stopped_when_its_link_evidence_ended(
    ago: float, after: float
) -> None:
    """The member may run for 3 s after its last message, and takes 1 s to kill its workers."""
    absent = Absent().heartbeat(ago)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(after - 0.05)
    assert absent.stopped(0.1)


def test_silent_member_counts_as_stopped_after_its_lease_and_kill_time() -> None:
    """The member was silent for longer than a link can be trusted."""
    absent = Absent().heartbeat(60.0)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


def test_former_coordinator_relied_on_link_from_its_successor() -> None:
    absent = Absent()
    absent.peers.note_leader_heartbeat(B, absent.job.now - 1.0)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(2.9)
    assert absent.stopped(0.1)


@pytest.mark.parametrize("lease", [2.0, 5.0, 60.0])
@pytest.mark.parametrize(("ago", "after"), [(0.0, 4.0), (60.0, member_loss.KILL_SECONDS)])
def test_launcher_without_port_has_the_same_deadline(
    lease: float, ago: float, after: float
) -> None:
    """The launcher has no port: it is the agent's own child."""
    absent = Absent(keep_alive_seconds=lease)
    roster = absent.job.roster(1)
    alone = tuple(assignment._replace(launcher_port=0) for assignment in roster.seats)
    absent.job.put(KEYS.roster(1), replace(roster, seats=alone))
    absent.heartbeat(ago)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


REPORTED_SECONDS = 9.0
STOPPED_AFTER: dict[Verdict | None, tuple[float, float]] = {
    None: (LONG_AGO, LONG_AGO),
    GONE: (0.0, 0.0),
    WORKERS: (ORPHAN_SECONDS, REPORTED_SECONDS + member_loss.KILL_SECONDS),
    BOTH: (ORPHAN_SECONDS, ORPHAN_SECONDS),
    AGENT: (LEASE, LEASE),
    UNKNOWN: (member_loss.KILL_SECONDS, REPORTED_SECONDS + member_loss.KILL_SECONDS),
}
"""Seconds from the absence, without and with a deadline of the workers in an answer."""


def test_stop_rule_exists_for_every_verdict_with_and_without_a_deadline() -> None:
    assert set(member_loss.STOP_RULES) == set(product((None, *Verdict), (False, True)))
    assert set(member_loss.STOP_RULES.values()) == set(member_loss.StopRule)


@pytest.mark.parametrize("verdict", [None, *Verdict])
@pytest.mark.parametrize("reported", [False, True], ids=["no deadline", "deadline"])
@pytest.mark.parametrize("launcher", [False, True], ids=["own children", "launcher"])
def test_workers_count_as_stopped_by_the_rule_of_the_verdict(
    verdict: Verdict | None, reported: bool, launcher: bool
) -> None:
    """A member without a launcher is judged as any other."""
    absent = Absent()
    if not launcher:
        roster = absent.job.roster(1)
        alone = tuple(assignment._replace(launcher_port=0) for assignment in roster.seats)
        absent.job.put(KEYS.roster(1), replace(roster, seats=alone))
    assert not absent.stopped()
    inquiry = absent.probe().peers.state(B).inquiry
    assert inquiry is not None
    inquiry.verdict = verdict
    inquiry.live_until = absent.job.now + REPORTED_SECONDS if reported else None
    after = STOPPED_AFTER[verdict][reported]
    if after:
        assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1) is (verdict is not None)


@pytest.mark.parametrize("last", [WORKERS, UNKNOWN])
def test_workers_that_answered_end_at_their_reported_deadline(last: Verdict) -> None:
    absent = Absent()
    assert not absent.stopped()
    absent.answers(WORKERS, live_seconds=9.0)
    absent.job.later(5.0)
    absent.answers(last, live_seconds=4.0 if last is WORKERS else None)
    assert not absent.stopped(4.0 + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


@pytest.mark.parametrize("told", [None, 1.0], ids=["silent", "told an earlier deadline"])
def test_deadline_granted_by_this_agent_is_waited_for(told: float | None) -> None:
    absent = Absent()
    absent.peers.states[B] = PeerState(granted=absent.job.now + 3.0)
    assert not absent.stopped()
    absent.answers(UNKNOWN if told is None else WORKERS, live_seconds=told)
    assert not absent.stopped(3.0 + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


@pytest.mark.parametrize(
    ("led_ago", "after"),
    [(0.0, TRUST_SECONDS + RELAY_SECONDS), (5.0, HANDOVER_SECONDS), (None, 4.5)],
)
def test_member_never_linked_here_relied_on_the_previous_coordinator(
    led_ago: float | None, after: float
) -> None:
    """The predecessor's knowledge is as old as its link here, and its own link adds age."""
    absent = Absent().took_over()
    if led_ago is not None:
        absent.peers.note_leader_heartbeat(identity("c"), absent.job.now - led_ago)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(after + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


def test_previous_coordinator_heard_last_determines_the_deadline() -> None:
    absent = Absent().took_over()
    absent.peers.note_leader_heartbeat(identity("d"), absent.job.now - 60.0)
    absent.peers.note_leader_heartbeat(identity("c"), absent.job.now)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    after = TRUST_SECONDS + RELAY_SECONDS + member_loss.KILL_SECONDS
    assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


@pytest.mark.parametrize("led_ago", [None, 0.0, 60.0])
@pytest.mark.parametrize("previous", [B, identity("c")], ids=["the absent one", "another"])
def test_coordinator_outside_the_round_waits_for_evidence_up_to_its_takeover(
    previous: str, led_ago: float | None
) -> None:
    """The members of the round may have been linked to the previous coordinator until then."""
    absent = Absent().took_over()
    absent.outside = True
    if led_ago is not None:
        absent.peers.note_leader_heartbeat(previous, absent.job.now - led_ago)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    after = TRUST_SECONDS + RELAY_SECONDS + member_loss.KILL_SECONDS
    assert not absent.stopped(after - 0.1)
    assert absent.stopped(0.1)


def test_member_linked_at_takeover_relied_on_this_coordinator_only() -> None:
    absent = Absent().took_over().heartbeat()
    absent.peers.note_leader_heartbeat(identity("c"), absent.job.now)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(TRUST_SECONDS + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


@pytest.mark.parametrize(
    ("absences", "after"),
    [((), 0.0), ((0.0,), TRUST_SECONDS), ((0.0, 2.0), TRUST_SECONDS - 2.0)],
    ids=["a was never absent", "a came back", "a came back earlier and was seen again"],
)
def test_returned_member_shows_that_its_gang_outlived_etcd(
    absences: tuple[float, ...], after: float
) -> None:
    """The others were linked to it until then; that it is still there shows nothing more."""
    absent = Absent()
    assignment = absent.job.roster(1).assignment(identity("a"))
    assert assignment is not None
    view, bounds = absent.job.view(), RendezvousParams(1, 4)
    absent.timers.begin_step(absent.job.now)
    if absences:
        member_loss.is_lost(assignment, view, bounds, absent.peers, absent.timers)
    for seconds in absences or (0.0,):
        absent.timers.begin_step(absent.job.later(seconds).now)
        member_loss.returned(assignment, absent.timers)
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(after + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


def test_silent_fenced_member_still_relies_on_its_lease() -> None:
    """The round tells the next coordinator of the fence, no matter who set it."""
    absent = Absent()
    absent.job.round(2, previous=1, fenced=(B,))
    assert not absent.stopped()
    absent.answers(UNKNOWN)
    assert not absent.stopped(LEASE + member_loss.KILL_SECONDS - 0.1)
    assert absent.stopped(0.1)


def test_last_answer_counts() -> None:
    absent = Absent()
    assert not absent.stopped()
    assert not absent.answers(WORKERS).stopped(1)
    assert not absent.answers(AGENT).stopped(1)
    assert absent.answers(GONE).stopped()


def test_running_workers_of_one_member_do_not_count_as_stopped_with_a_peer() -> None:
    """A whole gang outlived etcd; back in reach of etcd it stops, one node before the other."""
    job = Job("n", "y", "z", keep_alive_seconds=LEASE).sealed("y", "z")
    job.decide()
    job.later(60).gone("y", "z").round(2, previous=1).idle()
    job.answers("y", BOTH).answers("z", BOTH).later(LEASE + 1).idle()
    job.member("y", session="s2", round=1).idle()
    assert set(job.answers("z", AGENT).act().ids) == set(ids("ny"))


def test_earlier_proof_needs_no_probe() -> None:
    absent = Absent().answers(GONE)
    assert absent.stopped()
    assert not inquiries(absent.peers)


def test_proof_before_the_last_session_needs_a_probe() -> None:
    absent = Absent().answers(GONE).came_and_went("s2")
    assert not absent.stopped()
    assert B in inquiries(absent.peers)


def test_proof_at_assigned_address_counts_for_later_sessions() -> None:
    """Another session of it was here since: the proof is about its place, not that session."""
    absent = Absent().came_and_went("s2")
    assert not absent.stopped()
    assert absent.answers(GONE, "s1").stopped()


# -- no concurrent round --------------------------------------------------------------


def ids(names: str) -> tuple[str, ...]:
    return tuple(identity(name) for name in names)


def recovering(**bounds: Any) -> Job:
    """Return a job in joinable round 2: a and b wait; z, which ran round 1, is unknown."""
    job = Job("a", "b", "z", **bounds).sealed(*"abz")
    job.decide()
    job.later(60).gone("z").round(2, previous=1)
    return job.change("a", state=WAITING).change("b", state=WAITING)


@pytest.mark.parametrize(
    ("verdict", "seconds"),
    [
        (UNKNOWN, member_loss.KILL_SECONDS),
        (AGENT, LEASE),
        (BOTH, ORPHAN_SECONDS),
        (WORKERS, ORPHAN_SECONDS),
    ],
)
def test_round_is_not_frozen_before_absent_members_stopped(
    verdict: Verdict, seconds: float
) -> None:
    job = recovering(keep_alive_seconds=LEASE).idle().answers("z", verdict)
    job.idle().later(seconds - 0.1).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_answer_starts_the_round_at_once() -> None:
    assert recovering().idle().answers("z", GONE).act().ids == ids("ab")


def test_all_absent_members_are_probed_at_once() -> None:
    job = Job("a", "y", "z").sealed(*"ayz")
    job.decide()
    job.later(60).gone("y", "z").round(2, previous=1).change("a", state=WAITING).idle()
    assert inquiries(job.coordinator.peers) == {identity("y"), identity("z")}
    job.answers("y", GONE).idle().answers("z", GONE)
    assert job.act().ids == ids("a")


def test_done_member_is_not_probed() -> None:
    job = recovering().done("z")
    assert job.act().ids == ids("ab")
    assert not inquiries(job.coordinator.peers)


def test_member_that_left_and_reported_stop_is_not_probed() -> None:
    job = recovering().member("z", state=LEAVING, round=1, stopped=True)
    job.view()
    assert job.gone("z").act().ids == ids("ab")
    assert not inquiries(job.coordinator.peers)


def test_member_that_only_reported_leaving_is_probed() -> None:
    """The leaver's agent may have died while its workers stopped."""
    job = recovering()
    job.coordinator.leavers[identity("z")] = "drained"
    job.idle().answers("z", WORKERS).later(1).idle()
    assert job.answers("z", GONE).act().ids == ids("ab")


@pytest.mark.parametrize("fenced", [False, True], ids=["by its lease", "by a fence"])
def test_removed_key_of_leaving_member_does_not_prove_its_workers_stopped(fenced: bool) -> None:
    grace = {"stop_grace_seconds": 10, "confirm_seconds": 5}
    job = Job("a", "b", **grace).sealed("a", "b").idle().later(60)
    job.change("b", state=LEAVING).idle()
    if not fenced:
        job.gone("b")
    assert job.later(1).act().cause.kind is CauseKind.LEAVE
    job.change("a", state=WAITING).idle()
    if fenced:
        job.later(15).act()
        assert job.names() == {"a"}
        job.idle()
    assert job.answers("b", GONE).act().ids == ids("a")


def test_member_cut_off_from_etcd_only_gets_time_to_kill_after_the_round_opens() -> None:
    """The member's patience passed before the round opened, which its link reports only then."""
    job = Job("a", "b", expected=2, keep_alive_seconds=LEASE).sealed("a", "b").idle().later(60)
    link = job.coordinator.peers
    link.up(PeerUp(B, "s1"), job.now)
    job.gone("b").idle()
    for _ in range(4):
        link.up(PeerHeartbeat(B, "s1"), job.later(1).now)
        job.idle()
    link.up(PeerHeartbeat(B, "s1"), job.later(1).now)
    assert job.act().cause.kind is CauseKind.LOSS
    job.change("a", state=WAITING).idle()
    job.later(0.002).answers("b", AGENT).idle()
    job.later(member_loss.REACTION_SECONDS - 0.01).idle()
    assert job.later(0.01).act().ids == ids("a")


def test_member_that_returned_after_proof_may_register_again() -> None:
    job = Job("a", "b").sealed("a", "b").idle().later(60).answers("b", GONE)
    job.act()
    assert job.names() == {"a"}
    job.member("b", session="s2").sealed("a", "b", number=2).idle().later(60)
    job.coordinator.peers.up(PeerUp(B, "s2"), job.now)
    job.gone("b").idle()
    assert job.answers("b", GONE, "s2").act().cause.kind is CauseKind.LOSS


def test_returned_member_is_no_longer_probed() -> None:
    job = recovering().idle().member("z", session="s2", round=1)
    assert job.act().ids == ids("abz")


def test_broken_link_does_not_count_as_stopped() -> None:
    job = recovering()
    job.coordinator.peers.up(PeerUp(identity("z"), "s1"), job.now)
    job.coordinator.peers.down(PeerDown(identity("z"), "s1"), job.view(), job.now)
    job.idle().answers("z", UNKNOWN)
    job.later(TRUST_SECONDS + member_loss.KILL_SECONDS - 0.1).idle()
    assert job.later(0.1).act().ids == ids("ab")


def test_live_link_alone_does_not_count_as_stopped() -> None:
    job = recovering().idle().answers("z", UNKNOWN)
    for _ in range(20):
        job.coordinator.peers.up(PeerHeartbeat(identity("z"), "s1"), job.now)
        job.later(1).idle()


def test_fenced_member_is_probed_like_any_other() -> None:
    job = recovering(stop_grace_seconds=10, confirm_seconds=5, keep_alive_seconds=LEASE)
    job.change("b", state=RUNNING).answers("z", GONE).idle().later(15)
    job.act()
    assert job.names() == {"a"}
    job.idle().answers("b", UNKNOWN).later(LEASE + 0.4).idle()
    assert job.later(0.1).act().ids == ids("a")


@pytest.mark.parametrize("name", ["z", "y"])
def test_round_is_not_frozen_while_workers_of_an_orphan_live(name: str) -> None:
    """Workers of an older round, y's, count too, although y's seat is no longer considered."""
    job = recovering()
    job.coordinator.peers.adopt(a_member(name), 2, job.now, ORPHAN_SECONDS)
    job.idle().answers("z", GONE)
    if name == "y":
        job.idle().later(5).idle().answers("y", GONE)
    assert job.act().ids == ids("ab")


def test_new_coordinator_probes_again() -> None:
    job = recovering().idle().answers("z", UNKNOWN)
    job.coordinator.resign()
    job.coordinator.take_over(job.now, ())
    job.idle().later(10).idle()
    assert job.answers("z", UNKNOWN).later(1).act().state is RoundState.FROZEN
