"""The errors of the Kubernetes client: what the API server refused, why, and what would help.

Tree:

    KubeError
        Unreachable             no answer, or the server's own trouble; a write may have happened
        TooManyRequests         nothing happened; come back after `retry_after_seconds`
        Gone                    the history or page asked for is no longer kept: start over
        NotFound                no such object (or, for a create, no such namespace)
        NoSuchKind              the server does not serve this kind at all: its CRD is missing
        AlreadyExists           the name is taken
        Conflict                the object is not the one, or not the version, that was named
        Invalid                 the object breaks a rule; `causes` name the fields
        Unauthorized            the credentials were not accepted
        Forbidden               refused by RBAC, an admission plugin or a policy
            QuotaExceeded       refused by a ResourceQuota: may pass when others have ended
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Cause:
    """One of several reasons: `field` is a path such as `spec.maxNodes`, empty when none is."""

    field: str
    reason: str
    message: str


class KubeError(Exception):
    """A request to the API server that failed.

    Args:
        operation: what was asked for, e.g. `create pods ns/x`.
        message: the server's own words, or what went wrong on the way.
        status: HTTP status, 0 when there was no answer.
        reason: the server's reason in one word, e.g. `Invalid`, or "".
        causes: the fields that were wrong, as far as the server says.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        operation: str,
        message: str,
        status: int = 0,
        reason: str = "",
        causes: tuple[Cause, ...] = (),
    ) -> None:
        super().__init__(f"{operation}: {message}")
        self.operation = operation
        self.message = message
        self.status = status
        self.reason = reason
        self.causes = causes


class Unreachable(KubeError):
    """Nobody answered in time, or the server could not serve. A write may have happened."""

    retryable = True


class TooManyRequests(KubeError):
    """The server sheds load; nothing happened."""

    retryable = True
    retry_after_seconds: float = 1.0


class Gone(KubeError):
    """What was asked for is no longer kept: start over."""

    retryable = True


class NotFound(KubeError):
    """There is no such object."""


class NoSuchKind(KubeError):
    """The server does not know the kind: never to be taken for an absent object."""


class AlreadyExists(KubeError):
    """The name is taken."""


class Conflict(KubeError):
    """The object is another one, or has changed since it was read."""


class Invalid(KubeError):
    """The object breaks a rule, or cannot be read at all."""


class Unauthorized(KubeError):
    """The credentials were not accepted."""


class Forbidden(KubeError):
    """Not allowed."""


class QuotaExceeded(Forbidden):
    """A ResourceQuota is used up."""


_BY_REASON: dict[str, type[KubeError]] = {
    "AlreadyExists": AlreadyExists,
    "BadRequest": Invalid,
    "Conflict": Conflict,
    "Expired": Gone,
    "Forbidden": Forbidden,
    "Gone": Gone,
    "Invalid": Invalid,
    "NotFound": NotFound,
    "RequestEntityTooLarge": Invalid,
    "TooManyRequests": TooManyRequests,
    "Unauthorized": Unauthorized,
}
_BY_STATUS: dict[int, type[KubeError]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: Invalid,
    422: Invalid,
    429: TooManyRequests,
}
_QUOTA = ("exceeded quota:", "status unknown for quota:")
_LONGEST = 2000  # of an answer that is no Status, e.g. a proxy's page


def error_of(operation: str, status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """The error that an answer with an HTTP status of 400 or more stands for."""
    said = _status_of(body)
    reason = str(said.get("reason") or "")
    message = said.get("message") or body[:_LONGEST].decode(errors="replace").strip()
    details = said.get("details") or {}
    kind = _kind_of(status, reason, str(message), details)
    error = kind(
        operation, str(message) or f"HTTP status {status}", status, reason, _causes(details)
    )
    if isinstance(error, TooManyRequests):
        error.retry_after_seconds = _retry_after_seconds(details, headers)
    return error


def _kind_of(status: int, reason: str, message: str, details: Mapping[str, Any]) -> type[KubeError]:
    kind = _BY_REASON.get(reason) or _BY_STATUS.get(status)
    if kind is NotFound and not details.get("name"):
        return NoSuchKind  # "404 page not found": nothing serves this path
    if kind is Forbidden and any(words in message for words in _QUOTA):
        return QuotaExceeded
    if kind is None:
        return Unreachable if status >= 500 else KubeError
    return kind


def _status_of(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except ValueError:
        return {}
    return said if isinstance(said, dict) and said.get("kind") == "Status" else {}


def _causes(details: Mapping[str, Any]) -> tuple[Cause, ...]:
    return tuple(
        Cause(cause.get("field", ""), cause.get("reason", ""), cause.get("message", ""))
        for cause in details.get("causes") or ()
    )


def _retry_after_seconds(details: Mapping[str, Any], headers: Mapping[str, str]) -> float:
    said = headers.get("Retry-After") or details.get("retryAfterSeconds") or ""
    try:
        return max(float(said), 0.0)
    except ValueError:  # a date: nobody sends one
        return TooManyRequests.retry_after_seconds
