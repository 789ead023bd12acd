"""Pass over one job: observe, plan, apply. The caller writes the status, and runs the next pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.observed.state import Observation, Observed
from elasticjob_operator.domain.plan.actions import WriteNodes
from elasticjob_operator.domain.plan.planner import Plan, plan
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import Applied, ReconcileContext
from elasticjob_operator.reconcile.jobs import JobMemory
from elasticjob_operator.rendezvous.sources import RendezvousSource


class JobObserver(Protocol):
    """Reader of the observed state of jobs."""

    async def observe(
        self, job: ElasticJob, memory: JobMemory, source: RendezvousSource
    ) -> Observation:
        """Observe a job."""

    def observe_again(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        before: Observed,
        applied: Applied,
    ) -> Observed:
        """Return the observation after a plan."""


class PlanApplier(Protocol):
    """Applier of plans."""

    async def apply(self, context: ReconcileContext, planned: Plan) -> Applied:
        """Apply the plan; return expected errors in the result."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Result of a pass: the observation before the plan, the plan, and its application."""

    observation: Observation
    planned: Plan
    applied: Applied

    @property
    def wrote_nodes(self) -> bool:
        """True if spec.nodes was written: the next pass follows at once, without a status."""
        return any(isinstance(action, WriteNodes) for action in self.applied.actions)


async def run_pass(
    job: ElasticJob,
    memory: JobMemory,
    source: RendezvousSource,
    observer: JobObserver,
    applier: PlanApplier,
    now: Callable[[], datetime],
) -> Pass:
    """Observe a job, plan and apply the plan; `now` is UTC.

    Expected errors of the application are in the result.
    """
    observation = await observer.observe(job, memory, source)
    planned = plan(job, observation.observed, now())
    first = planned.actions[:1]
    if first and isinstance(first[0], WriteNodes):
        # It changes the object: the remaining actions must follow from the changed one.
        planned = replace(planned, actions=first)
    context = ReconcileContext(job, memory, source, observation)
    return Pass(observation, planned, await applier.apply(context, planned))
