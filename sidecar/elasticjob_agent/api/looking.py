"""What a handler and a round's store say: the facts that `core.follow` decides on."""

from __future__ import annotations

from typing import Any

from elasticjob_agent.core.following import Seen, Trouble

FAILED_NOTE = "elasticjob/failed"
ENDED_NOTE = "elasticjob/ended"
LEFT_NOTE = "elasticjob/left"


def look(handler: Any, store: Any, met_at: str) -> Seen:
    """One look. Blocks; raises what they raise.

    Args:
        met_at: the key that stands once all have come to the exit barrier; "" before we have.
    """
    waiting, closed = handler.num_nodes_waiting(), handler.is_closed()
    if store is None:
        return Seen(waiting, closed)
    news = waiting > 0 or closed
    lost = getattr(handler, "lost", None)
    return Seen(
        waiting,
        closed,
        failed=_noted(store, FAILED_NOTE) if news else "",
        ended=_noted(store, ENDED_NOTE) if closed else "",
        met=bool(met_at) and bool(store.check([met_at])),
        lost=waiting > 0 and lost is not None and bool(lost()),
        left=_noted(store, LEFT_NOTE) if waiting > 0 else "",
    )


def _noted(store: Any, key: str) -> str:
    return str(store.get(key).decode(errors="replace")) if store.check([key]) else ""


def trouble_of(error: Exception) -> Trouble:
    """By name: torch's errors are other classes than ours."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if "RendezvousClosedError" in names:
        return Trouble.CLOSED
    if "RendezvousTimeoutError" in names:
        return Trouble.TIMEOUT
    return Trouble.LEFT if "RendezvousGracefulExitError" in names else Trouble.ERROR
