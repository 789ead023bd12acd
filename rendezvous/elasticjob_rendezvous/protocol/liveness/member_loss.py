"""Failure detector: loss of a member without a key, and the end of its workers. No I/O.

Two questions with different consequences. *Is the member lost?* If so, a new round opens. An etcd
outage that costs a member its lease must not stop a healthy gang, so a member has time to register
again after a change of coordinator and while a link to it is alive. *Have its workers stopped?* If
so, the new round may start. The coordinator probes the member first; only its answer, or a silence
after which the member must have fenced itself, proves that they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.events import Verdict
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    LINK_SILENCE_SECONDS,
    RELAY_SECONDS,
    TRUST_SECONDS,
    FailureDetector,
)
from elasticjob_rendezvous.protocol.liveness.leader_link import HANDOVER_SECONDS
from elasticjob_rendezvous.protocol.records.members import Member, MemberState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment
from elasticjob_rendezvous.protocol.replica import View

TOOK_OVER = "took over"
RETURNED = "returned"
PROBE_SOON_SECONDS = 0.001
KILL_SECONDS = 0.5
"""Fixed allowance for killing workers: from their deadline, which their launcher knows beforehand,
to their end."""
REACTION_SECONDS = 1.0
"""Maximum time for an agent to act on a newer round number."""


def patience_seconds(bounds: RendezvousParams) -> float:
    """Return the time that a member has to register again.

    Covers its lease, and its life on the evidence of links alone plus the time to kill its
    workers.
    """
    return max(bounds.keep_alive_seconds, TRUST_SECONDS + KILL_SECONDS)


def is_lost(
    assignment: RankAssignment,
    view: View,
    bounds: RendezvousParams,
    peers: FailureDetector,
    timers: Timers,
) -> bool:
    """Return True if a member of the round without a key is lost; else request a later check."""
    since = timers.since(("absent", assignment.id))
    if peers.is_gone(assignment.id, _last_session(assignment, view)):
        return True
    took_over = timers.known(TOOK_OVER)
    patience = 0.0
    if peers.alive(assignment.id, timers.now):
        patience = patience_seconds(bounds)
    elif took_over is not None and since <= took_over:
        patience = patience_seconds(bounds)
        if _is_silent(assignment, peers, timers, patience):
            return True
    return timers.passed(since + patience)


def _is_silent(
    assignment: RankAssignment, peers: FailureDetector, timers: Timers, seconds: float
) -> bool:
    """Return True if neither a link nor the launcher of the member answers, as after a power loss.

    After an etcd outage, the reason for the time to register again, both would answer.
    """
    verdict = peers.inquire_during_round(assignment, timers.now, seconds)
    _wake_to_probe(assignment, peers, timers)
    if verdict is not Verdict.UNKNOWN:
        return False
    beat_at = peers.last_heartbeat_at(assignment.id)
    return beat_at is None or timers.passed(beat_at + LINK_SILENCE_SECONDS)


def _last_session(assignment: RankAssignment, view: View) -> str:
    """Return the member's last session known here."""
    last = view.departed.get(assignment.id)
    return assignment.session if last is None else last.session


class StopRule(StrEnum):
    """Time at which the workers of an absent member count as stopped.

    Each value names the end of a wait; `StopCheck` computes its time.
    """

    AT_ONCE = "at once"
    AFTER_AN_ANSWER = "not before an answer"
    REPORTED = "the deadline that its launcher reported, or that we permitted since"
    ORPHANED = "the maximum life of workers without their agent"
    REACTION = "the time of its agent to register again, or to act on the round"
    EVIDENCE = "the latest evidence that the member may have"


STOP_RULES: dict[tuple[Verdict | None, bool], StopRule] = {
    (None, False): StopRule.AFTER_AN_ANSWER,
    (None, True): StopRule.AFTER_AN_ANSWER,
    (Verdict.GONE, False): StopRule.AT_ONCE,
    (Verdict.GONE, True): StopRule.AT_ONCE,
    (Verdict.WORKERS_ALIVE, False): StopRule.ORPHANED,
    (Verdict.WORKERS_ALIVE, True): StopRule.REPORTED,
    (Verdict.BOTH_ALIVE, False): StopRule.ORPHANED,
    (Verdict.BOTH_ALIVE, True): StopRule.ORPHANED,
    (Verdict.AGENT_ALIVE, False): StopRule.REACTION,
    (Verdict.AGENT_ALIVE, True): StopRule.REACTION,
    (Verdict.UNKNOWN, False): StopRule.EVIDENCE,
    (Verdict.UNKNOWN, True): StopRule.EVIDENCE,
}
"""Rule by the last result of a probe and whether any answer contained a deadline of the workers.

A launcher ends workers without an agent at their deadline; an agent that is attached moves it. The
rules hold for members with a launcher and without one: an agent answers for its own children, and
always as attached.
"""


