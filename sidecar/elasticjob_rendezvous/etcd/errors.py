"""The errors of the etcd client: what went wrong, where, and whether to try again.

Tree:

    EtcdError
        Retryable               the same request may succeed later
            Unavailable         it had no effect, or was a read: safe to send again
            Ambiguous           a write whose outcome nobody knows: read, then decide
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
    """An etcd request that failed, with the endpoint, the operation and the remedy."""

    remedy: ClassVar[str] = ""

    def __init__(self, operation: str, endpoint: str, detail: str) -> None:
        super().__init__(f"etcd {operation} at {endpoint} failed: {detail} ({self.remedy})")
        self.operation = operation
        self.endpoint = endpoint
        self.detail = detail


class Retryable(EtcdError):
    """May succeed later; wait at least `delay_seconds`, with jitter."""

    delay_seconds: ClassVar[float] = 0.2


class Unavailable(Retryable):
    """No endpoint answered in time. Nothing was changed, so sending again is safe."""

    remedy = (
        "nothing was changed, so trying again is safe; check that etcd runs at the endpoints, "
        "and their scheme and TLS files"
    )


class Ambiguous(Retryable):
    """A write was sent and its outcome is unknown. Never repeat it before reading."""

    delay_seconds = 0.0
    remedy = "the write may or may not have been applied; read before deciding"


class Compacted(Retryable):
    """The watch asked for, or fell behind to, history below `compact_revision`."""

    delay_seconds = 0.0
    remedy = "read the range again and watch from its revision"

    def __init__(self, operation: str, endpoint: str, detail: str, compact_revision: int) -> None:
        super().__init__(operation, endpoint, detail)
        self.compact_revision = compact_revision


class LeaseLost(Retryable):
    """The lease has expired or was revoked, and its keys are gone."""

    delay_seconds = 0.0
    remedy = "grant a new lease and write its keys again"


class Terminal(EtcdError):
    """Will fail again until somebody changes something."""


class InvalidConfiguration(Terminal, ValueError):
    """The endpoints or the TLS files given to the client can't be used."""

    remedy = "correct the client's configuration"


class InvalidRequest(Terminal):
    """etcd refused the request itself."""

    remedy = "the request is wrong; it will be refused again"


class NotEtcd(Terminal):
    """Something answers at the endpoint, but it is not an etcd v3 server."""

    remedy = "check the endpoint's host, port and scheme: no etcd v3 gRPC server answers there"


class PermissionDenied(Terminal):
    """The user may not touch these keys."""

    remedy = "grant the user's role this key range, or use another user"


class Unauthenticated(Terminal):
    """etcd wants a user and password that the client has not, or refuses those it has."""

    remedy = "check the etcd user and password"
