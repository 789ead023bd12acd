"""Faults of the soak test, and checks of the status a job must then report. No I/O."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

LEAST, MOST = 2, 4


class Kind(StrEnum):
    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    DRAIN = "drain"
    DELETE_POD = "delete-pod"
    STOP_LAUNCHER = "stop-launcher"
    SCALE = "scale"
    KILL_ETCD = "kill-etcd"
    KILL_OPERATOR = "kill-operator"


ON_THIS_MACHINE: Mapping[Kind, int] = {
    Kind.KILL_WORKER: 5,
    Kind.KILL_AGENT: 3,
    Kind.KILL_NODE: 3,
    Kind.DRAIN: 3,
    Kind.STOP_LAUNCHER: 2,
    Kind.SCALE: 3,
    Kind.KILL_ETCD: 1,
}
"""Relative frequency of each fault. There is no operator to kill: the runner's end ends its job."""
ON_A_CLUSTER: Mapping[Kind, int] = {
    Kind.KILL_WORKER: 4,
    Kind.KILL_AGENT: 3,
    Kind.KILL_NODE: 3,
    Kind.DRAIN: 2,
    Kind.DELETE_POD: 2,
    Kind.STOP_LAUNCHER: 2,
    Kind.SCALE: 3,
    Kind.KILL_ETCD: 2,
    Kind.KILL_OPERATOR: 2,
}
UNNOTICED = frozenset({Kind.KILL_AGENT, Kind.KILL_ETCD, Kind.KILL_OPERATOR})
"""Faults that training survives without a new round."""
UNSEEN = frozenset({Kind.KILL_WORKER, Kind.KILL_NODE, Kind.STOP_LAUNCHER, Kind.SCALE})
"""Faults that may happen while the operator is down. It would miss facts that only the API server
reports, such as the eviction of a pod that left by itself."""
UNSEEN_SHARE = 0.25
_SYSTEM = frozenset({Kind.KILL_ETCD, Kind.KILL_OPERATOR})
_COUNTED = {"loss": "losses", "leave": "leaves", "preemption": "preemptions", "join": "joins"}
"""Status counters of rounds by their cause; failures count as restarts."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One fault on a pod, or a change of size.

    Args:
        unseen: set if it follows a kill of the operator.
    """

    kind: Kind
    pod: str = ""
    nodes: int = 0
    unseen: bool = False

    def __str__(self) -> str:
        text = f"{self.kind} {self.pod or (f'to {self.nodes}' if self.nodes else '')}".rstrip()
        return f"{text}, no operator" if self.unseen else text


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    kind: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """First failure that a status reports."""

    round: int
    pod: str
    kind: str


@dataclass(frozen=True, slots=True)
class JobState:
    """Status of the job at one time.

    Args:
        running: pods whose workers run in the newest round, by rank.
        rounds: rounds in the status.
        counts: numbers of rounds that ended without a failure, by counter.
        explanation: explanation in the status.
    """

    number: int
    restarts: int
    running: tuple[str, ...]
    rounds: tuple[Round, ...]
    failure: Failure | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    explanation: tuple[str, ...] = ()

    def since(self, before: JobState) -> list[Round]:
        """Return the rounds that followed those known before."""
        return [each for each in self.rounds if each.number > before.number]


def job_state(status: dict[str, Any], rounds: list[dict[str, Any]]) -> JobState:
    """Parse a status and the rounds of the job so far."""
    rendezvous = status.get("rendezvous") or {}
    number = rendezvous.get("round", 0) if rendezvous.get("state") == "final" else 0
    running = [
        member["pod"]
        for member in status.get("members") or ()
        if member["state"] == "running" and member["round"] == number
    ]
    complete = number and len(running) == rendezvous.get("nodes")
    failure = status.get("lastFailure")
    return JobState(
        number,
        status.get("restarts", 0),
        tuple(running if complete else ()),
        tuple(
            Round(each["round"], each["cause"], tuple(each.get("members") or ())) for each in rounds
        ),
        failure and Failure(failure["round"], failure["pod"], failure["class"]),
        status.get("interruptions") or {},
        tuple(status.get("explanation") or ()),
    )