@dataclass(frozen=True, slots=True)
class StopCheck:
    """Check for running workers of the members of the last round that have no key.

    Args:
        opened: time at which the present round opened.
        outside: this coordinator is not a member of the last round that still trains.
    """

    view: View
    bounds: RendezvousParams
    peers: FailureDetector
    timers: Timers
    opened: float
    outside: bool = False

    def has_stopped(self, assignment: RankAssignment) -> bool:
        """Return True if no worker of a member that has no key runs any more.

        A member that reported the end of its workers before its key went counts as stopped. Any
        other is probed. Its launcher kills workers older than the newest round. Its agent has a
        fixed time from the moment that the round opened. Without an answer the workers count as
        stopped once the member can have no valid evidence left. Workers seen running have not
        stopped, even past the time that their agent had: the agent may have hung a moment ago, or
        belong to a gang that outlives etcd.
        """
        view, peers, timers = self.view, self.peers, self.timers
        timers.since(("absent", assignment.id))
        last = view.departed.get(assignment.id)
        if last is not None and _reported_stopped(last, view):
            return True
        if peers.is_gone(assignment.id, _last_session(assignment, view)):
            return True
        verdict = peers.inquire(assignment, timers.now)
        rule = STOP_RULES[verdict, peers.live_until(assignment.id) is not None]
        deadline = self._deadline(rule, assignment)
        if deadline is None:
            _wake_to_probe(assignment, peers, timers)
            return False
        return timers.passed(deadline)

    def _deadline(self, rule: StopRule, assignment: RankAssignment) -> float | None:
        """Return the time from which the workers count as stopped; None: not known yet."""
        peers, opened = self.peers, self.opened
        since = self.timers.since(("absent", assignment.id))
        match rule:
            case StopRule.AT_ONCE:
                return self.timers.now
            case StopRule.AFTER_AN_ANSWER:
                return None
            case StopRule.REPORTED:
                known = (peers.live_until(assignment.id), peers.granted_until(assignment.id))
                return max(at for at in known if at is not None) + KILL_SECONDS
            case StopRule.ORPHANED:
                return max(since, opened) + peers.orphan_seconds
            case StopRule.REACTION:
                return max(since + patience_seconds(self.bounds), opened + REACTION_SECONDS)
            case StopRule.EVIDENCE:
                return self._latest_deadline(assignment, since) + KILL_SECONDS
            case _:
                assert_never(rule)

    def _latest_deadline(self, assignment: RankAssignment, since: float) -> float:
        """Return the latest time up to which a silent member's workers may have run.

        The launcher ends workers at a deadline, which only evidence moves: the member's lease,
        which has ended, or not yet in the member's own view if its key was deleted; its link, from
        the last heartbeat; permissions granted by this coordinator; or the member's last answer.
        The evidence of a member that was never linked to this coordinator came through the previous
        one, whose own came from its gang. A coordinator of that gang knows when its own link to it
        ended; one outside it knows only that the gang's links to it end soon after the takeover.
        """
        view, peers, timers, outside = self.view, self.peers, self.timers, self.outside
        fenced = view.round is not None and assignment.id in view.round.record.fenced
        latest = [since + self.bounds.keep_alive_seconds if fenced else since]
        deadlines = (peers.live_until(assignment.id), peers.granted_until(assignment.id))
        latest += [at for at in deadlines if at is not None]
        beat_at, took_over = peers.last_heartbeat_at(assignment.id), timers.known(TOOK_OVER)
        latest += [] if beat_at is None else [beat_at + TRUST_SECONDS]
        # A member that comes back shows that its gang outlived etcd: the others were linked to it.
        returned = timers.known(RETURNED)
        latest += [] if returned is None else [returned + TRUST_SECONDS]
        own_beat_at = peers.state(assignment.id).last_beat_at if outside else beat_at
        follows_us = own_beat_at is not None and took_over is not None and own_beat_at >= took_over
        led_our_gang = peers.leader == assignment.id and not outside
        if took_over is not None and not follows_us and not led_our_gang:
            led = None if outside else peers.leader_heartbeat_at(peers.leader)
            led = took_over if led is None else led
            latest += [took_over + HANDOVER_SECONDS, led + TRUST_SECONDS + RELAY_SECONDS]
        return max(latest)


def _wake_to_probe(assignment: RankAssignment, peers: FailureDetector, timers: Timers) -> None:
    """Request a wake-up for the first probe of a new inquiry, which the next step sends."""
    at = peers.first_probe_at(assignment.id)
    if at is not None:
        timers.passed(max(at, timers.now + PROBE_SOON_SECONDS))


def _reported_stopped(last: Member, view: View) -> bool:
    """Return True if the member last reported that no worker of the last round runs there."""
    match last.state:
        case MemberState.DONE:
            return True
        case MemberState.LEAVING:
            return last.stopped
        case MemberState.WAITING:
            return view.round is not None and last.round >= view.round.record.previous
    return False


def ended(id: str, timers: Timers) -> None:
    """Note that the member has a key again."""
    timers.forget(("absent", id))


def returned(assignment: RankAssignment, timers: Timers) -> None:
    """Note that a member of the last roster has a key again after its absence."""
    if timers.known(("absent", assignment.id)) is not None:
        timers.start(RETURNED, timers.now)
        ended(assignment.id, timers)
