"""State of a rendezvous store as one client sees it: reachable, unreachable or refusing writes.

No I/O. `elasticjob_rendezvous.store_monitor` probes the store and feeds `StoreHealth`, which
decides what is worth saying: a trouble is reported once it has lasted `TOLERATED_SECONDS`, each
distinct reason of it once, and its end once, with the duration.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_rendezvous.core.effects import Note
from elasticjob_rendezvous.core.events import Clock
from elasticjob_rendezvous.core.store_trouble import StoreState, StoreTrouble, shortened

FIRST_SECONDS = 1.2
"""Pause before the first probe: who starts asks the store for other things first."""
PROBE_SECONDS = 0.75
"""Pause between two probes of a healthy store."""
LONGEST_PROBE_SECONDS = 1.2
"""The same in a large gang."""
ANSWER_SECONDS = 1.5
"""Time that a probe may take."""
TOLERATED_SECONDS = 1.4
"""A trouble that is over so soon is not reported. Less than `ANSWER_SECONDS`: a store that does not
answer one probe is in trouble. With the pause it leaves a slow machine half a second of the 3 s in
which a trouble is named."""
CONFIRM_SECONDS = 0.25
"""Pause after a probe that failed, until the trouble is reported."""
SPARING_SECONDS = 3.0
"""Pause while the store refuses the user: each attempt makes etcd hash a password."""
MOST_REASONS = 16
"""Distinct reasons of one trouble that are reported; a store that invents more is cut off."""
CONSEQUENCE = "workers that run go on, and no round can change until it is over"


@dataclass(frozen=True, slots=True)
class Failed:
    """A probe that found a trouble. `costly`: each attempt costs the store much."""

    state: StoreState
    text: str
    costly: bool = False


@dataclass(slots=True)
class StoreHealth:
    """The state machine: probes in, log lines out.

    Attributes:
        trouble: what is reported at present; None while the store is usable.
    """

    store: str
    endpoint: str
    trouble: StoreTrouble | None = None
    _first: Clock | None = None
    _said: set[tuple[StoreState, str]] = field(default_factory=set)
    _refused: bool = False

    @property
    def suspected(self) -> bool:
        """Return whether the latest probe failed."""
        return self._first is not None

    def succeeded(self, now: Clock) -> list[Note]:
        """A probe was answered as it should be."""
        trouble, first, refused = self.trouble, self._first, self._refused
        self.trouble, self._first, self._refused = None, None, False
        self._said.clear()
        if trouble is None or first is None:
            return []
        what = "accepts writes again" if refused else "answers again"
        seconds = now.now - first.now
        return [Note(f"{self.store} at {self.endpoint} {what} after {seconds:.1f} s")]

    def failed(self, failure: Failed, sent: Clock, now: Clock) -> list[Note]:
        """A probe that was sent at `sent` failed."""
        if self._first is None:
            self._first = sent
        if now.now < self._first.now + TOLERATED_SECONDS:
            return []
        text = shortened(failure.text) or "no reason given"
        self._refused = self._refused or failure.state is StoreState.REFUSING
        self.trouble = StoreTrouble(
            self.store, failure.state, self.endpoint, text, self._first.utc_ms
        )
        # What a broken connection is told as varies; the store's own words do not.
        reason = (failure.state, text if self.trouble.refuses else "")
        if reason in self._said or len(self._said) >= MOST_REASONS:
            return []
        self._said.add(reason)
        return [Note(f"{self.trouble.sentence}; {CONSEQUENCE}", warning=True)]
