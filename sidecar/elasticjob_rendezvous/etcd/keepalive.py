"""Stream over which one client renews all its leases."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd.auth import Metadata
from elasticjob_rendezvous.etcd.endpoints import Link


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
