"""Observation of a job, and the context in which its plan is applied.

The rendezvous is read first, then the pods, live from the API server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import pod_name, uid_selector
from elasticjob_operator.domain.manifests.owned_objects import is_owned
from elasticjob_operator.domain.observed.pod_state import (
    clamp_end,
    essentials,
    first_seen_ends,
    pod_of,
)
from elasticjob_operator.domain.observed.state import Observation, Observed, Obstacle, Pod, Refusal
from elasticjob_operator.domain.plan.actions import Action
from elasticjob_operator.kubernetes.client import PODS, Json, Kind, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_operator.reconcile.jobs import JobMemory, PodMemory
from elasticjob_operator.reconcile.watches import NodeCache
from elasticjob_operator.rendezvous.sources import RendezvousSource
from elasticjob_rendezvous.protocol.records.roster import natural_order

Objects = list[Json]  # as `PodLister.list` hides the builtin where its own methods are annotated
MAX_PODS = 2 * MAX_NODES
"""Maximum number of a job's pods, ended and terminating ones included."""
MAX_CONCURRENT_READS = 16
"""Maximum number of pods read by name at a time."""


@dataclass(slots=True)
class Applied:
    """Result of applying a plan: the actions done and the first error.

    Args:
        refusal: reason for which pods cannot be created, as it is after the plan.
        refused: True if a pod of this plan could not be created.
        unfinished: True if the plan was left before its end so that the status can be written; the
            next reconcile continues at once.
        foreign: indices whose pod name turned out to be taken by a pod of another owner.
        unlisted: names of the job's pods that exist although the LIST did not show them.
        kept: pods that the API server refuses to delete, with its message.
    """

    actions: list[Action] = field(default_factory=list)
    created: list[Json] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    error: Exception | None = None
    refusal: Refusal | None = None
    refused: bool = False
    unfinished: bool = False
    foreign: set[int] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)

    def refuse(self, obstacle: Obstacle, message: str, now: datetime) -> None:
        """Record a refusal to create pods."""
        self.refusal = Refusal.after(self.refusal, obstacle, message, now)


@dataclass(frozen=True, slots=True)
class ReconcileContext:
    """Context of a plan: its job, the job's rendezvous, and their observation."""

    job: ElasticJob
    memory: JobMemory
    source: RendezvousSource
    observation: Observation

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.observation.observed.pods)


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


class Observer:
    """Reader of the observed state of jobs."""

    def __init__(
        self,
        kube: PodLister,
        nodes: NodeCache,
        now: Callable[[], datetime],
    ) -> None:
        self._pods = LivePods(kube, nodes, now)

    async def observe(
        self, job: ElasticJob, memory: JobMemory, source: RendezvousSource
    ) -> Observation:
        """Observe a job."""
        observation = await source.observe(job, memory, self._pods)
        return replace(observation, observed=_with_memory(observation.observed, memory))

    def observe_again(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        before: Observed,
        applied: Applied,
    ) -> Observed:
        """Return the observation after a plan: the pods from the API server's responses, the
        rendezvous read again."""
        seen = replace(before, pods=self._pods.after(job, memory, before.pods, applied))
        return source.observe_again(job, memory, _with_memory(seen, memory))


def _with_memory(seen: Observed, memory: JobMemory) -> Observed:
    """Return the observation with the obstacles to creating pods."""
    return replace(seen, refusal=memory.refusal, foreign=memory.pods.foreign)


