"""Registry of the etcds in use: the operator's own, and those that jobs name and the chart allows.

Each has one client and one informer cache. A change there wakes the job it concerns. A job of
another backend is read through its agents.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

from elasticjob_operator.agent_status import AgentStatus
from elasticjob_operator.agents_source import AgentsSource
from elasticjob_operator.claim import Claims
from elasticjob_operator.core.mirrored import job_of
from elasticjob_operator.core.observed import Obstacle
from elasticjob_operator.etcd_source import Etcd, EtcdSource
from elasticjob_operator.kube import SECRETS, Json, Kube, NotFound
from elasticjob_operator.mirror import Mirror
from elasticjob_operator.model import Backend, ElasticJob
from elasticjob_operator.settings import EtcdSettings
from elasticjob_operator.sources import RendezvousSource
from elasticjob_rendezvous.core.keys import ROOT, cluster_key
from elasticjob_rendezvous.core.store_trouble import endpoints_text
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.endpoints import Tls
from elasticjob_rendezvous.etcd.probe import STORE, EtcdProbe
from elasticjob_rendezvous.etcd.users import Users
from elasticjob_rendezvous.store_monitor import StoreMonitor

log = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
FIRST_READ_SECONDS = 5.0

Changed = Callable[[str, str], None]
"""Callback with namespace and uid of a job whose records changed."""


class Refused(Exception):
    """A job's etcd may not or cannot be used; the text gives the reason and the remedy."""

    def __init__(self, obstacle: Obstacle, message: str) -> None:
        super().__init__(message)
        self.obstacle = obstacle


