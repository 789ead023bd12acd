"""Classification of failed etcd calls: a table from gRPC status to a verdict. No I/O.

Details are matched only if etcd or gRPC use one code for cases that differ for
the caller. Any other failure is `UNKNOWN`, the cautious verdict.
"""

from __future__ import annotations

from enum import StrEnum

import grpc

from elasticjob_rendezvous.etcd.errors import (
    EtcdError,
    InvalidRequest,
    LeaseLost,
    NotEtcd,
    PermissionDenied,
    Unauthenticated,
)


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
