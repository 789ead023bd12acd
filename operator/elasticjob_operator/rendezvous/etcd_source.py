"""Rendezvous of a job in etcd v3: read from an informer cache, and written by the operator."""

from __future__ import annotations

import asyncio
import logging
from base64 import b64encode
from collections.abc import Set
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticjob_operator.domain.manifests.owned_objects import Access, author_access
from elasticjob_operator.domain.observed.etcd_records import (
    Records,
    bounded_members,
    rendezvous_view,
)
from elasticjob_operator.domain.observed.pod_identity import index_of
from elasticjob_operator.domain.observed.pod_state import without_members
from elasticjob_operator.domain.observed.state import UNREADABLE, Observation, Observed, SeenTrouble
from elasticjob_operator.etcd_tls.job_users import (
    access_for,
    access_of_author,
    remove_old_users,
    remove_users,
)
from elasticjob_operator.logs import of_job
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.rendezvous.agent_poller import AgentPoller, PollTarget
from elasticjob_operator.rendezvous.informer_cache import InformerCache, RendezvousWriter
from elasticjob_operator.rendezvous.sources import JobPods, PodReader, SecretReader
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.users import ROOT, Users
from elasticjob_rendezvous.protocol.records.keys import job_prefix
from elasticjob_rendezvous.protocol.records.members import MemberState, Outcome
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.store_monitor import StoreMonitor

log = logging.getLogger(__name__)

SETTLING_SECONDS = 5.0
"""Time for which an unreadable etcd changes no status."""
MAX_LOOKUPS = 64
"""Maximum number of pods that one observation looks up because a member's record has their name.
Any pod of a job may write such records."""


@dataclass(slots=True)
class Etcd:
    """One etcd.

    `users` is set if each job gets its own user there. `agents` are the files of the client
    certificate that agents get. `certified` administers users by our certificate alone.
    `held` is the content of the Secret that a job named for it. `tasks` run its informer cache and
    its monitor. `waiting` are namespace and uid of jobs that were reconciled while it was
    unreadable: those without a record are not among the changes of the cache. `resources` closes
    its client and removes its files.
    """

    client: Client
    cache: InformerCache
    users: Users | None = None
    ca_file: Path | str | None = None
    agents: tuple[Path, Path] | None = None
    certified: Users | None = None
    own: bool = True
    lost_at: float | None = None
    cache_dead_since: float | None = None
    """Time since which etcd has answered the resync while the informer cache was not in sync."""
    other_owner: str = ""
    """Identity of the other cluster that owns it; empty if none does."""
    held: dict[str, bytes] = field(default_factory=dict)
    poller: AgentPoller | None = None
    monitor: StoreMonitor | None = None
    tasks: tuple[asyncio.Task[None], ...] = ()
    waiting: set[tuple[str, str]] = field(default_factory=set)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    resources: AsyncExitStack = field(default_factory=AsyncExitStack)

    def await_readable(self, namespace: str, uid: str) -> None:
        """Add a job to `waiting` if etcd is unreadable."""
        if not self.cache.known:
            self.waiting.add((namespace, uid))
            self.waits.set()

    def trouble_of(self, uid: str) -> SeenTrouble | None:
        """Return the trouble with this etcd, seen by the operator or by agents of that job."""
        if self.monitor is not None and self.monitor.trouble is not None:
            return SeenTrouble(self.monitor.trouble, seconds=self.monitor.failing_seconds)
        return None if self.poller is None else self.poller.trouble(uid)

    def follow(self, namespace: str, uid: str, target: PollTarget) -> None:
        """Poll a sample of these agents for the health of their connection to it."""
        if self.poller is not None:
            self.poller.follow(namespace, uid, replace(target, sampled=True))

    def is_settling(self, now: float) -> bool:
        """Return True if it has been unreadable for too short a time to report."""
        if self.monitor is not None and self.monitor.trouble is not None:
            return False
        if self.cache.known:
            self.lost_at = None
            return False
        if self.lost_at is None:
            self.lost_at = now
        return now - self.lost_at < SETTLING_SECONDS

    async def guard(self) -> None:
        """Enable authentication if jobs have users here. Raises `EtcdError`."""
        if self.users is not None:
            await self.users.enable_auth()

    async def restore_root(self) -> bool:
        """Set root's password to ours, if our certificate alone makes us root; return True if so.

        The Secret has a new password, or a client took root while authentication was off. Raises
        `EtcdError`.
        """
        if self.certified is None:
            return False
        await self.certified.put_user(ROOT, self.client.transport.token.password)
        log.warning("replaced etcd's root password with that of the Secret")
        return True

    @property
    def ca(self) -> bytes | None:
        """Authorities that pods are to trust, as currently in the file."""
        return Path(self.ca_file).read_bytes() if self.ca_file else None

    @property
    def certificate(self) -> tuple[bytes, bytes] | None:
        """Client certificate of the agents and its key, as currently in the files."""
        return None if self.agents is None else _pair(*self.agents)

    def newest(self, namespace: str, uid: str) -> int | None:
        """Return the newest incarnation of a job that has records here."""
        return self.cache.newest(namespace, uid)

    def records(self, namespace: str, uid: str, incarnation: int) -> Records | None:
        return self.cache.records(job_prefix(namespace, uid, incarnation))


