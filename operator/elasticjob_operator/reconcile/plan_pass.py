"""Pass over one job: observe, plan, apply. The caller writes the status, and runs the next pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Protocol, assert_never

from elasticjob_operator.domain.observed.state import (
    MAX_REFUSAL,
    NodesRefusal,
    Observation,
    Observed,
    Pod,
)
from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.lifecycle import FINISHED, deadline
from elasticjob_operator.domain.plan.planner import Plan, earliest, plan
from elasticjob_operator.kubernetes.errors import Forbidden, Invalid, KubeError
from elasticjob_operator.model import ElasticJob, Status
from elasticjob_operator.reconcile.cluster import Applied, Cluster, NameTaken, ReconcileContext
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.informer_cache import Contended
from elasticjob_operator.rendezvous.sources import PodReader, RendezvousSource
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.text import printable, shortened

EXPECTED = (KubeError, EtcdError, Contended, NameTaken, Retry)
"""Errors of a pass that are not bugs in this program."""
NODES_RETRY = timedelta(minutes=1)
"""Time between two attempts to write spec.nodes that the API server refuses."""


class ObservedPods(PodReader, Protocol):
    """Reader of a job's pods that knows them after a plan, too."""

    def after(
        self, job: ElasticJob, memory: JobMemory, before: tuple[Pod, ...], applied: Applied
    ) -> tuple[Pod, ...]:
        """Return the pods after a plan was applied, and keep them."""


class Observer:
    """Reader of the observed state of jobs: the rendezvous first, then the pods."""

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
    pods = memory.pods
    return replace(
        seen,
        refusal=memory.refusal,
        nodes_refusal=memory.nodes_refusal,
        undeletable=memory.undeletable,
        foreign=pods.foreign,
        predecessors=pods.predecessors,
    )


class Applier:
    """Applier of plans to a cluster and to the rendezvous. `now` is UTC.

    It performs the actions in order, up to the first failure; the cluster gets consecutive
    creations or deletions of pods together.
    """

    def __init__(self, cluster: Cluster, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._now = now

    async def apply(self, context: ReconcileContext, planned: Plan) -> Applied:
        """Apply the plan. Return `EXPECTED` errors in the result instead of raising them."""
        applied = Applied(refusal=context.memory.refusal)
        creates = any(isinstance(action, CreatePod) for action in planned.actions)
        if not creates and context.source.usable:
            applied.refusal = None  # it concerned pods that are no longer wanted
        try:
            for kind, group in groupby(planned.actions, key=type):
                if applied.unfinished:
                    break
                await self._apply_alike(context, planned, kind, list(group), applied)
            if not creates:
                await self._cluster.update_owned(context, planned, applied)
        except EXPECTED as error:
            applied.error = error
        context.memory.undeletable = _undeletable(planned, applied, context.memory.undeletable)
        return applied

    async def _apply_alike(
        self,
        context: ReconcileContext,
        planned: Plan,
        kind: type,
        actions: list[Action],
        applied: Applied,
    ) -> None:
        """Apply consecutive actions of one kind."""
        if kind is CreatePod:
            creations = [one for one in actions if isinstance(one, CreatePod)]
            await self._cluster.create_pods(context, planned, creations, applied)
        elif kind is DeletePod:
            deletions = [one for one in actions if isinstance(one, DeletePod)]
            await self._cluster.delete_pods(context, deletions, applied)
        else:
            for action in actions:
                try:
                    await self._do(context, action)
                except (Invalid, Forbidden) as error:
                    if not isinstance(action, WriteNodes):
                        raise
                    applied.nodes_refused = error.message  # which must not delay the other actions
                else:
                    applied.actions.append(action)

    async def _do(self, context: ReconcileContext, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                await self._cluster.write_nodes(context.job, nodes)
            case WriteParams(incarnation, bounds, revision):
                await context.source.write_params(context.memory, incarnation, bounds, revision)
            case CloseRendezvous(incarnation):
                now_ms = int(self._now().timestamp() * 1000)
                await context.source.close(incarnation, action.outcome, now_ms)
            case RemoveMembers(incarnation, members):
                await context.source.remove_members(incarnation, members)
            case DeleteJob():
                await self._cluster.delete_job(context.job)
            case CreatePod() | DeletePod():
                raise AssertionError(f"{action} is applied with its like")
            case _:
                assert_never(action)


def _undeletable(planned: Plan, applied: Applied, before: Mapping[str, str]) -> dict[str, str]:
    """Return the messages on pods that the plan deletes and the API server refuses to delete, by
    uid. Those that the plan did not reach keep the message of an earlier pass."""
    wanted = [action for action in planned.actions if isinstance(action, DeletePod)]
    return {
        action.uid: message
        for action in wanted
        if action.uid not in applied.deleted
        and (message := applied.kept.get(action.name) or before.get(action.uid))
    }


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

    def due_seconds(self, job: ElasticJob, status: Status, now: datetime) -> float | None:
        """Return the seconds until the next plan of the job differs without any event; None for
        never. `status` is the job's after the pass, which may define its deadline, or its end,
        from which the actions after it count."""
        if status.phase in FINISHED and job.status.phase not in FINISHED:
            return 0.0
        return seconds_until(now, self.planned.wake_at, deadline_by(job, status))


def deadline_by(job: ElasticJob, status: Status) -> datetime | None:
    """Return the deadline of the job with that status; None without one."""
    return deadline(job.model_copy(update={"status": status}))


def seconds_until(now: datetime, *moments: datetime | None) -> float | None:
    """Return the seconds until the first moment that is still to come; None without one."""
    due = earliest(*(one for one in moments if one is not None and one > now))
    return None if due is None else (due - now).total_seconds()


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
    context = ReconcileContext(job, memory, source, observation)
    others = tuple(one for one in planned.actions if not isinstance(one, WriteNodes))
    writes = [one for one in planned.actions if isinstance(one, WriteNodes)]
    known = memory.nodes_refusal
    if not writes:
        memory.nodes_refusal = None
    elif known is not None and _holds(known, job, now()):
        planned = replace(planned, actions=others)
    elif planned.actions[0] is writes[0]:
        # It changes the object: the remaining actions must follow from the changed one.
        first = replace(planned, actions=planned.actions[:1])
        applied = await applier.apply(context, first)
        if applied.nodes_refused is None:
            memory.nodes_refusal = None if applied.error is None else known
            return Pass(observation, first, applied)
        memory.nodes_refusal = _nodes_refusal(job, writes[0], applied.nodes_refused, now())
        planned = replace(planned, actions=others)
    applied = await applier.apply(context, planned)
    if applied.nodes_refused is not None:
        memory.nodes_refusal = _nodes_refusal(job, writes[0], applied.nodes_refused, now())
    elif any(isinstance(one, WriteNodes) for one in applied.actions):
        memory.nodes_refusal = None
    return Pass(observation, planned, applied)


def _nodes_refusal(job: ElasticJob, write: WriteNodes, message: str, now: datetime) -> NodesRefusal:
    text = shortened(printable(message), MAX_REFUSAL)
    return NodesRefusal(write.nodes, text, job.metadata.generation, now + NODES_RETRY)


def _holds(refusal: NodesRefusal, job: ElasticJob, now: datetime) -> bool:
    """Return True if the write is not repeated yet: neither the job nor the time has changed."""
    return refusal.generation == job.metadata.generation and now < refusal.retry_at
