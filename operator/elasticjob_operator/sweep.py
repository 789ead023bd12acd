"""Periodic resync and garbage collection, about once a minute.

Detects watches that died silently, wakes jobs whose changes were missed, and clears etcd of deleted
jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Protocol

from elasticjob_operator.apply import EXPECTED
from elasticjob_operator.core.names import UID_LABEL
from elasticjob_operator.delivered import Delivered
from elasticjob_operator.departures import TROUBLE, close_departed, forget_departed
from elasticjob_operator.etcd_access import forget_user, uids_with_users
from elasticjob_operator.etcd_source import Etcd
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.jobs import JobKey, Jobs
from elasticjob_operator.kube import ELASTICJOBS, PODS, Json, Kind, Kube
from elasticjob_operator.nodes import Nodes

log = logging.getLogger(__name__)

SWEEP_SECONDS = 60.0
MOST_OF_THE_TIME = 20
"""Minimum ratio of the pause after a sweep to the sweep's duration."""
RESYNC_SWEEPS = 10
"""Number of sweeps over which every job is reconciled once, even if unchanged."""
MIRROR_DEAD_SECONDS = 60.0


class Waker(Protocol):
    """Work queue of the jobs to reconcile."""

    def wake(self, key: JobKey) -> None:
        """Schedule a reconcile of this job."""


class Sweep:
    """Sweep of the active replica. `namespaces` holds None for all."""

    def __init__(
        self,
        kube: Kube,
        namespaces: tuple[str | None, ...],
        jobs: Jobs,
        nodes: Nodes,
        delivered: Delivered,
        etcds: Etcds,
        wakeups: Waker,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces
        self._jobs = jobs
        self._nodes = nodes
        self._delivered = delivered
        self._etcds = etcds
        self._wakeups = wakeups
        self._clock = clock
        self._now = now
        self._count = 0
        self._gone: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Sweep until cancelled."""
        pause = SWEEP_SECONDS
        while True:
            await asyncio.sleep(pause)
            began = self._clock()
            try:
                await self.sweep()
            except EXPECTED as error:
                log.warning("the resync is incomplete: %s", error)
            pause = max(SWEEP_SECONDS, MOST_OF_THE_TIME * (self._clock() - began))

    def ailment(self) -> str:
        """Return the dead watches and caches for the health probe; empty if there are none."""
        found = [f"the watch of {kind} is dead" for kind in self._delivered.dead]
        now = self._clock()
        for etcd in self._etcds.all():
            since = etcd.mirror_dead_since
            if since is not None and now - since > MIRROR_DEAD_SECONDS:
                found.append("etcd answers but its mirror is dead")
        return "; ".join(found)

    async def sweep(self) -> None:
        """Run one sweep."""
        self._count += 1
        # Read etcd first: a job created between the two reads then does not look deleted.
        # A user's etcd may hold jobs of others: there, clear only jobs this process saw deleted.
        own = self._etcds.own
        kept = {*self._jobs.departed, *(() if own.stranger else own.mirror.jobs())}
        users = await self._users_in_etcd()
        listed = await self._list(ELASTICJOBS)
        pods = await self._list(PODS, UID_LABEL)
        changed = self._delivered.compare(ELASTICJOBS, listed)
        changed_pods = self._delivered.compare(PODS, pods)
        self._wake(listed, pods, changed, changed_pods)
        for node in await self._nodes.drop_ghosts(self._kube):
            for memory in self._jobs.on_node(node):
                self._wakeups.wake(memory.key)
        await self._clear_gone(kept, listed, pods)
        await self._clear_users(users - {uid for _, uid in kept}, listed, pods)
        for etcd in self._etcds.all():
            await self._check_mirror(etcd)
        await self._etcds.guard()

    def _wake(
        self, listed: list[Json], pods: list[Json], changed: set[str], changed_pods: set[str]
    ) -> None:
        present = set()
        for raw in listed:
            metadata = raw["metadata"]
            key = JobKey(metadata["namespace"], metadata["name"])
            present.add(key)
            due = hash(key) % RESYNC_SWEEPS == self._count % RESYNC_SWEEPS
            if due or metadata["uid"] in changed:
                self._wakeups.wake(key)
        for raw in pods:
            owner = self._jobs.find_uid(raw["metadata"]["labels"][UID_LABEL])
            if owner is not None and raw["metadata"]["uid"] in changed_pods:
                self._wakeups.wake(owner.key)
        there = {raw["metadata"]["uid"] for raw in pods}
        for memory in self._jobs:
            # An interrupted watch does not deliver the deletions it missed.
            if memory.key not in present or not memory.pods.uids <= there:
                self._wakeups.wake(memory.key)

    async def _clear_gone(
        self, kept: set[tuple[str, str]], listed: list[Json], pods: list[Json]
    ) -> None:
        """Close the rendezvous of deleted jobs; once no pod is left, delete their keys.

        Deletes only the keys of jobs that two consecutive sweeps found gone.
        """
        uids = {raw["metadata"]["uid"] for raw in listed}
        with_pods = {raw["metadata"]["labels"][UID_LABEL] for raw in pods}
        served = set(self._namespaces)
        gone = {
            (namespace, uid)
            for namespace, uid in kept
            if uid not in uids and (None in served or namespace in served)
        }
        for namespace, uid in gone:
            try:
                whole = await close_departed(self._etcds, namespace, uid, self._now())
                if whole and (namespace, uid) in self._gone and uid not in with_pods:
                    log.info("deleting etcd data of a deleted job of %s: %s", namespace, uid)
                    await forget_departed(self._etcds, namespace, uid)
                    self._jobs.departed.discard((namespace, uid))
            except TROUBLE as error:
                log.warning(
                    "cannot yet delete etcd data of a job of %s, %s: %s", namespace, uid, error
                )
        self._gone = gone

    async def _users_in_etcd(self) -> frozenset[str]:
        """Return the jobs with a user in the operator's etcd, in one of RESYNC_SWEEPS sweeps.

        Must be called before the jobs are listed.
        """
        users = self._etcds.own.users
        due = self._count % RESYNC_SWEEPS == 1 and None in self._namespaces
        if users is None or not due or self._etcds.own.stranger:
            return frozenset()
        return await uids_with_users(users)

    async def _clear_users(
        self, uids: frozenset[str], listed: list[Json], pods: list[Json]
    ) -> None:
        """Delete the users of jobs whose deletion was missed and that never had a record."""
        users = self._etcds.own.users
        there = {raw["metadata"]["uid"] for raw in listed}
        there |= {raw["metadata"]["labels"][UID_LABEL] for raw in pods}
        for uid in sorted(uids - there):
            assert users is not None
            log.info("deleting the etcd user of a deleted job: %s", uid)
            await forget_user(users, uid)

    async def _check_mirror(self, etcd: Etcd) -> None:
        if etcd.mirror.known:
            etcd.mirror_dead_since = None
            return
        try:
            await etcd.mirror.try_to_read()
        except EXPECTED:
            # etcd is down or denies access: a restart of the operator does not help.
            etcd.mirror_dead_since = None
        else:
            if etcd.mirror_dead_since is None:
                etcd.mirror_dead_since = self._clock()

    async def _list(self, kind: Kind, selector: str = "") -> list[Json]:
        found: list[Json] = []
        for namespace in self._namespaces:
            found += await self._kube.list(kind, namespace, selector, metadata_only=True)
        return found


def served(namespaces: Iterable[str]) -> tuple[str | None, ...]:
    """Return the namespaces to list; None stands for all of them."""
    return tuple(namespaces) or (None,)