@dataclass(frozen=True, slots=True)
class EtcdSource:
    """Rendezvous of one job in this etcd."""

    etcd: Etcd
    kube: SecretReader
    namespace: str
    uid: str

    @property
    def usable(self) -> bool:
        return True

    @property
    def needs_access(self) -> bool:
        return False

    def is_settling(self, now: float) -> bool:
        return self.etcd.is_settling(now)

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        recorded = self.etcd.newest(self.namespace, self.uid) or 0
        newest = max(recorded, memory.rendezvous.incarnation or 0)
        found, lost_seconds = self._read(newest)
        own = await pods.read(job, memory)
        if own.newest > newest or newest == 0:
            # etcd has lost the job's records or never had any: the pods decide.
            newest = max(own.newest, 1)
            found, lost_seconds = self._read(newest)
        # Suspension ended the last incarnation: while unreadable, the next may have begun.
        known = self.etcd.cache.known or own.has(newest) or memory.rendezvous.goes_on
        if known:
            memory.rendezvous = replace(memory.rendezvous, incarnation=newest)
        found = self._bounded(job, memory, found, own.uids)
        unchecked: frozenset[str] = frozenset()
        if found is not None:
            # The pod of a member missing from the LIST may still exist.
            names = _without_pods(job, found, own)
            names_to_check = frozenset(sorted(names, key=natural_order)[:MAX_LOOKUPS])
            unchecked = frozenset(
                member.id for member in found.members if member.name in names - names_to_check
            )
            await own.look_up(names_to_check)
        seen = await own.convert()
        if memory.owned.access is not None:
            target = PollTarget(
                self._prefix(newest),
                memory.owned.access.job_key,
                own.agents(newest),
            )
            self.etcd.follow(self.namespace, self.uid, target)
        before = Observed(seen, incarnation=newest, unchecked=unchecked)
        made = self._combined(memory, before, found, lost_seconds)
        if made.rendezvous.readable:
            goes_on = not made.rendezvous.suspended
            memory.rendezvous = replace(memory.rendezvous, goes_on=goes_on)
        return Observation(made, known)

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        incarnation = memory.rendezvous.incarnation or seen.incarnation
        found, lost_seconds = self._read(incarnation)
        found = self._bounded(job, memory, found, {pod.uid for pod in seen.pods})
        again = replace(seen, incarnation=incarnation)
        return self._combined(memory, again, found, lost_seconds)

    def _combined(
        self, memory: JobMemory, seen: Observed, found: Records | None, lost_seconds: float
    ) -> Observed:
        """Return this observation with the rendezvous as in these records.

        Args:
            lost_seconds: time for which etcd was unreadable when the records were read.
        """
        memory.rendezvous = memory.rendezvous.with_members(found, seen.pods)
        return replace(
            seen,
            pods=without_members(seen.pods, memory.rendezvous.joined),
            rendezvous=UNREADABLE if found is None else rendezvous_view(found),
            bounds=memory.rendezvous.bounds if found is None else found.bounds,
            bounds_revision=0 if found is None else found.bounds_revision,
            store=self.etcd.trouble_of(self.uid),
            unreadable_seconds=lost_seconds,
        )

    def _bounded(
        self, job: ElasticJob, memory: JobMemory, found: Records | None, pods: Set[str]
    ) -> Records | None:
        """Return the records without those of more members than the job can have; log that once."""
        if found is None:
            return None
        known, ignored = bounded_members(found, pods, job.spec.max_nodes)
        if ignored and not memory.rendezvous.crowded:
            log.warning(
                "ignoring the records of %d members beyond maxNodes (%d), which have no pod",
                ignored, job.spec.max_nodes, extra=of_job(f"{self.namespace}/{job.metadata.name}"),
            )  # fmt: skip
        if ignored:
            memory.rendezvous = replace(memory.rendezvous, crowded=True)
        return known

    def has_lost(self, seen: Observed) -> bool:
        return bool(seen.pods) and seen.rendezvous.readable and seen.bounds is None

    @property
    def manages_users(self) -> bool:
        return self.etcd.users is not None

    async def access(
        self, job: ElasticJob, known: Access | None, *, rotate: bool = False
    ) -> Access:
        etcd = self.etcd
        made = await access_for(
            etcd.users, self.namespace, self.uid, known, etcd.ca, etcd.certificate, rotate=rotate
        )
        return made if etcd.own else await access_of_author(self.kube.get, job, made)

    async def remove_former_users(self, access: Access) -> tuple[str, ...]:
        if self.etcd.users is None:
            return ()
        return await remove_old_users(self.etcd.users, self.uid, access)

    def is_stale(self, access: Access) -> bool:
        if self.etcd.own:
            held = None if access.cert is None or access.key is None else (access.cert, access.key)
            return access.ca != self.etcd.ca or held != self.etcd.certificate
        if not self.etcd.held:
            return False
        # The author's own Secret as read for the operator's client.
        data = {name: b64encode(value).decode() for name, value in self.etcd.held.items()}
        return author_access({"data": data}, access.job_key) != access

    async def revoke_access(self) -> None:
        if self.etcd.users is not None:
            await remove_users(self.etcd.users, self.uid)

    async def write_params(
        self, memory: JobMemory, incarnation: int, bounds: RendezvousParams, revision: int
    ) -> None:
        await self._writer.write_params(incarnation, bounds, revision)
        memory.rendezvous = replace(memory.rendezvous, incarnation=incarnation, bounds=bounds)

    async def close(self, incarnation: int, outcome: Outcome, now_ms: int) -> None:
        await self._writer.close(incarnation, outcome, now_ms)

    async def remove_members(self, incarnation: int, members: tuple[str, ...]) -> None:
        await self._writer.remove_members(incarnation, members)

    @property
    def _writer(self) -> RendezvousWriter:
        return RendezvousWriter(self.etcd.client, self.etcd.cache, self._prefix)

    def _read(self, incarnation: int) -> tuple[Records | None, float]:
        """Return the records of an incarnation, and the time for which etcd has been unreadable at
        that moment: it may be back, or lost, before the pods are read."""
        found = self.etcd.records(self.namespace, self.uid, incarnation) if incarnation else None
        return found, self.etcd.cache.lost_seconds

    def _prefix(self, incarnation: int) -> str:
        return job_prefix(self.namespace, self.uid, incarnation)


def _pair(cert: Path, key: Path) -> tuple[bytes, bytes]:
    """Return both files' contents of one version: a mounted Secret changes while it is read."""
    while True:
        before = cert.read_bytes()
        read = key.read_bytes()
        if cert.read_bytes() == before:
            return before, read


def _without_pods(job: ElasticJob, found: Records, own: JobPods) -> frozenset[str]:
    """Return the names of participating members that match none of these pods.

    The records are untrusted: only possible names of the job's pods are returned.
    """
    uids, listed = own.uids, own.names
    return frozenset(
        member.name
        for member in found.members
        if member.id not in uids
        and member.name not in listed
        and member.state is not MemberState.DONE
        and index_of(job, member.name) is not None
    )
