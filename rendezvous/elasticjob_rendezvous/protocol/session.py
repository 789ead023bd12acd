"""Begin and end of this member's sessions. No I/O.

A session is one key on one lease; a member that loses it registers again under another name.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.state import EngineState


def begin(state: EngineState) -> None:
    """Begin a session under a new name; the caller writes its key."""
    state.sessions += 1
    state.session = f"{state.config.session_nonce}-{state.sessions}"


def lose(state: EngineState, reason: str) -> None:
    """End the session, because its key no longer exists in etcd."""
    if not (state.leaving or state.refused or state.round_is(RoundState.CLOSED)):
        state.note(f"the session of {state.config.identity.name} ended: {reason}", warning=True)
    _reset(state)


def restart_session(state: EngineState) -> None:
    """Discard the view after etcd lost its data; the memory of the rounds stays valid."""
    state.note("etcd lost its data: registering again", warning=True)
    state.view = View(state.keys)
    state.answered.clear()
    state.lease.forget()
    state.effects += state.watches.drop()
    _reset(state)


def _reset(state: EngineState) -> None:
    """Drop the session and the role; links stay, as the evidence that lets workers continue."""
    state.self_fencing.lost_its_lease(state.now)
    state.session = ""
    state.leader_link.key = ""
    state.coordinator.resign()
    state.doubt = True
