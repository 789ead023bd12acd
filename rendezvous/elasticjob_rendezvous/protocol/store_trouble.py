"""Trouble with a rendezvous store: kind, endpoint, start and text. No I/O."""

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


@dataclass(frozen=True, slots=True)
class StoreTrouble:
    """Reason why a store cannot be used.

    Args:
        store: display name: `ETCD` or `C10D_STORE`.
        state: `UNREACHABLE` or `REFUSING`.
        endpoint: address of the failed probes.
        text: error text of the store or of the connection; one line.
        since_ms: Unix time of the first failed probe.
    """

    store: str
    state: StoreState
    endpoint: str
    text: str
    since_ms: int

    @property
    def refuses(self) -> bool:
        return self.state is StoreState.REFUSING

    @property
    def sentence(self) -> str:
        """Store, endpoint and cause, without a full stop."""
        what = "refuses writes" if self.refuses else "cannot be reached"
        return f"{self.store} at {self.endpoint} {what}: {self.text}"

    @property
    def waiting(self) -> str:
        """Reason why a member without workers waits."""
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
        }


def read_trouble(document: object) -> StoreTrouble | None:
    """Read a `StoreTrouble.document`, bounded; return None for None and for anything else."""
    if not isinstance(document, Mapping):
        return None
    try:
        return StoreTrouble(
            shortened(str(document["store"]), LONGEST_STORE),
            StoreState(document["state"]),
            shortened(str(document["endpoint"]), LONGEST_ENDPOINT),
            shortened(str(document["text"])),
            max(0, min(int(document["sinceMs"]), LATEST_MS)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def shortened(text: str, most: int = LONGEST_TEXT) -> str:
    """Return the first line of a foreign text, at most `most` characters."""
    line = one_line(" ".join(text.strip().partition("\n")[0].split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def endpoints_text(endpoints: tuple[str, ...]) -> str:
    """Return the endpoints of one store, bounded."""
    return shortened(", ".join(endpoints), LONGEST_ENDPOINT)
