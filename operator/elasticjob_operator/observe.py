"""Observation of a job: its rendezvous first, then its pods, read live from the API server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from datetime import datetime

from elasticjob_operator.agent_status import Agent, Agents, Asked
from elasticjob_operator.core.access import access_of
from elasticjob_operator.core.agent_causes import with_causes
from elasticjob_operator.core.agent_view import agent_view
from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.ends import bounded, first_seen
from elasticjob_operator.core.labels import incarnation_of, index_of
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.names import (
    pod_name,
    secret_name,
    uid_selector,
)
from elasticjob_operator.core.observed import Observed, Pod, SeenTrouble, Sight
from elasticjob_operator.core.podview import pod_of
from elasticjob_operator.core.remembered import remembered
from elasticjob_operator.core.rendezvous_view import UNREADABLE
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import JobMemory, PodMemory, RendezvousMemory
from elasticjob_operator.kube import PODS, SECRETS, Json, Kube, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.nodes import Nodes
from elasticjob_operator.task import Applied
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.records import MemberState
from elasticjob_rendezvous.core.roster import natural_order


class Observer:
    """Reader of the observed state of jobs."""

    def __init__(
        self,
        kube: Kube,
        nodes: Nodes,
        now: Callable[[], datetime],
    ) -> None:
        self._kube = kube
        self._nodes = nodes
        self._now = now

    async def look(self, job: ElasticJob, memory: JobMemory, etcd: Etcd | Agents | None) -> Sight:
        """Observe a job, the rendezvous first: a member without a pod is then really gone."""
        if isinstance(etcd, Agents):
            return await self._look_through_agents(job, memory, etcd)
        namespace, uid = job.metadata.namespace, job.metadata.uid
        mirrored = etcd.newest(namespace, uid) if etcd else None
        newest = max(mirrored or 0, memory.rendezvous.incarnation or 0)
        found = etcd.records(namespace, uid, newest) if etcd and newest else None
        own = await self._own_pods(job, memory)
        labelled = max((incarnation_of(raw) for raw in own), default=0)
        if labelled > newest or newest == 0:
            # etcd has lost the job's records or never had any: the pods' labels decide.
            newest = max(labelled, 1)
            found = etcd.records(namespace, uid, newest) if etcd else None
        readable = etcd is not None and etcd.mirror.known
        # Suspension ended the last incarnation: while unreadable, the next may have begun.
        known = readable or _has_pods(own, newest) or memory.rendezvous.goes_on
        if known:
            memory.rendezvous = replace(memory.rendezvous, incarnation=newest)
        if found is not None:
            # The pod of a member missing from the LIST may still exist.
            more = await self._unlisted(job, own, _without_pods(job, found, own))
            unlisted = memory.pods.unlisted | {raw["metadata"]["name"] for raw in more}
            memory.pods = replace(memory.pods, unlisted=unlisted)
            own += more
        pods = await self._pods(job, memory, own)
        if isinstance(etcd, Etcd) and memory.owned.access is not None:
            there = (raw for raw in own if incarnation_of(raw) == newest)
            prefix = job_prefix(namespace, uid, newest)
            etcd.follow(
                namespace, uid, Asked(prefix, memory.owned.access.job_key, agents_of(there))
            )
        seen = observed(memory, newest, found, pods, store_of(etcd, uid))
        if seen.rendezvous.readable:
            goes_on = not seen.rendezvous.suspended
            memory.rendezvous = replace(memory.rendezvous, goes_on=goes_on)
        return Sight(seen, known)

    async def _look_through_agents(
        self, job: ElasticJob, memory: JobMemory, agents: Agents
    ) -> Sight:
        """Observe a job through its agents.

        No record holds the incarnation: it is that of the pods, or without pods the job's
        generation, which grows with every suspension and resumption.
        """
        own = await self._own_pods(job, memory)
        labelled = max((incarnation_of(raw) for raw in own), default=0)
        newest = max(labelled or job.metadata.generation, 1)
        if memory.rendezvous.incarnation != newest:
            # The old attendance is of another incarnation.
            memory.rendezvous = RendezvousMemory(newest)
        pods = await self._pods(job, memory, own)
        if own and (job_key := await self._job_key(job, memory)):
            prefix = job_prefix(job.metadata.namespace, job.metadata.uid, newest)
            there = (raw for raw in own if incarnation_of(raw) == newest)
            agents.follow(Asked(prefix, job_key, agents_of(there)))
        return Sight(observed_through_agents(job, memory, agents, pods, self._now()))

    async def _job_key(self, job: ElasticJob, memory: JobMemory) -> bytes | None:
        """Return the key that signs requests to the job's agents; None before its Secret exists."""
        if memory.owned.access is not None:
            return memory.owned.access.job_key
        try:
            raw = await self._kube.get(SECRETS, job.metadata.namespace, secret_name(job))
        except NotFound:
            return None
        held = access_of(raw) if is_owned(job, raw) else None
        return held.job_key if held else None

    async def _own_pods(self, job: ElasticJob, memory: JobMemory) -> list[Json]:
        metadata = job.metadata
        listed = await self._kube.list(PODS, metadata.namespace, uid_selector(metadata.uid))
        own = [raw for raw in listed if is_owned(job, raw)]
        more = await self._unlisted(job, own, memory.pods.unlisted)
        unlisted = frozenset(raw["metadata"]["name"] for raw in more)
        memory.pods = replace(memory.pods, unlisted=unlisted)
        return own + more

    async def _unlisted(self, job: ElasticJob, own: list[Json], names: Set[str]) -> list[Json]:
        """Return the job's pods among these names that a LIST missed because of a lost label."""
        found: list[Json] = []
        there = {raw["metadata"]["name"] for raw in own}
        for name in sorted(names - there, key=natural_order):
            try:
                raw = await self._kube.get(PODS, job.metadata.namespace, name)
            except NotFound:
                continue
            if is_owned(job, raw):
                found.append(raw)
        return found

    async def _pods(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        foreign = await self._still_foreign(job, memory.pods.foreign)
        pods = tuple(pod for raw in own if (pod := self.pod(job, raw)) is not None)
        ends = first_seen(pods, memory.pods.ends, self._now())
        pods = tuple(bounded(pod, ends) for pod in pods)
        memory.pods = PodMemory(
            uids=frozenset(pod.uid for pod in pods),
            nodes=frozenset(pod.node for pod in pods if pod.node),
            ends=ends,
            foreign=foreign,
            unlisted=memory.pods.unlisted,
        )
        return pods

    def pod(self, job: ElasticJob, raw: Json) -> Pod | None:
        """Convert a Pod object to the planner's form."""
        return pod_of(job, raw, self._nodes.known)

    async def _still_foreign(self, job: ElasticJob, indices: frozenset[int]) -> frozenset[int]:
        """Return the indices whose pod name is still taken by another owner's pod."""
        found = set()
        for index in indices:
            name = pod_name(job.metadata.name, index)
            try:
                raw = await self._kube.get(PODS, job.metadata.namespace, name)
            except NotFound:
                continue
            if not is_owned(job, raw):
                found.add(index)
        return frozenset(found)


def observed(
    memory: JobMemory,
    incarnation: int,
    found: Records | None,
    pods: tuple[Pod, ...],
    store: SeenTrouble | None = None,
) -> Observed:
    """Combine the observation and the job's memory into the planner's input."""
    return Observed(
        pods=pods,
        rendezvous=UNREADABLE if found is None else rendezvous_view(found),
        bounds=memory.rendezvous.bounds if found is None else found.bounds,
        incarnation=incarnation,
        refusal=memory.refusal,
        foreign=memory.pods.foreign,
        store=store,
    )


def store_of(etcd: Etcd | Agents | None, uid: str) -> SeenTrouble | None:
    """Return the trouble with a job's rendezvous store, seen by the operator or by its agents."""
    return etcd.trouble_of(uid) if isinstance(etcd, Etcd | Agents) else None


def observed_through_agents(
    job: ElasticJob, memory: JobMemory, agents: Agents, pods: tuple[Pod, ...], now: datetime
) -> Observed:
    """Return the planner's input for a job read through its agents, which hold no bounds."""
    view = agent_view(job, pods, agents.records({pod.uid for pod in pods}), now)
    attendance = memory.rendezvous.attendance.seen(pods, view)
    memory.rendezvous = replace(memory.rendezvous, attendance=attendance)
    return Observed(
        pods=pods,
        rendezvous=with_causes(view, remembered(job.status), attendance.went.values()),
        incarnation=memory.rendezvous.incarnation or 1,
        refusal=memory.refusal,
        foreign=memory.pods.foreign,
        store=store_of(agents, job.metadata.uid),
    )


def agents_of(pods: Iterable[Json]) -> tuple[Agent, ...]:
    """Return the agents of running pods with an address."""
    return tuple(
        Agent(raw["metadata"]["uid"], status["podIP"])
        for raw in pods
        if (status := raw.get("status") or {}).get("podIP") and status.get("phase") == "Running"
    )


def seen_again(
    before: Observed,
    memory: JobMemory,
    etcd: Etcd | Agents | None,
    job: ElasticJob,
    created: tuple[Pod, ...],
    applied: Applied,
    now: datetime,
) -> Observed:
    """Return the observation after a plan: the rendezvous read again, the pods from responses."""
    kept = (
        replace(pod, terminating=True) if pod.uid in applied.deleted else pod for pod in before.pods
    )
    pods = (*kept, *created)
    memory.pods = replace(
        memory.pods,
        uids=frozenset(pod.uid for pod in pods),
        foreign=memory.pods.foreign | applied.foreign,
        unlisted=memory.pods.unlisted | applied.unlisted,
    )
    if isinstance(etcd, Agents):
        return observed_through_agents(job, memory, etcd, pods, now)
    incarnation = memory.rendezvous.incarnation or before.incarnation
    found = None
    if etcd is not None:
        found = etcd.records(job.metadata.namespace, job.metadata.uid, incarnation)
    return observed(memory, incarnation, found, pods, store_of(etcd, job.metadata.uid))


def due_seconds(wake_at: datetime | None, now: datetime) -> float | None:
    """Return the seconds until the plan's wake-up time; None without one."""
    return None if wake_at is None else max((wake_at - now).total_seconds(), 0.0)


def _has_pods(own: list[Json], incarnation: int) -> bool:
    """Return True if this incarnation has pods that are not being deleted."""
    there = (raw for raw in own if "deletionTimestamp" not in raw["metadata"])
    return any(incarnation_of(raw) == incarnation for raw in there)


def _without_pods(job: ElasticJob, found: Records, own: list[Json]) -> frozenset[str]:
    """Return the names of participating members that match none of these pods.

    The records are untrusted: only possible names of the job's pods are returned.
    """
    uids = {raw["metadata"]["uid"] for raw in own}
    return frozenset(
        member.name
        for member in found.members
        if member.id not in uids
        and member.state is not MemberState.DONE
        and index_of(job, member.name) is not None
    )
