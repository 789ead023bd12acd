"""What the operator remembers of each job between two looks at it.

Nothing here is a datum: all of it can be lost with the process and is found again, or costs one
more request.
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
"""How long what was read of a job's Service, Secret and budget is believed."""


class JobKey(NamedTuple):
    """What a job is called; two jobs after another may share it."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(slots=True)
class JobMemory:
    """One job, by its uid.

    Args:
        incarnation: the newest one known from any source; None before it was learnt.
        goes_on: whether that one was there and not suspended when its rendezvous was last read.
        bounds: what was written last, which the mirror may not show yet.
        refusal: why pods cannot be created, and since when.
        foreign: indices of pods of the right name that are not this job's.
        unlisted: names of pods of this job that a LIST does not show, for want of their label.
        unlabelled: uids of pods whose lost labels were told of.
        access: what its Secret holds, once that was read or made.
        seen_at: monotonic time when it was seen first.
        checked_at: monotonic time when Service and Secret were read last.
        min_available: of its budget as it was read or written last; None for no budget.
        budget_checked_at: monotonic time when that was.
        pods: the uids of its pods as they were seen last.
        nodes: the machines they are on.
        ends: since when each of them that has ended is known to have; UTC.
        changed_at: monotonic time of the oldest change in etcd that no status shows yet.
        written: resourceVersion of the last status written here, so as not to wake for it.
        phase: the one in that status.
        untold: the status before one that was sent and may have been written: what it says of
            events is not told yet.
        told: whether this process has told what a status says; another one may have died over it.
        invalid: resourceVersion at which it could not be understood.
        attendance: who takes part, where the rendezvous is read through its agents.
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
        """Remember why pods cannot be created; the time is that of the first refusal in a row."""
        since = self.refusal.since if self.refusal else now
        self.refusal = Refusal(obstacle, message, since)


class Jobs:
    """All jobs that were seen. `clock` is monotonic.

    `random` spreads out when the children of those that a start finds are read first.
    """

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock = clock
        self._random = random
        self._by_key: dict[JobKey, JobMemory] = {}
        self._by_uid: dict[str, JobMemory] = {}
        self.departed: set[tuple[str, str]] = set()
        """Namespace and uid of jobs that were there and are gone, until etcd is cleared of them."""

    def __iter__(self) -> Iterator[JobMemory]:
        return iter(tuple(self._by_key.values()))

    def __len__(self) -> int:
        return len(self._by_key)

    def recall(self, key: JobKey, uid: str) -> JobMemory:
        """What is remembered of this job; of one of the same name that came before, nothing."""
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
        """The jobs with a pod on this machine."""
        return [memory for memory in self._by_key.values() if node in memory.nodes]

    def forget(self, key: JobKey) -> None:
        memory = self._by_key.pop(key, None)
        if memory is not None:
            del self._by_uid[memory.uid]
            self.departed.add((key.namespace, memory.uid))
