"""Whether our workers may go on, and what others may rely on that link to us. Pure.

The evidence and its rules are `safety`'s.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Serve
from elasticjob_rendezvous.core.membership import Membership

ASK_AGAIN_SECONDS = 0.25


def may_go_on(our: Membership) -> bool:
    """Whether workers may go on; asks to be called again while that is uncertain."""
    if our.crew.idle:
        return True
    if our.safety.backed(our.now):
        our.alarm.set(our.safety.backed_until)
        return True
    our.alarm.set(our.now + ASK_AGAIN_SECONDS)
    return _gang_proves_safe(our, our.local.round)


def vouch(our: Membership) -> None:
    """Tell those who link to us which round we know of, for as long as we can tell.

    Past our lease without the whole gang we must assume that there is a newer one.
    """
    if our.current is None or not (our.coordinator.active or our.served >= 0):
        return
    number = our.current.number
    if not our.safety.backed(our.now) and not _gang_proves_safe(our, number):
        number += 1
    if number != our.served:
        our.served = number
        our.effects.append(Serve(number))


def _gang_proves_safe(our: Membership, number: int) -> bool:
    """Whether links, or etcd's own absence, prove that no newer round than this runs."""
    roster = our.rounds.roster
    if roster is not None and roster.number != number:
        roster = None
    done = our.view.dones.get(number, {})
    peers = our.coordinator.peers
    return our.safety.may_run(number, roster, done, our.leadership, peers, our.now)
