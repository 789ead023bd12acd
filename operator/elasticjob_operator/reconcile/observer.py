"""Observation of a job: the rendezvous is read first, then the pods."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from elasticjob_operator.domain.observed.state import Observation, Observed, Pod
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import Applied
from elasticjob_operator.reconcile.jobs import JobMemory
from elasticjob_operator.rendezvous.sources import PodReader, RendezvousSource


class ObservedPods(PodReader, Protocol):
    """Reader of a job's pods that knows them after a plan, too."""

    def after(
        self, job: ElasticJob, memory: JobMemory, before: tuple[Pod, ...], applied: Applied
    ) -> tuple[Pod, ...]:
        """Return the pods after a plan was applied, and keep them."""


class Observer:
    """Reader of the observed state of jobs."""

    def __init__(self, pods: ObservedPods) -> None:
        self._pods = pods

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
        """Return the observation after a plan: the pods as the plan left them, the
        rendezvous read again."""
        seen = replace(before, pods=self._pods.after(job, memory, before.pods, applied))
        return source.observe_again(job, memory, _with_memory(seen, memory))


def _with_memory(seen: Observed, memory: JobMemory) -> Observed:
    """Return the observation with the obstacles to creating pods."""
    return replace(seen, refusal=memory.refusal, foreign=memory.pods.foreign)
