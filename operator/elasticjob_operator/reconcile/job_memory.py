"""State in memory of each job between two reconciles.

Only a cache: after a restart it is rebuilt, or costs one more request.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.observed.agent_records import PodHistory
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.observed.state import NodesRefusal, Pod, Refusal
from elasticjob_operator.domain.status.set_aside import SetAside
from elasticjob_operator.model import Phase, Problem, Status
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

RECHECK_SECONDS = 600.0
"""Cache lifetime of a job's Service, Secret, NetworkPolicy and budget in seconds."""


class JobKey(NamedTuple):
    """Namespace and name of a job; successive jobs may share them."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class PodMemory:
    """Pods of a job at its last reconcile; their reader replaces it.

    Args:
        uids: uids of the pods.
        nodes: machines on which they run.
        ends: UTC time at which the end of each ended pod was first seen, by pod uid.
        foreign: indices whose pod name is taken by a pod of another owner.
        predecessors: those of `foreign` with a pod of a deleted job of the same name.
        unlisted: names of this job's pods that a LIST does not show because their label is missing.
        unowned: names of this job's pods whose owner references were removed, by uid.
    """

    uids: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    ends: Mapping[str, datetime] = field(default_factory=dict)
    foreign: frozenset[int] = frozenset()
    predecessors: frozenset[int] = frozenset()
    unlisted: frozenset[str] = frozenset()
    unowned: Mapping[str, str] = field(default_factory=dict)


FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 2.0, 60.0
"""Minimum and maximum pause after a withdrawn pod before the next one; it doubles each time."""


@dataclass(frozen=True, slots=True)
class Withdrawals:
    """Pods that lost their owner references at their creation and were deleted (withdrawn) for it.

    Args:
        pods: names of these pods by uid; they do not belong to the job, even while they exist.
        count: number of withdrawn pods in a row.
        until: monotonic time before which no further pod is created.
        message: message on the last withdrawn pod.
    """

    pods: Mapping[str, str] = field(default_factory=dict)
    count: int = 0
    until: float = 0.0
    message: str = ""

    def after(self, uid: str, name: str, message: str, now: float) -> Withdrawals:
        """Return the value after one more pod."""
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.count, 16), MOST_PAUSE_SECONDS)
        return Withdrawals({**self.pods, uid: name}, self.count + 1, now + pause, message)


@dataclass(frozen=True, slots=True)
class RendezvousMemory:
    """Last known state of a job's rendezvous; the job's rendezvous source replaces it.

    Args:
        incarnation: newest known incarnation from any source; None while unknown.
        goes_on: True if the last read found that incarnation, and it was not suspended.
        bounds: bounds written last, which the informer cache may lack.
        pod_history: participants, if the rendezvous is read through its agents.
        joined: uids of existing pods that are or have been members.
        crowded: True once the log has a line on ignored records of members beyond maxNodes.
    """

    incarnation: int | None = None
    goes_on: bool = False
    bounds: RendezvousParams | None = None
    pod_history: PodHistory = field(default_factory=PodHistory)
    joined: frozenset[str] = frozenset()
    crowded: bool = False

    def with_members(self, found: Records | None, pods: Iterable[Pod]) -> RendezvousMemory:
        """Return the memory with the members in these records added.

        A member's record disappears with it; its pod exists longer and shows that it was a member.
        """
        known = self.joined if found is None else self.joined | found.joined
        return replace(self, joined=known & {pod.uid for pod in pods})


@dataclass(frozen=True, slots=True)
class OwnedMemory:
    """Service, Secret and budget of a job as last read or written; `OwnedObjects` replaces it.

    Args:
        access: content of the Secret, once read or created.
        checked_at: monotonic time of the last read of Service and Secret.
        min_available: minimum in the budget; None for no budget.
        budget_checked_at: monotonic time at which the budget was last read or written.
        revoked: True if the finished job's user in etcd was removed.
        request: value of the annotation for a rotation of the credentials when they were checked.
    """

    access: Access | None = None
    checked_at: float = 0.0
    min_available: int | None = None
    budget_checked_at: float = -math.inf
    revoked: bool = False
    request: str = ""


@dataclass(frozen=True, slots=True)
class SentStatus:
    """Status of which the API server dropped fields, because its CRD is older than the operator.

    Args:
        stored: digest of the part that the API server stored.
        document: the complete status as JSON, which takes a third of the memory of its objects.
        sent_at: monotonic time of the write.
        unconfirmed: next status, if there was no answer to its write.
    """

    stored: str
    document: bytes
    sent_at: float
    unconfirmed: bytes | None = None

    @classmethod
    def of(cls, stored: str, status: Json, sent_at: float) -> SentStatus:
        return cls(stored, json.dumps(status).encode(), sent_at)

    def without_answer(self, status: Json) -> SentStatus:
        """Return the value after a write without an answer."""
        return replace(self, unconfirmed=json.dumps(status).encode())

    def content(self) -> Json:
        """Return the whole status."""
        found: Json = json.loads(self.document)
        return found


@dataclass(frozen=True, slots=True)
class ReportMemory:
    """Status and events that this process wrote for a job; the reconciler replaces it.

    Args:
        version: resourceVersion of the last status written; its watch event causes no reconcile.
        phase: phase in that status.
        goodput: goodput in that status in percent; None if it is unknown or the job has finished.
        unanswered: status before a status write without an answer; the events of that write are
            still to be posted.
        posted: True once this process has posted events for the job; a predecessor may have died
            before posting its own.
        unlabelled: uids of pods whose lost labels were reported.
        unowned: uids of pods whose lost owner references were reported.
        ignored: problems of the stored status at the last reconcile, whose parts are left out.
    """

    version: str = ""
    phase: Phase | None = None
    goodput: int | None = None
    unanswered: Status | None = None
    posted: bool = False
    unlabelled: frozenset[str] = frozenset()
    unowned: frozenset[str] = frozenset()
    ignored: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Faults:
    """Unexpected errors in a row of the reconciles of one generation; the guard replaces it.

    Args:
        generation: generation of the job.
        count: number of errors in a row.
        aside: set if the job is set aside until its generation changes.
    """

    generation: int = 0
    count: int = 0
    aside: SetAside | None = None

    def after_another(self, generation: int) -> Faults:
        """Return the value after one more error at this generation."""
        count = self.count if self.generation == generation else 0
        return Faults(generation, count + 1)


@dataclass(slots=True)
class PendingChange:
    """Monotonic time of the oldest etcd change that no status shows yet; None without one."""

    at: float | None = None

    def note(self, now: float) -> None:
        """Record a change; an older one that is still pending counts."""
        if self.at is None:
            self.at = now

    def take(self) -> float | None:
        """Return the time and clear it, before an observation that includes the change."""
        at, self.at = self.at, None
        return at

    def restore(self, at: float | None) -> None:
        """Put back the time taken for a status that was not written."""
        if at is not None:
            self.at = at


@dataclass(slots=True)
class JobMemory:
    """State of one job, identified by its uid: values with one writer each.

    Args:
        seen_at: monotonic time of the first reconcile.
        refusal: reason and start time of a refusal to create pods; the reconciler replaces it.
        nodes_refusal: last refusal to write spec.nodes; the pass replaces it.
        withdrawn: pods that were deleted right after their creation; the cluster replaces it.
        undeletable: messages on pods whose deletion was refused last, by uid; the applier
            replaces it.
        deleted_at: monotonic time at which the job's deletion was seen; the reconciler sets it.
        sent: last status written, if the API server dropped fields of it; `StatusWriter` sets it.
    """

    key: JobKey
    uid: str
    seen_at: float = 0.0
    pods: PodMemory = PodMemory()
    rendezvous: RendezvousMemory = RendezvousMemory()
    owned: OwnedMemory = OwnedMemory()
    report: ReportMemory = ReportMemory()
    faults: Faults = Faults()
    refusal: Refusal | None = None
    nodes_refusal: NodesRefusal | None = None
    withdrawn: Withdrawals = Withdrawals()
    undeletable: Mapping[str, str] = field(default_factory=dict)
    deleted_at: float | None = None
    sent: SentStatus | None = None
    change: PendingChange = field(default_factory=PendingChange)


class Jobs:
    """Registry of all known jobs. `clock` is monotonic.

    `random` spreads the first read of owned objects after a start over the recheck period.
    """

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._by_key: dict[JobKey, JobMemory] = {}
        self._by_uid: dict[str, JobMemory] = {}
        self.deleted: set[tuple[str, str]] = set()
        """Namespace and uid of deleted jobs whose etcd data is not cleared yet."""

    def __iter__(self) -> Iterator[JobMemory]:
        return iter(tuple(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def recall(self, key: JobKey, uid: str) -> JobMemory:
        """Return the state of this job; drop that of a predecessor of the same name."""
        found = self._by_key.get(key)
        if found is not None and found.uid == uid:
            return found
        self.forget(key)
        now = self._clock()
        checked_at = now - self._random() * RECHECK_SECONDS
        memory = JobMemory(key, uid, seen_at=now, owned=OwnedMemory(checked_at=checked_at))
        self._by_key[key] = self._by_uid[uid] = memory
        return memory

    def find(self, key: JobKey) -> JobMemory | None:
        return self._by_key.get(key)

    def find_uid(self, uid: str) -> JobMemory | None:
        return self._by_uid.get(uid)

    def goodput(self) -> list[tuple[str, str, int]]:
        """Return namespace, name and goodput of the jobs that have one."""
        known = [(memory.key, memory.report.goodput) for memory in self]
        return [(key.namespace, key.name, found) for key, found in known if found is not None]

    def on_node(self, node: str) -> list[JobMemory]:
        """Return the jobs with a pod on this machine."""
        return [memory for memory in self._by_key.values() if node in memory.pods.nodes]

    def forget(self, key: JobKey) -> None:
        memory = self._by_key.pop(key, None)
        if memory is not None:
            del self._by_uid[memory.uid]
            self.deleted.add((key.namespace, memory.uid))
