"""The auth token of one client: fetched when first needed, again when it went stale.

A token is used only as long as the connection holds. etcd's simple tokens name a place in its log,
and etcd keeps every request waiting until it has got there: after a loss of its data, or a restore
of older data, that may be never.
"""

from __future__ import annotations

import asyncio

import grpc
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd.endpoints import Link

Metadata = tuple[tuple[str, str], ...]

_HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Makes a member without a leader refuse at once, and end its streams, instead of hanging."""

_NOT_ENABLED = "etcdserver: authentication is not enabled"


class Token:
    """Owns the token; `user` None means that requests go without one."""

    def __init__(self, user: str | None, password: str | None) -> None:
        self.user = user
        self.password = password or ""
        self._metadata: Metadata | None = _HAS_LEADER if user is None else None
        self._lock = asyncio.Lock()

    async def metadata(self, link: Link, timeout_seconds: float) -> Metadata:
        """Return what a request must carry, after authenticating on `link` if need be."""
        if self.user is not None and not link.is_connected():
            self._metadata = None  # who answers there next may have lost its data
        if self._metadata is not None:
            return self._metadata
        async with asyncio.timeout(timeout_seconds), self._lock:
            if self._metadata is None:  # another call may have brought one meanwhile
                self._metadata = await self._authenticate(link, timeout_seconds)
            return self._metadata

    async def _authenticate(self, link: Link, timeout_seconds: float) -> Metadata:
        request = rpc_pb2.AuthenticateRequest(name=self.user, password=self.password)
        try:
            reply = await link.auth.Authenticate(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if (error.details() or "").startswith(_NOT_ENABLED):
                return (
                    _HAS_LEADER  # once it is enabled, a request without a token is refused as stale
                )
            raise
        return (*_HAS_LEADER, ("token", reply.token))

    def forget(self, metadata: Metadata) -> bool:
        """Drop a token that was refused or got no answer; False when there is no other to get."""
        if self.user is None:
            return False
        if self._metadata == metadata:  # else a newer one is already there
            self._metadata = None
        return True
