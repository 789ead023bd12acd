"""Keep-alive keys of a member, renewed in one thread each."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
import uuid
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import etcd

from elasticjob_rendezvous.etcd_v2.core.delays import Retries
from elasticjob_rendezvous.etcd_v2.core.records import KEEPALIVE_TTL_SECONDS, Paths, Status, read
from elasticjob_rendezvous.etcd_v2.directories import is_lost, put_back

log = logging.getLogger(__name__)


def renew(
    client: Any,
    path: str,
    ttl_seconds: float,
    retries: Retries,
    *,
    first_after_seconds: float = 0.0,
    lost: Callable[[], bool] = lambda: False,
    failed: Callable[[], None] = lambda: None,
    refresh: Callable[[], object] | None = None,
) -> threading.Event:
    """Refresh `path` twice per time to live, until the returned event is set.

    torch's thread ends on almost any error. This one soon retries after every error: during an
    outage of etcd nothing expires, and no other member can observe an expiry. Only if the path no
    longer exists, `lost` is called: it returns True to continue. The thread calls `failed` after
    every failure. `refresh` replaces the default request.
    """
    stop = threading.Event()
    refresh_key = refresh or (lambda: client.refresh(path, ttl=ttl_seconds))
    arguments = (refresh_key, path, ttl_seconds, retries, first_after_seconds, lost, failed, stop)
    threading.Thread(target=_keep, args=arguments, name=f"renew {path}", daemon=True).start()
    return stop


def _keep(
    refresh: Callable[[], object],
    path: str,
    ttl_seconds: float,
    retries: Retries,
    pause_seconds: float,
    lost: Callable[[], bool],
    failed: Callable[[], None],
    stop: threading.Event,
) -> None:
    while not stop.wait(pause_seconds):
        pause_seconds = ttl_seconds / 2
        try:
            refresh()
        except etcd.EtcdKeyNotFound:
            failed()
            if not _goes_on(lost):
                log.warning("%s has expired", path)
                return
        except etcd.EtcdException as error:
            if "Not a file" in str(error):
                log.info("not renewing %s: this etcd cannot renew directories", path)
                return
            failed()
            pause_seconds = _logged(path, ttl_seconds, retries, error)
        except Exception as error:  # top-level loop: renewal must continue after any error
            failed()
            pause_seconds = _logged(path, ttl_seconds, retries, error)


def _logged(path: str, ttl_seconds: float, retries: Retries, error: Exception) -> float:
    """Log a failed renewal; return the delay before the next one."""
    log.info("could not renew %s, trying again: %r", path, error)
    return retries.renewal(ttl_seconds, random.random())


def _goes_on(lost: Callable[[], bool]) -> bool:
    try:
        return lost()
    except Exception as error:  # as above: etcd may be unavailable again
        log.info("could not restore an expired key: %r", error)
        return True


class Holder(Enum):
    US = auto()
    NOBODY = auto()
    ANOTHER = auto()


class Place:
    """Keep-alive key of rank `rank` in `version`.

    torch sets the key on confirmation; we set it on joining, so that the others detect a member
    that dies in between. torch leaves the value empty; ours identifies the owner, since an etcd
    that lost its data restarts its versions and ranks, and assigns the same ones to others.

    `reading` is the number of the feed's reading that preceded the key.
    """

    def __init__(
        self, client: Any, paths: Paths, version: str, rank: int, reading: int, retries: Retries
    ) -> None:
        self._client = client
        self._retries = retries
        self._paths = paths
        self.version = version
        self.rank = rank
        self.reading = reading
        self.key = paths.keep_alive(version, rank)
        self._mark = uuid.uuid4().hex
        self._stop: threading.Event | None = None
        self._final: str | None = None
        self._lock = threading.Lock()  # no renewal may follow `stay`
        self._lasts = False
        self.stays = False
        """True if the key must outlive this member, which has finished its work in the version."""
        self.failed_at = float("-inf")
        """Monotonic time of the last failed renewal."""

    def confirm_final(self, text: str) -> None:
        """Record the final state of the version, which `_restored` writes back after data loss."""
        self._final = text

    def take(self) -> threading.Event:
        """Set the key and renew it periodically; return the event that ends the renewal."""
        self._client.set(self.key, self._mark, ttl=KEEPALIVE_TTL_SECONDS)
        self._stop = renew(
            self._client,
            self.key,
            KEEPALIVE_TTL_SECONDS,
            self._retries,
            first_after_seconds=KEEPALIVE_TTL_SECONDS / 2,
            lost=self._restored,
            failed=self._failed,
            refresh=self._refresh,
        )
        return self._stop

    def stay(self) -> None:
        """Make the key permanent, independent of this member's life.

        Raises etcd.EtcdException; the next renewal then tries again.
        """
        self.stays = True
        self._refresh()

    def release(self) -> None:
        """Stop the renewal; the key then expires, unless it is permanent."""
        if self._stop is not None:
            self._stop.set()

    def holder(self) -> Holder:
        """Return the present owner of the key, by a quorum read."""
        try:
            key = self._client.read(self.key, quorum=True)
        except etcd.EtcdKeyNotFound:
            return Holder.NOBODY
        return Holder.ANOTHER if self.belongs_to_another(key) else Holder.US

    def belongs_to_another(self, key: Any) -> bool:
        """Return True if this is the key of our rank but another member wrote it."""
        return bool(key.key == self.key and key.value != self._mark)

    def delete_own(self) -> None:
        """Delete the key if it is ours: the rank's next owner may already have set its own."""
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
        """Set our expired key again if the final version still exists; return True to continue.

        All keys expire during a long outage of etcd, although all members live. Before the
        version is final, members join again instead: in an etcd that lost its data the key may
        belong to another member.
        """
        client, paths = self._client, self._paths
        try:
            state = read(client.get(paths.active).value)
        except etcd.EtcdKeyNotFound:
            if self._final is None or not is_lost(client, paths):
                return False  # it was destroyed
            log.warning("%s was lost: restoring %s", paths.run, self._final)
            put_back(client, paths, self.version, self._final)
        else:
            if state.version != self.version or state.status is Status.CLOSED:
                return False
            if state.status is not Status.FINAL:
                return True
        client.set(self.key, self._mark, ttl=None if self.stays else KEEPALIVE_TTL_SECONDS)
        return True
