"""Coordinator as the other members see it: its key, the link to it and its start. No I/O."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Effect, Link, Unlink
from elasticjob_rendezvous.protocol.events import (
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    TRUST_SECONDS,
    Session,
    proven_at,
)
from elasticjob_rendezvous.protocol.liveness.probes import probe
from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.replica import Versioned, View

LINK_DELAY_SECONDS = 1.0
WATCH_LEADER_SECONDS = 0.2
"""Approximate delay of the watch on the coordinator's key, from the moment the round is final or
the coordinator changes. Each member adds its own jitter: many watches at once would delay the
round of the last members."""


@dataclass(slots=True)
class LinkDelay:
    """Times that the delays count from.

    `found_at`: when the coordinator became known; `sealed_at`: when the last round was seen final.
    """

    jitter: float
    found_at: float = 0.0
    sealed_at: float = 0.0

    def may_link(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Return True if this member may link to the coordinator: the round is `final`, or late."""
        return final or alarm.passed(self.found_at + LINK_DELAY_SECONDS, now)

    def may_watch(self, final: bool, now: float, alarm: Alarm) -> bool:
        """Return True if this member may watch the coordinator's key; the delay loses no change."""
        if not self.may_link(final, now, alarm):
            return False
        if not final:
            return True
        delay_seconds = WATCH_LEADER_SECONDS * (0.5 + self.jitter)
        return alarm.passed(max(self.found_at, self.sealed_at) + delay_seconds, now)


SUCCESSION_SECONDS = 0.25
HANDOVER_SECONDS = 0.7
"""Grace period for evidence from a dropped link; covers a reconnect, or the renewal of a lease.
The next coordinator waits for a second."""


