"""Trouble with a rendezvous store: kind, reason, endpoint, start and text. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.protocol.text import one_line

ETCD = "etcd"
C10D_STORE = "the c10d store"
LONGEST_TEXT = 240
LONGEST_STORE = 40
LATEST_MS = 32_503_680_000_000
"""Year 3000: no date beyond it can be shown."""
LONGEST_ENDPOINT = 120


class StoreState(StrEnum):
    """Availability of the store to a client."""

    REACHABLE = "reachable"
    UNREACHABLE = "unreachable"
    REFUSING = "refusing"


class StoreFailure(StrEnum):
    """Reason for which a store refuses writes. The values are part of the API."""

    NO_SPACE = "NoSpace"
    """Used-up quota."""
    CORRUPT = "Corrupt"
    """Damaged data of a member of etcd."""
    PERMISSION_DENIED = "PermissionDenied"
    """User without the right to write the keys."""
    UNAUTHENTICATED = "Unauthenticated"
    """User, password or token that the store does not accept."""
    NO_USER = "NoUser"
    """Missing user; the store requires one."""
    NO_LEADER = "NoLeader"
    """Too few running members of etcd."""
    OTHER = "Other"


_ETCD_TEXTS = (
    ("database space exceeded", StoreFailure.NO_SPACE),
    ("corrupt", StoreFailure.CORRUPT),
    ("permission denied", StoreFailure.PERMISSION_DENIED),
    ("authentication failed", StoreFailure.UNAUTHENTICATED),
    ("invalid auth token", StoreFailure.UNAUTHENTICATED),
    ("user name is empty", StoreFailure.NO_USER),
    ("no leader", StoreFailure.NO_LEADER),
)
"""Parts of etcd's own error texts."""


def failure_in(text: str) -> StoreFailure:
    """Return the failure that an error text of etcd names.

    etcd's own client distinguishes its errors by text too: several share one status code of gRPC.
    """
    found = (failure for part, failure in _ETCD_TEXTS if part in text)
    return next(found, StoreFailure.OTHER)


@dataclass(frozen=True, slots=True)
class StoreTrouble:
    """Reason for which a store cannot be used.

    Args:
        store: display name: `ETCD` or `C10D_STORE`.
        state: `UNREACHABLE` or `REFUSING`.
        endpoint: address of the failed probes.
        text: error text of the store or of the connection; one line.
        since_ms: Unix time of the first failed probe.
        reason: reason for the refusal; `OTHER` for a store that cannot be reached.
    """

    store: str
    state: StoreState
    endpoint: str
    text: str
    since_ms: int
    reason: StoreFailure = StoreFailure.OTHER

    @property
    def refuses(self) -> bool:
        return self.state is StoreState.REFUSING

    @property
    def sentence(self) -> str:
        """Store, endpoint and cause, without a full stop."""
        state = "refuses writes" if self.refuses else "cannot be reached"
        return f"{self.store} at {self.endpoint} {state}: {self.text}"

    @property
    def waiting(self) -> str:
        """Reason for the wait of a member without workers."""
        if self.refuses:
            return f"{self.store} refuses writes: no round can form until it accepts them"
        return f"{self.store} cannot be reached: no round can form until it answers"

    def document(self) -> dict[str, object]:
        """Return the trouble as JSON, for readers of an agent's status; `read_trouble` reads it."""
        return {
            "store": self.store,
            "state": str(self.state),
            "endpoint": self.endpoint,
            "text": self.text,
            "sinceMs": self.since_ms,
            "reason": str(self.reason),
        }


def read_trouble(document: object) -> StoreTrouble | None:
    """Read a `StoreTrouble.document`, bounded; return None for None and for anything else."""
    if not isinstance(document, Mapping):
        return None
    try:
        state, text = StoreState(document["state"]), bounded_line(str(document["text"]))
        return StoreTrouble(
            bounded_line(str(document["store"]), LONGEST_STORE),
            state,
            bounded_line(str(document["endpoint"]), LONGEST_ENDPOINT),
            text,
            max(0, min(int(document["sinceMs"]), LATEST_MS)),
            _reason(document, state, text),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _reason(document: Mapping[str, object], state: StoreState, text: str) -> StoreFailure:
    """Return the reason in a document, `OTHER` for one of a newer release; without one, as the
    previous release wrote it, the reason that etcd's text names."""
    if "reason" in document:
        known = {str(failure): failure for failure in StoreFailure}
        return known.get(str(document["reason"]), StoreFailure.OTHER)
    return failure_in(text) if state is StoreState.REFUSING else StoreFailure.OTHER


def bounded_line(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the first line of a foreign text, at most `most` characters."""
    line = one_line(" ".join(text.strip().partition("\n")[0].split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def endpoints_text(endpoints: tuple[str, ...]) -> str:
    """Return the endpoints of one store, bounded."""
    return bounded_line(", ".join(endpoints), LONGEST_ENDPOINT)
