"""Pods of a job, read live from the API server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import pod_name, uid_selector
from elasticjob_operator.domain.manifests.owned_objects import is_of_predecessor
from elasticjob_operator.domain.observed.pod_identity import (
    has_agent,
    incarnation_of,
    index_of,
    is_own,
)
from elasticjob_operator.domain.observed.pod_state import (
    clamp_end,
    first_seen_ends,
    pod_of,
    used_fields,
)
from elasticjob_operator.domain.observed.state import Pod
from elasticjob_operator.kubernetes.client import PODS, Json, Kind, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_operator.reconcile.cluster import Applied
from elasticjob_operator.reconcile.job_memory import JobMemory, PodMemory
from elasticjob_operator.reconcile.watches import NodeCache
from elasticjob_operator.rendezvous.report_client import Agent
from elasticjob_rendezvous.protocol.records.roster import natural_order

Objects = list[Json]  # as `PodLister.list` hides the builtin where its own methods are annotated
MAX_PODS = 2 * MAX_NODES
"""Maximum number of a job's pods, ended and terminating ones included."""
MAX_CONCURRENT_READS = 16
"""Maximum number of pods read by name at a time."""
SPARE_AGENTS = 8
"""Agents beyond maxNodes that are polled: those of pods that end, and of their successors."""


def agents_of(job: ElasticJob, own: Iterable[Json], incarnation: int) -> tuple[Agent, ...]:
    """Return the agents of this incarnation's running pods with an address.

    A user who may create pods in the namespace may give the job any number of them: only pods with
    the agent's container count, those that the operator may have created first, and at most
    maxNodes and `SPARE_AGENTS` of them.
    """
    found = [
        raw
        for raw in own
        if incarnation_of(raw) == incarnation
        and (status := raw.get("status") or {}).get("podIP")
        and status.get("phase") == "Running"
        and has_agent(raw)
    ]
    found.sort(key=lambda raw: _foreign_last(index_of(job, raw["metadata"]["name"])))
    return tuple(
        Agent(raw["metadata"]["uid"], raw["status"]["podIP"])
        for raw in found[: job.spec.max_nodes + SPARE_AGENTS]
    )


def _is_own(job: ElasticJob, memory: JobMemory, raw: Json) -> bool:
    return is_own(job, raw) and raw["metadata"]["uid"] not in memory.withdrawn.pods


def _foreign_last(index: int | None) -> tuple[bool, int]:
    return index is None, index or 0