@dataclass(slots=True)
class LeaderLink:
    """State of the coordinator as one member knows it.

    Attributes:
        key: the coordinator's session key; empty when unknown.
        seen_at: store revision at which the key was read.
        link: session that this member links to.
        evidence: time until which that link is known to carry both ways, and the round number last
            received on it (0: none yet).
        former_evidence: the same of the previous link, and the time until which it may stand in
            for the present one.
        proven_gone, orphaned: coordinators whose agent a probe found dead, without and with living
            workers -> when.
    """

    me: str
    jitter: float
    key: str = ""
    seen_at: int = 0
    link: Session | None = None
    evidence: tuple[float, int] | None = None
    former_evidence: tuple[float, int, float] = (0.0, 0, 0.0)
    read_at: float | None = None
    _suspected: set[Session] = field(default_factory=set)
    proven_gone: dict[Session, float] = field(default_factory=dict)
    orphaned: dict[Session, float] = field(default_factory=dict)

    def found(
        self,
        revision: int,
        ranges: tuple[tuple[Range, tuple[KeyValue, ...]], ...],
        malformed: Container[str] = (),
    ) -> bool:
        """Update the coordinator from a read; return True if the read asked for it.

        A key whose record is malformed does not coordinate: the next one does. If none of the keys
        that the read asked for is readable, more are read at once.
        """
        for target, kvs in ranges:
            if target.limit:
                readable = [kv.key for kv in kvs if kv.key not in malformed]
                self.key = readable[0] if readable else ""
                self.seen_at = revision
                self.read_at = 0.0 if len(kvs) == target.limit and not readable else None
                return True
        return False

    def leader(self, view: View) -> Versioned[Member] | None:
        for sessions in view.sessions.values():
            for session in sessions.values():
                if session.key == self.key:
                    return session
        return None

    def maintain(
        self, view: View, now: float, in_doubt: bool, may_link: bool = True
    ) -> list[Effect]:
        """Detect that the coordinator's key is gone; with `may_link`, hold a link to it."""
        leader = self.leader(view)
        if leader is None:
            if not self.key or in_doubt:
                return []
            self.key = ""
            self.read_at = now if self._named(view) else now + self._delay()
            return self.unlink(now)
        record = leader.record
        if (record.id, record.session) == self.link or not may_link:
            return []
        self._give_up(now)
        self.link = (record.id, record.session)
        return [Link(*self.link, record.address, record.agent_port)]

    def unlink(self, now: float) -> list[Effect]:
        if self.link is None:
            return []
        self._give_up(now)
        return [Unlink()]

    def _give_up(self, now: float) -> None:
        if self.evidence is not None:
            self.former_evidence = (*self.evidence, now + HANDOVER_SECONDS)
        self.link = self.evidence = None

    def read_due(self, now: float, alarm: Alarm) -> bool:
        return self.read_at is not None and alarm.passed(self.read_at, now)

    # -- the link -------------------------------------------------------------------

    def link_up(self, event: LinkUp, now: float) -> None:
        session = (event.member, event.session)
        self._suspected.discard(session)
        self.proven_gone.pop(session, None)
        self.orphaned.pop(session, None)
        if session == self.link:
            self.evidence = (proven_at(None, now), 0)

    def link_heartbeat(self, event: LinkHeartbeat, now: float) -> None:
        if (event.member, event.session) == self.link:
            proven = proven_at(event.sent, now)
            if event.vouched_seconds is not None:  # end of the coordinator's own evidence
                proven = min(proven, proven + event.vouched_seconds - TRUST_SECONDS)
            self.evidence = (
                max(proven, self.evidence[0]) if self.evidence else proven,
                event.round,
            )

    def suspected(self, event: LinkQuiet | LinkDown, view: View) -> Member | None:
        """Return the coordinator if it fell silent and this member is its successor.

        Only the successor probes it then, so that the result is known when the lease ends: probes
        of all members would be too many.
        """
        leader = self.leader(view)
        if leader is None or not self._named(view):
            return None
        session = (leader.record.id, leader.record.session)
        return leader.record if session == self.link == (event.member, event.session) else None

    def link_down(self, event: LinkDown, view: View) -> list[Effect]:
        """Probe the coordinator after its link broke, only once until there is an answer."""
        session = (event.member, event.session)
        if session != self.link:
            return []
        self.evidence = None
        leader = self.leader(view)
        if leader is None or session in self._suspected:
            return []
        if (leader.record.id, leader.record.session) != session:
            return []
        self._suspected.add(session)
        number = view.round.record.number if view.round else 0
        return [probe(leader.record, number)]

    def probed(self, event: Probed, now: float) -> None:
        session = (event.member, event.session)
        if event.verdict is Verdict.GONE:
            self.orphaned.pop(session, None)
            self.proven_gone.setdefault(session, now)
            return
        self._suspected.discard(session)
        if event.verdict is Verdict.WORKERS_ALIVE:
            self.orphaned.setdefault(session, now)
        else:
            self.orphaned.pop(session, None)

    def to_depose(self, view: View, now: float, alarm: Alarm) -> Versioned[Member] | None:
        """Return the coordinator's session if its agent is proven dead and this member must act."""
        leader = self.leader(view)
        if leader is None:
            return None
        session = (leader.record.id, leader.record.session)
        proven = self.proven_gone.get(session, self.orphaned.get(session))
        if proven is None:
            return None
        due = proven if self._named(view) else proven + self._delay()
        return leader if alarm.passed(due, now) else None

    # -- evidence from the link -----------------------------------------------------

    def evidence_until(self, round: int) -> float:
        """Return the time until which the coordinator's messages rule out a newer round."""
        if self.has_newer_round(round):
            return -math.inf
        at, number, until = self.former_evidence
        found = [(min(at + TRUST_SECONDS, until), number)]
        if self.evidence is not None:
            found.append((self.evidence[0] + TRUST_SECONDS, self.evidence[1]))
        ends = (end for end, number in found if 0 < number <= round)
        return max(ends, default=-math.inf)

    def has_newer_round(self, round: int) -> bool:
        return self.evidence is not None and self.evidence[1] > round

    def _named(self, view: View) -> bool:
        return view.round is not None and view.round.record.successor == self.me

    def _delay(self) -> float:
        return SUCCESSION_SECONDS * (1 + self.jitter)
