"""Periodic resync and garbage collection, about once a minute.

It detects watches that died silently, wakes jobs whose changes were missed, and clears etcd of
deleted jobs.

The rendezvous of a deleted job is closed at once, its keys are deleted later. There is no
finalizer, so deletion does not wait for this; the resync finds missed jobs. An unreadable etcd
is skipped, so it does not delay work on the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import UID_LABEL
from elasticjob_operator.domain.manifests.owned_objects import controlling_job
from elasticjob_operator.domain.observed.etcd_records import outcome_record, rendezvous_view
from elasticjob_operator.domain.observed.state import UNREADABLE, StopReason
from elasticjob_operator.domain.plan.closing_checkpoint import closing_step
from elasticjob_operator.etcd_tls.job_users import (
    namespace_of_user,
    remove_job,
    remove_users,
    uids_with_users,
)
from elasticjob_operator.kubernetes.client import (
    ELASTICJOBS,
    PODS,
    Json,
    Kind,
    Kube,
    TooManyObjects,
)
from elasticjob_operator.reconcile.job_memory import JobKey, Jobs
from elasticjob_operator.reconcile.namespaces import ServedNamespaces
from elasticjob_operator.reconcile.plan_pass import EXPECTED
from elasticjob_operator.reconcile.watches import NodeCache, StalenessCheck
from elasticjob_operator.rendezvous.etcd_registry import EtcdRegistry
from elasticjob_operator.rendezvous.etcd_source import Etcd
from elasticjob_operator.rendezvous.informer_cache import Contended, close, write_params
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.records.keys import job_prefix
from elasticjob_rendezvous.protocol.records.members import OutcomeKind

log = logging.getLogger(__name__)

CLEANUP_ERRORS = (EtcdError, Contended)
"""Errors that closing and clearing may raise."""
RESYNC_SECONDS = 60.0
MIN_PAUSE_RATIO = 20
"""Minimum ratio of the pause after a resync to its duration."""
FULL_RESYNC_CYCLES = 10
"""Number of resyncs over which every job is reconciled once, even if unchanged."""
CACHE_DEAD_SECONDS = 60.0


async def close_deleted_job(etcds: EtcdRegistry, namespace: str, uid: str, now: datetime) -> bool:
    """Close a deleted job's rendezvous after a checkpoint, so that its agents start no further
    round.

    Return True if everything is closed; the resync retries the rest, and an etcd that cannot be
    read wakes the job once it can. Raises `CLEANUP_ERRORS`.
    """
    etcds.agents.forget(uid)
    whole = True
    for etcd in etcds.all():
        newest = etcd.newest(namespace, uid)
        if newest is None and etcd.users is None:
            continue
        if not etcd.cache.known:
            etcd.await_readable(namespace, uid)
            whole = False
        elif newest is not None:
            prefix = job_prefix(namespace, uid, newest)
            whole = await _close(etcd, prefix, now) and whole
    return whole


async def _close(etcd: Etcd, prefix: str, now: datetime) -> bool:
    """Request the checkpoint before the end, or close; return True if it is closed."""
    found = etcd.cache.records(prefix)
    view = UNREADABLE if found is None else rendezvous_view(found)
    bounds, revision = (None, 0) if found is None else (found.bounds, found.bounds_revision)
    step = closing_step(view, bounds, StopReason.DELETED, now)
    if step.bounds is not None:
        await write_params(etcd.client, prefix, step.bounds, revision)
    if step.wake_at is not None:
        return False
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.DELETED)
    outcome = replace(outcome, save=step.report)
    await close(etcd.client, prefix, outcome, int(now.timestamp() * 1000))
    return True


async def delete_job_data(etcds: EtcdRegistry, namespace: str, uid: str) -> None:
    """Delete all etcd data of a closed job without pods. Raises `CLEANUP_ERRORS`."""
    for etcd in etcds.all():
        if etcd.users is not None or etcd.newest(namespace, uid) is not None:
            await remove_job(etcd.client, etcd.users, namespace, uid)


Namespaces = tuple[str | None, ...]
"""Namespaces to list; None stands for all of them."""


class Waker(Protocol):
    """Work queue of the jobs to reconcile."""

    def wake(self, key: JobKey) -> None:
        """Schedule a reconcile of this job."""


class Resync:
    """Resync of the active replica. Each one leaves out the namespaces without access."""

    def __init__(
        self,
        kube: Kube,
        namespaces: ServedNamespaces,
        jobs: Jobs,
        nodes: NodeCache,
        staleness: StalenessCheck,
        etcds: EtcdRegistry,
        queue: Waker,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._jobs = jobs
        self._nodes = nodes
        self._staleness = staleness
        self._etcds = etcds
        self._queue = queue
        self._clock = clock
        self._now = now
        self._count = 0
        self._gone: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Resync until cancelled."""
        pause = RESYNC_SECONDS
        while True:
            await asyncio.sleep(pause)
            began = self._clock()
            try:
                await self.resync()
            except (*EXPECTED, TooManyObjects) as error:
                log.warning("the resync is incomplete: %s", error)
            pause = max(RESYNC_SECONDS, MIN_PAUSE_RATIO * (self._clock() - began))

    def failure_text(self) -> str:
        """Return the dead watches and caches for the health probe; empty if there are none."""
        found = [f"the watch of {kind} is dead" for kind in self._staleness.dead]
        now = self._clock()
        for etcd in self._etcds.all():
            since = etcd.cache_dead_since
            if since is not None and now - since > CACHE_DEAD_SECONDS:
                found.append("etcd answers but its informer cache is dead")
        return "; ".join(found)

    async def resync(self) -> None:
        """Run one resync."""
        self._count += 1
        # Read etcd first: a job created between the two reads then does not look deleted.
        # A user's etcd may hold jobs of others: there, clear only jobs this process saw deleted.
        own = self._etcds.own
        kept = {*self._jobs.deleted, *(() if own.other_owner else own.cache.jobs())}
        users = await self._users_in_etcd()
        served = await self._namespaces.to_list()
        listed = await self._list(ELASTICJOBS, served)
        pods = await self._list(PODS, served, UID_LABEL)
        changed = self._staleness.compare(ELASTICJOBS, listed)
        changed_pods = self._staleness.compare(PODS, pods)
        self._wake(served, listed, pods, changed, changed_pods)
        for node in await self._nodes.drop_missed_deletions(self._kube):
            for memory in self._jobs.on_node(node):
                self._queue.wake(memory.key)
        here = {(namespace, uid) for namespace, uid in kept if _covers(served, namespace)}
        await self._clear_deleted(here, listed, pods)
        await self._clear_users(users - {uid for _, uid in kept}, listed, pods)
        for etcd in self._etcds.all():
            await self._check_cache(etcd)
        known = {memory.uid for memory in self._jobs} | {uid for _, uid in self._jobs.deleted}
        await self._etcds.release(known, self._clock())
        await self._etcds.guard()
        await self._etcds.audit()

    def _wake(
        self,
        served: Namespaces,
        listed: list[Json],
        pods: list[Json],
        changed: set[str],
        changed_pods: set[str],
    ) -> None:
        present = set()
        for raw in listed:
            metadata = raw["metadata"]
            key = JobKey(metadata["namespace"], metadata["name"])
            present.add(key)
            due = hash(key) % FULL_RESYNC_CYCLES == self._count % FULL_RESYNC_CYCLES
            if due or metadata["uid"] in changed:
                self._queue.wake(key)
        for raw in pods:
            owner = self._jobs.find_uid(raw["metadata"]["labels"][UID_LABEL])
            if (
                owner is not None
                and owner.key.namespace == raw["metadata"]["namespace"]
                and raw["metadata"]["uid"] in changed_pods
            ):
                self._queue.wake(owner.key)
        there = {raw["metadata"]["uid"] for raw in pods}
        for memory in self._jobs:
            if not _covers(served, memory.key.namespace):
                continue
            # An interrupted watch does not deliver the deletions it missed.
            if memory.key not in present or not memory.pods.uids <= there:
                self._queue.wake(memory.key)

    async def _clear_deleted(
        self, kept: set[tuple[str, str]], listed: list[Json], pods: list[Json]
    ) -> None:
        """Close the rendezvous of deleted jobs; once no pod is left, delete their keys.

        Deletes only the keys of jobs that two consecutive resyncs found gone.
        """
        uids = {raw["metadata"]["uid"] for raw in listed}
        with_pods = _jobs_with_pods(pods)
        gone = {(namespace, uid) for namespace, uid in kept if uid not in uids}
        for namespace, uid in gone:
            try:
                whole = await close_deleted_job(self._etcds, namespace, uid, self._now())
                if whole and (namespace, uid) in self._gone - with_pods:
                    log.info("deleting etcd data of a deleted job of %s: %s", namespace, uid)
                    await delete_job_data(self._etcds, namespace, uid)
                    self._jobs.deleted.discard((namespace, uid))
            except CLEANUP_ERRORS as error:
                log.warning(
                    "cannot yet delete etcd data of a job of %s, %s: %s", namespace, uid, error
                )
        self._gone = gone

    async def _users_in_etcd(self) -> frozenset[str]:
        """Return the jobs with a user in the operator's etcd, in one of FULL_RESYNC_CYCLES resyncs.

        Must be called before the jobs are listed.
        """
        users = self._etcds.own.users
        due = self._count % FULL_RESYNC_CYCLES == 1 and None in self._namespaces.configured
        if users is None or not due or self._etcds.own.other_owner:
            return frozenset()
        return await uids_with_users(users)

    async def _clear_users(
        self, uids: frozenset[str], listed: list[Json], pods: list[Json]
    ) -> None:
        """Delete the users of jobs whose deletion was missed and that never had a record."""
        users = self._etcds.own.users
        there = {raw["metadata"]["uid"] for raw in listed}
        with_pods = _jobs_with_pods(pods)
        for uid in sorted(uids - there):
            assert users is not None
            if (await namespace_of_user(users, uid), uid) in with_pods:
                continue
            log.info("deleting the etcd user of a deleted job: %s", uid)
            await remove_users(users, uid)

    async def _check_cache(self, etcd: Etcd) -> None:
        if etcd.cache.known:
            etcd.cache_dead_since = None
            return
        try:
            await etcd.cache.try_to_read()
        except EXPECTED:
            # etcd is down or denies access: a restart of the operator does not help.
            etcd.cache_dead_since = None
        else:
            if etcd.cache_dead_since is None:
                etcd.cache_dead_since = self._clock()

    async def _list(self, kind: Kind, served: Namespaces, selector: str = "") -> list[Json]:
        found: list[Json] = []
        for namespace in served:
            found += await self._kube.list(kind, namespace, selector, metadata_only=True)
        return found


def _jobs_with_pods(pods: Iterable[Json]) -> frozenset[tuple[str, str]]:
    """Return namespace and uid of the jobs that control one of these pods.

    A label alone proves nothing: every user who may create pods can set it.
    """
    return frozenset(
        (raw["metadata"]["namespace"], raw["metadata"]["labels"][UID_LABEL])
        for raw in pods
        if controlling_job(raw) == raw["metadata"]["labels"][UID_LABEL]
    )


def _covers(served: Namespaces, namespace: str) -> bool:
    return None in served or namespace in served
