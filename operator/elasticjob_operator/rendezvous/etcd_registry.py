"""Registry of the etcds in use: the operator's own, and those that jobs name and the chart allows.

Each has one client and one informer cache. A change there wakes the job it concerns. A job of
another backend is read through its agents.

A Kubernetes cluster owns the operator's etcd exclusively and permanently: the resync treats
jobs unknown to its API server as deleted, so two clusters on one etcd would delete each
other's records.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import tempfile
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

from elasticjob_operator.domain.manifests.owned_objects import (
    AUTHOR_USER,
    CA,
    CERT,
    KEY,
    PASSWORD,
    credential,
)
from elasticjob_operator.domain.observed.etcd_records import job_of
from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.domain.status.readiness import stalled
from elasticjob_operator.etcd_tls.job_users import (
    SecretMissing,
    remove_job,
    remove_users,
    renew_revoked_secret,
)
from elasticjob_operator.etcd_tls.user_audit import (
    UnknownAccess,
    is_removable,
    remove,
    unknown_access,
)
from elasticjob_operator.kubernetes.client import (
    NAMESPACES,
    SECRETS,
    Forbidden,
    Json,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.model import Backend, ElasticJob
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from elasticjob_operator.rendezvous.etcd_source import Etcd, EtcdSource
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_operator.rendezvous.record_store import quota_of
from elasticjob_operator.rendezvous.sources import RendezvousSource
from elasticjob_operator.settings import EtcdSettings
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.endpoints import Tls
from elasticjob_rendezvous.etcd.errors import (
    Ambiguous,
    EtcdError,
    InvalidConfiguration,
    Unauthenticated,
)
from elasticjob_rendezvous.etcd.probe import STORE, EtcdProbe
from elasticjob_rendezvous.etcd.users import Users
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.keys import ROOT, cluster_key
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble, endpoints_text
from elasticjob_rendezvous.store_monitor import StoreMonitor

log = logging.getLogger(__name__)

OLDEST_NAMESPACE = "kube-system"
"""Namespace whose uid identifies the cluster: it lives as long as the cluster."""
REQUEST_SECONDS = 5.0
FIRST_READ_SECONDS = 5.0

UNUSED_SECONDS = 300.0
"""Time after which the client of an etcd that no job uses is closed; longer than a reconcile."""

Place = tuple[str, ...]
"""Namespace, name of the Secret and endpoints of an etcd that a job names."""

Changed = Callable[[str, str], None]
"""Callback with namespace and uid of a job whose records changed."""


class EtcdOwnership:
    """Ownership of etcds by the cluster that `kube` connects to."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._identity: str | None = None

    async def other_owner(self, client: Client) -> str:
        """Claim this etcd; return the identity of another cluster that owns it, or "".

        Without permission to read this cluster's identity nothing is claimed.

        Raises:
            EtcdError, KubeError: the owner could not be determined.
        """
        identity = await self._own_identity()
        if not identity:
            return ""
        holder = await claim_etcd(client, identity)
        return "" if holder == identity else holder

    async def _own_identity(self) -> str:
        if self._identity is None:
            try:
                raw = await self._kube.get(NAMESPACES, None, OLDEST_NAMESPACE)
            except (Forbidden, NotFound) as error:
                log.warning(
                    "cannot claim etcd, its use by another cluster would go unnoticed: %s", error
                )
                self._identity = ""
            else:
                self._identity = str(raw["metadata"]["uid"])
        return self._identity


async def claim_etcd(client: Client, identity: str) -> str:
    """Claim an unclaimed etcd; return its owner afterwards. Raises `EtcdError`."""
    key = cluster_key()
    found = await client.range(Range(key))
    if not found.kvs:
        is_absent = Compare(key, Target.MOD, 0)
        with suppress(Ambiguous):  # the read below decides
            await client.txn(Txn((is_absent,), (Put(key, identity.encode()),)))
        found = await client.range(Range(key))
    return found.kvs[0].value.decode(errors="replace") if found.kvs else identity


class EtcdRefused(Exception):
    """Etcd of a job that may not or cannot be used; the text gives the reason and the remedy."""

    def __init__(self, obstacle: Obstacle, message: str) -> None:
        super().__init__(message)
        self.obstacle = obstacle


