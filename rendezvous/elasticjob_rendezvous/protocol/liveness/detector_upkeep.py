"""Upkeep of the failure detector: probes that no event asks for, and leases of orphans. No I/O.

Targets of the probes: members without a link after a takeover or a final round, agents that answer
without a link, and the launchers of orphaned workers, whose leases the coordinator renews.
"""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Effect, KeepAlive, Probe
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    ORPHAN_PROBE_SECONDS,
    UNLINKED_PROBE_SECONDS,
    FailureDetector,
)
from elasticjob_rendezvous.protocol.liveness.peer_state import LinkState, Orphan, SessionEvent
from elasticjob_rendezvous.protocol.liveness.probes import (
    PROBE_INTERVAL_SECONDS,
    newest_number,
    probe,
)
from elasticjob_rendezvous.protocol.records.members import ASIDE, Member, MemberState, RoundState
from elasticjob_rendezvous.protocol.replica import View

_LINKED_WHEN_FINAL = (MemberState.RUNNING, MemberState.WAITING, MemberState.STOPPING)


def maintain(
    peers: FailureDetector, view: View, own: str, now: float, keep_every: float
) -> tuple[list[Effect], float | None]:
    """Probe members and renew leases of orphans where due; return effects and the next time."""
    alarm = Alarm()
    effects = _probe_unlinked(peers, view, own, now, alarm)
    effects += _probe_answering(peers, view, now, alarm)
    effects += _maintain_orphans(peers, view, now, keep_every, alarm)
    effects += peers.maintain_inquiries(view, now, alarm)
    return effects, alarm.at


def extend_orphans(
    peers: FailureDetector, lease: int, deadline: float, view: View, now: float
) -> list[Effect]:
    """Extend the life of workers without an agent to the end of their member's renewed lease.

    No newer round begins while their member's key, which hangs on that lease, is there.
    """
    for id, _, state in peers.open_sessions():
        orphan, member = state.orphan, view.member(id)
        if orphan is None or orphan.record.lease != lease:
            continue
        if member is None or member.record.lease != lease:
            continue
        orphan.renewing = False
        orphan.kept_until = max(orphan.kept_until, deadline)
        return [_permission(peers, orphan, view, now)]
    return []


def _permission(peers: FailureDetector, orphan: Orphan, view: View, now: float) -> Probe:
    """Return the probe of a launcher whose workers may live as long as their member's lease."""
    request = probe(orphan.record, newest_number(view))
    member = view.member(orphan.record.id)
    if member is None or member.record.lease != orphan.record.lease:
        return request
    until = min(orphan.kept_until, orphan.until)
    if until <= now:
        return request
    peer = peers.stored(orphan.record.id)
    peer.granted = until if peer.granted is None else max(until, peer.granted)
    return replace(request, live_until=until)


def _probe_unlinked(
    peers: FailureDetector, view: View, own: str, now: float, alarm: Alarm
) -> list[Effect]:
    """Probe, once and soon after the takeover and each final round, members without a link.

    Members link when their round is final; one that is killed before closes no link. Until a
    round is final, only members with workers are probed: the others need not have linked. A
    session that was set aside had no agent, so it is probed at once: its lease, which nobody renews
    after the end of the coordinator before, may run out before the others have linked.
    """
    number = newest_number(view)
    final = view.round is not None and view.round.record.state is RoundState.FINAL
    if final and number > peers.probed_round:
        peers.probed_round = number
        peers.unlinked_probe_at = now + UNLINKED_PROBE_SECONDS
    if peers.unlinked_probe_at is None:
        return []
    is_due = alarm.passed(peers.unlinked_probe_at, now)
    if is_due:
        peers.unlinked_probe_at = None
    expected = _LINKED_WHEN_FINAL if final else (MemberState.RUNNING,)
    missing = [
        versioned.record
        for id, versioned in view.members().items()
        if (is_due or _lost_its_agent(peers, versioned.record))
        and id != own
        and versioned.record.state in expected
        and peers.session(id, versioned.record.session).orphan is None
        and not peers.alive(id, now)
    ]
    for member in missing:
        peers.suspect(member, now + PROBE_INTERVAL_SECONDS)
    return [probe(member, number) for member in missing]


def _lost_its_agent(peers: FailureDetector, member: Member) -> bool:
    """Return True for a session that was set aside, if nothing else is known of it yet."""
    if not member.session.endswith(ASIDE):
        return False
    is_asked = peers.state(member.id).inquiry is not None
    return not is_asked and not peers.session(member.id, member.session).known


def _probe_answering(peers: FailureDetector, view: View, now: float, alarm: Alarm) -> list[Effect]:
    effects: list[Effect] = []
    for id, session, state in peers.open_sessions():
        member = view.member(id)
        if state.link is not LinkState.ANSWERING:
            continue
        if member is None:
            peers.take_session(id, session, SessionEvent.KEY_LOST)
        elif member.record.session != session:
            peers.take_session(id, session, SessionEvent.REPLACED)
        elif alarm.passed(state.next_probe, now):
            peers.take_session(id, session, SessionEvent.PROBE_REPEATED)
            effects.append(probe(member.record, newest_number(view)))
    return effects


def _maintain_orphans(
    peers: FailureDetector, view: View, now: float, keep_every: float, alarm: Alarm
) -> list[Effect]:
    """Renew an orphan's lease while it has one, and probe its launcher repeatedly.

    A newer round is sent at once: the launcher ends workers that are older.
    """
    effects: list[Effect] = []
    number = newest_number(view)
    for id, session, state in peers.open_sessions():
        member, orphan = view.member(id), state.orphan
        if orphan is None:
            continue
        if member is not None and member.record.session != session:
            peers.take_session(id, session, SessionEvent.REPLACED)
        elif alarm.passed(orphan.until, now):
            peers.take_session(id, session, SessionEvent.ORPHAN_EXPIRED)
        elif number > orphan.sent_round or alarm.passed(orphan.next_probe, now):
            sent, orphan.sent_round = orphan.sent_round, number
            orphan.next_probe = now + min(ORPHAN_PROBE_SECONDS, keep_every)
            alarm.set(orphan.next_probe)
            if number > sent or orphan.renewing or member is None:
                effects.append(_permission(peers, orphan, view, now))
            if member is not None:
                orphan.renewing = True
                effects.append(KeepAlive(orphan.record.lease))
    return effects
