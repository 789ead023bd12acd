"""Auth token of one client: fetched on first use, and again when it becomes stale.

A token is used only while its connection lasts. etcd's simple tokens contain an index of its log,
and etcd delays every request until it has applied that index: after a loss of its data, or a
restore of older data, that may never happen.
"""

from __future__ import annotations

import asyncio

import grpc
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd.endpoints import Link

Metadata = tuple[tuple[str, str], ...]

_HAS_LEADER: Metadata = (("hasleader", "true"),)
"""Metadata that makes an etcd server without a leader fail requests and streams at once."""

_NOT_ENABLED = "etcdserver: authentication is not enabled"


class Token:
    """Cache of the token. With `user` None, requests carry no token."""

    def __init__(self, user: str | None, password: str | None) -> None:
        self.user = user
        self.password = password or ""
        self._metadata: Metadata | None = _HAS_LEADER if user is None else None
        self._lock = asyncio.Lock()

    async def metadata(self, link: Link, timeout_seconds: float) -> Metadata:
        """Return the metadata of a request, after authentication on `link` if necessary."""
        if self.user is not None and not link.is_connected():
            self._metadata = None  # the next server at this endpoint may have lost its data
        if self._metadata is not None:
            return self._metadata
        async with asyncio.timeout(timeout_seconds), self._lock:
            if self._metadata is None:  # another call may have fetched one
                self._metadata = await self._authenticate(link, timeout_seconds)
            return self._metadata

    async def _authenticate(self, link: Link, timeout_seconds: float) -> Metadata:
        request = rpc_pb2.AuthenticateRequest(name=self.user, password=self.password)
        try:
            reply = await link.auth.Authenticate(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            if (error.details() or "").startswith(_NOT_ENABLED):
                return _HAS_LEADER  # if it is enabled later, etcd refuses a missing token as stale
            raise
        return (*_HAS_LEADER, ("token", reply.token))

    def forget(self, metadata: Metadata) -> bool:
        """Drop a refused or unanswered token; return False if the client uses no tokens."""
        if self.user is None:
            return False
        if self._metadata == metadata:  # otherwise it has already been replaced
            self._metadata = None
        return True
