"""One active replica: whoever holds the Lease. The others stand by and take it when it is let go.

async with hold_lease(kube, settings):
    ...  # active; cancelled in time when the Lease cannot be kept
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

from elasticjob_operator.core.leases import (
    Lease,
    LeaseSettings,
    Sighting,
    claim,
    lease_of,
    release,
    sighting,
)
from elasticjob_operator.kube import (
    LEASES,
    AlreadyExists,
    Conflict,
    Kube,
    KubeError,
    NotFound,
)

log = logging.getLogger(__name__)

EXIT_OVERDUE = 70
_CHANGED = (Conflict, AlreadyExists)


class LeaseLost(Exception):
    """The Lease is another's, or could not be renewed in time: this replica is active no more."""


def _abort() -> None:
    os._exit(EXIT_OVERDUE)


@asynccontextmanager
async def hold_lease(
    kube: Kube,
    settings: LeaseSettings,
    clock: Callable[[], float] = time.monotonic,
    abort: Callable[[], None] = _abort,
) -> AsyncIterator[None]:
    """Wait for the Lease, keep it while the body runs, and let go of it after the body.

    When it cannot be kept the body is cancelled while nobody else can have it yet. If the body
    does not end in what is left of that time, `abort` ends the process.

    Raises:
        LeaseLost: after the body that was cancelled for it has ended.
    """
    # A process that runs beside its successor, or twice on one host, must not pass for the other.
    own = replace(settings, identity=f"{settings.identity}_{uuid.uuid4().hex[:8]}")
    held = _Held(kube, own, clock, abort)
    failure: BaseException | None = None
    try:
        await held.acquire()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(held.keep())
            yield
            keeping.cancel()
    except BaseExceptionGroup as errors:
        lost = [error for error in errors.exceptions if isinstance(error, LeaseLost)]
        failure = (lost or errors.exceptions)[0]
        if len(errors.exceptions) > 1:
            failure.__cause__ = errors
    finally:
        held.body_has_ended()
        await held.release()
    if failure is not None:
        raise failure


class _Held:
    """This replica's hold on the Lease."""

    def __init__(
        self,
        kube: Kube,
        settings: LeaseSettings,
        clock: Callable[[], float],
        abort: Callable[[], None],
    ) -> None:
        self._kube = kube
        self._settings = settings
        self._clock = clock
        self._abort = abort
        self._sent_at = 0.0  # of the last claim that was confirmed
        self._lease: Lease | None = None  # as last written or read; None: it is not there
        self._in_doubt = True  # whether it has to be read before it is written
        self._overdue: asyncio.TimerHandle | None = None
        self._trouble = ""

    async def acquire(self) -> None:
        """Wait until the Lease is ours."""
        seen: Sighting | None = None
        while True:
            pause = self._settings.renew_seconds
            try:
                async with asyncio.timeout(pause):
                    await self._read()
                    now = self._clock()
                    seen = sighting(seen, self._lease, now) if self._lease else None
                    # Ours already: by a claim whose answer was lost.
                    ours = seen is not None and seen.lease.holder == self._settings.identity
                    if seen is None or ours or seen.free_at <= now:
                        await self._claim()
                        log.info("%s: the Lease is ours, this replica is active", self)
                        return
                pause = min(pause, seen.free_at - now)
                if self._trouble != seen.lease.holder:
                    self._trouble = seen.lease.holder
                    log.info("%s: %s is active, this replica stands by", self, self._trouble)
            except _CHANGED:
                pause = 0.0  # somebody was faster
            except (KubeError, TimeoutError) as error:
                self._warn("cannot be had", error)
            await asyncio.sleep(pause)

    async def keep(self) -> None:
        """Renew for ever. Raises LeaseLost."""
        pause = self._settings.renew_seconds
        while True:
            await asyncio.sleep(min(pause, self._left()))
            try:
                async with asyncio.timeout(min(self._settings.renew_seconds, self._left())):
                    if self._in_doubt:
                        await self._read()
                    holder = self._lease.holder if self._lease else ""
                    if holder not in ("", self._settings.identity):
                        self._lose(f"{holder} holds it")
                    await self._claim()
                pause = self._settings.renew_seconds
                self._trouble = ""
            except _CHANGED:
                pause = 0.0
            except (KubeError, TimeoutError) as error:
                pause = self._settings.renew_seconds / 4
                self._warn("is not renewed", error)
            if self._left() <= 0:
                self._lose("it could not be renewed in time")

    async def release(self) -> None:
        """Let go of the Lease, if it is ours, so that another need not wait."""
        try:
            async with asyncio.timeout(self._settings.renew_seconds):
                if self._in_doubt:
                    await self._read()
                if self._lease is None or self._lease.holder != self._settings.identity:
                    return
                body = release(self._lease)
                await self._kube.patch(LEASES, self._settings.namespace, self._settings.name, body)
                log.info("%s: let go of the Lease", self)
        except (KubeError, TimeoutError) as error:
            log.info("%s: the Lease runs out by itself: %r", self, error)

    def body_has_ended(self) -> None:
        """There is nothing left to abort."""
        if self._overdue is not None:
            self._overdue.cancel()

    async def _read(self) -> None:
        namespace, name = self._settings.namespace, self._settings.name
        try:
            self._lease = lease_of(await self._kube.get(LEASES, namespace, name))
        except NotFound:
            self._lease = None
        self._in_doubt = False

    async def _claim(self) -> None:
        """Take or renew the Lease as it was last read or written."""
        namespace, name = self._settings.namespace, self._settings.name
        body = claim(self._settings, self._lease, datetime.now(UTC))
        sent_at, self._in_doubt = self._clock(), True  # whatever comes instead of an answer
        if self._lease is None:
            raw = await self._kube.create(LEASES, namespace, body)
        else:
            raw = await self._kube.patch(LEASES, namespace, name, body)
        self._lease, self._in_doubt, self._sent_at = lease_of(raw), False, sent_at

    def _left(self) -> float:
        """Seconds until the body has to be cancelled."""
        return max(self._settings.cancels_at(self._sent_at) - self._clock(), 0.0)

    def _lose(self, why: str) -> None:
        log.error("%s: the Lease is lost: %s; this replica ends its activity", self, why)
        rest = max(self._settings.ends_at(self._sent_at) - self._clock(), 0.0)
        self._overdue = asyncio.get_running_loop().call_later(rest, self._too_late)
        raise LeaseLost(f"Lease {self}: {why}")

    def _too_late(self) -> None:
        log.critical("%s: the activity has not ended in time; this process ends", self)
        self._abort()

    def _warn(self, what: str, error: Exception) -> None:
        said = f"{what}: {str(error) or 'no answer in time'}"
        if said != self._trouble:
            self._trouble = said
            log.warning("%s: the Lease %s", self, said)

    def __str__(self) -> str:
        return f"{self._settings.namespace}/{self._settings.name}"
