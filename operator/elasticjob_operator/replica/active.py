"""Composition root of the active replica, which serves all jobs.

Its components run as tasks of one group: if one fails, the process exits and Kubernetes restarts
it; running jobs keep training meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing
from datetime import timedelta
from functools import partial

from kopf._cogs.structs.references import Insights  # no public name

from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.kubernetes.client import Kube, KubeError
from elasticjob_operator.kubernetes.event_recorder import EventRecorder
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.reconcile.job_memory import Jobs
from elasticjob_operator.reconcile.kube_cluster import KubeCluster
from elasticjob_operator.reconcile.live_pods import LivePods
from elasticjob_operator.reconcile.namespaces import ServedNamespaces
from elasticjob_operator.reconcile.owned_objects import Credentials, OwnedObjects
from elasticjob_operator.reconcile.plan_pass import Applier, Observer
from elasticjob_operator.reconcile.processor_time import ProcessorTime
from elasticjob_operator.reconcile.reconciler import Dependencies, Reconciler
from elasticjob_operator.reconcile.resync import Resync, close_deleted_job
from elasticjob_operator.reconcile.watches import (
    COALESCE_SECONDS,
    Handlers,
    NodeCache,
    StalenessCheck,
    StopSignals,
    registry,
    watch,
)
from elasticjob_operator.reconcile.workqueue import WorkQueue
from elasticjob_operator.rendezvous.etcd_registry import EtcdRegistry
from elasticjob_operator.replica.health import Health
from elasticjob_operator.settings import Settings
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.text import counted

log = logging.getLogger(__name__)

FIRST_READ_SECONDS = 15.0
"""Wait for etcd at start, which avoids status writes that report it as unreadable."""
STUCK_SECONDS = 300.0
FINISH_SECONDS = 8.0
"""Maximum wait at shutdown for running reconciles and their events; a kubelet waits for 30 s."""


class ActiveReplica:
    """Active replica: wires and runs all of its components."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics, health: Health) -> None:
        self._settings = settings
        self._kube = kube
        self._metrics = metrics
        self._health = health
        self._jobs = Jobs(time.monotonic, random.random)
        self._queue = WorkQueue(time.monotonic, failed=metrics.count_error)
        self._namespaces = ServedNamespaces(kube, settings.namespaces)
        self._nodes = NodeCache()
        self._staleness = StalenessCheck()
        self._signals = StopSignals()

    @property
    def interrupted(self) -> bool:
        """True if reconciles were cancelled; the API server may still process their requests.

        Valid after the end of `run`.
        """
        return self._queue.running > 0

    async def run(self) -> None:
        """Serve until a signal, until cancelled, or until a component fails."""
        await self._namespaces.check()  # fail at once on a missing CRD, or without any access
        await self._nodes.load(self._kube)
        async with asyncio.TaskGroup() as tasks:
            etcds = EtcdRegistry(self._settings.etcd, self._kube, tasks, self._etcd_changed)
            async with aclosing(etcds):
                guarded = await self._guard(etcds)
                if not await etcds.own.cache.reached(0, FIRST_READ_SECONDS):
                    log.warning("cannot read etcd; running jobs continue, none can be changed")
                elif not guarded:  # it has started meanwhile
                    await self._guard(etcds)
                await self._serve(etcds, tasks)

    async def _guard(self, etcds: EtcdRegistry) -> bool:
        """Claim etcd and enable authentication; return True if both are done.

        On failure no job gets a user until the resync succeeds.
        """
        try:
            await etcds.guard()
        except (EtcdError, KubeError) as error:
            log.error("cannot enable etcd authentication; not starting jobs: %s", error)
            return False
        return True

    async def _serve(self, etcds: EtcdRegistry, tasks: asyncio.TaskGroup) -> None:
        identity = self._settings.lease.identity
        events = EventRecorder(self._kube, identity, time.monotonic, self._kube.now)
        reconciler = Reconciler(self._dependencies(etcds, events))
        resync = Resync(
            self._kube, self._namespaces, self._jobs, self._nodes, self._staleness, etcds,
            self._queue, time.monotonic, self._kube.now,
        )  # fmt: skip
        self._metrics.queue_depth.set_function(lambda: self._queue.depth)
        self._metrics.unknown_access.set_function(lambda: len(etcds.unknown_access))
        self._metrics.count_jobs(lambda: (str(memory.report.phase or "") for memory in self._jobs))
        self._metrics.show_goodput(self._jobs.goodput)
        self._health.checks += [resync.failure_text, self._stuck]
        insights = Insights()
        parts = [
            tasks.create_task(part)
            for part in (
                events.run(),
                resync.run(),
                self._queue.run(reconciler.reconcile),
                self._namespaces.follow(insights),
            )
        ]
        try:
            await self._watch(insights)
        except Exception:
            await self._finish(events)
            raise
        await self._finish(events)
        for part in parts:
            part.cancel()

    async def _finish(self, events: EventRecorder) -> None:
        """Wait for running reconciles, and for the events of statuses already written: the
        successor will not post them. A second signal ends the wait."""
        if count := self._queue.running:
            log.info("stopping after %s in progress", counted(count, "reconcile"))
        waits = (
            asyncio.create_task(self._complete(events)),
            asyncio.create_task(self._signals.second.wait()),
        )
        try:
            await asyncio.wait(waits, timeout=FINISH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _complete(self, events: EventRecorder) -> None:
        await self._queue.finish()
        await events.finish()

    async def _watch(self, insights: Insights) -> None:
        handlers = Handlers(self._jobs, self._nodes, self._staleness, self._queue)
        # `watch` takes over signal handling: SIGTERM ends it, and with it this replica.
        await watch(
            registry(handlers, watch_nodes=self._nodes.known is not None),
            self._settings.lease.identity,
            self._signals,
            namespaces=[name for name in self._namespaces.accessible if name is not None],
            clusterwide=not self._settings.namespaces,
            insights=insights,
        )

    def _dependencies(self, etcds: EtcdRegistry, events: EventRecorder) -> Dependencies:
        sidecar = self._settings.sidecar
        pods = PodSettings(
            sidecar_image=sidecar.image,
            pull_policy=sidecar.pull_policy,
            pull_secrets=sidecar.pull_secrets,
            endpoints=self._settings.etcd.endpoints,
            cpu=sidecar.cpu,
            memory=sidecar.memory,
            cpu_limit=sidecar.cpu_limit,
            memory_limit=sidecar.memory_limit,
            always_limited=sidecar.always_limited,
            server_name=self._settings.etcd.tls.server_name if self._settings.etcd.tls else None,
        )
        owned_objects = OwnedObjects(
            self._kube,
            time.monotonic,
            Credentials(
                timedelta(days=self._settings.etcd.credentials_days), self._kube.now, events.record
            ),
            self._settings.policy_peer,
            self._settings.namespace_selector,
        )
        cluster = KubeCluster(
            self._kube, owned_objects, pods, self._metrics, self._kube.now, time.monotonic
        )
        return Dependencies(
            kube=self._kube,
            jobs=self._jobs,
            sources=etcds,
            close_deleted_job=partial(close_deleted_job, etcds),
            observer=Observer(LivePods(self._kube, self._nodes, self._kube.now)),
            applier=Applier(cluster, self._kube.now),
            owned_objects=owned_objects,
            events=events,
            metrics=self._metrics,
            processor_time=ProcessorTime(),
            clock=time.monotonic,
            now=self._kube.now,
        )

    def _etcd_changed(self, namespace: str, uid: str) -> None:
        memory = self._jobs.find_uid(uid)
        if memory is not None and memory.key.namespace == namespace:
            memory.change.note(time.monotonic())
            self._queue.wake(memory.key, COALESCE_SECONDS)

    def _stuck(self) -> str:
        seconds = self._queue.longest_seconds
        return f"one reconcile has run for {seconds:.0f} s" if seconds > STUCK_SECONDS else ""
