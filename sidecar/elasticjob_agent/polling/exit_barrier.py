"""Exit barrier of one round, from the success of this node's workers to that of all nodes.

The agent polls the round's store for the barrier's key instead of waiting for it: a store that
waits answers no other requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any

from elasticjob_agent.core.poll_step import BarrierTimedOut, Polled
from elasticjob_agent.polling.join import Place
from elasticjob_agent.polling.poll import kept_by_etcd
from elasticjob_agent.polling.round_store import (
    MAX_OUTAGE_SECONDS,
    ExitBarrierClient,
    unknown_outcome,
)
from elasticjob_agent.threads import CALL_SECONDS, in_thread

log = logging.getLogger("elasticjob.agent")

MAX_FAILED_POLLS = 3
"""Failed polls in the exit barrier after which the store counts as gone, with its host."""


class ExitBarrier:
    """Participation of this node in the exit barrier of a round, after all its workers are done.

    Args:
        handler: rendezvous handler.
        place: this node's place in the round.
        member: this node's id in the roster.
        interval_seconds: polling interval.
        barrier_seconds: maximum wait for the other nodes; infinity waits as long as they work.
        meeting: returns False once this node no longer waits in the barrier.
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
        self._away_seconds = min(MAX_OUTAGE_SECONDS, barrier_seconds)
        self._meeting = meeting
        self.met_at = ""
        """Key that exists once all nodes have arrived; "" before this node has."""

    async def met(self) -> Polled | BarrierTimedOut | None:
        """Enter the barrier and return the resulting event; None if polling will detect it."""
        if self._place.store is None:
            return await self._met_by_handler()
        barrier = self._barrier()
        try:
            self.met_at = await barrier.arrived()
        except Exception as error:
            if not self._meeting():
                return None
            # The store may have ended with the agent that hosted it, which was then done.
            log.warning("cannot reach the exit barrier: %r", error)
            return BarrierTimedOut(barrier.unknown(error))
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
        return BarrierTimedOut()

    def failed_polls(
        self, failures: int, seconds: float, error: Exception
    ) -> Polled | BarrierTimedOut | None:
        """Interpret a store that is unreachable while this node is done.

        A store's host ends when it is done itself. A host that stays until all nodes have seen the
        end (`host_stays`) was lost instead, and its round ends with it. An etcd outage is waited
        out up to the limit.

        Args:
            failures: consecutive failed polls.
            seconds: time since the first of them.
            error: last error.
        """
        if kept_by_etcd(self._handler):
            away = seconds >= self._away_seconds
            return BarrierTimedOut(unknown_outcome(error, seconds)) if away else None
        if failures < MAX_FAILED_POLLS:
            return None
        stays = getattr(self._handler, "host_stays", False)
        return Polled(waiting=1, moved_on=True) if stays else BarrierTimedOut()

    def _barrier(self) -> ExitBarrierClient:
        return ExitBarrierClient(
            self._handler,
            self._place.store,
            [assignment.id == self._member for assignment in self._place.roster.seats],
            self._interval_seconds,
            self._away_seconds,
            self._meeting,
        )

    async def _met_by_handler(self) -> Polled | BarrierTimedOut:
        """Wait for the end through the handler if it supports that, as v3's does."""
        handler = self._handler
        if not hasattr(handler, "report_done"):
            return BarrierTimedOut()
        try:
            await in_thread(handler.report_done, CALL_SECONDS)
            outcome = await in_thread(lambda: handler.wait_end(self._barrier_seconds))
        except Exception as error:
            log.warning("gave up waiting for the other agents: %r", error)
            return BarrierTimedOut()
        anew = Polled(waiting=1, failed="another node failed, and a newer round began")
        return Polled(met=True) if outcome is not None else anew
