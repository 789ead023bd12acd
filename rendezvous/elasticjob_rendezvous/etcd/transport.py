"""Transport of calls to etcd: choice of endpoint, timeout, retries, and resulting error.

A call is retried on the next endpoint, within its deadline, if it provably
had no effect or is `repeatable`. A write that may have been applied is never
retried: it raises `Ambiguous`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import grpc
import grpc.aio

from elasticjob_rendezvous.etcd.endpoints import Link, Links, Metadata, Token
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    EtcdError,
    NotEtcd,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Verdict,
    meaning,
)

Reply = TypeVar("Reply")
Send = Callable[[Link, Metadata, float], Awaitable[Reply]]
"""Function that sends one request, given the link, the request's metadata and its timeout."""

BROKEN = (
    grpc.aio.AioRpcError,
    grpc.aio.InternalError,
    grpc.aio.UsageError,  # the channel was closed
    asyncio.InvalidStateError,  # a write to a stream that has ended
    asyncio.CancelledError,  # if the channel was closed during the call; otherwise re-raised
    TimeoutError,
)

_FIRST_BACKOFF_SECONDS = 0.05
_LAST_BACKOFF_SECONDS = 1.0
_ETCD_PREFIX = "etcdserver: "
_LEAST_WRITE_SECONDS = 0.1
"""Minimum remaining time for a retry of a write.

A timeout of the retry would make the outcome ambiguous; so far the write was certainly refused.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of one attempt."""

    verdict: Verdict | type[EtcdError]
    detail: str
    answered: bool = False
    """True if the error came from etcd itself."""


def read_failure(error: BaseException) -> Failure:
    """Classify an exception of `BROKEN`. Re-raise a cancellation of the calling task."""
    if isinstance(error, grpc.aio.AioRpcError):
        detail = error.details() or ""
        verdict = meaning(error.code(), detail)
        return Failure(verdict, f"{error.code().name}: {detail}", detail.startswith(_ETCD_PREFIX))
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise error
        return Failure(Verdict.UNKNOWN, "the connection was closed by this process")
    if isinstance(error, TimeoutError):
        return Failure(Verdict.UNKNOWN, "no answer in time")
    return Failure(Verdict.UNKNOWN, f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class _Call:
    """State of one call across its attempts."""

    operation: str
    repeatable: bool
    deadline: float
    once: bool = False
    sent: bool = False
    refreshed: bool = False
    overtaken: int = 0
    failures: int = 0
    metadata: Metadata = field(default=())


class Transport:
    """Sender of calls for one client."""

    def __init__(
        self, links: Links, token: Token, timeout_seconds: float, random: Callable[[], float]
    ) -> None:
        self.links = links
        self.token = token
        self.timeout_seconds = timeout_seconds
        self._random = random
        self.written_at = float("-inf")
        """Monotonic time of the last write that etcd accepted."""

    async def call(
        self,
        operation: str,
        send: Send[Reply],
        *,
        repeatable: bool = True,
        timeout_seconds: float | None = None,
        once: bool = False,
    ) -> Reply:
        """Send until etcd answers or refuses, or the timeout expires. Raises `EtcdError`.

        `once` limits the call to one attempt per endpoint.
        """
        loop = asyncio.get_running_loop()
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        call = _Call(operation, repeatable, loop.time() + seconds, once)
        while True:
            link = self.links.current()
            try:
                return await self._attempt(call, link, send, call.deadline - loop.time())
            except BROKEN as error:
                failure = read_failure(error)
                delay = await self._delay_before_next(call, link, failure, error)
                latest = call.deadline - (0.0 if repeatable else _LEAST_WRITE_SECONDS)
                if loop.time() + delay < latest:
                    await asyncio.sleep(delay)
                    if loop.time() < latest:
                        continue
                kind = _kind(call, failure.verdict)
                raise kind(operation, link.endpoint.url, failure.detail) from error

    async def _attempt(
        self, call: _Call, link: Link, send: Send[Reply], remaining_seconds: float
    ) -> Reply:
        untried = max(1, len(self.links) - call.failures)
        share_seconds = remaining_seconds / untried
        call.sent = False
        call.metadata = await self.token.metadata(link, share_seconds)
        if call.repeatable:
            return await send(link, call.metadata, share_seconds)
        # Connect first: a request whose connection fails was never sent and may be retried.
        if not link.is_settled():
            async with asyncio.timeout(share_seconds):
                await link.settled()
        call.sent = True
        reply = await send(link, call.metadata, call.deadline - asyncio.get_running_loop().time())
        self.written_at = time.monotonic()
        return reply

    async def _delay_before_next(
        self, call: _Call, link: Link, failure: Failure, cause: BaseException
    ) -> float:
        """Return the delay before the next attempt in seconds; raise if the call must end."""
        unproven = failure.verdict is PermissionDenied and self.token.is_absent(call.metadata)
        if (unproven or failure.verdict is Verdict.STALE_TOKEN) and not call.refreshed:
            call.refreshed = True
            if self.token.forget(call.metadata):
                return 0.0
        if failure.verdict is Verdict.OVERTAKEN:
            return self._delay_when_overtaken(call)
        kind = _kind(call, failure.verdict)
        if kind in (Unavailable, Ambiguous, NotEtcd):  # the endpoint failed, not the request
            call.failures += 1
            if not failure.answered:
                self.token.forget(call.metadata)
            await self.links.failed(link)
        rounds, place_in_round = divmod(call.failures, len(self.links))
        if place_in_round == 0 and call.once:
            raise kind(call.operation, link.endpoint.url, failure.detail) from cause
        if kind is not Unavailable and (kind is not NotEtcd or place_in_round == 0):
            raise kind(call.operation, link.endpoint.url, failure.detail) from cause
        if place_in_round:
            return 0.0
        return self._backoff_seconds(rounds)

    def _delay_when_overtaken(self, call: _Call) -> float:
        """Return the delay before a retry after a change of the users; these come in bursts.

        A simple token remains valid; a JWT is bound to the auth revision, so fetch a new one.
        """
        call.overtaken += 1
        if call.overtaken == 1:
            return 0.0
        self.token.forget(call.metadata)
        return self._backoff_seconds(call.overtaken - 1)

    def _backoff_seconds(self, attempt: int) -> float:
        seconds = min(_FIRST_BACKOFF_SECONDS * 2.0 ** (attempt - 1), _LAST_BACKOFF_SECONDS)
        return seconds * (0.5 + self._random() / 2)


def _kind(call: _Call, verdict: Verdict | type[EtcdError]) -> type[EtcdError]:
    match verdict:
        case Verdict.STALE_TOKEN:
            return Unauthenticated
        case Verdict.UNKNOWN:
            return Ambiguous if call.sent else Unavailable
        case Verdict.NO_EFFECT | Verdict.OVERTAKEN:
            return Unavailable
        case _:
            return verdict