class EtcdRegistry:
    """Registry of all etcds in use; background tasks run in the task group `tasks`."""

    def __init__(
        self, settings: EtcdSettings, kube: Kube, tasks: asyncio.TaskGroup, changed: Changed
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._ownership = EtcdOwnership(kube)
        self._tasks = tasks
        self._changed = changed
        self._running: list[asyncio.Task[None]] = []
        self._named: dict[Place, Etcd] = {}
        self._seen: set[Place] = set()
        self._places: dict[str, Place] = {}
        """Place of each job that names an etcd, by uid of the job."""
        self._replaced: list[Etcd] = []
        self._unused: list[tuple[float, Etcd]] = []
        self.unknown_access: tuple[UnknownAccess, ...] = ()
        """Access found by the last audit, before it was removed."""
        self.agents = AgentPoller(changed)
        self._running.append(tasks.create_task(self.agents.run()))
        self.own: Etcd = self._own()

    async def aclose(self) -> None:
        """Stop all informer caches and close all connections."""
        for task in self._running:
            task.cancel()
        unused = [etcd for _, etcd in self._unused]
        for etcd in (*self.all(), *self._replaced, *unused):
            await etcd.resources.aclose()

    def all(self) -> list[Etcd]:
        return [self.own, *self._named.values()]

    async def release(self, uids: Collection[str], now: float) -> None:
        """Stop the informer caches of etcds that none of these jobs names or has records in.

        Their connections are closed after `UNUSED_SECONDS`: a reconcile may still use them.
        """
        self._places = {uid: place for uid, place in self._places.items() if uid in uids}
        used = set(self._places.values())
        self._seen &= used
        for place, etcd in list(self._named.items()):
            if place in used or any(uid in uids for _, uid in etcd.cache.jobs()):
                continue
            log.info("closing the connections to %s: no job uses it", ", ".join(place[2:]))
            self._stop(self._named.pop(place))
        self._unused += [(now, etcd) for etcd in self._replaced]
        self._replaced.clear()
        while self._unused and now - self._unused[0][0] >= UNUSED_SECONDS:
            await self._unused.pop(0)[1].resources.aclose()

    async def of(self, job: ElasticJob) -> RendezvousSource:
        """Return the source of this job's rendezvous: its etcd, or its agents.

        Raises `EtcdRefused`, or `KubeError` if its Secret is unreadable.
        """
        wanted = job.spec.rendezvous
        namespace, uid = job.metadata.namespace, job.metadata.uid
        self._places.pop(uid, None)
        if not wanted.endpoints and wanted.backend is Backend.ETCD:
            self._check_owner()
            self.own.await_readable(namespace, uid)
            await _check_records(job, self.own, self._kube)
            return EtcdSource(self.own, self._kube, namespace, uid)
        self._check_endpoints(job)
        secret = wanted.secret_name
        place = (namespace, secret or "", *sorted(wanted.endpoints))
        self._places[uid] = place
        if wanted.backend is not Backend.ETCD:
            if secret and place not in self._seen:
                await self._secret(namespace, secret)
                self._seen.add(place)
            return AgentsSource(self.agents, self._kube, namespace, uid)
        found = self._named.get(place)
        if found is None or (secret and not found.cache.known):
            # Read the Secret again: its password may have been mistyped, or changed since.
            held = await self._secret(namespace, secret) if secret else {}
            found = self._named.get(place)
            if found is None or found.held != held:
                started = self._restarted(place, self._foreign(list(wanted.endpoints), held))
                await started.cache.reached(0, FIRST_READ_SECONDS)
                found = self._named.get(place, started)  # another reconcile may have replaced it
        found.await_readable(namespace, uid)
        await _check_records(job, found, self._kube)
        return EtcdSource(found, self._kube, namespace, uid)

    async def guard(self) -> None:
        """Claim the operator's own etcd for this cluster and enable authentication there.

        Raises `EtcdError` or `KubeError`.
        """
        try:
            other_owner = await self._ownership.other_owner(self.own.client)
        except Unauthenticated:
            if not await self.own.restore_root():
                raise
            other_owner = await self._ownership.other_owner(self.own.client)
        if other_owner and not self.own.other_owner:
            log.error(
                "etcd belongs to another cluster, %s: this cluster cannot use it", other_owner
            )
        self.own.other_owner = other_owner
        if not other_owner:
            await self.own.guard()

    async def audit(self) -> None:
        """Find users, roles and grants in the operator's etcd that do not belong to a job.

        Remove them if only the operator administers the users of that etcd. Raises `EtcdError`.
        """
        users = self.own.users
        if users is None or self.own.other_owner:
            return
        before, exclusive = self.unknown_access, self._settings.exclusive
        self.unknown_access = await unknown_access(users, self._settings.known_users)
        for found in self.unknown_access:
            if is_removable(found, exclusive):
                log.error("etcd has unknown access, which is removed: %s", found)
                await remove(users, found)
            elif found not in before:
                log.error("etcd has unknown access, which its administrator must check: %s", found)

    def _check_owner(self) -> None:
        if self.own.other_owner:
            raise EtcdRefused(
                Obstacle.FOREIGN_ETCD,
                f"the operator's etcd holds the jobs of another cluster ({self.own.other_owner}), "
                "and each cluster needs its own; if that cluster is no more, delete etcd's key "
                f"{cluster_key()}",
            )

    def _check_endpoints(self, job: ElasticJob) -> None:
        wanted = job.spec.rendezvous
        if wanted.backend is Backend.ETCD_V2 and not wanted.endpoints:
            raise EtcdRefused(
                Obstacle.BACKEND,
                "spec.rendezvous.endpoints must name an etcd with the v2 API (3.5 or older, with "
                "--enable-v2) for backend EtcdV2: the operator's own etcd speaks v3 alone; or use "
                "backend Etcd",
            )
        refused = [
            endpoint for endpoint in wanted.endpoints if endpoint not in self._settings.allowed
        ]
        if refused:
            raise EtcdRefused(
                Obstacle.ENDPOINT,
                f"spec.rendezvous.endpoints: {', '.join(refused)} must be among the chart's "
                "allowedEndpoints",
            )

    async def _secret(self, namespace: str, name: str) -> dict[str, bytes]:
        try:
            found: Json = await self._kube.get(SECRETS, namespace, name)
        except NotFound as error:
            missing = SecretMissing(namespace, name)
            raise EtcdRefused(Obstacle.SECRET, str(missing)) from error
        except Forbidden as error:
            raise EtcdRefused(
                Obstacle.NOT_SERVED,
                f"spec.rendezvous.secretName: the operator must be allowed to read Secret {name} "
                f"in {namespace}; run the job in a namespace that it serves: {error.message}",
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
        certified, resources = None, AsyncExitStack()
        if users is not None and settings.tls is not None and settings.tls.cert_file:
            bare = Client(
                settings.endpoints, tls=settings.tls, request_timeout_seconds=REQUEST_SECONDS
            )
            resources.push_async_callback(bare.aclose)
            certified = Users(bare)
        cache = InformerCache(client)
        own = Etcd(client, cache, users, ca_file, settings.agents, certified, resources=resources)
        return self._start(own)

    def _restarted(self, place: Place, etcd: Etcd) -> Etcd:
        """Replace the etcd followed for this place."""
        before = self._named.get(place)
        if before is not None:
            for namespace, uid in before.waiting:
                etcd.await_readable(namespace, uid)
            self._stop(before)
        self._named[place] = self._start(etcd)
        return etcd

    def _stop(self, etcd: Etcd) -> None:
        """Stop following this etcd; `release` closes its client later."""
        for task in etcd.tasks:
            task.cancel()
            self._running.remove(task)
        self._replaced.append(etcd)

    def _foreign(self, endpoints: list[str], held: dict[str, bytes]) -> Etcd:
        """Return an etcd with credentials from a user's Secret, which are in its own files.

        Raises `EtcdRefused` if they do not fit each other or the endpoints.
        """
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            etcd = self._with_files(endpoints, held, folder)
            etcd.resources.enter_context(stack.pop_all())
        return etcd

    def _with_files(self, endpoints: list[str], held: dict[str, bytes], folder: Path) -> Etcd:
        """Write the certificates to this folder; return the etcd. Raises `EtcdRefused`."""
        files: dict[str, Path | None] = {CA: None, CERT: None, KEY: None}
        for name in files:
            if held.get(name):
                files[name] = folder / name
                (folder / name).write_bytes(held[name])
        tls = Tls(files[CA], files[CERT], files[KEY])
        try:
            client = Client(
                endpoints,
                tls=tls if any(files.values()) else None,
                user=credential(held.get(AUTHOR_USER)),
                password=credential(held.get(PASSWORD)),
                request_timeout_seconds=REQUEST_SECONDS,
            )
        except InvalidConfiguration as error:
            found = " and ".join(name for name, path in files.items() if path) or "no certificates"
            raise EtcdRefused(
                Obstacle.SECRET,
                f"spec.rendezvous: {', '.join(endpoints)} cannot be used with {found} in the "
                f"Secret of secretName: {error.detail}",
            ) from error
        return Etcd(client, InformerCache(client), ca_file=files[CA], own=False, held=held)

    def _start(self, etcd: Etcd) -> Etcd:
        etcd.resources.push_async_callback(etcd.client.aclose)
        etcd.poller = self.agents
        etcd.monitor = StoreMonitor(
            STORE,
            endpoints_text(tuple(etcd.client.endpoints)),
            EtcdProbe(etcd.client, ROOT, lambda: 1),
            lambda trouble: self._trouble_changed(etcd, trouble),
        )
        etcd.tasks = (
            self._tasks.create_task(etcd.cache.run()),
            self._tasks.create_task(self._follow(etcd.cache)),
            self._tasks.create_task(etcd.monitor.run()),
            self._tasks.create_task(self._wake_waiting(etcd)),
        )
        self._running += etcd.tasks
        return etcd

    def _trouble_changed(self, etcd: Etcd, trouble: StoreTrouble | None) -> None:
        """Wake all jobs that have records there. A refusal may be that of an etcd which lost its
        data, and has another password of root until it is replaced."""
        for namespace, uid in etcd.cache.jobs():
            self._changed(namespace, uid)
        if etcd.own and trouble is not None and trouble.state is StoreState.REFUSING:
            task = self._tasks.create_task(self._guard_again())
            self._running.append(task)
            task.add_done_callback(self._running.remove)

    async def _guard_again(self) -> None:
        try:
            await self.guard()
        except (EtcdError, KubeError) as error:
            log.warning("cannot restore the access to etcd yet, trying again: %s", error)

    async def _wake_waiting(self, etcd: Etcd) -> None:
        """Wake jobs once etcd is readable again instead of at the end of their back-off."""
        while True:
            await etcd.waits.wait()
            await etcd.cache.until_readable()
            etcd.waits.clear()
            waiting = set(etcd.waiting)
            etcd.waiting.clear()
            for namespace, uid in waiting:
                self._changed(namespace, uid)

    async def _follow(self, cache: InformerCache) -> None:
        async for prefix in cache.changes():
            if found := job_of(prefix):
                namespace, uid, _ = found
                self._changed(namespace, uid)


async def _check_records(job: ElasticJob, etcd: Etcd, kube: Kube) -> None:
    """Revoke the etcd users of a job whose records exceed its quota, and delete its records.

    The job stays refused until its spec changes, and then gets another user and password. The
    records are deleted last: until then they have a new process do all of this again.

    Raises:
        EtcdError: the users or the records could not be deleted.
        KubeError: the Secret could not be written.
        EtcdRefused: the job has exceeded its quota.
    """
    namespace, uid = job.metadata.namespace, job.metadata.uid
    etcd.cache.allow(namespace, uid, job.spec.max_nodes)
    before = stalled(job)
    if etcd.cache.exceeded(namespace, uid) is not None:
        if etcd.users is not None:
            await remove_users(etcd.users, uid)
            await renew_revoked_secret(kube, job)
        await remove_job(etcd.client, etcd.users, namespace, uid)
        etcd.cache.forget(namespace, uid)
    elif before is None or before.reason != Obstacle.RECORDS:
        return
    raise EtcdRefused(
        Obstacle.RECORDS,
        f"the job's records in etcd exceeded {quota_of(job.spec.max_nodes)}: they were deleted "
        "and the job's etcd user was revoked, until spec changes",
    )
