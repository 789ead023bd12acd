"""From the end of our workers to the end of all: one round's exit barrier, as an event or two.

The looks at the round's store then see whether all have come: a store that waits is deaf to
other questions.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from elasticjob_agent.api.calling import CALL_SECONDS, in_thread
from elasticjob_agent.api.finishing import AWAY_SECONDS, ExitBarrier, unknown
from elasticjob_agent.api.looking import kept_by_etcd
from elasticjob_agent.api.seeking import Place
from elasticjob_agent.core.following import Seen, Waited

log = logging.getLogger("elasticjob.agent")

DEAF_LOOKS = 3
"""So many looks in vain from the exit barrier: the store went with the agent that hosted it."""


class Done:
    """Our part in a round in which all workers here are done.

    Args:
        handler: of the rendezvous.
        place: in the round.
        member: our id in its roster.
        interval_seconds: between two looks at it.
        barrier_seconds: what the exit barrier may take; infinity: as long as the others work.
        meeting: whether we still want to come to the barrier.
    """

    def __init__(
        self,
        handler: Any,
        place: Place,
        member: str,
        interval_seconds: float,
        barrier_seconds: float,
        meeting: Callable[[], bool],
    ) -> None:
        self._handler = handler
        self._place = place
        self._member = member
        self._interval_seconds = interval_seconds
        self._barrier_seconds = barrier_seconds
        self._away_seconds = min(AWAY_SECONDS, barrier_seconds)
        self._meeting = meeting
        self.met_at = ""
        """The key that stands once all have come; "" before we have."""

    async def met(self) -> Seen | Waited | None:
        """Come to the barrier; what came of it, None where the looks are to see that."""
        if self._place.store is None:
            return await self._met_by_handler()
        barrier = self._barrier()
        try:
            self.met_at = await barrier.arrived()
        except Exception as error:
            if not self._meeting():
                return None
            # The store may have ended with the agent that hosted it, which was done then.
            log.warning("the exit barrier cannot be reached: %r", error)
            return Waited(barrier.unknown(error))
        if not self._meeting():
            return None
        if math.isinf(self._barrier_seconds):
            log.info("done; waiting for the other agents")
            return None
        log.info("done; waiting up to %g s for the other agents", self._barrier_seconds)
        await asyncio.sleep(self._barrier_seconds)
        if not self._meeting():
            return None
        log.warning("other agents are not done after %g s", self._barrier_seconds)
        return Waited()

    def deaf(self, looks: int, seconds: float, error: Exception) -> Seen | Waited | None:
        """What a store means that is gone while we are done: its host was done too, and ended.

        A host that stays until all have seen the end was lost: its round ends with it. An etcd
        that is away comes back.
        """
        if kept_by_etcd(self._handler):
            away = seconds >= self._away_seconds
            return Waited(unknown(error, seconds)) if away else None
        if looks < DEAF_LOOKS:
            return None
        stays = getattr(self._handler, "host_stays", False)
        return Seen(waiting=1, moved_on=True) if stays else Waited()

    def _barrier(self) -> ExitBarrier:
        return ExitBarrier(
            self._handler,
            self._place.store,
            [seat.id == self._member for seat in self._place.roster.seats],
            self._interval_seconds,
            self._away_seconds,
            self._meeting,
        )

    async def _met_by_handler(self) -> Seen | Waited:
        """Without a store, the handler may know of the others' end, as v3's does."""
        handler = self._handler
        if not hasattr(handler, "report_done"):
            return Waited()
        try:
            await in_thread(handler.report_done, CALL_SECONDS)
            outcome = await in_thread(lambda: handler.wait_end(self._barrier_seconds))
        except Exception as error:
            log.warning("gave up waiting for the other agents: %r", error)
            return Waited()
        anew = Seen(waiting=1, failed="another node failed, and a newer round began")
        return Seen(met=True) if outcome is not None else anew
