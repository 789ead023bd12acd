"""Watch of several ranges over one gRPC stream, ended by a typed error.

A watch never resumes by itself: only a new read of the ranges recovers missed
events, so any doubt ends the watch and the caller starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc.aio

from elasticjob_rendezvous.etcd import wire
from elasticjob_rendezvous.etcd.endpoints import Link, Metadata
from elasticjob_rendezvous.etcd.errors import (
    Compacted,
    EtcdError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    Verdict,
)
from elasticjob_rendezvous.etcd.transport import BROKEN, Transport, read_failure
from elasticjob_rendezvous.protocol.kv import Range, WatchBatch

_OPERATION = "watch"


class _Refused(Exception):
    """Refusal of a watch that a new auth token may resolve."""

    def __init__(self, kind: type[EtcdError], detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


async def watch(
    transport: Transport,
    targets: Sequence[Range],
    start_revision: int,
    idle_seconds: float,
    deletions_only: bool = False,
) -> AsyncGenerator[WatchBatch, None]:
    """Yield the events of `targets` from `start_revision` on; see `Client.watch`."""
    refreshed = False
    while True:
        link = transport.links.current()
        url = link.endpoint.url
        metadata: Metadata = ()
        stream: _Stream | None = None
        try:
            metadata = await transport.token.metadata(link, transport.timeout_seconds)
            stream = _Stream(link, metadata, transport.timeout_seconds, idle_seconds)
            yield await stream.open(targets, start_revision, deletions_only)
            while True:
                yield await stream.batch()
        except _Refused as refusal:
            if refreshed or not transport.token.forget(metadata):
                raise refusal.kind(_OPERATION, url, refusal.detail) from None
            refreshed = True
        except BROKEN as error:
            failure = read_failure(error)
            if failure.verdict is Verdict.STALE_TOKEN:
                if refreshed or not transport.token.forget(metadata):
                    raise Unauthenticated(_OPERATION, url, failure.detail) from error
                refreshed = True
                continue
            if not failure.answered:
                transport.token.forget(metadata)
            await transport.links.failed(link)
            kind = failure.verdict if isinstance(failure.verdict, type) else Unavailable
            raise kind(_OPERATION, url, failure.detail) from error
        except Unavailable:
            await transport.links.failed(link)
            raise
        finally:
            if stream is not None:
                await stream.close()


class _Stream:
    """gRPC stream of one watch."""

    def __init__(
        self, link: Link, metadata: Metadata, timeout_seconds: float, idle_seconds: float
    ) -> None:
        self._url = link.endpoint.url
        self._timeout_seconds = timeout_seconds
        self._idle_seconds = idle_seconds
        self._call: Any = link.watch.Watch(metadata=metadata)
        self._early: list[Any] = []
        self._revision = 0
        self._cluster_id = 0
        self._reading_since: float | None = None
        self._gave_up = False
        self._attention: asyncio.Task[None] | None = None

    async def open(
        self, targets: Sequence[Range], start_revision: int, deletions_only: bool
    ) -> WatchBatch:
        """Create all watches; return the empty batch that confirms them."""
        for target in targets:
            await self._write(wire.watch_create_request(target, start_revision, deletions_only))
        self._revision = start_revision - 1
        created = 0
        while created < len(targets):
            async with asyncio.timeout(self._timeout_seconds):
                reply = await self._read()
            if reply.created:
                created += 1
                self._revision = self._revision if start_revision else reply.header.revision
                self._cluster_id = reply.header.cluster_id
                self._check_not_behind(reply)
            else:  # an event of a watch that was created before the others
                self._early.append(reply)
        self._attention = asyncio.create_task(self._end_when_silent())
        return WatchBatch(self._revision, (), self._cluster_id)

    def _check_not_behind(self, reply: Any) -> None:
        """Raise `Unavailable` if the server is behind the watch's revision.

        It may have lost its data, and would then never send another event.
        """
        if reply.header.revision < self._revision:
            detail = (
                f"the server is at revision {reply.header.revision}, behind {self._revision}: "
                "it lags, or it has lost its data"
            )
            raise Unavailable(_OPERATION, self._url, detail)

    async def batch(self) -> WatchBatch:
        """Wait for the next events."""
        while True:
            reply = self._early.pop(0) if self._early else await self._read()
            if reply.events:
                events = wire.watch_events(reply.events)
                self._revision = max(self._revision, events[-1].mod_revision)
                return WatchBatch(events[-1].mod_revision, events, self._cluster_id)
            self._check_not_behind(reply)  # a progress notification

    async def _write(self, request: Any) -> None:
        async with asyncio.timeout(self._timeout_seconds):
            await self._call.write(request)

    async def _read(self) -> Any:
        """Return the next reply. Cancelling a read ends the whole stream."""
        self._reading_since = asyncio.get_running_loop().time()
        try:
            reply = await self._call.read()
        except asyncio.CancelledError as error:
            if not self._gave_up:
                raise
            read_failure(error)  # re-raises a cancellation of the calling task
            silent_seconds = self._idle_seconds + self._timeout_seconds
            detail = f"silent for {silent_seconds:g} s, and no answer to a progress request"
            raise Unavailable(_OPERATION, self._url, detail) from None
        finally:
            self._reading_since = None
        if reply is grpc.aio.EOF:
            raise Unavailable(_OPERATION, self._url, "the server ended the stream")
        if reply.canceled:
            self._raise_cancellation(reply)
        return reply

    async def _end_when_silent(self) -> None:
        """Send a progress request after an idle period; end the stream if no reply follows.

        A single task monitors all reads: a separate timeout would cost each read more than the
        read itself, and a coordinator reads hundreds at a time.
        """
        loop = asyncio.get_running_loop()
        while True:
            since = self._reading_since or loop.time()
            await asyncio.sleep(since + self._idle_seconds - loop.time())
            if self._reading_since != since:
                continue
            try:
                await self._write(wire.progress_request())
            except BROKEN as error:
                read_failure(error)  # the pending read reports the error; re-raises a cancellation
                return
            await asyncio.sleep(self._timeout_seconds)
            if self._reading_since == since:
                self._gave_up = True
                self._call.cancel()
                return

    def _raise_cancellation(self, reply: Any) -> None:
        reason = reply.cancel_reason or "cancelled by the server"
        if reply.compact_revision:
            detail = f"compacted at revision {reply.compact_revision}"
            raise Compacted(_OPERATION, self._url, detail, reply.compact_revision)
        # etcd 3.4 also reports "permission denied" for a stale token.
        for phrase, kind in _RETRIED.items():
            if phrase in reason:
                raise _Refused(kind, reason)
        raise Unavailable(_OPERATION, self._url, reason)

    async def close(self) -> None:
        self._call.cancel()
        if self._attention is not None:
            self._attention.cancel()
            await asyncio.wait((self._attention,))


_RETRIED: dict[str, type[EtcdError]] = {
    "permission denied": PermissionDenied,
    "invalid auth token": Unauthenticated,
    "revision of auth store is old": Unavailable,
    "user name is empty": Unauthenticated,
}
