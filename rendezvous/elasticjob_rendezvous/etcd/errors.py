"""Errors of the etcd client, and the table that derives them from gRPC statuses. No I/O."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import grpc


class EtcdError(Exception):
    """Failed etcd request, with the endpoint, the operation and the remedy."""

    remedy: ClassVar[str] = ""

    def __init__(self, operation: str, endpoint: str, detail: str) -> None:
        super().__init__(f"etcd {operation} at {endpoint} failed: {detail} ({self.remedy})")
        self.operation = operation
        self.endpoint = endpoint
        self.detail = detail


class Retryable(EtcdError):
    """Request that may succeed later; wait at least `delay_seconds`, with jitter."""

    delay_seconds: ClassVar[float] = 0.2


class Unavailable(Retryable):
    """Request that no endpoint answered in time. It changed nothing, so a retry is safe."""

    remedy = (
        "nothing was changed, so trying again is safe; check that etcd runs at the endpoints, "
        "and their scheme and TLS files"
    )


class Ambiguous(Retryable):
    """Write that was sent and whose outcome is unknown. Read before repeating it."""

    delay_seconds = 0.0
    remedy = "the write may or may not have been applied; read before deciding"


class Compacted(Retryable):
    """Watch of history that etcd has compacted: its revision is below `compact_revision`."""

    delay_seconds = 0.0
    remedy = "read the range again and watch from its revision"

    def __init__(self, operation: str, endpoint: str, detail: str, compact_revision: int) -> None:
        super().__init__(operation, endpoint, detail)
        self.compact_revision = compact_revision


class LeaseLost(Retryable):
    """Lease that has expired or was revoked; its keys are gone."""

    delay_seconds = 0.0
    remedy = "grant a new lease and write its keys again"


class Terminal(EtcdError):
    """Request that fails again until the configuration or the server is changed."""


class InvalidConfiguration(Terminal, ValueError):
    """Invalid endpoints or TLS files in the client's configuration."""

    remedy = "correct the client's configuration"


class InvalidRequest(Terminal):
    """Request that etcd itself refused."""

    remedy = "the request is wrong; it will be refused again"


class NotEtcd(Terminal):
    """Endpoint where a server other than etcd v3 answers."""

    remedy = "check the endpoint's host, port and scheme: no etcd v3 gRPC server answers there"


class PermissionDenied(Terminal):
    """Request for keys that the user's role does not cover."""

    remedy = "grant the user's role this key range, or use another user"


class Unauthenticated(Terminal):
    """Missing or refused etcd credentials."""

    remedy = "check the etcd user and password"


class Verdict(StrEnum):
    """Effect of a failed call, which determines its retry."""

    NO_EFFECT = "NoEffect"
    """Never sent, or refused before it could change anything."""
    UNKNOWN = "Unknown"
    """Possibly applied."""
    STALE_TOKEN = "StaleToken"
    """Refused because the auth token is no longer valid; nothing was changed."""
    OVERTAKEN = "Overtaken"
    """Refused because a user or role changed during the request; nothing was changed."""


_NEVER_SENT = ("failed to connect to all addresses", "errors resolving", "DNS resolution failed")
_NOT_HTTP2 = "Failed parsing HTTP/2"
_STALE_TOKEN = ("etcdserver: invalid auth token", "etcdserver: user name is empty")
_OVERTAKEN = "etcdserver: revision of auth store is old"
_REFUSED_FOR_NOW = (
    "etcdserver: no leader",  # requested by `hasleader` in the metadata
    "etcdserver: too many requests",
)
_NO_SPACE = "etcdserver: mvcc: database space exceeded"  # also for the last applied write
_BAD_PASSWORD = "etcdserver: authentication failed"

_REFUSALS: dict[grpc.StatusCode, type[EtcdError]] = {
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: LeaseLost,  # in our requests only a lease can be "not found"
    grpc.StatusCode.UNIMPLEMENTED: NotEtcd,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: InvalidRequest,  # larger than the server accepts
}


def meaning(code: grpc.StatusCode, detail: str) -> Verdict | type[EtcdError]:
    """Return the verdict for a call with this status, or the error class of a final refusal."""
    if detail.startswith(_REFUSED_FOR_NOW):
        return Verdict.NO_EFFECT
    if detail.startswith(_NO_SPACE):
        return Verdict.UNKNOWN
    if code is grpc.StatusCode.UNAVAILABLE:
        if not detail.startswith(_NEVER_SENT):
            return Verdict.UNKNOWN
        return NotEtcd if _NOT_HTTP2 in detail else Verdict.NO_EFFECT
    if detail.startswith("Received http2 header with status"):
        return NotEtcd
    if detail.startswith(_STALE_TOKEN):
        return Verdict.STALE_TOKEN
    if detail.startswith(_OVERTAKEN):
        return Verdict.OVERTAKEN
    if detail.startswith(_BAD_PASSWORD):
        return Unauthenticated
    return _REFUSALS.get(code, Verdict.UNKNOWN)
