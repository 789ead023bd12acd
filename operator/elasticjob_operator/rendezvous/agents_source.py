"""Rendezvous of a job of a torch backend (etcd-v2, c10d), as its agents report it.

Agents of these backends take nothing from an operator: it only reads. The job's Secret holds its
author's credentials and the agents' key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_operator.domain.manifests.names import secret_name
from elasticjob_operator.domain.manifests.owned_objects import Access, access_in, is_owned
from elasticjob_operator.domain.observed.agent_records import (
    agent_view,
    rendezvous_from_status,
    with_causes,
)
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.observed.pod_state import without_members
from elasticjob_operator.domain.observed.state import Observation, Observed, Pod, RendezvousView
from elasticjob_operator.etcd_tls.job_users import access_for, access_of_author
from elasticjob_operator.kubernetes.errors import NotFound
from elasticjob_operator.kubernetes.kinds import SECRETS
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobMemory, RendezvousMemory
from elasticjob_operator.rendezvous.agent_poller import AgentPoller, PollTarget
from elasticjob_operator.rendezvous.sources import PodReader, SecretReader, Unsteered
from elasticjob_rendezvous.protocol.records.keys import job_prefix


@dataclass(frozen=True, slots=True)
class AgentsSource(Unsteered):
    """Rendezvous of one job as reported by its agents."""

    status: AgentPoller
    kube: SecretReader
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

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        """Observe a job through its agents.

        No record holds the incarnation: it is that of the pods, or without pods the job's
        generation, which grows with every suspension and resumption.
        """
        own = await pods.read(job, memory)
        newest = max(own.newest or job.metadata.generation, 1)
        if memory.rendezvous.incarnation != newest:
            # The history of the pods is of another incarnation.
            memory.rendezvous = RendezvousMemory(newest)
        seen = await own.convert()
        if own.uids and (job_key := await self._job_key(job, memory)):
            prefix = job_prefix(self.namespace, self.uid, newest)
            self.status.follow(
                self.namespace, self.uid, PollTarget(prefix, job_key, own.agents(newest))
            )
        return Observation(self.observe_again(job, memory, Observed(seen, incarnation=newest)))

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        uids = {pod.uid for pod in seen.pods}
        ended = {pod.uid for pod in seen.pods if pod.over}
        records = self.status.records(self.uid, uids)
        memory.rendezvous = memory.rendezvous.with_members(records, seen.pods)
        if ended:
            records = self.status.records(self.uid, uids, ended)
        pods = without_members(seen.pods, memory.rendezvous.joined)
        view = self._view(job, memory, pods, records)
        return replace(seen, pods=pods, rendezvous=view, store=self.status.trouble(self.uid))

    def _view(
        self, job: ElasticJob, memory: JobMemory, pods: tuple[Pod, ...], records: Records | None
    ) -> RendezvousView:
        view = agent_view(job, pods, records, self.kube.now())
        pod_history = memory.rendezvous.pod_history.seen(pods, view)
        memory.rendezvous = replace(memory.rendezvous, pod_history=pod_history)
        return with_causes(
            view, rendezvous_from_status(job.status), pod_history.departures.values()
        )

    async def _job_key(self, job: ElasticJob, memory: JobMemory) -> bytes | None:
        """Return the key that signs requests to the job's agents; None before its Secret exists."""
        if memory.owned.access is not None:
            return memory.owned.access.job_key
        try:
            raw = await self.kube.get(SECRETS, self.namespace, secret_name(job))
        except NotFound:
            return None
        held = access_in(raw) if is_owned(job, raw) else None
        return held.job_key if held else None

    async def access(
        self, job: ElasticJob, known: Access | None, *, rotate: bool = False
    ) -> Access:
        made = await access_for(None, self.namespace, self.uid, known, None)
        return await access_of_author(self.kube.get, job, made)

    def is_stale(self, access: Access) -> bool:
        return False
