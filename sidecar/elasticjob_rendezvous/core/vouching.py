"""Deadlines derived from this member's evidence, for its workers and for linked members. No I/O.

`safety` owns the evidence and its rules.
"""

from __future__ import annotations

import math

from elasticjob_rendezvous.core.effects import Serve
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.peers import RELAY_SECONDS
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.roster import Roster


def live_until(our: Membership) -> float:
    """Return the deadline of this member's workers, unless there is new evidence by then.

    Their launcher gets this deadline and enforces it without the agent: an agent that hangs or
    dies renews nothing. A closed job has no newer round.
    """
    if our.round_is(RoundState.CLOSED):
        return math.inf
    if _holds_another(our):
        return _proven_until(our, our.local.round)
    return max(our.safety.backed_until, _proven_until(our, our.local.round))


def _holds_another(our: Membership) -> bool:
    """Return True if the launcher holds a deadline of found workers, and the agent none yet."""
    return not our.sessions and our.local.live_until is not None


def vouched_until(our: Membership) -> float:
    """Return the time until which linked members may rely on the round number that we send.

    The evidence that a coordinator has from its gang passes through one more link: that takes two
    more heartbeat intervals.
    """
    number = our.current.number if our.current is not None else 0
    gang = our.safety.whole_until(
        _roster(our, number),
        our.view.dones.get(number, {}),
        our.leadership.me,
        our.coordinator.peers,
    )
    return max(our.safety.backed_until, _proven_until(our, number), gang + RELAY_SECONDS)


def may_go_on(our: Membership) -> bool:
    """Return True if workers may continue; set the alarm for the time when that may end."""
    if our.crew.idle or _holds_another(our):
        return True
    deadline = max(our.safety.backed_until, _proven_until(our, our.local.round))
    return not our.alarm.passed(deadline, our.now)


def vouch(our: Membership) -> None:
    """Send the known round to the members linked to us, as long as there is evidence for it.

    Past our lease, without the whole gang, we must assume that there is a newer one.
    """
    if our.current is None or not (our.coordinator.active or our.served >= 0):
        return
    number = our.current.number
    deadline = max(our.safety.backed_until, _proven_until(our, number))
    if our.alarm.passed(deadline, our.now):
        number += 1
    if number != our.served:
        our.served = number
        our.effects.append(Serve(number))


def _proven_until(our: Membership, number: int) -> float:
    """Return the time until which links, or etcd's own absence, prove that no newer round runs."""
    done = our.view.dones.get(number, {})
    peers = our.coordinator.peers
    return our.safety.live_until(number, _roster(our, number), done, our.leadership, peers)


def _roster(our: Membership, number: int) -> Roster | None:
    roster = our.rounds.roster
    return roster if roster is not None and roster.number == number else None
