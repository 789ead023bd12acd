"""In-memory state of each job between two reconciles.

Only a cache: after a restart it is rebuilt, or costs one more request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from elasticjob_operator.core.access import Access
from elasticjob_operator.core.agent_causes import Attendance
from elasticjob_operator.core.observed import Obstacle, Refusal
from elasticjob_operator.model import Phase, Status
from elasticjob_rendezvous.core.bounds import Bounds

RECHECK_SECONDS = 600.0
"""Cache lifetime of a job's Service, Secret and budget in seconds."""


class JobKey(NamedTuple):
    """Namespace and name of a job; successive jobs may share them."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class JobMemory:
    """State of one job, identified by its uid.

    Args:
        incarnation: newest known incarnation from any source; None while unknown.
        goes_on: whether that incarnation existed, not suspended, when its rendezvous was last read.
        bounds: bounds written last, which the informer cache may lack.
        refusal: reason and start time of a refusal to create pods.
        foreign: indices whose pod name is taken by a pod of another owner.
        unlisted: names of this job's pods that a LIST does not show because their label is missing.
        unlabelled: uids of pods whose lost labels were reported.
        access: content of its Secret, once read or created.
        seen_at: monotonic time of the first reconcile.
        checked_at: monotonic time of the last read of Service and Secret.
        min_available: minimum in its budget as last read or written; None for no budget.
        budget_checked_at: monotonic time of that read or write.
        pods: uids of its pods at the last reconcile.
        nodes: machines those pods run on.
        ends: UTC time at which the end of each ended pod was first seen, by pod uid.
        changed_at: monotonic time of the oldest etcd change that no status shows yet.
        written: resourceVersion of the last status written here; its watch event wakes nobody.
        phase: phase in that status.
        untold: status before a status write without an answer; events since then are not posted
            yet.
        told: whether this process has posted events for the job; a predecessor may have died
            before posting its own.
        invalid: resourceVersion at which the job could not be parsed.
        attendance: participants, if the rendezvous is read through its agents.
    """

    key: JobKey
    uid: str
    incarnation: int | None = None
    goes_on: bool = False
    bounds: Bounds | None = None
    refusal: Refusal | None = None
    foreign: set[int] = field(default_factory=set)
    unlisted: set[str] = field(default_factory=set)
    unlabelled: frozenset[str] = frozenset()
    access: Access | None = None
    seen_at: float = 0.0
    checked_at: float = 0.0
    min_available: int | None = None
    budget_checked_at: float = -math.inf
    pods: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    ends: dict[str, datetime] = field(default_factory=dict)
    changed_at: float | None = None
    written: str = ""
    phase: Phase | None = None
    untold: Status | None = None
    told: bool = False
    invalid: str = ""
    attendance: Attendance = field(default_factory=Attendance)

    def refuse(self, obstacle: Obstacle, message: str, now: datetime) -> None:
        """Record a refusal to create pods; its time is that of the first refusal in a row."""
        since = self.refusal.since if self.refusal else now
        self.refusal = Refusal(obstacle, message, since)


class Jobs:
    """Registry of all known jobs. `clock` is monotonic.

    `random` spreads the first read of owned objects after a start over the recheck period.
    """

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._by_key: dict[JobKey, JobMemory] = {}
        self._by_uid: dict[str, JobMemory] = {}
        self.departed: set[tuple[str, str]] = set()
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
        memory = JobMemory(key, uid, seen_at=now, checked_at=checked_at)
        self._by_key[key] = self._by_uid[uid] = memory
        return memory

    def find(self, key: JobKey) -> JobMemory | None:
        return self._by_key.get(key)

    def find_uid(self, uid: str) -> JobMemory | None:
        return self._by_uid.get(uid)

    def on_node(self, node: str) -> list[JobMemory]:
        """Return the jobs with a pod on this machine."""
        return [memory for memory in self._by_key.values() if node in memory.nodes]

    def forget(self, key: JobKey) -> None:
        memory = self._by_key.pop(key, None)
        if memory is not None:
            del self._by_uid[memory.uid]
            self.departed.add((key.namespace, memory.uid))
