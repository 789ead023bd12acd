"""Handling of events: updates the state; other modules decide what is due then. No I/O.

`answers` handles the answers of etcd.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import answers
from elasticjob_rendezvous.core.directives import Refused
from elasticjob_rendezvous.core.events import (
    Changed,
    Close,
    Event,
    Granted,
    KeptAlive,
    LeaseGone,
    LinkDown,
    LinkHeard,
    LinkQuiet,
    LinkUp,
    LocalChanged,
    PeerDown,
    PeerHeard,
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
from elasticjob_rendezvous.core.inquiries import INQUIRY_SECONDS
from elasticjob_rendezvous.core.membership import Membership


def take(our: Membership, event: Event) -> None:
    """Handle any event of the protocol."""
    match event:
        case Started():
            # Workers taken over from an earlier agent get the time of one lease, if their launcher
            # holds no deadline for them.
            our.started_at = our.now
            our.safety.backed_until = our.now + our.config.keep_alive_seconds
        case Tick():
            pass
        case LocalChanged(local):
            our.crew.tell(local)
        case StoreChanged(trouble):
            our.store = trouble
        case Close(outcome):
            our.close = outcome
        case Granted() | KeptAlive() | LeaseGone() | StoreRefused():
            answers.take_lease(our, event)
        case ReadDone():
            answers.take_read(our, event)
        case TxnDone():
            answers.take_txn(our, event)
        case TxnAmbiguous():
            answers.take_doubt(our)
        case RequestFailed():
            answers.take_failure(our, event)
        case WatchOpened() | Changed() | WatchBroken():
            _take_watch(our, event)
        case LinkUp() | LinkHeard() | LinkQuiet() | LinkDown():
            _take_link(our, event)
        case PeerUp() | PeerHeard() | PeerQuiet() | PeerDown() | Probed():
            _take_peer(our, event)
        case _:
            raise TypeError(f"not an event of the protocol: {event!r}")


def _take_watch(our: Membership, event: WatchOpened | Changed | WatchBroken) -> None:
    match event:
        case WatchOpened(generation, revision, cluster_id):
            our.watches.opened(generation, revision, cluster_id)
        case Changed(generation, revision, events):
            if our.watches.holds(generation):
                our.view.apply(revision, events)
        case WatchBroken(generation, error, terminal):
            if our.watches.broke(generation, our.now + our.backoff.pause_seconds):
                our.doubt = True
                our.backoff.lengthen()
                if terminal and not our.reached:
                    our.refused = Refused(error)


def _take_link(our: Membership, event: LinkUp | LinkHeard | LinkQuiet | LinkDown) -> None:
    """Handle an event of this member's link to the coordinator."""
    match event:
        case LinkUp(member):
            our.leadership.link_up(event, our.now)
            our.coordinator.peers.led_by(member, our.now)
        case LinkHeard(member, _, number):
            our.leadership.link_heard(event, our.now)
            our.coordinator.peers.led_by(member, our.now)
            if our.current and number > our.current.number:
                our.doubt = True
        case LinkQuiet():
            _suspect_leader(our, event, our.now)
        case LinkDown():
            _suspect_leader(our, event, our.now + INQUIRY_SECONDS)
            our.effects += our.leadership.link_down(event, our.view)


def _suspect_leader(our: Membership, event: LinkQuiet | LinkDown, at: float) -> None:
    leader = our.leadership.suspected(event, our.view)
    if leader is not None:
        our.coordinator.peers.suspect(leader, at)


def _take_peer(our: Membership, event: PeerUp | PeerHeard | PeerQuiet | PeerDown | Probed) -> None:
    """Handle an event of a link from a member, or the answer to a probe."""
    peers, active = our.coordinator.peers, our.coordinator.active
    match event:
        case PeerUp() | PeerHeard():
            peers.up(event, our.now)
        case PeerQuiet():
            if active:
                peers.quiet(event, our.view, our.now)
        case PeerDown():
            effects = peers.down(event, our.view, our.now)
            our.effects += effects if active else []
        case Probed():
            our.leadership.probed(event, our.now)
            if active:
                our.effects += peers.probed(event, our.view, our.now, our.config.orphan_seconds)
            else:
                peers.answered(event, our.now)
