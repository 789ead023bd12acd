"""Classification of statuses that are hard to provoke."""

from __future__ import annotations

import grpc
import pytest

from elasticjob_rendezvous.etcd.errors import (
    EtcdError,
    InvalidRequest,
    LeaseLost,
    NotEtcd,
    PermissionDenied,
    Unauthenticated,
    Verdict,
    meaning,
)

CODE = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "detail", "expected"),
    [
        # Never sent, or refused before any effect: another endpoint may be asked.
        (CODE.UNAVAILABLE, "failed to connect to all addresses; last error: …", Verdict.NO_EFFECT),
        (CODE.UNAVAILABLE, "etcdserver: no leader", Verdict.NO_EFFECT),
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Verdict.NO_EFFECT),
        # Perhaps applied.
        (CODE.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Verdict.UNKNOWN),
        (CODE.UNAVAILABLE, "Socket closed", Verdict.UNKNOWN),
        (CODE.UNAVAILABLE, "etcdserver: request timed out", Verdict.UNKNOWN),
        (CODE.UNAVAILABLE, "etcdserver: leader changed", Verdict.UNKNOWN),
        (CODE.UNAVAILABLE, "etcdserver: server stopped", Verdict.UNKNOWN),
        (CODE.UNAVAILABLE, "Failed parsing HTTP/2", Verdict.UNKNOWN),  # it was connected
        (CODE.DEADLINE_EXCEEDED, "Deadline Exceeded", Verdict.UNKNOWN),
        (CODE.CANCELLED, "", Verdict.UNKNOWN),
        (CODE.UNKNOWN, "raft proposal dropped", Verdict.UNKNOWN),
        (CODE.INTERNAL, "stream terminated by RST_STREAM", Verdict.UNKNOWN),
        # A new token may help.
        (CODE.UNAUTHENTICATED, "etcdserver: invalid auth token", Verdict.STALE_TOKEN),
        (CODE.INVALID_ARGUMENT, "etcdserver: revision of auth store is old", Verdict.OVERTAKEN),
        (CODE.INVALID_ARGUMENT, "etcdserver: user name is empty", Verdict.STALE_TOKEN),
        # Refused for good.
        (
            CODE.INVALID_ARGUMENT,
            "etcdserver: authentication failed, invalid user ID or password",
            Unauthenticated,
        ),
        (CODE.PERMISSION_DENIED, "etcdserver: permission denied", PermissionDenied),
        (CODE.NOT_FOUND, "etcdserver: requested lease not found", LeaseLost),
        (CODE.INVALID_ARGUMENT, "etcdserver: request is too large", InvalidRequest),
        (CODE.RESOURCE_EXHAUSTED, "grpc: received message larger than max", InvalidRequest),
        (CODE.UNIMPLEMENTED, "unknown service etcdserverpb.KV", NotEtcd),
        (CODE.UNIMPLEMENTED, "Received http2 header with status: 404", NotEtcd),
        (CODE.PERMISSION_DENIED, "Received http2 header with status: 403", NotEtcd),
        # A gateway in front of an absent etcd, perhaps after passing the request on.
        (CODE.UNAVAILABLE, "Received http2 header with status: 503", Verdict.UNKNOWN),
    ],
)
def test_status_is_classified(
    code: grpc.StatusCode, detail: str, expected: Verdict | type[EtcdError]
) -> None:
    assert meaning(code, detail) is expected
