"""Leave notices on links, a substitute for a key while etcd is unreachable. No I/O.

The view keeps the notices; one counts only while the leaver has no key, which says more.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol.effects import Effect, Tell
from elasticjob_rendezvous.protocol.events import LeavesTold
from elasticjob_rendezvous.protocol.records.members import LeaveNotice, agent_of
from elasticjob_rendezvous.protocol.state import EngineState


def hear(state: EngineState, event: LeavesTold) -> list[Effect]:
    """Note the leave notices, and forward them.

    No judgement is repeated: a notice has no effect while the leaver's key is there.
    """
    state.view.told_leaving(event.leaving)
    state.effects = []
    tell(state)
    return state.effects


def tell(state: EngineState) -> None:
    """Announce this member's leave on its links; as a coordinator, forward the notices of others.

    The next coordinator may have no other source. This member's own notice comes first, so that
    there is room for it.
    """
    told: list[LeaveNotice] = []
    if state.leaving:
        told = [LeaveNotice(state.config.identity.id, state.config.session_nonce, state.leaving)]
    if state.coordinator.active or state.served >= 0:
        told += state.view.leave_notices.values()
    if tuple(told) != state.told:
        state.told = tuple(told)
        state.effects.append(Tell(state.told))


def forget(state: EngineState) -> None:
    """Drop old notices: only agents seated in the newest final round may still be leaving."""
    roster = state.rounds.roster
    seated = (
        {assignment.id: agent_of(assignment.session) for assignment in roster.seats}
        if roster
        else {}
    )
    kept = {
        id: said for id, said in state.view.leave_notices.items() if seated.get(id) == said.agent
    }
    state.view.leave_notices = kept
