"""Informer cache of the rendezvous records of all jobs of one etcd, kept by a single watch.

Range, then watch. On any doubt (broken watch, compacted history, another cluster, an older
revision) the cache is discarded and read again. While etcd is unreadable, `records` returns None,
never stale records. A job whose records exceed its quota is dropped, so that no job can exhaust
the operator's memory; the range is read in pages for the same reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from elasticjob_operator.domain.observed.etcd_records import (
    Records,
    closed_round,
    decode_records,
    folder_of,
    is_progress_only,
    prefix_of,
)
from elasticjob_operator.rendezvous.record_store import Quota, RecordStore, size_of
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous, EtcdError
from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Deleted,
    KeyValue,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    WatchBatch,
)
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import ROOT, Keys, job_folder
from elasticjob_rendezvous.protocol.records.members import Outcome
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

log = logging.getLogger(__name__)

Written = TypeVar("Written")

LEAST_BACKOFF_SECONDS = 0.1
MOST_BACKOFF_SECONDS = 5.0
ATTEMPTS = 5
PROGRESS_SECONDS = 30.0
"""Minimum interval between two changes of a job that are training progress only."""
SEEN_SECONDS = 2.0
"""Maximum wait for a write to reach the informer cache before the status is computed."""
OPERATIONS_A_TXN = 100
"""Maximum operations per transaction; etcd's own limit is 128."""
PAGE_KEYS = 64
"""Keys of one page of the range. etcd's default limit of a value, 1.5 MiB, allows for 96."""


class RecordReader(Protocol):
    """Part of the etcd client that an informer cache uses."""

    async def range(self, target: Range) -> RangeResult:
        """Read one key or all keys of a prefix. Raises `EtcdError`."""

    async def page(self, target: Range, start: str, revision: int) -> RangeResult:
        """Read keys of a prefix from `start` on, at a revision or the present one (0).

        Raises `EtcdError`.
        """

    def watch(self, targets: Sequence[Range]) -> AsyncGenerator[WatchBatch, None]:
        """Yield the changes of these keys from now on. Raises `EtcdError`."""


