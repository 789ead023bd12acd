"""State of a rendezvous store as one client sees it: reachable, unreachable or refusing writes.

No I/O. `elasticjob_rendezvous.store_monitor` probes the store and feeds `StoreHealth`, which
selects the log lines: a trouble is reported once it has lasted `TOLERATED_SECONDS`, each distinct
reason of it once, and its end once, with the duration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.store_trouble import (
    StoreFailure,
    StoreState,
    StoreTrouble,
    bounded_line,
)

FIRST_SECONDS = 1.2
"""Pause before the first probe: a starting client has other requests to the store first."""
PROBE_SECONDS = 0.75
"""Pause between two probes of a healthy store."""
LONGEST_PROBE_SECONDS = 1.2
"""Pause between two probes of a healthy store in a large gang."""
ANSWER_SECONDS = 1.5
"""Maximum duration of a probe."""
TOLERATED_SECONDS = 1.4
"""Minimum duration of a trouble that is reported. Less than `ANSWER_SECONDS`, so that one probe
without an answer counts as trouble. With the pause, a slow machine has half a second left
of the 3 s in which a trouble is reported."""
CONFIRM_SECONDS = 0.25
"""Pause after a failed probe, until the trouble is reported."""
SPARING_SECONDS = 3.0
"""Pause while the store refuses the user: each attempt makes etcd hash a password."""
MOST_REASONS = 16
"""Maximum number of distinct reasons of one trouble that are reported; further ones are dropped."""
CONSEQUENCE = "workers that run go on, and no round can change until it is over"


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed probe.

    Args:
        state: `UNREACHABLE` or `REFUSING`.
        text: error text of the store or of the connection.
        reason: reason for the refusal.
        costly: each attempt costs the store much.
    """

    state: StoreState
    text: str
    reason: StoreFailure = StoreFailure.OTHER
    costly: bool = False


@dataclass(slots=True)
class StoreHealth:
    """State machine of a store's health: probes in, log lines out.

    Attributes:
        trouble: the reported trouble; None while the store is usable.
    """

    store: str
    endpoint: str
    trouble: StoreTrouble | None = None
    _first: Clock | None = None
    _reported: set[tuple[StoreState, str]] = field(default_factory=set)
    _refused: bool = False

    @property
    def suspected(self) -> bool:
        """True if the latest probe failed."""
        return self._first is not None

    def failing_seconds(self, now: float) -> float:
        """Return the time since the first failed probe in a row; 0 if the latest one succeeded."""
        return 0.0 if self._first is None else now - self._first.now

    def succeeded(self, now: Clock) -> list[Note]:
        """Record a successful probe; return the log line if it ends a reported trouble."""
        trouble, first, refused = self.trouble, self._first, self._refused
        self.trouble, self._first, self._refused = None, None, False
        self._reported.clear()
        if trouble is None or first is None:
            return []
        change = "accepts writes again" if refused else "answers again"
        seconds = now.now - first.now
        return [Note(f"{self.store} at {self.endpoint} {change} after {seconds:.1f} s")]

    def failed(self, failure: Failed, sent: Clock, now: Clock) -> list[Note]:
        """Record a failed probe that was sent at `sent`; return the log line for a new reason."""
        if self._first is None:
            self._first = sent
        if now.now < self._first.now + TOLERATED_SECONDS:
            return []
        text = bounded_line(failure.text) or "no reason given"
        self._refused = self._refused or failure.state is StoreState.REFUSING
        self.trouble = StoreTrouble(
            self.store, failure.state, self.endpoint, text, self._first.utc_ms, failure.reason
        )
        # The text of a connection error varies; the store's own messages do not.
        reason = (failure.state, text if self.trouble.refuses else "")
        if reason in self._reported or len(self._reported) >= MOST_REASONS:
            return []
        self._reported.add(reason)
        return [Note(f"{self.trouble.sentence}; {CONSEQUENCE}", warning=True)]
