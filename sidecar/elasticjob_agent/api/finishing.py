"""Client of a round's exit barrier that survives an etcd outage.

A finished node announces its success in the round's store. Otherwise the other nodes would consider
it lost once its key expires, and start a new round without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from elasticjob_agent.api.calling import CALL_SECONDS, in_thread
from elasticjob_agent.api.looking import FIRST_DONE, done_note, kept_by_etcd
from elasticjob_agent.api.stores import TERMINAL_STATE_SYNC_ID, arrive, last_member

log = logging.getLogger("elasticjob.agent")

AWAY_SECONDS = 300.0
"""Maximum etcd outage that a finished node waits out."""
SEEK_SECONDS = 0.5
T = TypeVar("T")


class ExitBarrier:
    """Exit barrier of one round.

    Args:
        handler: rendezvous handler.
        store: store of the round.
        ours: for each node's group rank, True if it is this node.
        interval_seconds: polling interval.
        away_seconds: maximum etcd outage.
        meeting: returns False once this node no longer waits in the barrier.
    """

    def __init__(
        self,
        handler: Any,
        store: Any,
        ours: Sequence[bool],
        interval_seconds: float,
        away_seconds: float,
        meeting: Callable[[], bool],
    ) -> None:
        self._handler = handler
        self._store = store
        self._ours = ours
        self._interval_seconds = interval_seconds
        self._away_seconds = away_seconds
        self._meeting = meeting

    async def arrived(self) -> str:
        """Enter the barrier; return the key that exists once all nodes have arrived.

        After the count this node's end is no loss to the others; `handler.stay` makes its key
        permanent for that. Raises the store's errors.
        """
        last = await self._counted()
        stay = getattr(self._handler, "stay", None)
        if stay is not None:
            with contextlib.suppress(TimeoutError):
                await in_thread(stay, CALL_SECONDS)
        return last

    async def _counted(self) -> str:
        """Count this node in the barrier.

        It first writes its done notes, so that nodes that miss it afterwards know that it was done.
        A count whose answer was lost may have taken effect, so it is not repeated; all nodes have
        arrived once each has written its note.
        """
        store, last = self._store, last_member(TERMINAL_STATE_SYNC_ID)

        def count() -> str:
            return arrive(store, len(self._ours), TERMINAL_STATE_SYNC_ID)

        if not hasattr(self._handler, "gone"):
            await self._insisted(lambda: store.check([last]))
            return await in_thread(count, CALL_SECONDS)
        own = [done_note(rank) for rank, is_ours in enumerate(self._ours) if is_ours]
        own.append(FIRST_DONE)
        await self._insisted(lambda: [store.set(note, b"1") for note in own])
        try:
            return await in_thread(count, CALL_SECONDS)
        except Exception as error:
            if not kept_by_etcd(self._handler):
                raise
            log.warning("done, but the exit barrier may not have counted this node: %r", error)
        await self._all_noted()
        await self._insisted(lambda: store.set(last, b"1"))
        return last

    def unknown(self, error: Exception) -> str:
        """Return a message about the other nodes if the barrier cannot be reached.

        Empty for a store hosted by a node: its disappearance means that the others are done.
        """
        return unknown(error, self._away_seconds) if kept_by_etcd(self._handler) else ""

    async def _all_noted(self) -> None:
        notes = [done_note(rank) for rank in range(len(self._ours))]
        while True:
            if await self._insisted(lambda: self._store.check(notes)):
                return
            await asyncio.sleep(self._interval_seconds)

    async def _insisted(self, call: Callable[[], T]) -> T:
        """Run an idempotent call, and retry it during an etcd outage up to the limit."""
        began, said = time.monotonic(), False
        while True:
            try:
                return await in_thread(call, CALL_SECONDS)
            except Exception as error:
                waits = self._meeting() and kept_by_etcd(self._handler)
                if not waits or time.monotonic() - began >= self._away_seconds:
                    raise
                if not said:
                    log.warning(
                        "done, but cannot notify the other nodes yet; retrying for up to %g s: %r",
                        self._away_seconds,
                        error,
                    )
                said = True
            await asyncio.sleep(SEEK_SECONDS)


def unknown(error: Exception, seconds: float) -> str:
    """Return the message of an agent that is done and ends because etcd does not answer."""
    return (
        "all workers here did, but whether the other nodes are done is not known: "
        f"etcd did not answer for {seconds:.0f} s ({error})"
    )
