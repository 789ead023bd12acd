"""Single request to etcd that may be in flight, and the state when it was sent. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.effects import Grant, Read, Write
from elasticjob_rendezvous.core.kv import KeyValue, Range
from elasticjob_rendezvous.core.view import View
from elasticjob_rendezvous.core.watching import Watches

Request = Grant | Read | Write
Ranges = tuple[tuple[Range, tuple[KeyValue, ...]], ...]


@dataclass(slots=True)
class InFlight:
    """Request in flight; `request` is None without one.

    `note` is the log line once the write has succeeded; `under` the watch's generation and
    `revision` the store's, both as they were when the request was sent.
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
        """Return the request, which is in flight no more, and its note."""
        request, note = self.request, self.note
        self.request, self.note = None, ""
        return request, note

    def is_up_to_date(self, watches: Watches) -> bool:
        """Return True if the request's result is still current: its watch saw all changes since."""
        return watches.kept(self.under)

    def tells_of_loss(
        self, view: View, watches: Watches, cluster_id: int, revision: int, ranges: Ranges
    ) -> bool:
        """Return True if the answer contradicts the known history: etcd was set up anew."""
        if watches.has_another_past(self.under, revision, cluster_id):
            return True
        if not view.cluster_id:
            return False
        if cluster_id != view.cluster_id or revision < self.revision:
            return True
        return view.contradicted_by(revision, ranges)
