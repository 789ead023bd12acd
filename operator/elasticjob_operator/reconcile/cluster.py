"""Port for the place where pods run and the job's object is kept, independent of the platform.

Implementations: `KubeCluster` for the API server, and the CLI's `LocalCluster` for one machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from elasticjob_operator.domain.manifests.names import UID_LABEL
from elasticjob_operator.domain.observed.state import Observation, Obstacle, Refusal
from elasticjob_operator.domain.plan.actions import Action, CreatePod, DeletePod
from elasticjob_operator.domain.plan.planner import Plan
from elasticjob_operator.kubernetes.kinds import Json, Kind
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.rendezvous.sources import RendezvousSource


@dataclass(slots=True)
class Applied:
    """Result of applying a plan: the actions done and the first error.

    Args:
        refusal: reason for which pods cannot be created, as it is after the plan.
        refused: True if a pod of this plan could not be created.
        unfinished: True if the plan was left before its end so that the status can be written; the
            next reconcile continues at once.
        foreign: indices whose pod name turned out to be taken by a pod of another owner.
        predecessors: those of `foreign` with a pod of a deleted job of the same name.
        unlisted: names of the job's pods that exist although the LIST did not show them.
        nodes_refused: message of the API server, if it refused to write spec.nodes.
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
    predecessors: set[int] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    nodes_refused: str | None = None
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


class NameTaken(Exception):
    """Name of an object that does not belong to the job."""

    def __init__(self, kind: Kind, name: str) -> None:
        singular = kind.singular or kind.plural.removesuffix("s")
        super().__init__(
            f"{singular} {name} exists and is not this job's; delete it, or name the job otherwise"
        )


class OwnerRemoved(NameTaken):
    """Object of the job whose owner references were removed."""

    def __init__(self, kind: Kind, name: str) -> None:
        singular = kind.singular or kind.plural.removesuffix("s")
        Exception.__init__(
            self,
            f"metadata.ownerReferences was removed from {singular} {name}, which would outlive the "
            f"job; exclude objects with the label {UID_LABEL} from the webhook or policy that "
            f"removes it, and delete that {singular}",
        )


class Cluster(Protocol):
    """Cluster in which a plan is applied.

    An error among `applier.EXPECTED` ends the plan; actions before it are in `applied`.
    """

    async def create_pods(
        self, context: ReconcileContext, planned: Plan, creations: list[CreatePod], applied: Applied
    ) -> None:
        """Create pods and, before them, the objects that they need. Store a refusal in `applied`,
        and the remaining actions follow."""

    async def delete_pods(
        self, context: ReconcileContext, deletions: list[DeletePod], applied: Applied
    ) -> None:
        """Delete pods; the uid protects a successor of the same name."""

    async def update_owned(
        self, context: ReconcileContext, planned: Plan, applied: Applied
    ) -> None:
        """Update the objects that existing pods need, after a plan that creates no pod."""

    async def write_nodes(self, job: ElasticJob, nodes: int) -> None:
        """Write spec.nodes."""

    async def delete_job(self, job: ElasticJob) -> None:
        """Delete the job's object."""
