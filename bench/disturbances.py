"""What the soak does to a job, and what the job must then say of it. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LEAST, MOST = 2, 4


class Kind(StrEnum):
    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    DRAIN = "drain"
    STOP_LAUNCHER = "stop-launcher"
    SCALE = "scale"
    KILL_ETCD = "kill-etcd"


WEIGHTS = {
    Kind.KILL_WORKER: 5,
    Kind.KILL_AGENT: 3,
    Kind.KILL_NODE: 3,
    Kind.DRAIN: 3,
    Kind.STOP_LAUNCHER: 2,
    Kind.SCALE: 3,
    Kind.KILL_ETCD: 1,
}
UNNOTICED = frozenset({Kind.KILL_AGENT, Kind.KILL_ETCD})
"""Training goes on through these: no round may follow from them."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One fault: on a pod, or to a new size."""

    kind: Kind
    pod: str = ""
    nodes: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.pod or (f'to {self.nodes}' if self.nodes else '')}".rstrip()


@dataclass(frozen=True, slots=True)
class Round:
    number: int
    kind: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What the status of the job said at one time.

    Args:
        running: the pods whose workers run in the newest round, by rank.
        rounds: the rounds that it remembers.
    """

    number: int
    restarts: int
    running: tuple[str, ...]
    rounds: tuple[Round, ...]

    def since(self, before: Told) -> list[Round]:
        """The rounds that came after those known before."""
        return [each for each in self.rounds if each.number > before.number]


def told(status: dict[str, Any], rounds: list[dict[str, Any]]) -> Told:
    """Read a status, and the rounds of the job so far."""
    rendezvous = status.get("rendezvous") or {}
    number = rendezvous.get("round", 0) if rendezvous.get("state") == "final" else 0
    running = [
        member["pod"]
        for member in status.get("members") or ()
        if member["state"] == "running" and member["round"] == number
    ]
    complete = number and len(running) == rendezvous.get("nodes")
    return Told(
        number,
        status.get("restarts", 0),
        tuple(running if complete else ()),
        tuple(Round(each["round"], each["cause"], tuple(each["members"])) for each in rounds),
    )


def disturbance(chance: random.Random, wanted: int, now: Told) -> Disturbance:
    """The next fault, on any of the pods that run."""
    kind = chance.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    if kind is Kind.SCALE:
        others = [nodes for nodes in range(LEAST, MOST + 1) if nodes != wanted]
        return Disturbance(kind, nodes=chance.choice(others))
    if kind is Kind.KILL_ETCD:
        return Disturbance(kind)
    return Disturbance(kind, chance.choice(now.running))


def judged(done: Disturbance, before: Told, after: Told) -> str:
    """What the job said wrongly of what was done; empty when all of it is right."""
    rounds = after.since(before)
    charged = after.restarts - before.restarts
    if charged != (done.kind is Kind.KILL_WORKER):
        return f"restarts went from {before.restarts} to {after.restarts}"
    if done.kind in UNNOTICED:
        return f"there were rounds: {', '.join(each.kind for each in rounds)}" if rounds else ""
    if not rounds:
        return "there was no round"
    first, *later = rounds
    expected = _causes(done, len(before.running))
    if first.kind not in expected:
        return f"the cause was {first.kind}"
    if done.pod and first.members and first.members != (done.pod,):
        return f"{', '.join(first.members)} was named"
    if strange := [each.kind for each in later if each.kind != "join"]:
        return f"then came {', '.join(strange)}"
    return ""


def _causes(done: Disturbance, nodes: int) -> tuple[str, ...]:
    match done.kind:
        case Kind.KILL_WORKER:
            return ("failure",)
        case Kind.KILL_NODE:
            return ("loss",)
        case Kind.SCALE if done.nodes > nodes:
            return ("join",)
        case _:
            return ("leave",)
