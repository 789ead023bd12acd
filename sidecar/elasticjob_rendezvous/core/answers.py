"""Handling of etcd's answers and failures. No I/O.

After an answer that shows the loss of etcd's data, or of this member's key, the member registers
again.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import sessions
from elasticjob_rendezvous.core.directives import Refused
from elasticjob_rendezvous.core.effects import Read, Write
from elasticjob_rendezvous.core.events import (
    Granted,
    KeptAlive,
    LeaseGone,
    ReadDone,
    RequestFailed,
    StoreRefused,
    TxnDone,
)
from elasticjob_rendezvous.core.inflight import Ranges
from elasticjob_rendezvous.core.membership import Membership


def take_lease(our: Membership, event: Granted | KeptAlive | LeaseGone | StoreRefused) -> None:
    """Handle an event about this member's lease, or about one it renews for orphaned workers."""
    match event:
        case Granted(lease, deadline):
            our.inflight.taken()
            _calm(our)
            our.lease.grant(lease, deadline, our.now)
        case KeptAlive(lease, deadline):
            if lease == our.lease.id:
                our.lease.keep(deadline)
                our.safety.store_answers(our.now)
            elif our.coordinator.active and our.safety.backed(our.now):
                our.effects += our.coordinator.peers.kept(lease, deadline, our.view, our.now)
        case LeaseGone(lease):
            if lease == our.lease.id:
                our.safety.store_answers(our.now)
                sessions.lose(our, "its lease expired")
                our.lease.forget()
        case StoreRefused():
            our.safety.store_refused_at = our.now


def take_read(our: Membership, event: ReadDone) -> None:
    """Merge the result of a read into the view."""
    read, _ = our.inflight.taken()
    _calm(our)
    our.reached = True
    if our.inflight.tells_of_loss(
        our.view, our.watches, event.cluster_id, event.revision, event.ranges
    ):
        sessions.begin_anew(our)
    our.view.cluster_id = event.cluster_id
    our.view.absorb(event.revision, event.ranges)
    our.looked_at = our.now
    _find_leader(our, event.revision, event.ranges)
    our.answered |= {target.key for target, _ in event.ranges}
    whole = isinstance(read, Read) and any(r.covers(our.keys.bounds) for r in read.ranges)
    if whole and our.inflight.is_up_to_date(our.watches):
        our.doubt = False
    own = our.own
    seen = any(r.covers(own.key) and not r.limit for r, _ in event.ranges)
    if our.session and seen and own.stored is None:
        sessions.lose(our, "its key is gone")


def take_txn(our: Membership, event: TxnDone) -> None:
    """Merge the result of a write, and of the reads in it, into the view."""
    write, note = our.inflight.taken()
    _calm(our)
    our.reached = True
    assert isinstance(write, Write)
    result = event.result
    if our.inflight.tells_of_loss(
        our.view, our.watches, result.cluster_id, result.revision, result.ranges
    ):
        # The decision rested on lost data: start over from a read.
        sessions.begin_anew(our)
        return
    our.view.cluster_id = result.cluster_id
    our.view.wrote(write.txn, result)
    our.looked_at = our.now
    found = _find_leader(our, result.revision, result.ranges)
    if found and our.inflight.is_up_to_date(our.watches):
        our.doubt = False
    if not result.succeeded:
        our.doubt = True
    elif note:
        our.note(note)
    if our.session and our.stored is None:
        sessions.lose(our, "its key is gone")


def take_doubt(our: Membership) -> None:
    """Note that a write may or may not have been applied: read again before any decision."""
    our.inflight.taken()
    our.doubt = True
    our.backoff.failed(our.now)


def take_failure(our: Membership, event: RequestFailed) -> None:
    """Back off after a request that etcd did not serve.

    Before etcd's first answer a terminal error, or the connect timeout, refuses the member; after
    it the member keeps trying.
    """
    our.inflight.taken()
    our.backoff.failed(our.now)
    if our.reached:
        return
    if event.terminal:
        our.refused = Refused(event.error)
    elif our.now >= our.started_at + our.config.connect_seconds:
        waited = f"no answer for {our.config.connect_seconds:g} s"
        our.refused = Refused(f"{waited}: {event.error}")


def _find_leader(our: Membership, revision: int, ranges: Ranges) -> bool:
    """Update the known coordinator; return True if the read asked for it."""
    before = our.leadership.key
    found = our.leadership.found(revision, ranges, our.view.malformed)
    if our.leadership.key != before:
        our.attendance.found_at = our.now
    return found


def _calm(our: Membership) -> None:
    our.backoff.answered()
    our.safety.store_answers(our.now)
