"""The exit barrier of a round as an agent comes to it, also where etcd is just away.

Who is done tells the others through the round's store. Untold, its node would look lost to them
as soon as its key has run out, and they would begin anew without it.
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
"""So long etcd may be away from who is done."""
SEEK_SECONDS = 0.5
T = TypeVar("T")


class ExitBarrier:
    """The barrier of one round.

    Args:
        handler: of the round's rendezvous.
        store: of the round.
        ours: for each rank of a node whether it is ours.
        interval_seconds: between two looks at it.
        away_seconds: how long etcd is waited for.
        meeting: whether we still want to come to it.
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
        """Come to it; the key that stands once all have. Raises what the store raises.

        Who was counted is missed by nobody any more, and lets the handler say so.
        """
        last = await self._counted()
        stay = getattr(self._handler, "stay", None)
        if stay is not None:
            with contextlib.suppress(TimeoutError):
                await in_thread(stay, CALL_SECONDS)
        return last

    async def _counted(self) -> str:
        """Be counted.

        Before that, who misses us is to know that we were done. A count whose answer was lost
        may have been taken: it is not sent again, but all are there once each has left its note.
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
            log.warning("done; whether that was counted is not known: %r", error)
        await self._all_noted()
        await self._insisted(lambda: store.set(last, b"1"))
        return last

    def unknown(self, error: Exception) -> str:
        """What is not known of the others when the barrier cannot be reached; empty where just
        that tells their end.
        """
        return unknown(error, self._away_seconds) if kept_by_etcd(self._handler) else ""

    async def _all_noted(self) -> None:
        notes = [done_note(rank) for rank in range(len(self._ours))]
        while True:
            if await self._insisted(lambda: self._store.check(notes)):
                return
            await asyncio.sleep(self._interval_seconds)

    async def _insisted(self, call: Callable[[], T]) -> T:
        """A call that may be repeated, and is while etcd is away: it comes back."""
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
                        "done, but the others cannot be told yet; trying on for up to %g s: %r",
                        self._away_seconds,
                        error,
                    )
                said = True
            await asyncio.sleep(SEEK_SECONDS)


def unknown(error: Exception, seconds: float) -> str:
    """What an agent that is done, and ends for want of etcd, does not know."""
    return (
        "all workers here did, but whether the other nodes are done is not known: "
        f"etcd did not answer for {seconds:.0f} s ({error})"
    )
