"""Errors of the etcd client, by cause and by whether a retry can succeed.

Tree:

    EtcdError
        Retryable               the same request may succeed later
            Unavailable         it had no effect, or was a read: safe to send again
            Ambiguous           a write with an unknown outcome: read, then decide
            Compacted           the watched history is gone: range, then watch anew
            LeaseLost           the lease is gone: grant a new one
        Terminal                the same request will fail again
            InvalidConfiguration
            InvalidRequest
            NotEtcd
            PermissionDenied
            Unauthenticated
"""

from __future__ import annotations

from typing import ClassVar


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
