"""Upkeep of a member between its requests to etcd. No I/O.

Requests the effects that keep the lease, the watches, the leader link and the probes current, and
those that send the round number and the leave notices to linked members.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol.coordinator import election
from elasticjob_rendezvous.protocol.effects import KeepAlive
from elasticjob_rendezvous.protocol.liveness import detector_upkeep, leave_notices
from elasticjob_rendezvous.protocol.liveness.worker_deadlines import serve_round
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.state import EngineState


def maintain(state: EngineState) -> None:
    """Request the effects that are due now, and set the alarm for the next ones."""
    state.leave_state.update(state.local, state.now, leaving=bool(state.leaving))
    _renew(state)
    _maintain_roles(state)
    serve_round(state)
    leave_notices.send(state)


def _renew(state: EngineState) -> None:
    lease = state.lease
    if not lease.id:
        return
    if lease.due(state.now):
        state.effects.append(KeepAlive(lease.id))
    state.alarm.set(lease.renew_at)
    if state.now < lease.deadline:
        state.alarm.set(lease.deadline)


def _maintain_roles(state: EngineState) -> None:
    """Become or stop being the coordinator; watch and link accordingly."""
    stored = state.stored
    if stored is not None and state.lease.id:
        state.self_fencing.backed_until = state.lease.deadline
    leads = stored is not None and state.leader_link.key == stored.key
    if leads and not state.coordinator.active:
        election.take_over(state)
    _maintain_watches(state)
    state.coordinator.peers.inquiry_seconds = 2 * state.keep_alive_seconds
    if stored is None:
        if state.worker_group.idle:
            state.effects += state.leader_link.unlink(state.now)  # no worker needs evidence
    elif state.coordinator.active:
        _maintain_peers(state)
    else:
        _maintain_leader(state)


def _maintain_watches(state: EngineState) -> None:
    """Watch everything as coordinator; else the job's state and the coordinator's key."""
    watches, leader_link, now, alarm = state.watches, state.leader_link, state.now, state.alarm
    leads = state.coordinator.active
    opened = watches.keep_main(state.everything if leads else state.shared, now, alarm)
    if opened:
        state.doubt = True
        state.effects += opened
    if leads or not leader_link.key:
        state.effects += watches.keep_leader("", 0, now, alarm)
    elif not state.doubt and state.link_delay.may_watch(
        state.round_is(RoundState.FINAL), now, alarm
    ):
        state.effects += watches.keep_leader(leader_link.key, leader_link.seen_at, now, alarm)


def _maintain_peers(state: EngineState) -> None:
    """Keep the links and probes of the members, as the coordinator."""
    every = state.lease.ttl_seconds / 3
    me = state.config.identity.id
    effects, wake = detector_upkeep.maintain(
        state.coordinator.peers, state.view, me, state.now, every
    )
    state.effects += effects
    state.alarm.set(wake)


def _maintain_leader(state: EngineState) -> None:
    """Keep the link to the coordinator, and probe it, as any other member."""
    now, alarm = state.now, state.alarm
    may_link = state.link_delay.may_link(state.round_is(RoundState.FINAL), now, alarm)
    state.effects += state.leader_link.maintain(state.view, now, state.doubt, may_link)
    state.effects += state.coordinator.peers.maintain_inquiries(state.view, now, alarm)