class InformerCache:
    """Informer cache of the records of all jobs below `root`, current while `run` runs.

    `changes` yields the prefix of each changed job and merges the changes of one job until it is
    taken. Losing and regaining etcd counts as a change of every job.
    """

    def __init__(self, client: RecordReader, root: str = ROOT) -> None:
        self._client = client
        self._target = Range(root, prefix=True)
        self._store = RecordStore()
        self._reread = asyncio.Event()
        self._known = False
        self._lost_at = time.monotonic()
        self._changed: dict[str, None] = {}
        self._progress_posted_at: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._advanced = asyncio.Condition()
        self._cluster_id = 0
        self._revision = 0

    @property
    def known(self) -> bool:
        """True if etcd is currently readable."""
        return self._known

    @property
    def lost_seconds(self) -> float:
        """Time since etcd was lost, or since the start; infinite while it is readable."""
        return math.inf if self.known else time.monotonic() - self._lost_at

    @property
    def cluster_id(self) -> int:
        """ID of the etcd cluster read last; a change means that its data was lost."""
        return self._cluster_id

    @property
    def revision(self) -> int:
        """Revision of etcd up to which changes were seen; goes back after a loss of data."""
        return self._revision

    def prefixes(self) -> tuple[str, ...]:
        """Return the prefixes of all jobs that have a record."""
        return tuple(self._store.jobs)

    def jobs(self) -> tuple[tuple[str, str], ...]:
        """Return namespace and uid of every job that has a record."""
        return self._store.uids()

    def newest(self, namespace: str, uid: str) -> int | None:
        """Return the newest incarnation of a job that has a record; None if none has."""
        return self._store.newest(namespace, uid)

    def records(self, prefix: str) -> Records | None:
        """Return the records of a job, possibly empty; None while they are not known."""
        if not self._known or not self._store.has(prefix):
            return None
        return decode_records(prefix, self._store.jobs.get(prefix, {}).values())

    def allow(self, namespace: str, uid: str, nodes: int) -> None:
        """Raise a job's quota to that of this number of nodes."""
        if self._store.allow(job_folder(namespace, uid), nodes):
            self._reread.set()

    def exceeded(self, namespace: str, uid: str) -> Quota | None:
        """Return the quota that a job's records exceed; None if they do not."""
        return self._store.exceeded(job_folder(namespace, uid))

    def forget(self, namespace: str, uid: str) -> None:
        """Count a job's records from zero, after all of them were deleted."""
        self._store.forget(job_folder(namespace, uid))

    async def reached(self, revision: int, timeout_seconds: float) -> bool:
        """Wait until the cache has this revision; return False on timeout."""
        try:
            async with asyncio.timeout(timeout_seconds), self._advanced:
                await self._advanced.wait_for(lambda: self._known and self._revision >= revision)
        except TimeoutError:
            return False
        return True

    async def until_readable(self) -> None:
        """Wait until etcd is readable."""
        async with self._advanced:
            await self._advanced.wait_for(lambda: self._known)

    async def try_to_read(self) -> None:
        """Read one of the watched keys from etcd as a probe. Raises `EtcdError`."""
        await self._client.range(replace(self._target, limit=1))

    async def changes(self) -> AsyncIterator[str]:
        """Yield the prefixes of jobs whose records changed. Supports a single consumer."""
        while True:
            await self._wake.wait()
            while self._changed:
                prefix = next(iter(self._changed))
                del self._changed[prefix]
                yield prefix
            self._wake.clear()

    async def run(self) -> None:
        """Keep the cache current until cancelled."""
        delay_seconds = LEAST_BACKOFF_SECONDS
        while True:
            try:
                if await self._follow_until_reread():
                    continue
            except EtcdError as error:
                if self._known:
                    delay_seconds = LEAST_BACKOFF_SECONDS
                    log.warning(
                        "informer cache %s: watch lost, reading again: %s", self._target.key, error
                    )
                self._lose()
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(2 * delay_seconds, MOST_BACKOFF_SECONDS)

    async def _follow_until_reread(self) -> bool:
        """Run one watch until it fails or all records must be read again, and return True then."""
        self._reread.clear()
        following = asyncio.ensure_future(self._follow())
        reread = asyncio.ensure_future(self._reread.wait())
        try:
            await asyncio.wait((following, reread), return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following
            return True
        finally:
            for task in (following, reread):
                task.cancel()
            await asyncio.gather(following, reread, return_exceptions=True)

    async def _follow(self) -> None:
        """Run one watch until it fails; opened before the range, so no change is missed."""
        async with aclosing(self._client.watch((self._target,))) as batches:
            await anext(batches)
            await self._read()
            await self._notify_of_advance()
            async for batch in batches:
                self._apply(batch)
                await self._notify_of_advance()

    async def _read(self) -> None:
        """Read all records at one revision, page by page; of a job that exceeds its quota no
        more than that. The former records are kept until then."""
        target = replace(self._target, limit=PAGE_KEYS)
        page = await self._client.page(target, target.key, 0)
        first, store = page, self._store.emptied()
        while True:
            start = ""
            for kv in page.kvs:
                start = kv.key + "\0"
                if (prefix := prefix_of(kv.key)) and not self._put(store, prefix, kv):
                    start = _end_of(folder_of(prefix))
                    break
            if not start or (len(page.kvs) < PAGE_KEYS and start.endswith("\0")):
                break
            page = await self._client.page(target, start, first.revision)
        self._take(first, store)

    def _take(self, first: RangeResult, store: RecordStore) -> None:
        if self._cluster_id not in (0, first.cluster_id):
            log.warning(
                "informer cache %s: another etcd cluster answers (%x, was %x): its data was lost",
                self._target.key, first.cluster_id, self._cluster_id,
            )  # fmt: skip
        elif first.revision < self._revision:
            log.warning(
                "informer cache %s: etcd went back from revision %d to %d: data was lost",
                self._target.key, self._revision, first.revision,
            )  # fmt: skip
        before, self._store = self._store, store
        self._cluster_id, self._revision, self._known = first.cluster_id, first.revision, True
        self._notify(*store.jobs, *before.jobs)

    def _apply(self, batch: WatchBatch) -> None:
        store, now = self._store, asyncio.get_running_loop().time()
        for event in batch.events:
            if event.mod_revision <= self._revision or not (prefix := prefix_of(event.key)):
                continue  # already in the range's result
            size = len(event.key) if isinstance(event, Deleted) else size_of(event)
            if store.has(prefix) and not store.wrote(prefix, size, now):
                self._log_dropped(store, prefix)
            elif isinstance(event, Deleted):
                store.delete(prefix, event.key)
                if prefix not in store.jobs:
                    self._progress_posted_at.pop(prefix, None)
            elif not store.has(prefix):
                continue
            else:
                before = store.jobs.get(prefix, {}).get(event.key)
                kept = self._put(store, prefix, event)
                if kept and is_progress_only(before, event) and not self._progress_is_due(prefix):
                    continue
            self._notify(prefix)
        # With several watched ranges a revision's events may span batches; with this single range
        # each batch holds complete revisions.
        self._revision = max(self._revision, batch.revision)

    def _put(self, store: RecordStore, prefix: str, kv: KeyValue) -> bool:
        if store.put(prefix, kv):
            return True
        self._log_dropped(store, prefix)
        return False

    def _log_dropped(self, store: RecordStore, prefix: str) -> None:
        folder = folder_of(prefix)
        log.warning(
            "informer cache %s: dropped the records of %s: more than %s",
            self._target.key, folder, store.exceeded(folder),
        )  # fmt: skip

    def _progress_is_due(self, prefix: str) -> bool:
        """Return True if a job's progress may be reported again: each reconcile costs requests."""
        now = asyncio.get_running_loop().time()
        due = now >= self._progress_posted_at.get(prefix, now - PROGRESS_SECONDS) + PROGRESS_SECONDS
        if due:
            self._progress_posted_at[prefix] = now
        return due

    def _lose(self) -> None:
        if self._known:
            self._known, self._lost_at = False, time.monotonic()
            self._notify(*self._store.jobs)

    async def _notify_of_advance(self) -> None:
        async with self._advanced:
            self._advanced.notify_all()

    def _notify(self, *prefixes: str) -> None:
        self._changed.update(dict.fromkeys(prefixes))
        self._wake.set()


def _end_of(folder: str) -> str:
    """Return the first key after all keys of a folder."""
    return folder[:-1] + chr(ord("/") + 1)


async def write_params(client: Client, prefix: str, bounds: RendezvousParams, revision: int) -> int:
    """Write a job's bounds over those of this revision, 0 for none; return that of the write.

    A former leader that was paused thus overwrites nothing that its successor wrote. Repeating the
    write is safe.

    Raises:
        EtcdError: etcd cannot be written.
        Contended: the record has changed.
    """
    key, value = Keys(prefix).bounds, encode(bounds)
    unchanged = Compare(key, Target.MOD, revision)
    txn = Txn((unchanged,), (Put(key, value),), (Range(key),))
    done = await _settled(lambda: client.txn(txn))
    if done.succeeded:
        return done.revision
    for _, found in done.ranges:
        for kv in found:
            if kv.value == value:  # by an earlier attempt without an answer
                return kv.mod_revision
    raise Contended(f"cannot write the parameters below {prefix}: changed since they were read")


async def close(client: Client, prefix: str, outcome: Outcome, utc_ms: int) -> int | None:
    """Close a job's rendezvous from outside; return the write's revision, None if already closed.

    The coordinator writes the same record, so the write is conditional on the version read; after
    a concurrent write by the coordinator, the new version is read and closed.
    """
    key = Keys(prefix).round
    for _ in range(ATTEMPTS):
        found = await client.range(Range(key))
        before = found.kvs[0] if found.kvs else None
        value = closed_round(before, outcome, utc_ms)
        if value is None:
            return None
        revision = before.mod_revision if before else 0
        unchanged = Compare(key, Target.MOD, revision)
        try:
            written = await client.txn(Txn((unchanged,), (Put(key, value),)))
            if written.succeeded:
                return written.revision
        except Ambiguous:
            continue  # the next read decides
    raise Contended(f"cannot close the round below {prefix}: changed in {ATTEMPTS} attempts")


async def remove_members(client: Client, prefix: str, members: Sequence[str]) -> int:
    """Delete every session of members whose pods are gone; return the revision afterwards.

    Pod uids are never reused, so the deletes need no comparison and are safe to repeat.
    """
    keys, revision = Keys(prefix), 0
    for first in range(0, len(members), OPERATIONS_A_TXN):
        some = members[first : first + OPERATIONS_A_TXN]
        txn = Txn((), tuple(Delete(keys.sessions(member), prefix=True) for member in some))
        revision = (await _settled(partial(client.txn, txn))).revision
    return revision


class RendezvousWriter:
    """Writer of one job's rendezvous: each write waits until the informer cache shows it.

    `prefix_of` returns the key prefix of an incarnation. The methods raise `EtcdError` or
    `Contended`.
    """

    def __init__(
        self, client: Client, cache: InformerCache, prefix_of: Callable[[int], str]
    ) -> None:
        self._client = client
        self._cache = cache
        self._prefix_of = prefix_of

    async def write_params(self, incarnation: int, bounds: RendezvousParams, revision: int) -> None:
        prefix = self._prefix_of(incarnation)
        written = await write_params(self._client, prefix, bounds, revision)
        await self._cache.reached(written, SEEN_SECONDS)

    async def close(self, incarnation: int, outcome: Outcome, now_ms: int) -> None:
        revision = await close(self._client, self._prefix_of(incarnation), outcome, now_ms)
        if revision is not None:
            await self._cache.reached(revision, SEEN_SECONDS)

    async def remove_members(self, incarnation: int, members: Sequence[str]) -> None:
        revision = await remove_members(self._client, self._prefix_of(incarnation), members)
        # Else a reconcile in between would remove and report them again.
        await self._cache.reached(revision, SEEN_SECONDS)


async def _settled(write: Callable[[], Awaitable[Written]]) -> Written:
    """Repeat an idempotent write while its outcome is ambiguous."""
    for _ in range(ATTEMPTS - 1):
        with suppress(Ambiguous):
            return await write()
    return await write()


class Contended(Exception):
    """Write that met a concurrent change; read again."""
