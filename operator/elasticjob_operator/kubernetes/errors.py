"""Errors of the Kubernetes client and their meaning for the caller.

Tree:

    KubeError
        Unreachable             no response, or a server error; a write may have happened
        TooManyRequests         no effect; retry after `retry_after_seconds`
        Gone                    the requested history or page has expired: start over
        NotFound                no such object (or, for a create, no such namespace)
        NoSuchKind              the server does not serve this kind: its CRD is missing
        AlreadyExists           the name is taken
        Conflict                another uid or resourceVersion than the precondition's
            QuotaConflict       concurrent changes of a ResourceQuota; no effect, retry soon
        Invalid                 validation failed; `causes` name the fields
        Unauthorized            the credentials were not accepted
        Forbidden               refused by RBAC, an admission plugin or a policy
            QuotaExceeded       refused by a ResourceQuota; may succeed after other objects end
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Cause:
    """One of an error's causes; `field` is a path such as `spec.maxNodes`, or empty."""

    field: str
    reason: str
    message: str


class KubeError(Exception):
    """Failed request to the API server.

    Args:
        operation: the request, e.g. `create pods ns/x`.
        message: the server's message, or the transport error.
        status: HTTP status; 0 without a response.
        reason: the server's reason in one word, e.g. `Invalid`, or "".
        causes: the invalid fields, if the server names them.
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
    """Missing response, or a server error. A write may have happened."""

    retryable = True


class TooLarge(KubeError):
    """Response above the maximum size; a list can be read in smaller pages."""


class TooManyRequests(KubeError):
    """Refusal of a server that sheds load; the request had no effect."""

    retryable = True
    retry_after_seconds: float = 1.0


class Gone(KubeError):
    """Expired history or page: start over."""

    retryable = True


class NotFound(KubeError):
    """Missing object."""


class NoSuchKind(KubeError):
    """Kind that the server does not know; the object itself may exist."""


class AlreadyExists(KubeError):
    """Name that is taken."""


class Conflict(KubeError):
    """Object that was replaced, or has changed since it was read."""


class QuotaConflict(Conflict):
    """Request whose ResourceQuota other requests changed at the same time; it had no effect."""

    retryable = True


class Invalid(KubeError):
    """Object that failed validation or could not be parsed."""


class Unauthorized(KubeError):
    """Credentials that were not accepted."""


class Forbidden(KubeError):
    """Request that is not allowed."""


class QuotaExceeded(Forbidden):
    """Request that exceeds a ResourceQuota."""


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
_QUOTA_CONFLICT = "Operation cannot be fulfilled on resourcequotas"
_LONGEST = 2000  # bytes kept of a body that is not a Status, e.g. a proxy's page


def error_of(operation: str, status: int, body: bytes, headers: Mapping[str, str]) -> KubeError:
    """Return the error for a response with an HTTP status of 400 or more."""
    document = _status_of(body)
    reason = str(document.get("reason") or "")
    message = document.get("message") or body[:_LONGEST].decode(errors="replace").strip()
    details = document.get("details") or {}
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
        return NoSuchKind  # "404 page not found": the path is not served
    if kind is Conflict and (
        details.get("kind") == "resourcequotas" or message.startswith(_QUOTA_CONFLICT)
    ):
        return QuotaConflict
    if kind is Forbidden and any(words in message for words in _QUOTA):
        return QuotaExceeded
    if kind is None:
        return Unreachable if status >= 500 else KubeError
    return kind


def _status_of(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) and document.get("kind") == "Status" else {}


def _causes(details: Mapping[str, Any]) -> tuple[Cause, ...]:
    return tuple(
        Cause(cause.get("field", ""), cause.get("reason", ""), cause.get("message", ""))
        for cause in details.get("causes") or ()
    )


def _retry_after_seconds(details: Mapping[str, Any], headers: Mapping[str, str]) -> float:
    seconds = headers.get("Retry-After") or details.get("retryAfterSeconds") or ""
    try:
        return max(float(seconds), 0.0)
    except ValueError:  # an HTTP date, which API servers do not send
        return TooManyRequests.retry_after_seconds
