"""Self-fencing: deadline of workers by the evidence that no newer round runs. No I/O.

Past its lease a member needs the link of a coordinator that knows of no newer round, and a
coordinator the links of the whole gang; a member without either needs the proof that etcd itself
is down, which no partition gives. So training outlives etcd, and a node that is cut off stops
before it can be replaced.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    LINK_SILENCE_SECONDS,
    TRUST_SECONDS,
    FailureDetector,
)
from elasticjob_rendezvous.protocol.liveness.leader_link import LeaderLink
from elasticjob_rendezvous.protocol.records.roster import Roster

REGISTER_AGAIN_SECONDS = 2.0
"""Time to register again for a member whose key etcd has just lost: less than a coordinator allows
before it counts the member as lost."""


@dataclass(slots=True)
class SelfFencing:
    """Evidence, with its times on this process's clock.

    `key_lost_at`: when a reachable etcd reported that the lease is gone, or answered again while
    the lease was not renewed yet.
    `backed_until`: end of a lease on which a key of this member is known to hang.
    """

    store_refused_at: float | None = None
    key_lost_at: float | None = None
    backed_until: float = 0.0

    def backed(self, now: float) -> bool:
        """Return True if a lease holds the key of this member."""
        return now < self.backed_until

    def lost_its_lease(self, now: float) -> None:
        """Note that etcd has no key of this member any more."""
        if self.backed(now):
            self.key_lost_at = now
        self.backed_until = 0.0

    def store_answers(self, now: float) -> None:
        """Note that etcd is up again: a member that ran on past its lease renews it now."""
        if self._etcd_is_down(now):
            self.key_lost_at = now
        self.store_refused_at = None

    def live_until(
        self,
        round: int,
        roster: Roster | None,
        done: Collection[str],
        leader_link: LeaderLink,
        peers: FailureDetector,
    ) -> float:
        """Return the deadline of workers of `round`, seated by `roster` if that is known.

        The lease of this member is not considered here.
        """
        gang = self.gang_evidence_until(roster, done, leader_link.me, peers)
        deadline = max(leader_link.evidence_until(round), gang)
        if leader_link.has_newer_round(round) or self.key_lost_at is None:
            return deadline
        return max(deadline, self.key_lost_at + REGISTER_AGAIN_SECONDS)

    def gang_evidence_until(
        self, roster: Roster | None, done: Collection[str], me: str, peers: FailureDetector
    ) -> float:
        """Return the validity of the evidence from the whole gang.

        Evidence is a link to every other member or, if there are no others, the absence of etcd.
        """
        seated = {assignment.id for assignment in roster.seats} if roster else set()
        others = seated - {me} - set(done)
        if not others:
            at = self.store_refused_at
            return -math.inf if at is None else at + LINK_SILENCE_SECONDS
        proven = peers.evidence(others)
        return -math.inf if proven is None else proven + TRUST_SECONDS

    def _etcd_is_down(self, now: float) -> bool:
        at = self.store_refused_at
        return at is not None and now - at < LINK_SILENCE_SECONDS
