"""Handling of etcd's answers and failed requests: each updates the engine state. No I/O.

If an answer shows that etcd has lost its data or this member's key, the session ends, and the
member registers again.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol import session
from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.effects import Read, Write
from elasticjob_rendezvous.protocol.events import (
    Granted,
    KeptAlive,
    LeaseGone,
    ReadDone,
    RequestFailed,
    StoreRefused,
    TxnDone,
)
from elasticjob_rendezvous.protocol.liveness import detector_upkeep
from elasticjob_rendezvous.protocol.requests import Ranges
from elasticjob_rendezvous.protocol.state import EngineState


def handle_lease(state: EngineState, event: Granted | KeptAlive | LeaseGone | StoreRefused) -> None:
    """Handle an event of this member's lease, or of one that it renews for orphaned workers."""
    match event:
        case Granted(lease, deadline):
            state.inflight.taken()
            _record_answer(state)
            state.lease.grant(lease, deadline, state.now)
        case KeptAlive(lease, deadline):
            if lease == state.lease.id:
                state.lease.keep(deadline)
                state.self_fencing.store_answers(state.now)
            elif state.coordinator.active and state.self_fencing.backed(state.now):
                state.effects += detector_upkeep.extend_orphans(
                    state.coordinator.peers, lease, deadline, state.view, state.now
                )
        case LeaseGone(lease):
            if lease == state.lease.id:
                state.self_fencing.store_answers(state.now)
                session.lose(state, "its lease expired")
                state.lease.forget()
        case StoreRefused():
            state.self_fencing.store_refused_at = state.now


def handle_read(state: EngineState, event: ReadDone) -> None:
    """Merge the result of a read into the view."""
    read, _ = state.inflight.taken()
    _record_answer(state)
    state.reached = True
    if state.inflight.shows_data_loss(
        state.view, state.watches, event.cluster_id, event.revision, event.ranges
    ):
        session.restart_session(state)
    state.view.cluster_id = event.cluster_id
    state.view.absorb(event.revision, event.ranges)
    state.checked_at = state.now
    _update_leader(state, event.revision, event.ranges)
    state.answered |= {target.key for target, _ in event.ranges}
    whole = isinstance(read, Read) and any(r.covers(state.keys.bounds) for r in read.ranges)
    if whole and state.inflight.is_up_to_date(state.watches):
        state.doubt = False
    if whole:
        state.coordinator.checked = state.coordinator.doubted
    own = state.own
    seen = any(r.covers(own.key) and not r.limit for r, _ in event.ranges)
    if state.session and seen and own.stored is None:
        session.lose(state, "its key is gone")


def handle_txn(state: EngineState, event: TxnDone) -> None:
    """Merge the result of a write, and of the reads in it, into the view."""
    write, note = state.inflight.taken()
    _record_answer(state)
    state.reached = True
    assert isinstance(write, Write)
    result = event.result
    if state.inflight.shows_data_loss(
        state.view, state.watches, result.cluster_id, result.revision, result.ranges
    ):
        # The decision was based on lost data: start again with a read.
        session.restart_session(state)
        return
    state.view.cluster_id = result.cluster_id
    state.view.wrote(write.txn, result)
    state.checked_at = state.now
    found = _update_leader(state, result.revision, result.ranges)
    if found and state.inflight.is_up_to_date(state.watches):
        state.doubt = False
    if not result.succeeded:
        state.doubt = True
    elif note:
        state.note(note)
    if state.session and state.stored is None:
        session.lose(state, "its key is gone")


def handle_ambiguous_write(state: EngineState) -> None:
    """Mark the view as doubtful after a write of unknown outcome: a read precedes any decision."""
    state.inflight.taken()
    state.doubt = True
    state.backoff.failed(state.now)


def handle_failure(state: EngineState, event: RequestFailed) -> None:
    """Back off after a request that etcd did not serve.

    Before etcd's first answer a terminal error, or the connect timeout, refuses the member; after
    it the member keeps trying.
    """
    state.inflight.taken()
    state.backoff.failed(state.now)
    if state.reached:
        return
    if event.terminal:
        state.refused = Refused(event.error)
    elif state.now >= state.started_at + state.config.connect_seconds:
        waited = f"no answer for {state.config.connect_seconds:g} s"
        state.refused = Refused(f"{waited}: {event.error}")


def _update_leader(state: EngineState, revision: int, ranges: Ranges) -> bool:
    """Update the known coordinator; return True if the read asked for it."""
    before = state.leader_link.key
    found = state.leader_link.found(revision, ranges, state.view.malformed)
    if state.leader_link.key != before:
        state.link_delay.found_at = state.now
    return found


def _record_answer(state: EngineState) -> None:
    state.backoff.answered()
    state.self_fencing.store_answers(state.now)