def disturbance(
    chance: random.Random, weights: Mapping[Kind, int], wanted: int, now: JobState
) -> Disturbance:
    """Return the next random fault, on one of the running pods."""
    kind = chance.choices([*weights], [*weights.values()])[0]
    may_be_unseen = kind in UNSEEN and Kind.KILL_OPERATOR in weights
    unseen = may_be_unseen and chance.random() < UNSEEN_SHARE
    if kind is Kind.SCALE:
        others = [nodes for nodes in range(LEAST, MOST + 1) if nodes != wanted]
        return Disturbance(kind, nodes=chance.choice(others), unseen=unseen)
    if kind in _SYSTEM:
        return Disturbance(kind)
    return Disturbance(kind, chance.choice(now.running), unseen=unseen)


def judged(done: Disturbance, before: JobState, after: JobState, *, evicts: bool = False) -> str:
    """Return the error in the job's report of a fault; empty if the report is right.

    Args:
        evicts: set if a drain is an eviction, which counts as a preemption.
    """
    rounds = after.since(before)
    charged = after.restarts - before.restarts
    if charged != (done.kind is Kind.KILL_WORKER):
        return f"restarts went from {before.restarts} to {after.restarts}"
    if done.kind in UNNOTICED:
        return f"there were rounds: {', '.join(each.kind for each in rounds)}" if rounds else ""
    if not rounds:
        return "there was no round"
    first, *later = rounds
    if first.kind != (expected := _cause(done, len(before.running), evicts)):
        return f"the cause was {first.kind}, not {expected}"
    if done.pod and first.members and first.members != (done.pod,):
        return f"{', '.join(first.members)} was named"
    if strange := [each.kind for each in later if each.kind != "join"]:
        return f"then came {', '.join(strange)}"
    return (
        _failure_fault(done, before, after)
        or _miscounted(rounds, before, after)
        or _unexplained(done, first, after)
    )


def _cause(done: Disturbance, nodes: int, evicts: bool) -> str:
    match done.kind:
        case Kind.KILL_WORKER:
            return "failure"
        case Kind.KILL_NODE:
            return "loss"
        case Kind.DRAIN if evicts:
            return "preemption"
        case Kind.SCALE if done.nodes > nodes:
            return "join"
        case _:
            return "leave"


def _failure_fault(done: Disturbance, before: JobState, after: JobState) -> str:
    """Check that a failure is reported after one, and otherwise the old one is kept."""
    kinds = {Kind.KILL_WORKER: "Signal", Kind.KILL_NODE: "NodeLost"}
    expected = before.failure
    if done.kind in kinds:
        expected = Failure(before.number, done.pod, kinds[done.kind])
    return "" if after.failure == expected else f"the first failure is {after.failure}"


def _miscounted(rounds: list[Round], before: JobState, after: JobState) -> str:
    """Check that every round, which ended the previous one, is counted once under its cause."""
    expected = Counter(_COUNTED[each.kind] for each in rounds if each.kind in _COUNTED)
    counted = {name: after.counts[name] - before.counts.get(name, 0) for name in after.counts}
    if +Counter(counted) == expected:
        return ""
    return f"{dict(expected)} were counted as {dict(+Counter(counted))}"


def _unexplained(done: Disturbance, first: Round, after: JobState) -> str:
    """Check that the explanation names the last interruption."""
    if not done.pod:
        return ""
    words = {
        "failure": f"a worker of {done.pod} failed",
        "loss": f"{done.pod} was lost",
        "leave": f"{done.pod} left",
        "preemption": f"{done.pod}'s node was drained",
    }
    begin = f"Last interruption: {words[first.kind]}"
    if any(sentence.startswith(begin) for sentence in after.explanation):
        return ""
    return f"it was explained as {' '.join(after.explanation)}"
