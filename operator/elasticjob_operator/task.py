"""A plan's task and what came of it: what those who apply plans hand each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticjob_operator.agent_status import Agents
from elasticjob_operator.core.actions import Action
from elasticjob_operator.etcds import Etcd
from elasticjob_operator.jobs import JobMemory
from elasticjob_operator.kube import Json
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.observe import Sight
from elasticjob_operator.wakeups import Retry
from elasticjob_rendezvous.core.keys import job_prefix


@dataclass(slots=True)
class Applied:
    """What came of a plan: what was done, and what went wrong first.

    Args:
        kept: pods that the API server refuses to delete, and its words.
    """

    actions: list[Action] = field(default_factory=list)
    created: list[Json] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    error: Exception | None = None
    refused: bool = False
    kept: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Task:
    """A plan and whose it is. `etcd` is None while the job's may not be used."""

    job: ElasticJob
    memory: JobMemory
    etcd: Etcd | Agents | None
    sight: Sight

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.sight.observed.pods)

    @property
    def lost(self) -> bool:
        """Whether etcd lost the job's records, and with them its user."""
        observed = self.sight.observed
        if not isinstance(self.etcd, Etcd):
            return False
        return bool(observed.pods) and observed.rendezvous.readable and observed.bounds is None

    def prefix(self, incarnation: int) -> str:
        return job_prefix(self.job.metadata.namespace, self.job.metadata.uid, incarnation)

    def usable_etcd(self) -> Etcd:
        """For actions that a plan holds only while the rendezvous is readable."""
        if not isinstance(self.etcd, Etcd):
            raise Retry("the job's etcd may not be used")
        return self.etcd
