"""Rendezvous of a job of a torch backend (etcd-v2, c10d), as its agents report it.

Agents of these backends take nothing from an operator: it only reads. The job's Secret holds its
author's credentials and the agents' key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_operator.agent_status import AgentStatus, Asked
from elasticjob_operator.core.access import Access, access_of
from elasticjob_operator.core.agent_causes import with_causes
from elasticjob_operator.core.agent_view import agent_view
from elasticjob_operator.core.children import is_owned
from elasticjob_operator.core.names import secret_name
from elasticjob_operator.core.observed import Observed, Pod, Sight
from elasticjob_operator.core.remembered import remembered
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.etcd_access import access_for, access_of_author
from elasticjob_operator.jobs import JobMemory, RendezvousMemory
from elasticjob_operator.kube import SECRETS, NotFound
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.sources import KubeReader, PodReader, Unsteered, agents_of, newest_label
from elasticjob_rendezvous.core.keys import job_prefix


@dataclass(frozen=True, slots=True)
class AgentsSource(Unsteered):
    """Rendezvous of one job as reported by its agents."""

    status: AgentStatus
    kube: KubeReader
    namespace: str
    uid: str

    @property
    def usable(self) -> bool:
        return True

    @property
    def needs_access(self) -> bool:
        return True

    def is_settling(self, now: float) -> bool:
        return self.status.is_settling(self.uid)

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Sight:
        """Observe a job through its agents.

        No record holds the incarnation: it is that of the pods, or without pods the job's
        generation, which grows with every suspension and resumption.
        """
        own = await pods.own(job, memory)
        newest = max(newest_label(own) or job.metadata.generation, 1)
        if memory.rendezvous.incarnation != newest:
            # The old attendance is of another incarnation.
            memory.rendezvous = RendezvousMemory(newest)
        seen = await pods.convert(job, memory, own)
        if own and (job_key := await self._job_key(job, memory)):
            prefix = job_prefix(self.namespace, self.uid, newest)
            self.status.follow(
                self.namespace, self.uid, Asked(prefix, job_key, agents_of(own, newest))
            )
        return Sight(self.observe_again(job, memory, Observed(seen, incarnation=newest)))

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        view = self._view(job, memory, seen.pods)
        return replace(seen, rendezvous=view, store=self.status.trouble(self.uid))

    def _view(self, job: ElasticJob, memory: JobMemory, pods: tuple[Pod, ...]) -> RendezvousView:
        records = self.status.records(self.uid, {pod.uid for pod in pods})
        view = agent_view(job, pods, records, self.kube.now())
        attendance = memory.rendezvous.attendance.seen(pods, view)
        memory.rendezvous = replace(memory.rendezvous, attendance=attendance)
        return with_causes(view, remembered(job.status), attendance.went.values())

    async def _job_key(self, job: ElasticJob, memory: JobMemory) -> bytes | None:
        """Return the key that signs requests to the job's agents; None before its Secret exists."""
        if memory.owned.access is not None:
            return memory.owned.access.job_key
        try:
            raw = await self.kube.get(SECRETS, self.namespace, secret_name(job))
        except NotFound:
            return None
        held = access_of(raw) if is_owned(job, raw) else None
        return held.job_key if held else None

    async def access(self, job: ElasticJob, known: Access | None) -> Access:
        made = await access_for(None, self.namespace, self.uid, known, None)
        return await access_of_author(self.kube.get, job, made)

    def is_stale(self, access: Access) -> bool:
        return False