class PodLister(Protocol):
    """Part of the Kubernetes client that reads pods."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    async def list(
        self,
        kind: Kind,
        namespace: str | None,
        selector: str,
        *,
        keep: Callable[[Json], Json],
        most: int,
    ) -> Objects:
        """Return these parts of at most so many objects that match the label selector."""


class ObjectReader(Protocol):
    """Reader of a job's Pod objects."""

    async def unlisted(
        self, job: ElasticJob, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        """Return the job's pods among these names that are missing from `own`."""

    async def convert(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        """Convert these pods to the planner's form, and keep them."""


@dataclass(frozen=True, slots=True)
class PodObjects:
    """Pod objects of a job, read at one time; `found` has them in their form in the API."""

    reader: ObjectReader
    job: ElasticJob
    memory: JobMemory
    found: list[Json]

    @property
    def uids(self) -> Set[str]:
        return {raw["metadata"]["uid"] for raw in self.found}

    @property
    def names(self) -> Set[str]:
        return {raw["metadata"]["name"] for raw in self.found}

    @property
    def newest(self) -> int:
        """Newest incarnation in the labels of the pods; 0 without pods."""
        return max((incarnation_of(raw) for raw in self.found), default=0)

    def has(self, incarnation: int) -> bool:
        """Return True if this incarnation has pods that are not being deleted."""
        there = (raw for raw in self.found if "deletionTimestamp" not in raw["metadata"])
        return any(incarnation_of(raw) == incarnation for raw in there)

    def agents(self, incarnation: int) -> tuple[Agent, ...]:
        return agents_of(self.job, self.found, incarnation)

    async def look_up(self, names: Set[str]) -> None:
        self.found.extend(await self.reader.unlisted(self.job, self.memory, self.found, names))

    async def convert(self) -> tuple[Pod, ...]:
        return await self.reader.convert(self.job, self.memory, self.found)


class LivePods:
    """Reader of a job's pods from the API server."""

    def __init__(self, kube: PodLister, nodes: NodeCache, now: Callable[[], datetime]) -> None:
        self._kube = kube
        self._nodes = nodes
        self._now = now

    async def read(self, job: ElasticJob, memory: JobMemory) -> PodObjects:
        """Return the job's pods."""
        return PodObjects(self, job, memory, await self.own(job, memory))

    async def own(self, job: ElasticJob, memory: JobMemory) -> list[Json]:
        """Return the job's pods; keep those that the LIST does not show."""
        metadata = job.metadata
        # A pod may have as many bytes as its author likes, and a job many pods.
        listed = await self._kube.list(
            PODS, metadata.namespace, uid_selector(metadata.uid), keep=used_fields, most=MAX_PODS
        )
        own = [raw for raw in listed if _is_own(job, memory, raw)]
        more = await self._named(job, memory, own, memory.pods.unlisted)
        unlisted = frozenset(raw["metadata"]["name"] for raw in more)
        memory.pods = replace(memory.pods, unlisted=unlisted)
        return own + more

    async def unlisted(
        self, job: ElasticJob, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        """Return and keep the job's pods among these names that are missing from `own`."""
        more = await self._named(job, memory, own, names)
        unlisted = memory.pods.unlisted | {raw["metadata"]["name"] for raw in more}
        memory.pods = replace(memory.pods, unlisted=unlisted)
        return more

    async def _named(
        self, job: ElasticJob, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        """Return the job's pods among these names that a LIST missed because of a lost label."""
        there = {raw["metadata"]["name"] for raw in own}
        found = await self._read(job, sorted(names - there, key=natural_order))
        return [raw for raw in found.values() if _is_own(job, memory, raw)]

    async def _read(self, job: ElasticJob, names: list[str]) -> dict[str, Json]:
        """Return the existing pods among these names, several read at a time."""
        found: dict[str, Json] = {}

        async def read(name: str) -> None:
            with suppress(NotFound):
                raw = await self._kube.get(PODS, job.metadata.namespace, name)
                found[name] = used_fields(raw)

        for first in range(0, len(names), MAX_CONCURRENT_READS):
            some = names[first : first + MAX_CONCURRENT_READS]
            for result in await asyncio.gather(*map(read, some), return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        return {name: found[name] for name in names if name in found}

    async def convert(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        """Convert these pods to the planner's form, and keep them."""
        foreign = await self._still_foreign(job, memory.pods.foreign)
        of_predecessor = (at for at, raw in foreign.items() if is_of_predecessor(job, raw))
        pods = tuple(pod for raw in own if (pod := self._pod(job, raw)) is not None)
        ends = first_seen_ends(pods, memory.pods.ends, self._now())
        pods = tuple(clamp_end(pod, ends) for pod in pods)
        memory.pods = PodMemory(
            uids=frozenset(pod.uid for pod in pods),
            nodes=frozenset(pod.node for pod in pods if pod.node),
            ends=ends,
            foreign=frozenset(foreign),
            predecessors=frozenset(of_predecessor),
            unlisted=memory.pods.unlisted,
            unowned={pod.uid: pod.name for pod in pods if pod.lost_owner},
        )
        return pods

    def _pod(self, job: ElasticJob, raw: Json) -> Pod | None:
        """Convert a Pod object to the planner's form."""
        return pod_of(job, raw, self._nodes.known)

    async def _still_foreign(self, job: ElasticJob, indices: frozenset[int]) -> dict[int, Json]:
        """Return the indices whose pod name is still taken, with the other owner's pod."""
        names = {index: pod_name(job.metadata.name, index) for index in sorted(indices)}
        found = await self._read(job, list(names.values()))
        return {
            index: found[name]
            for index, name in names.items()
            if name in found and not is_own(job, found[name])
        }

    def after(
        self, job: ElasticJob, memory: JobMemory, before: tuple[Pod, ...], applied: Applied
    ) -> tuple[Pod, ...]:
        """Return the pods after a plan was applied, and keep them."""
        pods = [
            replace(pod, terminating=True) if pod.uid in applied.deleted else pod for pod in before
        ]
        pods += [pod for raw in applied.created if (pod := self._pod(job, raw)) is not None]
        memory.pods = replace(
            memory.pods,
            uids=frozenset(pod.uid for pod in pods),
            foreign=memory.pods.foreign | applied.foreign,
            predecessors=memory.pods.predecessors | applied.predecessors,
            unlisted=memory.pods.unlisted | applied.unlisted,
        )
        return tuple(pods)
