"""Composition root of the active replica, which serves all jobs.

Its components run as tasks of one group: if one fails, the process exits and Kubernetes restarts
it; running jobs keep training meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, cast

import kopf

from elasticjob_operator.apply import Applier
from elasticjob_operator.core.pod import PodSettings
from elasticjob_operator.delivered import Delivered
from elasticjob_operator.departures import close_departed
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
"""Wait for etcd at start, which avoids status writes that report it as unreadable."""
STUCK_SECONDS = 300.0
FINISH_SECONDS = 3.0
"""Maximum wait at shutdown for running reconciles and their events."""


class Active:
    """Active replica: wires and runs all of its components."""

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
        """Serve until cancelled, or until a component fails."""
        namespaces = served(self._settings.namespaces)
        for namespace in namespaces:  # fail at once on a missing CRD or permission
            await self._kube.list(ELASTICJOBS, namespace, metadata_only=True)
        await self._nodes.load(self._kube)
        async with asyncio.TaskGroup() as tasks:
            etcds = Etcds(self._settings.etcd, self._kube, tasks, self._etcd_changed)
            async with aclosing(etcds):
                if await etcds.own.mirror.reached(0, FIRST_READ_SECONDS):
                    await self._guard(etcds)
                else:
                    log.warning("cannot read etcd; running jobs continue, none can be changed")
                await self._serve(etcds, namespaces, tasks)

    async def _guard(self, etcds: Etcds) -> None:
        """Claim etcd and enable authentication; on failure no job gets a user until it succeeds."""
        try:
            await etcds.guard()
        except (EtcdError, KubeError) as error:
            log.error("cannot enable etcd authentication; not starting jobs: %s", error)

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
        self._metrics.count_jobs(lambda: (str(memory.report.phase or "") for memory in self._jobs))
        self._health.checks += [sweep.ailment, self._stuck]
        parts = [
            tasks.create_task(part)
            for part in (events.run(), sweep.run(), self._wakeups.run(reconciler.look))
        ]
        await self._watch()
        # Post the events of statuses already written: the successor will not post them.
        with suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                await self._wakeups.finish()
                await events.finish()
        for part in parts:
            part.cancel()

    async def _watch(self) -> None:
        handlers = Handlers(self._jobs, self._nodes, self._delivered, self._wakeups)
        # kopf takes over signal handling: SIGTERM ends it, and with it this replica.
        await kopf.operator(
            registry=registry(handlers, watch_nodes=self._nodes.known is not None),
            settings=kopf_settings(),
            namespaces=self._settings.namespaces,
            clusterwide=not self._settings.namespaces,
            # Otherwise kopf looks up the user's name, which a container's uid may not have.
            identity=cast(Any, self._settings.lease.identity),  # kopf has a type of its own for it
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
            sources=etcds,
            close_departed=partial(close_departed, etcds),
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
            memory.change.note(time.monotonic())
            self._wakeups.wake(memory.key, COALESCE_SECONDS)

    def _stuck(self) -> str:
        seconds = self._wakeups.longest_seconds
        return f"one reconcile has run for {seconds:.0f} s" if seconds > STUCK_SECONDS else ""
