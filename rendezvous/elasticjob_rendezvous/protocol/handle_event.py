"""Handling of events: each event updates the engine state. No I/O.

`handle_etcd` handles the answers of etcd. Decisions follow in `upkeep`, `next_request` and
`next_directive`, from the updated state alone.
"""

from __future__ import annotations

from elasticjob_rendezvous.protocol import handle_etcd
from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Close,
    Event,
    Granted,
    KeptAlive,
    LeaseGone,
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    LocalChanged,
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
    Probed,
    ReadDone,
    RequestFailed,
    Started,
    StoreChanged,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    WatchBroken,
    WatchOpened,
)
from elasticjob_rendezvous.protocol.liveness.probes import PROBE_INTERVAL_SECONDS
from elasticjob_rendezvous.protocol.state import EngineState


def handle(state: EngineState, event: Event) -> None:
    """Update the state from an event of the protocol."""
    match event:
        case Started():
            # Workers taken over from an earlier agent get the time of one lease, if their launcher
            # holds no deadline for them.
            state.started_at = state.now
            state.self_fencing.backed_until = state.now + state.config.keep_alive_seconds
        case Tick():
            pass
        case LocalChanged(local):
            state.worker_group.report(local)
        case StoreChanged(trouble):
            state.store = trouble
        case Close(outcome):
            state.close = outcome
        case Granted() | KeptAlive() | LeaseGone() | StoreRefused():
            handle_etcd.handle_lease(state, event)
        case ReadDone():
            handle_etcd.handle_read(state, event)
        case TxnDone():
            handle_etcd.handle_txn(state, event)
        case TxnAmbiguous():
            handle_etcd.handle_ambiguous_write(state)
        case RequestFailed():
            handle_etcd.handle_failure(state, event)
        case WatchOpened() | Changed() | WatchBroken():
            _handle_watch(state, event)
        case LinkUp() | LinkHeartbeat() | LinkQuiet() | LinkDown():
            _handle_link(state, event)
        case PeerUp() | PeerHeartbeat() | PeerQuiet() | PeerDown() | Probed():
            _handle_peer(state, event)
        case _:
            raise TypeError(f"not an event of the protocol: {event!r}")


def _handle_watch(state: EngineState, event: WatchOpened | Changed | WatchBroken) -> None:
    match event:
        case WatchOpened(generation, revision, cluster_id):
            state.watches.opened(generation, revision, cluster_id)
        case Changed(generation, revision, events):
            if state.watches.holds(generation):
                state.view.apply(revision, events)
        case WatchBroken(generation, error, terminal):
            if state.watches.broke(generation, state.now + state.backoff.pause_seconds):
                state.doubt = True
                state.backoff.lengthen()
                if terminal and not state.reached:
                    state.refused = Refused(error)


def _handle_link(state: EngineState, event: LinkUp | LinkHeartbeat | LinkQuiet | LinkDown) -> None:
    """Handle an event of this member's link to the coordinator."""
    match event:
        case LinkUp(member):
            state.leader_link.link_up(event, state.now)
            state.coordinator.peers.note_leader_heartbeat(member, state.now)
        case LinkHeartbeat(member, _, number):
            state.leader_link.link_heartbeat(event, state.now)
            state.coordinator.peers.note_leader_heartbeat(member, state.now)
            if state.current and number > state.current.number:
                state.doubt = True
        case LinkQuiet():
            _suspect_leader(state, event, state.now)
        case LinkDown():
            _suspect_leader(state, event, state.now + PROBE_INTERVAL_SECONDS)
            state.effects += state.leader_link.link_down(event, state.view)


def _suspect_leader(state: EngineState, event: LinkQuiet | LinkDown, at: float) -> None:
    leader = state.leader_link.suspected(event, state.view)
    if leader is not None:
        state.coordinator.peers.suspect(leader, at)


def _handle_peer(
    state: EngineState, event: PeerUp | PeerHeartbeat | PeerQuiet | PeerDown | Probed
) -> None:
    """Handle an event of a link from a member, or the answer to a probe."""
    peers, active = state.coordinator.peers, state.coordinator.active
    match event:
        case PeerUp() | PeerHeartbeat():
            peers.up(event, state.now)
        case PeerQuiet():
            if active:
                peers.quiet(event, state.view, state.now)
        case PeerDown():
            effects = peers.down(event, state.view, state.now)
            state.effects += effects if active else []
        case Probed():
            state.leader_link.probed(event, state.now)
            if active:
                state.effects += peers.probed(
                    event, state.view, state.now, state.config.orphan_seconds
                )
            else:
                peers.answered(event, state.now)
