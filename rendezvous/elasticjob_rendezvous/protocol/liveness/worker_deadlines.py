"""Deadlines derived from this member's evidence, for its workers and for linked members. No I/O.

`self_fencing` owns the evidence and its rules.
"""

from __future__ import annotations

import math

from elasticjob_rendezvous.protocol.effects import Serve
from elasticjob_rendezvous.protocol.liveness.failure_detector import RELAY_SECONDS
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.state import EngineState


def live_until(state: EngineState) -> float:
    """Return the deadline of this member's workers, unless there is new evidence by then.

    Their launcher gets this deadline and enforces it without the agent: an agent that hangs or
    dies renews nothing. A closed job has no newer round.
    """
    if state.round_is(RoundState.CLOSED):
        return math.inf
    if _holds_predecessors_deadline(state):
        return _proven_until(state, state.local.round)
    return max(state.self_fencing.backed_until, _proven_until(state, state.local.round))


def _holds_predecessors_deadline(state: EngineState) -> bool:
    """Return True if the launcher enforces the deadline that a previous agent set.

    This agent has taken over running workers and has not begun a session of its own.
    """
    return not state.sessions and state.local.live_until is not None


def evidence_until(state: EngineState) -> float:
    """Return the time until which linked members may rely on the round number that we send.

    The evidence that a coordinator has from its gang passes through one more link: that takes two
    more heartbeat intervals.
    """
    number = state.current.number if state.current is not None else 0
    gang = state.self_fencing.gang_evidence_until(
        _roster(state, number),
        state.view.dones.get(number, {}),
        state.leader_link.me,
        state.coordinator.peers,
    )
    return max(state.self_fencing.backed_until, _proven_until(state, number), gang + RELAY_SECONDS)


def may_workers_continue(state: EngineState) -> bool:
    """Return True if workers may continue; set the alarm for the time when that may end."""
    if state.worker_group.idle or _holds_predecessors_deadline(state):
        return True
    deadline = max(state.self_fencing.backed_until, _proven_until(state, state.local.round))
    return not state.alarm.passed(deadline, state.now)


def serve_round(state: EngineState) -> None:
    """Send the known round to the members linked to us, as long as there is evidence for it.

    Past our lease, without the whole gang, we must assume that there is a newer one.
    """
    if state.current is None or not (state.coordinator.active or state.served >= 0):
        return
    number = state.current.number
    deadline = max(state.self_fencing.backed_until, _proven_until(state, number))
    if state.alarm.passed(deadline, state.now):
        number += 1
    if number != state.served:
        state.served = number
        state.effects.append(Serve(number))


def _proven_until(state: EngineState, number: int) -> float:
    """Return the time until which links, or etcd's own absence, prove that no newer round runs."""
    done = state.view.dones.get(number, {})
    peers = state.coordinator.peers
    return state.self_fencing.live_until(
        number, _roster(state, number), done, state.leader_link, peers
    )


def _roster(state: EngineState, number: int) -> Roster | None:
    roster = state.rounds.roster
    return roster if roster is not None and roster.number == number else None
