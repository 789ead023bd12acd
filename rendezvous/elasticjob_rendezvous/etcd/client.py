"""asyncio client of etcd v3 for the requests of `protocol.kv`; independent of the protocol."""

from __future__ import annotations

import asyncio
import random as _random
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc.aio
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd import wire
from elasticjob_rendezvous.etcd.endpoints import Link, Links, LoginFiles, Metadata, Tls, Token
from elasticjob_rendezvous.etcd.errors import LeaseLost
from elasticjob_rendezvous.etcd.transport import Transport
from elasticjob_rendezvous.etcd.watch import watch
from elasticjob_rendezvous.protocol.kv import (
    LeaseGrant,
    Put,
    Range,
    RangeResult,
    Txn,
    TxnResult,
    WatchBatch,
)

__all__ = ["Client", "LoginFiles", "Status", "Tls"]


class KeepAliveStream:
    """Keep-alive stream; opened on first use, dropped at the first failure.

    One exchange at a time: etcd answers in the order of the requests anyway,
    and a reply cannot be attributed to the wrong lease.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._link: Link | None = None
        self._call: Any = None

    async def renew(
        self, lease: int, link: Link, metadata: Metadata, timeout_seconds: float
    ) -> int:
        """Return the remaining seconds of the lease, 0 if it is gone.

        Raises `TimeoutError`, or gRPC's error if the stream breaks.
        """
        async with asyncio.timeout(timeout_seconds), self._lock:
            if self._link is not link:
                self._drop()
                self._call = link.lease.LeaseKeepAlive(metadata=metadata)
                self._link = link
            try:
                await self._call.write(rpc_pb2.LeaseKeepAliveRequest(ID=lease))
                reply = await self._call.read()
            except BaseException:  # the reply to a cancelled exchange may still be in the stream
                self._drop()
                raise
            if reply is grpc.aio.EOF:
                self._drop()
                raise asyncio.InvalidStateError("the server ended the keep-alive stream")
            remaining: int = reply.TTL
            return remaining

    def _drop(self) -> None:
        if self._call is not None:
            self._call.cancel()
        self._call = self._link = None


@dataclass(frozen=True, slots=True)
class Status:
    """Status of one etcd server."""

    cluster_id: int
    member_id: int
    leader_id: int
    revision: int
    version: str


class Client:
    """etcd client for one event loop; connects on first use.

    `request_timeout_seconds` limits each call including its retries. Within it,
    reads and other repeatable requests are retried on the next endpoint; a
    write only if it was provably never sent. All calls raise the errors of
    `etcd.errors`. `login_files` replace `user` and `password` at each
    authentication.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: Tls | None = None,
        user: str | None = None,
        password: str | None = None,
        request_timeout_seconds: float = 5.0,
        watch_idle_seconds: float = 30.0,
        random: Callable[[], float] = _random.random,
        login_files: LoginFiles | None = None,
    ) -> None:
        self._links = Links(endpoints, tls, random)
        token = Token(user, password, login_files)
        self._transport = Transport(self._links, token, request_timeout_seconds, random)
        self._keep_alives = KeepAliveStream()
        self._watch_idle_seconds = watch_idle_seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs of all endpoints."""
        return self._links.urls

    @property
    def transport(self) -> Transport:
        """Transport for the parts of etcd's API that this client does not cover."""
        return self._transport

    async def aclose(self) -> None:
        """Close all connections. Pending calls and watches raise `Unavailable`."""
        await self._links.close()

    async def range(self, target: Range) -> RangeResult:
        """Read one key or all keys of a prefix, linearizably."""
        return await self._range(target.key, wire.range_request(target))

    async def page(self, target: Range, start: str, revision: int) -> RangeResult:
        """Read at most `target.limit` keys of a prefix, in order from `start` on, linearizably.

        Args:
            revision: revision to read at, that of the first page; 0 for the present one.

        Raises:
            EtcdError: also if the revision was compacted.
        """
        return await self._range(target.key, wire.page_request(target, start, revision))

    async def _range(self, key: str, request: Any) -> RangeResult:
        reply: Any = await self._transport.call(
            f"range {key!r}",
            lambda link, metadata, timeout: link.kv.Range(
                request, metadata=metadata, timeout=timeout
            ),
        )
        return wire.range_result(reply)

    async def put(self, op: Put) -> int:
        """Write one key; return the revision of the write. Raises `LeaseLost` for a dead lease."""
        request = wire.put_request(op)
        reply: Any = await self._transport.call(
            f"put {op.key!r}",
            lambda link, metadata, timeout: link.kv.Put(
                request, metadata=metadata, timeout=timeout
            ),
            repeatable=False,
        )
        revision: int = reply.header.revision
        return revision

    async def txn(self, txn: Txn) -> TxnResult:
        """Apply a transaction. Raises `LeaseLost` if it puts with a dead lease."""
        request = wire.txn_request(txn)
        reply: Any = await self._transport.call(
            "txn",
            lambda link, metadata, timeout: link.kv.Txn(
                request, metadata=metadata, timeout=timeout
            ),
            repeatable=all(isinstance(op, Range) for op in txn.success + txn.failure),
        )
        return wire.txn_result(txn, reply)

    async def grant(self, ttl_seconds: int) -> LeaseGrant:
        """Grant a lease. Repeatable: a lease whose reply was lost holds no key and expires."""
        request = rpc_pb2.LeaseGrantRequest(TTL=ttl_seconds)
        reply: Any = await self._transport.call(
            "lease grant",
            lambda link, metadata, timeout: link.lease.LeaseGrant(
                request, metadata=metadata, timeout=timeout
            ),
        )
        return LeaseGrant(id=reply.ID, ttl_seconds=reply.TTL)

    async def keep_alive(self, lease: int) -> int:
        """Renew a lease; return its time to live in seconds. Raises `LeaseLost`.

        The time to live counts from the time of the call, not of its return.
        """
        operation = f"keep-alive of lease {lease:x}"
        remaining_seconds = await self._transport.call(
            operation,
            lambda link, metadata, timeout: self._keep_alives.renew(lease, link, metadata, timeout),
        )
        if remaining_seconds <= 0:
            endpoint = self._links.current().endpoint.url
            raise LeaseLost(operation, endpoint, "the lease has expired or was revoked")
        return remaining_seconds

    async def revoke(self, lease: int) -> None:
        """Revoke a lease and delete its keys. A lease that no longer exists is not an error."""
        request = rpc_pb2.LeaseRevokeRequest(ID=lease)
        try:
            await self._transport.call(
                f"revoke of lease {lease:x}",
                lambda link, metadata, timeout: link.lease.LeaseRevoke(
                    request, metadata=metadata, timeout=timeout
                ),
            )
        except LeaseLost:
            return

    def watch(
        self, targets: Sequence[Range], start_revision: int = 0, *, deletions_only: bool = False
    ) -> AsyncGenerator[WatchBatch, None]:
        """Yield the events of all `targets` whose revision is `start_revision` or later.

        The first batch is empty: it confirms that the watch is open, and every
        event after its `revision` will follow. `start_revision` 0 means now.
        Opening the watch before the range is faster than the reverse order,
        because etcd catches up with past revisions only every 100 ms.

        Within one target, events arrive in order and a revision is never split.
        Events of one revision in different targets arrive in different batches;
        an event of a key in two targets arrives twice.

        The watch ends only with an error: `Compacted` if its start, or the
        revision it has reached, was compacted; `Unavailable` if the connection,
        the server's leader or its data was lost, or if nothing arrived for
        `watch_idle_seconds` plus a request timeout; `PermissionDenied` and
        similar errors. The caller then ranges again. Close the generator
        (`contextlib.aclosing`) to leave it early.
        """
        return watch(
            self._transport,
            tuple(targets),
            start_revision,
            self._watch_idle_seconds,
            deletions_only,
        )

    async def status(self) -> Status:
        """Return the status of the current endpoint's server."""
        reply: Any = await self._transport.call(
            "status",
            lambda link, metadata, timeout: link.maintenance.Status(
                rpc_pb2.StatusRequest(), metadata=metadata, timeout=timeout
            ),
        )
        header = reply.header
        return Status(
            cluster_id=header.cluster_id,
            member_id=header.member_id,
            leader_id=reply.leader,
            revision=header.revision,
            version=reply.version,
        )
