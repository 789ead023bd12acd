"""One replica of the operator: it stands by until it is the active one, then serves all jobs.

The active one's parts run as tasks of one group: when one of them fails the process ends, and
Kubernetes starts it again; the jobs train on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing, suppress
from typing import Any, cast

import kopf

from elasticjob_operator.apply import Applier
from elasticjob_operator.core.pod import PodSettings
from elasticjob_operator.delivered import Delivered
from elasticjob_operator.dependents import Dependents
from elasticjob_operator.etcds import Etcds
from elasticjob_operator.events import Events
from elasticjob_operator.handlers import COALESCE_SECONDS, Handlers, registry
from elasticjob_operator.handlers import settings as kopf_settings
from elasticjob_operator.health import Health
from elasticjob_operator.jobs import Jobs
from elasticjob_operator.kube import ELASTICJOBS, Kube, KubeError
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.nodes import Nodes
from elasticjob_operator.observe import Observer
from elasticjob_operator.reconcile import Parts, Reconciler
from elasticjob_operator.settings import Settings
from elasticjob_operator.sweep import Sweep, served
from elasticjob_operator.wakeups import Wakeups
from elasticjob_rendezvous.etcd.errors import EtcdError

log = logging.getLogger(__name__)

FIRST_READ_SECONDS = 15.0
"""How long a start waits for etcd, so that no status says in vain that it cannot be read."""
STUCK_SECONDS = 300.0
FINISH_SECONDS = 3.0
"""How long an end waits for the looks that are under way, and for their events."""


class Active:
    """The active replica: all of its parts, put together."""

    def __init__(self, settings: Settings, kube: Kube, metrics: Metrics, health: Health) -> None:
        self._settings = settings
        self._kube = kube
        self._metrics = metrics
        self._health = health
        self._jobs = Jobs(time.monotonic, random.random)
        self._wakeups = Wakeups(time.monotonic, failed=metrics.count_error)
        self._nodes = Nodes()
        self._delivered = Delivered()

    async def run(self) -> None:
        """Serve until cancelled, or until one of the parts fails."""
        namespaces = served(self._settings.namespaces)
        for namespace in namespaces:  # a missing CRD or right is to be told at once
            await self._kube.list(ELASTICJOBS, namespace, metadata_only=True)
        await self._nodes.load(self._kube)
        async with asyncio.TaskGroup() as tasks:
            etcds = Etcds(self._settings.etcd, self._kube, tasks, self._etcd_changed)
            async with aclosing(etcds):
                if await etcds.own.mirror.reached(0, FIRST_READ_SECONDS):
                    await self._guard(etcds)
                else:
                    log.warning("etcd cannot be read; jobs train on, none can be changed")
                await self._serve(etcds, namespaces, tasks)

    async def _guard(self, etcds: Etcds) -> None:
        """No job needs etcd to be closed to strangers; but none is given a user before it is."""
        try:
            await etcds.guard()
        except (EtcdError, KubeError) as error:
            log.error("etcd lets in whoever comes, and no job can start: %s", error)

    async def _serve(
        self, etcds: Etcds, namespaces: tuple[str | None, ...], tasks: asyncio.TaskGroup
    ) -> None:
        identity = self._settings.lease.identity
        events = Events(self._kube, identity, time.monotonic, self._kube.now)
        reconciler = Reconciler(self._parts(etcds, events))
        sweep = Sweep(
            self._kube, namespaces, self._jobs, self._nodes, self._delivered, etcds,
            self._wakeups, time.monotonic, self._kube.now,
        )  # fmt: skip
        self._metrics.queue_depth.set_function(lambda: self._wakeups.depth)
        self._metrics.count_jobs(lambda: (str(memory.phase or "") for memory in self._jobs))
        self._health.checks += [sweep.ailment, self._stuck]
        parts = [
            tasks.create_task(part)
            for part in (events.run(), sweep.run(), self._wakeups.run(reconciler.look))
        ]
        await self._watch()
        # What a look has written its successor finds written, and does not tell.
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await self._wakeups.finish()
                await events.finish()
        for part in parts:
            part.cancel()

    async def _watch(self) -> None:
        handlers = Handlers(self._jobs, self._nodes, self._delivered, self._wakeups)
        # It takes the signals over: a SIGTERM ends it, and then everything.
        await kopf.operator(
            registry=registry(handlers, watch_nodes=self._nodes.known is not None),
            settings=kopf_settings(),
            namespaces=self._settings.namespaces,
            clusterwide=not self._settings.namespaces,
            # Else kopf asks for the user's name, and a uid of a container has none.
            identity=cast(Any, self._settings.lease.identity),  # its type is kopf's own
        )

    def _parts(self, etcds: Etcds, events: Events) -> Parts:
        sidecar = self._settings.sidecar
        pods = PodSettings(
            sidecar_image=sidecar.image,
            pull_policy=sidecar.pull_policy,
            pull_secrets=sidecar.pull_secrets,
            endpoints=self._settings.etcd.endpoints,
            cpu=sidecar.cpu,
            memory=sidecar.memory,
            server_name=self._settings.etcd.tls.server_name if self._settings.etcd.tls else None,
        )
        dependents = Dependents(self._kube, time.monotonic)
        return Parts(
            kube=self._kube,
            jobs=self._jobs,
            etcds=etcds,
            observer=Observer(self._kube, self._nodes, self._kube.now),
            applier=Applier(self._kube, dependents, pods, self._metrics, self._kube.now),
            dependents=dependents,
            events=events,
            metrics=self._metrics,
            clock=time.monotonic,
            now=self._kube.now,
        )

    def _etcd_changed(self, namespace: str, uid: str) -> None:
        memory = self._jobs.find_uid(uid)
        if memory is not None and memory.key.namespace == namespace:
            if memory.changed_at is None:
                memory.changed_at = time.monotonic()
            self._wakeups.wake(memory.key, COALESCE_SECONDS)

    def _stuck(self) -> str:
        seconds = self._wakeups.longest_seconds
        return f"a look at a job has taken {seconds:.0f} s" if seconds > STUCK_SECONDS else ""
