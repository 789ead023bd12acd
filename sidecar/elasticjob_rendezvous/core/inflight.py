"""The one request to etcd that may be under way, and what was known when it was sent. Pure."""

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
    """`request` is None when none is under way.

    `note` is the line for the log once the write has succeeded; `under` the watch's generation
    and `revision` the store's, both as they were when the request was sent.
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
        """The request, which is under way no more, and its note."""
        request, note = self.request, self.note
        self.request, self.note = None, ""
        return request, note

    def is_up_to_date(self, watches: Watches) -> bool:
        """Whether what the request read is still true: its watch has seen all that followed."""
        return watches.kept(self.under)

    def tells_of_loss(
        self, view: View, watches: Watches, cluster_id: int, revision: int, ranges: Ranges
    ) -> bool:
        """Whether the answer comes from another past than ours: etcd was set up anew."""
        if watches.has_another_past(self.under, revision, cluster_id):
            return True
        if not view.cluster_id:
            return False
        if cluster_id != view.cluster_id or revision < self.revision:
            return True
        return view.contradicted_by(revision, ranges)
