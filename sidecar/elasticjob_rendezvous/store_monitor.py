"""Probes a rendezvous store at intervals and reports when it cannot be used, and when it can.

The state machine is `core.store_health`; what a probe is, its backend knows (`etcd.probe`,
`etcd_v2.probe`, `c10d.probe`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from elasticjob_rendezvous.core.effects import Note
from elasticjob_rendezvous.core.events import Clock
from elasticjob_rendezvous.core.store_health import (
    ANSWER_SECONDS,
    CONFIRM_SECONDS,
    FIRST_SECONDS,
    PROBE_SECONDS,
    SPARING_SECONDS,
    Failed,
    StoreHealth,
)
from elasticjob_rendezvous.core.store_trouble import StoreState, StoreTrouble

log = logging.getLogger(__name__)

STALLED_SECONDS = 1.0
"""A probe that ran out of time so long after it says that this process stood still, and no more."""

Probe = Callable[[float], Awaitable[Failed | None]]
"""Asks the store once; None where it serves us. It is cancelled after the seconds that it gets."""


@dataclass(frozen=True, slots=True)
class StoreProbe:
    """Probe of a store whose client blocks.

    Args:
        store: what it is called.
        endpoint: where it is.
        ask: asks once, and blocks for about so many seconds at most.
    """

    store: str
    endpoint: str
    ask: Callable[[float], Failed | None]


def system_clock() -> Clock:
    return Clock(time.monotonic(), time.time_ns() // 1_000_000)


def to_log(note: Note) -> None:
    log.log(logging.WARNING if note.warning else logging.INFO, "%s", note.text)


class StoreMonitor:
    """Follows one store while `run` runs.

    Args:
        store: what it is called in messages, at the start of a sentence too.
        endpoint: where it is, for messages.
        probe: see `Probe`.
        changed: called with the new trouble when it began, changed or ended (None).
        say: where the lines go; the log by default.
        pause: how long to wait after a probe of a healthy store.
        written_at: when the store last took a write (monotonic), which is as good as a probe.
    """

    def __init__(
        self,
        store: str,
        endpoint: str,
        probe: Probe,
        changed: Callable[[StoreTrouble | None], None] = lambda trouble: None,
        say: Callable[[Note], None] = to_log,
        pause: Callable[[], float] = lambda: PROBE_SECONDS,
        written_at: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._health = StoreHealth(store, endpoint)
        self._probe = probe
        self._changed = changed
        self._say = say
        self._pause = pause
        self._written_at = written_at

    @property
    def trouble(self) -> StoreTrouble | None:
        """Trouble with the store; None while it can be used, as far as known."""
        return self._health.trouble

    async def run(self) -> None:
        """Probe until cancelled."""
        await asyncio.sleep(FIRST_SECONDS)
        while True:
            failure = None
            if not self._health.suspected and (spared := self._spared_seconds()) > 0:
                await asyncio.sleep(spared)
                continue
            try:
                failure = await self._look()
            except Exception:  # the top loop: a defect here must end no training
                log.exception("%s cannot be probed", self._health.store)
            await asyncio.sleep(self._pause_seconds(failure))

    async def _look(self) -> Failed | None:
        began = system_clock()
        failure = await self._probed()
        now = system_clock()
        late = now.now - began.now - ANSWER_SECONDS
        answered = failure is None or failure.state is StoreState.REFUSING
        if answered or late < STALLED_SECONDS:
            self._take(failure, began, now)
        return failure

    def _spared_seconds(self) -> float:
        """Seconds for which a write makes a probe unnecessary."""
        return self._written_at() + self._pause() - time.monotonic()

    async def _probed(self) -> Failed | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await self._probe(ANSWER_SECONDS)
        except TimeoutError:
            return Failed(StoreState.UNREACHABLE, f"no answer within {ANSWER_SECONDS:g} s")

    def _take(self, failure: Failed | None, sent: Clock, now: Clock) -> None:
        before = self._health.trouble
        if failure is None:
            notes = self._health.succeeded(now)
        else:
            notes = self._health.failed(failure, sent, now)
        for note in notes:
            self._say(note)
        if self._health.trouble != before:
            self._changed(self._health.trouble)

    def _pause_seconds(self, failure: Failed | None) -> float:
        if failure is not None and self._health.trouble is None:
            return CONFIRM_SECONDS
        return SPARING_SECONDS if failure is not None and failure.costly else self._pause()
