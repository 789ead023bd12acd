"""A member's own key in one version: there while the member lives."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from enum import Enum, auto
from typing import Any

import etcd

from elasticjob_rendezvous.etcd_v2.core.paths import Paths
from elasticjob_rendezvous.etcd_v2.core.records import KEEPALIVE_TTL_SECONDS, Status, read
from elasticjob_rendezvous.etcd_v2.layout import is_lost, put_back
from elasticjob_rendezvous.etcd_v2.lease import renew

log = logging.getLogger(__name__)


class Holder(Enum):
    US = auto()
    NOBODY = auto()
    ANOTHER = auto()


class Place:
    """Rank `rank` of `version`. torch sets the key to confirm; we have it from joining on,
    so that the others learn of a member that dies before. torch leaves the key empty; in ours
    stands whose it is, for an etcd that lost its data counts versions and ranks from the
    beginning, and has the same ones for others.

    `reading` is which reading of the feed it was taken after.
    """

    def __init__(self, client: Any, paths: Paths, version: str, rank: int, reading: int) -> None:
        self._client = client
        self._paths = paths
        self.version = version
        self.rank = rank
        self.reading = reading
        self.key = paths.keep_alive(version, rank)
        self._mark = uuid.uuid4().hex
        self._stop: threading.Event | None = None
        self._final: str | None = None
        self._lock = threading.Lock()  # a renewal must not come after `stay`
        self._lasts = False
        self.stays = False
        """Whether the key is to outlive us: our part in the version is done."""
        self.failed_at = float("-inf")
        """When the key could not be renewed last, in monotonic seconds."""

    def confirm_final(self, text: str) -> None:
        """The version is final: this is what is put back if all gets lost."""
        self._final = text

    def take(self) -> threading.Event:
        """Set the key and keep it; returns the event that ends the keeping."""
        self._client.set(self.key, self._mark, ttl=KEEPALIVE_TTL_SECONDS)
        self._stop = renew(
            self._client,
            self.key,
            KEEPALIVE_TTL_SECONDS,
            first_after_seconds=KEEPALIVE_TTL_SECONDS / 2,
            lost=self._restored,
            failed=self._failed,
            refresh=self._refresh,
        )
        return self._stop

    def stay(self) -> None:
        """Let the key stand from now on, whatever becomes of us. Raises etcd.EtcdException; then
        it is tried again with the next renewal.
        """
        self.stays = True
        self._refresh()

    def release(self) -> None:
        """Keep the key no more; it runs out by itself, unless it is to stay."""
        if self._stop is not None:
            self._stop.set()

    def holder(self) -> Holder:
        """Whose key it is by now, as a majority of the servers knows."""
        try:
            key = self._client.read(self.key, quorum=True)
        except etcd.EtcdKeyNotFound:
            return Holder.NOBODY
        return Holder.ANOTHER if self.is_anothers(key) else Holder.US

    def is_anothers(self, key: Any) -> bool:
        """Whether a key that was read is that of our rank, and not we wrote it."""
        return bool(key.key == self.key and key.value != self._mark)

    def vacate(self) -> None:
        """Delete the key if it is ours: the next one on this rank may have set its own."""
        with contextlib.suppress(etcd.EtcdKeyNotFound, etcd.EtcdCompareFailed):
            self._client.delete(self.key, prevValue=self._mark)

    def _refresh(self) -> None:
        with self._lock:
            if not self.stays:
                self._client.refresh(self.key, ttl=KEEPALIVE_TTL_SECONDS)
            elif self._lasts:
                self._client.get(self.key)
            else:
                self._client.write(self.key, self._mark, prevExist=True)
                self._lasts = True

    def _failed(self) -> None:
        self.failed_at = time.monotonic()

    def _restored(self) -> bool:
        """Set our key again where it ran out and the final version still stands: nobody missed it.

        All keys run out when etcd was away for long, and all members are there nevertheless.
        Before it is final they join again: it may be others' in an etcd that lost its data.
        """
        client, paths = self._client, self._paths
        try:
            state = read(client.get(paths.active).value)
        except etcd.EtcdKeyNotFound:
            if self._final is None or not is_lost(client, paths):
                return False  # it was destroyed
            log.warning("%s was lost: putting back %s", paths.run, self._final)
            put_back(client, paths, self.version, self._final)
        else:
            if state.version != self.version or state.status is Status.CLOSED:
                return False
            if state.status is not Status.FINAL:
                return True
        client.set(self.key, self._mark, ttl=None if self.stays else KEEPALIVE_TTL_SECONDS)
        return True
