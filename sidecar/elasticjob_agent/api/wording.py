"""What an agent tells the others: by a note in the round's store, or by a call of the handler.

Whether it gets there changes nothing for us: what goes wrong is only logged.
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

DEPART_SECONDS = 5.0  # less than the agent itself waits to hear that it has left
LAST_JOIN_SECONDS = 1.0


async def called(what: str, call: Callable[[], object], seconds: float = CALL_SECONDS) -> None:
    """A call whose failure changes nothing for us."""
    try:
        await in_thread(call, seconds)
    except Exception as error:
        log.warning("the rendezvous did not take %s: %r", what, error)


async def note(place: Place | None, key: str, text: str, seconds: float = CALL_SECONDS) -> None:
    """A note in the store of our round, if we have one."""
    store = None if place is None else place.store
    if store is not None:
        await called(key, lambda: store.set(key, text.encode()), seconds)


async def depart(
    handler: Any, place: Place | None, name: str, join: asyncio.Task[None] | None
) -> None:
    """Tell the handler, if it knows how to leave without closing for all.

    torch's do not: their members find out. `name` is what the others know us by, empty for
    nothing to tell them; `join` is a search for a place, which is to end.
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
