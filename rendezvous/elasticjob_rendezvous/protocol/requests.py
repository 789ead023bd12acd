"""Request to etcd in flight, and the back-off after a failed one. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.effects import Grant, Read, Write
from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.watches import Watches

Request = Grant | Read | Write
Ranges = tuple[tuple[Range, tuple[KeyValue, ...]], ...]


@dataclass(slots=True)
class InFlight:
    """Request in flight; `request` is None without one.

    `note` is the log line for a write that succeeds. `under` is the generation of the watch, and
    `revision` the revision of the store, at the time of the request.
    """

    request: Request | None = None
    note: str = ""
    under: int = 0
    revision: int = 0

    def send(self, request: Request, view: View, watches: Watches) -> None:
        self.request = request
        self.under = watches.reading_under
        self.revision = view.revision

    def taken(self) -> tuple[Request | None, str]:
        """Return the request and its note; none is in flight any more."""
        request, note = self.request, self.note
        self.request, self.note = None, ""
        return request, note

    def is_up_to_date(self, watches: Watches) -> bool:
        """Return True if the request's result is still current: its watch saw all changes since."""
        return watches.kept(self.under)

    def shows_data_loss(
        self, view: View, watches: Watches, cluster_id: int, revision: int, ranges: Ranges
    ) -> bool:
        """Return True if the answer contradicts the known history: etcd was set up again."""
        if watches.has_another_past(self.under, revision, cluster_id):
            return True
        if not view.cluster_id:
            return False
        if cluster_id != view.cluster_id or revision < self.revision:
            return True
        return view.contradicted_by(revision, ranges)


FIRST_SECONDS = 0.1
LAST_SECONDS = 2.0


@dataclass(slots=True)
class Backoff:
    """Exponential back-off that ends with etcd's next answer. `jitter` is in [0, 1).

    `until` is the earliest time of the next request.
    """

    jitter: float
    until: float = 0.0
    _seconds: float = FIRST_SECONDS

    @property
    def pause_seconds(self) -> float:
        return self._seconds * (0.5 + self.jitter / 2)

    def failed(self, now: float) -> None:
        self.until = now + self.pause_seconds
        self.lengthen()

    def lengthen(self) -> None:
        """Double the next pause, without starting one now."""
        self._seconds = min(self._seconds * 2, LAST_SECONDS)

    def answered(self) -> None:
        self._seconds = FIRST_SECONDS
        self.until = 0.0