class Etcds:
    """Registry of all etcds in use; background tasks run in the task group `tasks`."""

    def __init__(
        self, settings: EtcdSettings, kube: Kube, tasks: asyncio.TaskGroup, changed: Changed
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._claims = Claims(kube)
        self._tasks = tasks
        self._changed = changed
        self._stack = AsyncExitStack()
        self._running: list[asyncio.Task[None]] = []
        self._named: dict[tuple[str, ...], Etcd] = {}
        self._seen: set[tuple[str, ...]] = set()
        self.agents = AgentStatus(changed)
        self._running.append(tasks.create_task(self.agents.run()))
        self.own: Etcd = self._own()

    async def aclose(self) -> None:
        """Stop all informer caches and close all connections."""
        for task in self._running:
            task.cancel()
        await self._stack.aclose()

    def all(self) -> list[Etcd]:
        return [self.own, *self._named.values()]

    async def of(self, job: ElasticJob) -> RendezvousSource:
        """Return the source of this job's rendezvous: its etcd, or its agents.

        Raises `Refused`, or `KubeError` if its Secret is unreadable.
        """
        wanted = job.spec.rendezvous
        namespace, uid = job.metadata.namespace, job.metadata.uid
        if not wanted.endpoints and wanted.backend is Backend.ETCD:
            self._check_owner()
            return EtcdSource(self.own, self._kube, namespace, uid)
        self._check_endpoints(job)
        secret = wanted.secret_name
        place = (namespace, secret or "", *sorted(wanted.endpoints))
        if wanted.backend is not Backend.ETCD:
            if secret and place not in self._seen:
                await self._secret(namespace, secret)
                self._seen.add(place)
            return AgentsSource(self.agents, self._kube, namespace, uid)
        found = self._named.get(place)
        if found is None or (secret and not found.mirror.known):
            # Read the Secret again: its password may have been mistyped, or changed since.
            held = await self._secret(namespace, secret) if secret else {}
            found = self._named.get(place)
            if found is None or found.held != held:
                found = self._begun_anew(place, self._foreign(list(wanted.endpoints), held))
                await found.mirror.reached(0, FIRST_READ_SECONDS)
        return EtcdSource(found, self._kube, namespace, uid)

    async def guard(self) -> None:
        """Claim the operator's own etcd for this cluster and enable authentication there.

        Raises `EtcdError` or `KubeError`.
        """
        stranger = await self._claims.stranger(self.own.client)
        if stranger and not self.own.stranger:
            log.error("etcd belongs to another cluster, %s: this cluster cannot use it", stranger)
        self.own.stranger = stranger
        if not stranger:
            await self.own.guard()

    def _check_owner(self) -> None:
        if self.own.stranger:
            raise Refused(
                Obstacle.ANOTHERS_ETCD,
                f"the operator's etcd holds the jobs of another cluster ({self.own.stranger}), and "
                "each cluster needs its own; if that cluster is no more, delete etcd's key "
                f"{cluster_key()}",
            )

    def _check_endpoints(self, job: ElasticJob) -> None:
        wanted = job.spec.rendezvous
        if wanted.backend is Backend.ETCD_V2 and not wanted.endpoints:
            raise Refused(
                Obstacle.BACKEND,
                "spec.rendezvous.endpoints must name an etcd with the v2 API (3.5 or older, with "
                "--enable-v2) for backend etcd-v2: the operator's own etcd speaks v3 alone; or use "
                "backend etcd",
            )
        refused = [one for one in wanted.endpoints if one not in self._settings.allowed]
        if refused:
            raise Refused(
                Obstacle.ENDPOINT,
                f"spec.rendezvous.endpoints: {', '.join(refused)} must be among the chart's "
                "allowedEndpoints",
            )

    async def _secret(self, namespace: str, name: str) -> dict[str, bytes]:
        try:
            found: Json = await self._kube.get(SECRETS, namespace, name)
        except NotFound as error:
            raise Refused(
                Obstacle.ENDPOINT,
                f"spec.rendezvous.secretName: there must be a Secret {name} in {namespace}",
            ) from error
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def _own(self) -> Etcd:
        settings = self._settings
        client = Client(
            settings.endpoints,
            tls=settings.tls,
            user=settings.user,
            password=settings.password,
            request_timeout_seconds=REQUEST_SECONDS,
        )
        users = Users(client) if settings.manage_users else None
        ca_file = settings.tls.ca_file if settings.tls else None
        return self._start(Etcd(client, Mirror(client), users, ca_file))

    def _begun_anew(self, place: tuple[str, ...], etcd: Etcd) -> Etcd:
        """Replace the etcd followed for this place. The old client stays open until `aclose`: a
        reconcile may still use it."""
        before = self._named.get(place)
        for task in () if before is None else before.tasks:
            task.cancel()
            self._running.remove(task)
        self._named[place] = self._start(etcd)
        return etcd

    def _foreign(self, endpoints: list[str], held: dict[str, bytes]) -> Etcd:
        """Return an etcd with credentials from a user's Secret; its files live until `aclose`."""
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        files: dict[str, Path | None] = {"ca.crt": None, "tls.crt": None, "tls.key": None}
        for name in files:
            if name in held:
                files[name] = folder / name
                (folder / name).write_bytes(held[name])
        user, password = held.get("username"), held.get("password")
        tls = Tls(files["ca.crt"], files["tls.crt"], files["tls.key"])
        client = Client(
            endpoints,
            tls=tls if any(files.values()) else None,
            user=user.decode() if user else None,
            password=password.decode() if password else None,
            request_timeout_seconds=REQUEST_SECONDS,
        )
        return Etcd(client, Mirror(client), ca_file=files["ca.crt"], own=False, held=held)

    def _start(self, etcd: Etcd) -> Etcd:
        self._stack.push_async_callback(etcd.client.aclose)
        etcd.agents = self.agents
        etcd.monitor = StoreMonitor(
            STORE,
            endpoints_text(tuple(etcd.client.endpoints)),
            EtcdProbe(etcd.client, ROOT, lambda: 1),
            lambda trouble: self._wake_all(etcd),
        )
        etcd.tasks = (
            self._tasks.create_task(etcd.mirror.run()),
            self._tasks.create_task(self._follow(etcd.mirror)),
            self._tasks.create_task(etcd.monitor.run()),
        )
        self._running += etcd.tasks
        return etcd

    def _wake_all(self, etcd: Etcd) -> None:
        """Wake all jobs that have records there."""
        for namespace, uid in etcd.mirror.jobs():
            self._changed(namespace, uid)

    async def _follow(self, mirror: Mirror) -> None:
        async for prefix in mirror.changes():
            if found := job_of(prefix):
                namespace, uid, _ = found
                self._changed(namespace, uid)
