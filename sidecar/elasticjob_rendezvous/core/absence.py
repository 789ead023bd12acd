"""When a member without a key counts as gone. Pure.

After a change of coordinator, and while a link to it is alive, a member has a lease's
time to register again: an etcd outage may have cost it its lease, and a healthy gang
must not stop for that. Until then its workers may still run.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.peers import Peers
from elasticjob_rendezvous.core.records import Bounds
from elasticjob_rendezvous.core.timers import Timers

TOOK_OVER = "took over"


def is_over(id: str, bounds: Bounds, peers: Peers, timers: Timers) -> bool:
    """Whether member `id`, which has no key, is gone for good; else be called again then."""
    since = timers.since(("absent", id))
    if any(gone == id for gone, _ in peers.gone):
        return True
    took_over = timers.known(TOOK_OVER)
    patience = 0.0
    if (took_over is not None and since <= took_over) or peers.alive(id, timers.now):
        patience = bounds.keep_alive_seconds
    return timers.passed(since + patience)


def ended(id: str, timers: Timers) -> None:
    """The member has a key again."""
    timers.forget(("absent", id))
