"""Poll of a handler and a round's store for the facts that `core.poll_step` decides on."""

from __future__ import annotations

from typing import Any

from elasticjob_agent.core.poll_step import JoinTrouble, Polled

FAILED_NOTE = "elasticjob/failed"
ENDED_NOTE = "elasticjob/ended"
LEFT_NOTE = "elasticjob/left"
FIRST_DONE = "elasticjob/done"


def kept_by_etcd(handler: Any) -> bool:
    """Return True if etcd keeps the rendezvous: no node hosts it, and it survives an outage."""
    return handler.get_backend() in ("etcd", "etcd-v2")


def done_note(rank: int) -> str:
    """Return the key of the note that the workers of the node with this rank are done."""
    return f"elasticjob/done/{rank}"


def poll_round(handler: Any, store: Any, met_at: str, nodes: int = 0) -> Polled:
    """Poll once. Blocks; raises the errors of the handler and the store.

    Args:
        handler: rendezvous handler.
        store: store of the round; None if there is none.
        met_at: key that exists once all nodes are in the exit barrier; "" before this node is.
        nodes: number of nodes of the round.
    """
    waiting, closed = handler.num_nodes_waiting(), handler.is_closed()
    if store is None:
        return Polled(waiting, closed)
    left = read_note(store, LEFT_NOTE) if waiting > 0 or _shows_left_nodes(handler) else ""
    if left and not closed:
        waiting = max(1, waiting)
    failed = read_note(store, FAILED_NOTE) if waiting > 0 or closed else ""
    moved_on = waiting > 0 and not closed and _moved_on(handler, store)
    # Once a node is done, no new round begins for joining nodes or for nodes that were done and
    # ended.
    if waiting > 0 and not failed and not moved_on and _some_are_done(handler, store):
        waiting = 0
    return Polled(
        waiting,
        closed,
        failed=failed,
        ended=read_note(store, ENDED_NOTE) if closed else "",
        met=bool(met_at) and _all_done(handler, store, met_at, nodes),
        lost=waiting > 0 and query_handler(handler, "lost"),
        left=left if waiting > 0 else "",
        moved_on=bool(met_at) and moved_on,
    )


def _shows_left_nodes(handler: Any) -> bool:
    """Return True if a left node looks alive until its key expires; never for torch's handlers."""
    return kept_by_etcd(handler) and hasattr(handler, "gone")


def _moved_on(handler: Any, store: Any) -> bool:
    """Return True if others moved to a newer round, or a node is gone that was not done."""
    return query_handler(handler, "moved_on") or any(
        not store.check([done_note(rank)]) for rank in _missing_ranks(handler)
    )


def _some_are_done(handler: Any, store: Any) -> bool:
    """Return True if a node of the round is done.

    False for handlers that cannot report that others want a newer round.
    """
    knows = hasattr(handler, "moved_on") and hasattr(handler, "gone")
    return knows and bool(store.check([FIRST_DONE]))


def _all_done(handler: Any, store: Any, met_at: str, nodes: int) -> bool:
    """Return True if all nodes are done.

    A node that ended just before it was counted has still written its done note. If all notes
    exist, this sets the key, the only thing that a later observer of the round reads.
    """
    if store.check([met_at]):
        return True
    notes = [done_note(rank) for rank in range(nodes)]
    if not notes or not _missing_ranks(handler) or not store.check(notes):
        return False
    store.set(met_at, "1")
    return True


def _missing_ranks(handler: Any) -> list[int]:
    return sorted(getattr(handler, "gone", frozenset)())


def query_handler(handler: Any, fact: str) -> bool:
    """Call an optional method of ElasticJob's handlers; return False for torch's."""
    ask = getattr(handler, fact, None)
    return ask is not None and bool(ask())


def read_note(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def trouble_of(error: Exception) -> JoinTrouble:
    """Classify a rendezvous error by class name, since torch's errors are other classes."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "RendezvousClosedError" in names:
        return JoinTrouble.CLOSED
    if "RendezvousTimeoutError" in names:
        return JoinTrouble.TIMEOUT
    if "RendezvousUnsupportedError" in names:
        return JoinTrouble.UNSUPPORTED
    return JoinTrouble.LEFT if "RendezvousGracefulExitError" in names else JoinTrouble.ERROR
