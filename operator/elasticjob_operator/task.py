"""Context and result of applying a plan, shared by the modules that apply it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from elasticjob_operator.core.actions import Action
from elasticjob_operator.core.observed import Obstacle, Refusal, Sight
from elasticjob_operator.jobs import JobMemory
from elasticjob_operator.kube import Json
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.sources import RendezvousSource


@dataclass(slots=True)
class Applied:
    """Result of applying a plan: the actions done and the first error.

    Args:
        refusal: reason for which pods cannot be created, as it is after the plan.
        refused: True if a pod of this plan could not be created.
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
    foreign: set[int] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    kept: dict[str, str] = field(default_factory=dict)

    def refuse(self, obstacle: Obstacle, message: str, now: datetime) -> None:
        """Record a refusal to create pods."""
        self.refusal = Refusal.after(self.refusal, obstacle, message, now)


@dataclass(frozen=True, slots=True)
class Task:
    """Context of a plan: its job, the job's rendezvous, and their observation."""

    job: ElasticJob
    memory: JobMemory
    source: RendezvousSource
    sight: Sight

    @property
    def ready(self) -> int:
        return sum(pod.ready for pod in self.sight.observed.pods)
