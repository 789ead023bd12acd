"""Periodic health probe of a rendezvous store; reports outages and recoveries.

The state machine is `protocol.store_health`; each backend has its own probe (`etcd.probe`,
`etcd_v2.probe`, `c10d.native`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.store_health import (
    ANSWER_SECONDS,
    CONFIRM_SECONDS,
    FIRST_SECONDS,
    PROBE_SECONDS,
    SPARING_SECONDS,
    Failed,
    StoreHealth,
)
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble

log = logging.getLogger(__name__)

STALLED_SECONDS = 1.0
"""Minimum overrun of a probe's timeout that shows that this process itself was suspended.

Such a probe proves nothing about the store.
"""

Probe = Callable[[float], Awaitable[Failed | None]]
"""Request to the store; None if the store serves us. Cancelled after the given seconds."""


@dataclass(frozen=True, slots=True)
class StoreProbe:
    """Probe of a store whose client blocks.

    Args:
        store: name of the store.
        endpoint: address of the store.
        ask: sends one request; blocks for about the given number of seconds at most.
    """

    store: str
    endpoint: str
    ask: Callable[[float], Failed | None]


def system_clock() -> Clock:
    return Clock(time.monotonic(), time.time_ns() // 1_000_000)


def to_log(note: Note) -> None:
    log.log(logging.WARNING if note.warning else logging.INFO, "%s", note.text)


class StoreMonitor:
    """Health monitor of one store; active while `run` runs.

    Args:
        store: name of the store in messages; must also fit the start of a sentence.
        endpoint: address of the store in messages.
        probe: see `Probe`.
        changed: called with the new trouble when trouble begins, changes or ends (None).
        report: receiver of the notes; the log by default.
        pause: seconds between probes of a healthy store.
        written_at: monotonic time of the last successful write, which counts as a probe.
    """

    def __init__(
        self,
        store: str,
        endpoint: str,
        probe: Probe,
        changed: Callable[[StoreTrouble | None], None] = lambda trouble: None,
        report: Callable[[Note], None] = to_log,
        pause: Callable[[], float] = lambda: PROBE_SECONDS,
        written_at: Callable[[], float] = lambda: float("-inf"),
    ) -> None:
        self._health = StoreHealth(store, endpoint)
        self._probe = probe
        self._changed = changed
        self._report = report
        self._pause = pause
        self._written_at = written_at

    @property
    def trouble(self) -> StoreTrouble | None:
        """Known trouble with the store; None while it appears usable."""
        return self._health.trouble

    @property
    def failing_seconds(self) -> float:
        """Time since the first failed probe in a row; 0 if the latest one succeeded."""
        return self._health.failing_seconds(time.monotonic())

    async def run(self) -> None:
        """Probe until cancelled."""
        await asyncio.sleep(FIRST_SECONDS)
        while True:
            failure = None
            if not self._health.suspected and (spared := self._spared_seconds()) > 0:
                await asyncio.sleep(spared)
                continue
            try:
                failure = await self._probe_once()
            except Exception:  # top-level loop: a defect in a probe must not end the training
                log.exception("%s cannot be probed", self._health.store)
            await asyncio.sleep(self._pause_seconds(failure))

    async def _probe_once(self) -> Failed | None:
        began = system_clock()
        failure = await self._probed()
        now = system_clock()
        late = now.now - began.now - ANSWER_SECONDS
        answered = failure is None or failure.state is StoreState.REFUSING
        if answered or late < STALLED_SECONDS:
            self._take(failure, began, now)
        return failure

    def _spared_seconds(self) -> float:
        """Return the seconds for which a recent write makes a probe unnecessary."""
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
            self._report(note)
        if self._health.trouble != before:
            self._changed(self._health.trouble)

    def _pause_seconds(self, failure: Failed | None) -> float:
        if failure is not None and self._health.trouble is None:
            return CONFIRM_SECONDS
        return SPARING_SECONDS if failure is not None and failure.costly else self._pause()
