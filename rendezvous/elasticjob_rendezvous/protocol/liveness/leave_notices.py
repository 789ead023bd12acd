"""Leave notices on links, a substitute for a key while etcd is unreachable. No I/O.

The view keeps the notices; one counts only while the leaver has no key, which would be newer.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol.effects import Effect, SendLeaveNotices
from elasticjob_rendezvous.protocol.events import LeaveNoticesReceived
from elasticjob_rendezvous.protocol.records.members import LeaveNotice, agent_of
from elasticjob_rendezvous.protocol.state import EngineState


def receive(state: EngineState, event: LeaveNoticesReceived) -> list[Effect]:
    """Note the leave notices, and forward them.

    The members are not evaluated again: a notice has no effect while the leaver's key exists.
    """
    state.view.merge_leave_notices(event.leaving)
    state.effects = []
    send(state)
    return state.effects


def send(state: EngineState) -> None:
    """Announce this member's leave on its links; as a coordinator, forward the notices of others.

    The next coordinator may have no other source. This member's own notice comes first, so that
    there is room for it.
    """
    notices: list[LeaveNotice] = []
    if state.leaving:
        notices = [LeaveNotice(state.config.identity.id, state.config.session_nonce, state.leaving)]
    if state.coordinator.active or state.served >= 0:
        notices += state.view.leave_notices.values()
    if tuple(notices) != state.sent_notices:
        state.sent_notices = tuple(notices)
        state.effects.append(SendLeaveNotices(state.sent_notices))


def forget(state: EngineState) -> None:
    """Drop old notices: only agents seated in the newest final round may still be leaving."""
    roster = state.rounds.roster
    seated = (
        {assignment.id: agent_of(assignment.session) for assignment in roster.seats}
        if roster
        else {}
    )
    kept = {
        id: notice
        for id, notice in state.view.leave_notices.items()
        if seated.get(id) == notice.agent
    }
    state.view.leave_notices = kept
