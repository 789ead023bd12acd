"""Rendezvous source whose observation a test sets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticjob_operator.domain.observed.state import (
    NO_MEMBERS,
    Observation,
    Observed,
    RendezvousView,
)
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.rendezvous.sources import PodReader, UnusableSource
from elasticjob_rendezvous.protocol.records.members import Outcome
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


@dataclass
class FakeSource(UnusableSource):
    """Usable source; `writes` holds the names of the writes."""

    view: RendezvousView = NO_MEMBERS
    settling: bool = False
    writes: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return True

    def is_settling(self, now: float) -> bool:
        return self.settling

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        return Observation(Observed(rendezvous=self.view))

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        return replace(seen, rendezvous=self.view)

    async def write_params(
        self, memory: JobMemory, incarnation: int, bounds: RendezvousParams, revision: int
    ) -> None:
        self.writes.append("bounds")

    async def close(self, incarnation: int, outcome: Outcome, now_ms: int) -> None:
        self.writes.append("close")

    async def remove_members(self, incarnation: int, members: tuple[str, ...]) -> None:
        self.writes.append("remove")