class LivePods:
    """Reader of a job's pods from the API server."""

    def __init__(self, kube: PodLister, nodes: NodeCache, now: Callable[[], datetime]) -> None:
        self._kube = kube
        self._nodes = nodes
        self._now = now

    async def own(self, job: ElasticJob, memory: JobMemory) -> list[Json]:
        """Return the job's pods; remember those that the LIST does not show."""
        metadata = job.metadata
        # A pod may have as many bytes as its author likes, and a job many pods.
        listed = await self._kube.list(
            PODS, metadata.namespace, uid_selector(metadata.uid), keep=essentials, most=MAX_PODS
        )
        own = [raw for raw in listed if is_owned(job, raw)]
        more = await self._named(job, own, memory.pods.unlisted)
        unlisted = frozenset(raw["metadata"]["name"] for raw in more)
        memory.pods = replace(memory.pods, unlisted=unlisted)
        return own + more

    async def unlisted(
        self, job: ElasticJob, memory: JobMemory, own: list[Json], names: Set[str]
    ) -> list[Json]:
        """Return and remember the job's pods among these names that are missing from `own`."""
        more = await self._named(job, own, names)
        unlisted = memory.pods.unlisted | {raw["metadata"]["name"] for raw in more}
        memory.pods = replace(memory.pods, unlisted=unlisted)
        return more

    async def _named(self, job: ElasticJob, own: list[Json], names: Set[str]) -> list[Json]:
        """Return the job's pods among these names that a LIST missed because of a lost label."""
        there = {raw["metadata"]["name"] for raw in own}
        found = await self._read(job, sorted(names - there, key=natural_order))
        return [raw for raw in found.values() if is_owned(job, raw)]

    async def _read(self, job: ElasticJob, names: list[str]) -> dict[str, Json]:
        """Return the existing pods among these names, several read at a time."""
        found: dict[str, Json] = {}

        async def read(name: str) -> None:
            with suppress(NotFound):
                raw = await self._kube.get(PODS, job.metadata.namespace, name)
                found[name] = essentials(raw)

        for first in range(0, len(names), MAX_CONCURRENT_READS):
            some = names[first : first + MAX_CONCURRENT_READS]
            for result in await asyncio.gather(*map(read, some), return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        return {name: found[name] for name in names if name in found}

    async def convert(self, job: ElasticJob, memory: JobMemory, own: list[Json]) -> tuple[Pod, ...]:
        foreign = await self._still_foreign(job, memory.pods.foreign)
        pods = tuple(pod for raw in own if (pod := self._pod(job, raw)) is not None)
        ends = first_seen_ends(pods, memory.pods.ends, self._now())
        pods = tuple(clamp_end(pod, ends) for pod in pods)
        memory.pods = PodMemory(
            uids=frozenset(pod.uid for pod in pods),
            nodes=frozenset(pod.node for pod in pods if pod.node),
            ends=ends,
            foreign=foreign,
            unlisted=memory.pods.unlisted,
        )
        return pods

    def _pod(self, job: ElasticJob, raw: Json) -> Pod | None:
        """Convert a Pod object to the planner's form."""
        return pod_of(job, raw, self._nodes.known)

    async def _still_foreign(self, job: ElasticJob, indices: frozenset[int]) -> frozenset[int]:
        """Return the indices whose pod name is still taken by another owner's pod."""
        names = {index: pod_name(job.metadata.name, index) for index in sorted(indices)}
        found = await self._read(job, list(names.values()))
        return frozenset(
            index
            for index, name in names.items()
            if name in found and not is_owned(job, found[name])
        )

    def after(
        self, job: ElasticJob, memory: JobMemory, before: tuple[Pod, ...], applied: Applied
    ) -> tuple[Pod, ...]:
        """Return the pods after a plan was applied, and remember them."""
        pods = [
            replace(pod, terminating=True) if pod.uid in applied.deleted else pod for pod in before
        ]
        pods += [pod for raw in applied.created if (pod := self._pod(job, raw)) is not None]
        memory.pods = replace(
            memory.pods,
            uids=frozenset(pod.uid for pod in pods),
            foreign=memory.pods.foreign | applied.foreign,
            unlisted=memory.pods.unlisted | applied.unlisted,
        )
        return tuple(pods)


def due_seconds(wake_at: datetime | None, now: datetime) -> float | None:
    """Return the seconds until the plan's wake-up time; None without one."""
    return None if wake_at is None else max((wake_at - now).total_seconds(), 0.0)
