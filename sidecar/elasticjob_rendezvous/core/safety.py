"""Until when workers may live, by the evidence that no newer round runs. No I/O.

Past its lease a member needs the link of a coordinator that knows of no newer round,
and a coordinator the links of the whole gang; a member without either needs the proof
that etcd itself is down, which no partition gives. So training outlives etcd, and a
node that is cut off stops before anybody can replace it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from elasticjob_rendezvous.core.leadership import Leadership
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, TRUST_SECONDS, Peers
from elasticjob_rendezvous.core.roster import Roster

REGISTER_AGAIN_SECONDS = 2.0
"""How long a member that etcd has just forgotten may take to register again: less than
the patience that a coordinator has with it."""


@dataclass(slots=True)
class Safety:
    """Evidence, with the times of our own clock at which it was had.

    `forgotten_at`: etcd, within reach, told us that our lease is gone; or it answered again, and
    our lease was not renewed yet. `backed_until`: until then a lease vouches for us, one on which a
    key of ours is known to hang.
    """

    store_refused_at: float | None = None
    forgotten_at: float | None = None
    backed_until: float = 0.0

    def backed(self, now: float) -> bool:
        """Whether a lease vouches for us."""
        return now < self.backed_until

    def lost_its_lease(self, now: float) -> None:
        """Etcd has no key of ours any more."""
        if self.backed(now):
            self.forgotten_at = now
        self.backed_until = 0.0

    def store_answers(self, now: float) -> None:
        """Etcd is not down any more: whoever ran on for that, past its lease, renews it now."""
        if self._etcd_is_down(now):
            self.forgotten_at = now
        self.store_refused_at = None

    def live_until(
        self,
        round: int,
        roster: Roster | None,
        done: Collection[str],
        leadership: Leadership,
        peers: Peers,
    ) -> float:
        """Return the deadline of workers of `round`, seated by `roster` if that is known.

        A lease that vouches for us is not looked at here.
        """
        gang = self.whole_until(roster, done, leadership.me, peers)
        deadline = max(leadership.vouched_until(round), gang)
        if leadership.tells_newer(round) or self.forgotten_at is None:
            return deadline
        return max(deadline, self.forgotten_at + REGISTER_AGAIN_SECONDS)

    def whole_until(
        self, roster: Roster | None, done: Collection[str], me: str, peers: Peers
    ) -> float:
        """Return until when the links to the whole gang, or etcd's absence, prove anything."""
        seated = {seat.id for seat in roster.seats} if roster else set()
        others = seated - {me} - set(done)
        if not others:
            at = self.store_refused_at
            return -math.inf if at is None else at + LINK_SILENCE_SECONDS
        heard = peers.evidence(others)
        return -math.inf if heard is None else heard + TRUST_SECONDS

    def _etcd_is_down(self, now: float) -> bool:
        at = self.store_refused_at
        return at is not None and now - at < LINK_SILENCE_SECONDS
