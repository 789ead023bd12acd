"""Port for the rendezvous of one job, independent of its backend.

Implementations: `EtcdSource` for etcd v3, which the operator also writes; `AgentsSource` for the
torch backends, read through the agents; `UnusableSource` while the job's store must not be used.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from datetime import datetime
from typing import NoReturn, Protocol

from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.observed.state import UNREADABLE, Observation, Observed, Pod
from elasticjob_operator.kubernetes.kinds import Json, Kind
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.report_client import Agent
from elasticjob_rendezvous.protocol.records.members import Outcome
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


class SecretReader(Protocol):
    """Reader of Secrets: the part of the Kubernetes client that sources use."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises `NotFound`."""

    def now(self) -> datetime:
        """Return the UTC time of the API server's clock."""


class JobPods(Protocol):
    """Pods of a job, read at one time."""

    @property
    def uids(self) -> Set[str]: ...

    @property
    def names(self) -> Set[str]: ...

    @property
    def newest(self) -> int:
        """Newest incarnation of these pods; 0 without pods."""

    def has(self, incarnation: int) -> bool:
        """Return True if this incarnation has pods that are not being deleted."""

    def agents(self, incarnation: int) -> tuple[Agent, ...]:
        """Return the agents of this incarnation that can answer."""

    async def look_up(self, names: Set[str]) -> None:
        """Add the job's pods among these names that are missing here."""

    async def convert(self) -> tuple[Pod, ...]:
        """Convert the pods to the planner's form, and keep them."""


class PodReader(Protocol):
    """Reader of a job's pods."""

    async def read(self, job: ElasticJob, memory: JobMemory) -> JobPods:
        """Return the job's pods."""


class RendezvousSource(Protocol):
    """Rendezvous of one job: reads its state and, where the backend allows it, steers it."""

    @property
    def usable(self) -> bool:
        """True if pods may be created for this rendezvous."""

    @property
    def needs_access(self) -> bool:
        """True if the source reads nothing before the job's Secret exists."""

    def is_settling(self, now: float) -> bool:
        """Return True if the rendezvous has been unreadable only for a time too short to report."""

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        """Observe the job, the rendezvous before the pods: a member without a pod is then really
        gone."""

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        """Return this observation with the rendezvous read again."""

    def has_lost(self, seen: Observed) -> bool:
        """Return True if the store lost the job's records, and with them its user."""

    @property
    def manages_users(self) -> bool:
        """True if the operator creates an etcd user for the job."""

    async def access(
        self, job: ElasticJob, known: Access | None, *, rotate: bool = False
    ) -> Access:
        """Return the content for the job's Secret; create the job's user if it gets one.

        Args:
            known: present content, whose keys and passwords are kept.
            rotate: True to create another user beside the present one, with a new password.

        Raises:
            EtcdError, KubeError: the content is not known yet; call again.
        """

    async def remove_former_users(self, access: Access) -> tuple[str, ...]:
        """Remove all users of the job but that of this access; return their names.

        Raises `EtcdError`.
        """

    def is_stale(self, access: Access) -> bool:
        """Return True if this content of the Secret is out of date."""

    async def revoke_access(self) -> None:
        """Remove the finished job's user and role; its records stay. Raises `EtcdError`."""

    async def write_params(
        self, memory: JobMemory, incarnation: int, bounds: RendezvousParams, revision: int
    ) -> None:
        """Write the bounds and drain requests of an incarnation, which begins with them, over those
        of this revision, 0 for none."""

    async def close(self, incarnation: int, outcome: Outcome, now_ms: int) -> None:
        """Close the rendezvous with this outcome, unless it is closed already."""

    async def remove_members(self, incarnation: int, members: tuple[str, ...]) -> None:
        """Remove the records of members whose pods are gone."""


class Unsteered:
    """Base of sources that the operator cannot write; the plan for them has no such action."""

    @property
    def manages_users(self) -> bool:
        return False

    async def remove_former_users(self, access: Access) -> tuple[str, ...]:
        return ()

    def has_lost(self, seen: Observed) -> bool:
        return False

    async def revoke_access(self) -> None:
        """Do nothing: no user was created for the job."""

    async def write_params(
        self, memory: JobMemory, incarnation: int, bounds: RendezvousParams, revision: int
    ) -> None:
        _refuse()

    async def close(self, incarnation: int, outcome: Outcome, now_ms: int) -> None:
        _refuse()

    async def remove_members(self, incarnation: int, members: tuple[str, ...]) -> None:
        _refuse()


class UnusableSource(Unsteered):
    """Rendezvous in a store that must not be used; the refusal of the job gives the reason.

    The pods of the job are still observed.
    """

    @property
    def usable(self) -> bool:
        return False

    @property
    def needs_access(self) -> bool:
        return False

    def is_settling(self, now: float) -> bool:
        return False

    async def observe(self, job: ElasticJob, memory: JobMemory, pods: PodReader) -> Observation:
        own = await pods.read(job, memory)
        newest = max(own.newest, memory.rendezvous.incarnation or 1)
        known = own.has(newest) or memory.rendezvous.goes_on
        if known:
            memory.rendezvous = replace(memory.rendezvous, incarnation=newest)
        seen = await own.convert()
        return Observation(Observed(seen, UNREADABLE, memory.rendezvous.bounds, newest), known)

    def observe_again(self, job: ElasticJob, memory: JobMemory, seen: Observed) -> Observed:
        return seen

    async def access(
        self, job: ElasticJob, known: Access | None, *, rotate: bool = False
    ) -> Access:
        _refuse()

    def is_stale(self, access: Access) -> bool:
        return False


def _refuse() -> NoReturn:
    raise Retry("the job's etcd may not be used")
