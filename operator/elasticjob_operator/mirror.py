"""The operator's copy of every job's rendezvous: one watch for all jobs of an etcd.

Range, then watch; on any doubt (the watch broke, history was compacted, another cluster answers,
the revision went back) all is forgotten and read again. What cannot be read is unknown: `records`
then returns None, never what was true before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from elasticjob_operator.core.mirrored import (
    Records,
    closed,
    is_mere_progress,
    job_of,
    prefix_of,
    records,
)
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.keys import ROOT, Keys
from elasticjob_rendezvous.core.kv import (
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
from elasticjob_rendezvous.core.records import Outcome
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous, EtcdError

log = logging.getLogger(__name__)

Written = TypeVar("Written")

LEAST_BACKOFF_SECONDS = 0.1
MOST_BACKOFF_SECONDS = 5.0
ATTEMPTS = 5
PROGRESS_SECONDS = 30.0
"""How often the mere progress of a job's training is told as a change."""
OPERATIONS_A_TXN = 100
"""etcd takes 128."""


class Mirror:
    """The rendezvous of all jobs below `root`, kept while `run` runs.

    `changes` yields the prefix of each job that changed; many changes of one job before it is
    taken are one. It is woken also when a job becomes unknown, or known again.
    """

    def __init__(self, client: Client, root: str = ROOT) -> None:
        self._client = client
        self._target = Range(root, prefix=True)
        self._jobs: dict[str, dict[str, KeyValue]] = {}
        self._incarnations: dict[tuple[str, str], set[int]] = {}
        self._known = False
        self._changed: dict[str, None] = {}
        self._progress_told: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._advanced = asyncio.Condition()
        self._cluster_id = 0
        self._revision = 0

    @property
    def known(self) -> bool:
        """Whether etcd can be read at present."""
        return self._known

    @property
    def cluster_id(self) -> int:
        """The etcd cluster that was read last; a change means that its data was lost."""
        return self._cluster_id

    @property
    def revision(self) -> int:
        """The revision of etcd up to which changes were seen; lower than before after a loss."""
        return self._revision

    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all jobs that have a record."""
        return tuple(self._jobs)

    def jobs(self) -> tuple[tuple[str, str], ...]:
        """Namespace and uid of every job that has a record."""
        return tuple(self._incarnations)

    def newest(self, namespace: str, uid: str) -> int | None:
        """The newest incarnation of a job that has a record; None where it has none."""
        return max(self._incarnations.get((namespace, uid), ()), default=None)

    def records(self, prefix: str) -> Records | None:
        """The records of a job, empty ones where it has none; None while etcd can't be read."""
        if not self._known:
            return None
        return records(prefix, self._jobs.get(prefix, {}).values())

    async def reached(self, revision: int, timeout_seconds: float) -> bool:
        """Wait until what this revision wrote can be read here; false after the time."""
        try:
            async with asyncio.timeout(timeout_seconds), self._advanced:
                await self._advanced.wait_for(lambda: self._known and self._revision >= revision)
        except TimeoutError:
            return False
        return True

    async def try_to_read(self) -> None:
        """Ask etcd for a little of what is mirrored. Raises `EtcdError` where it can't be had."""
        await self._client.range(replace(self._target, limit=1))

    async def changes(self) -> AsyncIterator[str]:
        """The prefixes of jobs whose records changed. For one consumer."""
        while True:
            await self._wake.wait()
            while self._changed:
                prefix = next(iter(self._changed))
                del self._changed[prefix]
                yield prefix
            self._wake.clear()

    async def run(self) -> None:
        """Mirror until cancelled."""
        delay_seconds = LEAST_BACKOFF_SECONDS
        while True:
            try:
                await self._follow()
            except EtcdError as error:
                if self._known:
                    delay_seconds = LEAST_BACKOFF_SECONDS
                    log.warning("mirror %s: lost, reading again: %s", self._target.key, error)
                self._lose()
            await asyncio.sleep(delay_seconds)
            delay_seconds = min(2 * delay_seconds, MOST_BACKOFF_SECONDS)

    async def _follow(self) -> None:
        """One watch's life. It is opened before the range, so nothing falls between them."""
        async with aclosing(self._client.watch((self._target,))) as batches:
            await anext(batches)
            self._rebuild(await self._client.range(self._target))
            await self._tell_advance()
            async for batch in batches:
                self._apply(batch)
                await self._tell_advance()

    def _rebuild(self, found: RangeResult) -> None:
        if self._cluster_id not in (0, found.cluster_id):
            log.warning(
                "mirror %s: another etcd cluster answers (%x, was %x): its data was lost",
                self._target.key, found.cluster_id, self._cluster_id,
            )  # fmt: skip
        elif found.revision < self._revision:
            log.warning(
                "mirror %s: etcd went back from revision %d to %d: data was lost",
                self._target.key, self._revision, found.revision,
            )  # fmt: skip
        before, self._jobs, self._incarnations = self._jobs, {}, {}
        for kv in found.kvs:
            if prefix := prefix_of(kv.key):
                self._job(prefix)[kv.key] = kv
        self._cluster_id, self._revision, self._known = found.cluster_id, found.revision, True
        self._tell(*self._jobs, *before)

    def _apply(self, batch: WatchBatch) -> None:
        for event in batch.events:
            if event.mod_revision <= self._revision or not (prefix := prefix_of(event.key)):
                continue  # the range has seen it already
            job = self._job(prefix)
            if isinstance(event, Deleted):
                job.pop(event.key, None)
                if not job:
                    self._drop(prefix)
            else:
                before = job.get(event.key)
                job[event.key] = event
                if is_mere_progress(before, event) and not self._progress_is_due(prefix):
                    continue
            self._tell(prefix)
        # Events of one revision may come in several batches of several watched ranges; here there
        # is one range, so a revision is complete.
        self._revision = max(self._revision, batch.revision)

    def _progress_is_due(self, prefix: str) -> bool:
        """Whether a job's progress was not told for a while: each look at a job costs requests."""
        now = asyncio.get_running_loop().time()
        due = now >= self._progress_told.get(prefix, now - PROGRESS_SECONDS) + PROGRESS_SECONDS
        if due:
            self._progress_told[prefix] = now
        return due

    def _job(self, prefix: str) -> dict[str, KeyValue]:
        """The records of a job, which is remembered from now on."""
        if prefix not in self._jobs:
            self._jobs[prefix] = {}
            if found := job_of(prefix):
                namespace, uid, incarnation = found
                self._incarnations.setdefault((namespace, uid), set()).add(incarnation)
        return self._jobs[prefix]

    def _drop(self, prefix: str) -> None:
        del self._jobs[prefix]
        self._progress_told.pop(prefix, None)
        if found := job_of(prefix):
            namespace, uid, incarnation = found
            others = self._incarnations[namespace, uid]
            others.discard(incarnation)
            if not others:
                del self._incarnations[namespace, uid]

    def _lose(self) -> None:
        if self._known:
            self._known = False
            self._tell(*self._jobs)

    async def _tell_advance(self) -> None:
        async with self._advanced:
            self._advanced.notify_all()

    def _tell(self, *prefixes: str) -> None:
        self._changed.update(dict.fromkeys(prefixes))
        self._wake.set()


