"""Cluster of a local run: the operator's ports, on this machine's kubelet and the job's folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.observed.state import Pod, PodPhase
from elasticjob_operator.domain.plan.actions import CreatePod, DeletePod
from elasticjob_operator.domain.plan.backends import is_steered
from elasticjob_operator.domain.plan.lifecycle import grace_seconds
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.kubernetes.errors import NotFound
from elasticjob_operator.kubernetes.kinds import Json, Kind
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.cluster import Applied, ReconcileContext
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.rendezvous.agent_poller import Polling
from elasticjob_operator.rendezvous.report_client import REQUEST_SECONDS, Agent, request_report

PERIOD_SECONDS = 0.2
POLLING = Polling(
    period_seconds=PERIOD_SECONDS,
    least_period_seconds=PERIOD_SECONDS,
    lifetime_seconds=float("inf"),  # the kubelet knows of each agent if it runs
    most_backoff_seconds=PERIOD_SECONDS,
    most_silent_backoff_seconds=PERIOD_SECONDS,
)
"""Intervals of the polls of a local job's agents."""


async def fetch_report(agent: Agent, port: int, job_key: bytes, most_bytes: int) -> bytes:
    """Return one agent's proven answer over its unix socket, the address; there is no port."""
    async with asyncio.timeout(REQUEST_SECONDS):
        reader, writer = await asyncio.open_unix_connection(agent.address)
        try:
            return await request_report(
                reader, writer, "localhost", agent.member, job_key, most_bytes
            )
        finally:
            writer.close()


class LocalCluster:
    """Cluster on this machine: pods are processes, and the job's object is in its folder.

    Args:
        allows_pods: returns False if no further pod is created in this pass.
    """

    def __init__(
        self,
        kubelet: Kubelet,
        stored: StoredJob,
        note: Callable[[str], None],
        allows_pods: Callable[[], bool] = lambda: True,
    ) -> None:
        self._kubelet = kubelet
        self._stored = stored
        self._note = note
        self._allows_pods = allows_pods

    async def create_pods(
        self, context: ReconcileContext, planned: Plan, creations: list[CreatePod], applied: Applied
    ) -> None:
        for action in creations:
            if not self._allows_pods():
                return
            await self._kubelet.create(action.index, action.name, action.incarnation)
            applied.actions.append(action)

    async def delete_pods(
        self, context: ReconcileContext, deletions: list[DeletePod], applied: Applied
    ) -> None:
        for action in deletions:
            self._note(f"deleting pod {action.name}: {action.reason}")
            self._kubelet.delete(action.uid, grace_seconds(self._stored.job))
            applied.actions.append(action)

    async def update_owned(
        self, context: ReconcileContext, planned: Plan, applied: Applied
    ) -> None:
        """Do nothing: local pods need no objects."""

    async def write_nodes(self, job: ElasticJob, nodes: int) -> None:
        self._stored.change_spec(nodes=nodes)

    async def delete_job(self, job: ElasticJob) -> None:
        """Do nothing: the last status stays readable until its user deletes it."""


class NoSecrets:
    """Reader of the Secrets of a machine, which has none; the clock is the machine's."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        raise NotFound(f"get {kind.plural}", f"{kind.plural} {name} not found")

    def now(self) -> datetime:
        return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class KubeletPods:
    """Pods of the kubelet, which are the same at every time: reading them takes none.

    Args:
        members: returns the uids of the pods that hold a lease.
        has_seen_end: returns True if the agent of this pod (uid) reported the end of the job.
    """

    kubelet: Kubelet
    job: ElasticJob
    members: Callable[[], Collection[str]]
    has_seen_end: Callable[[str], bool]

    async def read(self, job: ElasticJob, memory: JobMemory) -> KubeletPods:
        return self

    def after(
        self, job: ElasticJob, memory: JobMemory, before: tuple[Pod, ...], applied: Applied
    ) -> tuple[Pod, ...]:
        return self.pods()

    @property
    def uids(self) -> Set[str]:
        return self.kubelet.pods.keys()

    @property
    def names(self) -> Set[str]:
        return {pod.name for pod in self.kubelet.pods.values()}

    @property
    def newest(self) -> int:
        """Newest incarnation of the pods; 0 without pods."""
        return max((pod.files.incarnation for pod in self.kubelet.pods.values()), default=0)

    def has(self, incarnation: int) -> bool:
        """Return True if this incarnation has pods that are not being deleted."""
        pods = self.kubelet.pods.values()
        return any(pod.files.incarnation == incarnation and not pod.terminating for pod in pods)

    def agents(self, incarnation: int) -> tuple[Agent, ...]:
        """Return the agents that run; the address is the path of a socket."""
        return tuple(
            Agent(pod.uid, str(pod.files.control))
            for pod in self.kubelet.pods.values()
            if pod.files.incarnation == incarnation and self.kubelet.agent_runs(pod)
        )

    async def look_up(self, names: Set[str]) -> None:
        """Do nothing: the kubelet knows all pods."""

    async def convert(self) -> tuple[Pod, ...]:
        return self.pods()

    def pods(self) -> tuple[Pod, ...]:
        """Return the pods in the planner's form."""
        pods = self.kubelet.observed(self.members())
        return pods if is_steered(self.job) else tuple(map(self._with_agent, pods))

    def _with_agent(self, pod: Pod) -> Pod:
        """Return a pod of a torch backend as its agent shows it.

        An ended pod counts as running until its agent reported the end of the job or ended too.
        """
        local = self.kubelet.pods[pod.uid]
        if self._is_unreported(local):
            return replace(pod, phase=PodPhase.RUNNING, exit_code=None, ended_at=None)
        return replace(pod, over=pod.ended)

    def _is_unreported(self, pod: LocalPod) -> bool:
        ended = pod.launcher_exit is not None and self.kubelet.agent_runs(pod)
        return ended and not self.has_seen_end(pod.uid)
