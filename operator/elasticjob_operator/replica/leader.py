"""Leader election: the replica that holds the Lease is active, the others stand by.

async with hold_lease(kube, settings) as lease:
    ...  # active; cancelled in time if the Lease cannot be renewed
    lease.let_expire()  # if requests of this replica may still take effect
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

from elasticjob_operator.kubernetes.client import (
    LEASES,
    AlreadyExists,
    Conflict,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.replica.lease import (
    Lease,
    LeaseSettings,
    ObservedLease,
    claim_body,
    observe_lease,
    parse_lease,
    release_body,
)

log = logging.getLogger(__name__)

EXIT_OVERDUE = 70
_CHANGED = (Conflict, AlreadyExists)


class LeaseLost(Exception):
    """Lease with another holder, or not renewed in time; this replica is no longer active."""


def _abort() -> None:
    os._exit(EXIT_OVERDUE)


@asynccontextmanager
async def hold_lease(
    kube: Kube,
    settings: LeaseSettings,
    clock: Callable[[], float] = time.monotonic,
    abort: Callable[[], None] = _abort,
) -> AsyncIterator[HeldLease]:
    """Acquire the Lease, renew it while the body runs, and release it afterwards.

    If it cannot be renewed, the body is cancelled before another replica can acquire it. If the
    body does not end within the remaining validity, `abort` ends the process.

    Raises:
        LeaseLost: after the cancelled body has ended.
    """
    # A unique suffix distinguishes a process from its successor and from others on its host.
    own = replace(settings, identity=f"{settings.identity}_{uuid.uuid4().hex[:8]}")
    held = HeldLease(kube, own, clock, abort)
    failure: BaseException | None = None
    try:
        await held.acquire()
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(held.keep())
            yield held
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


class HeldLease:
    """Lease as acquired, renewed and released by this replica."""

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
        self._sent_at = 0.0  # send time of the last confirmed claim
        self._lease: Lease | None = None  # as last written or read; None if absent
        self._in_doubt = True  # read it before the next write
        self._overdue: asyncio.TimerHandle | None = None
        self._trouble = ""
        self._expires = False

    def let_expire(self) -> None:
        """Let the Lease expire after the body instead of releasing it."""
        self._expires = True

    async def acquire(self) -> None:
        """Wait until this replica holds the Lease."""
        seen: ObservedLease | None = None
        while True:
            pause = self._settings.renew_seconds
            try:
                async with asyncio.timeout(pause):
                    await self._read()
                    now = self._clock()
                    seen = observe_lease(seen, self._lease, now) if self._lease else None
                    # Already held, by a claim whose response was lost.
                    ours = seen is not None and seen.lease.holder == self._settings.identity
                    if seen is None or ours or seen.free_at <= now:
                        await self._claim()
                        log.info("%s: acquired the Lease, this replica is active", self)
                        return
                pause = min(pause, seen.free_at - now)
                if self._trouble != seen.lease.holder:
                    self._trouble = seen.lease.holder
                    log.info("%s: %s is active, this replica stands by", self, self._trouble)
            except _CHANGED:
                pause = 0.0  # another replica was faster
            except (KubeError, TimeoutError) as error:
                self._warn("acquire", error)
            await asyncio.sleep(pause)

    async def keep(self) -> None:
        """Renew until cancelled. Raises LeaseLost."""
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
                self._warn("renew", error)
            if self._left() <= 0:
                self._lose("it could not be renewed in time")

    async def release(self) -> None:
        """Release the Lease if held, so that another replica need not wait for its expiry."""
        try:
            async with asyncio.timeout(self._settings.renew_seconds):
                if self._in_doubt:
                    await self._read()
                if self._lease is None or self._lease.holder != self._settings.identity:
                    return
                if self._expires:
                    log.info("%s: work was cancelled, the Lease will expire", self)
                    return
                body = release_body(self._lease)
                await self._kube.patch(LEASES, self._settings.namespace, self._settings.name, body)
                log.info("%s: released the Lease", self)
        except (KubeError, TimeoutError) as error:
            log.info("%s: cannot release the Lease, it will expire: %r", self, error)

    def body_has_ended(self) -> None:
        """Cancel the pending abort."""
        if self._overdue is not None:
            self._overdue.cancel()

    async def _read(self) -> None:
        namespace, name = self._settings.namespace, self._settings.name
        try:
            self._lease = parse_lease(await self._kube.get(LEASES, namespace, name))
        except NotFound:
            self._lease = None
        self._in_doubt = False

    async def _claim(self) -> None:
        """Take or renew the Lease as it was last read or written."""
        namespace, name = self._settings.namespace, self._settings.name
        body = claim_body(self._settings, self._lease, datetime.now(UTC))
        sent_at, self._in_doubt = self._clock(), True  # until a response confirms it
        if self._lease is None:
            raw = await self._kube.create(LEASES, namespace, body)
        else:
            raw = await self._kube.patch(LEASES, namespace, name, body)
        self._lease, self._in_doubt, self._sent_at = parse_lease(raw), False, sent_at

    def _left(self) -> float:
        """Return the seconds until the body has to be cancelled."""
        return max(self._settings.cancels_at(self._sent_at) - self._clock(), 0.0)

    def _lose(self, reason: str) -> None:
        log.error("%s: lost the Lease, stopping: %s", self, reason)
        rest = max(self._settings.ends_at(self._sent_at) - self._clock(), 0.0)
        self._overdue = asyncio.get_running_loop().call_later(rest, self._too_late)
        raise LeaseLost(f"Lease {self}: {reason}")

    def _too_late(self) -> None:
        log.critical("%s: work did not stop before the Lease expired, exiting", self)
        self._abort()

    def _warn(self, action: str, error: Exception) -> None:
        trouble = f"{action} the Lease: {str(error) or 'no answer in time'}"
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s: cannot %s", self, trouble)

    def __str__(self) -> str:
        return f"{self._settings.namespace}/{self._settings.name}"