async def write_bounds(client: Client, prefix: str, bounds: Bounds) -> int:
    """Write a job's bounds, of which the operator is the only writer: putting again is safe.

    Returns the revision of the write.
    """
    put = Put(Keys(prefix).bounds, encode(bounds))
    return await _settled(lambda: client.put(put))


async def close(client: Client, prefix: str, outcome: Outcome, utc_ms: int) -> int | None:
    """Close a job's rendezvous from outside; None when it was closed already.

    Returns the revision of the write.

    The round belongs to its coordinator, so the write compares what was read; when the coordinator
    was faster, its word is read and closed in turn.
    """
    key = Keys(prefix).round
    for _ in range(ATTEMPTS):
        found = await client.range(Range(key))
        before = found.kvs[0] if found.kvs else None
        value = closed(before, outcome, utc_ms)
        if value is None:
            return None
        revision = before.mod_revision if before else 0
        unchanged = Compare(key, Target.MOD, revision)
        try:
            written = await client.txn(Txn((unchanged,), (Put(key, value),)))
            if written.succeeded:
                return written.revision
        except Ambiguous:
            continue  # read again: the next look decides
    raise Contended(prefix)


async def remove_members(client: Client, prefix: str, members: Sequence[str]) -> int:
    """Delete every session of members whose pods are gone. A pod's uid never comes back, so there
    is nothing to compare and deleting again is safe.

    Returns the revision after it.
    """
    keys, revision = Keys(prefix), 0
    for first in range(0, len(members), OPERATIONS_A_TXN):
        some = members[first : first + OPERATIONS_A_TXN]
        txn = Txn((), tuple(Delete(keys.sessions(member), prefix=True) for member in some))
        revision = (await _settled(partial(client.txn, txn))).revision
    return revision


async def _settled(write: Callable[[], Awaitable[Written]]) -> Written:
    """Make a write again while it is not known to have happened: one that is safe to repeat."""
    for _ in range(ATTEMPTS - 1):
        with suppress(Ambiguous):
            return await write()
    return await write()


class Contended(Exception):
    """The round changed under every attempt to close it; try again."""

    def __init__(self, prefix: str) -> None:
        super().__init__(f"the round below {prefix} changed under {ATTEMPTS} attempts to close it")
