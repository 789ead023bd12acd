"""Messages to the other agents: notes in the round's store, and calls of the handler.

Delivery is best effort: errors are only logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from elasticjob_agent.api.calling import CALL_SECONDS, in_thread
from elasticjob_agent.api.looking import LEFT_NOTE
from elasticjob_agent.api.seeking import Place

log = logging.getLogger("elasticjob.agent")

DEPART_SECONDS = 5.0  # shorter than the agent's own wait for its departure
LAST_JOIN_SECONDS = 1.0


async def called(what: str, call: Callable[[], object], seconds: float = CALL_SECONDS) -> None:
    """Make a blocking call; log its error instead of raising it."""
    try:
        await in_thread(call, seconds)
    except Exception as error:
        log.warning("cannot send %s to the rendezvous: %r", what, error)


async def note(place: Place | None, key: str, text: str, seconds: float = CALL_SECONDS) -> None:
    """Write a note to the store of this node's round, if there is one."""
    store = None if place is None else place.store
    if store is not None:
        await called(key, lambda: store.set(key, text.encode()), seconds)


async def depart(
    handler: Any, place: Place | None, name: str, join: asyncio.Task[None] | None
) -> None:
    """Leave through the handler, if it can leave without closing the rendezvous for all.

    torch's handlers cannot: the other members detect the loss. `name` is written to the round's
    store as the leave note, unless it is empty. `join` is a running join, which is to end.
    """
    leave = getattr(handler, "leave", None)
    if leave is None:
        return
    if name:
        await note(place, LEFT_NOTE, name, DEPART_SECONDS / 4)
    await called("leave", leave, DEPART_SECONDS / 2)
    if join is None or join.done():
        return
    await asyncio.wait([join], timeout=LAST_JOIN_SECONDS)
    if not join.done():
        await called("shutdown", handler.shutdown, DEPART_SECONDS / 4)
