"""Plan of a mixed gang's changes: a list determined by a seed that never empties a side."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class Side(StrEnum):
    OURS = "ours"
    THEIRS = "theirs"


class Kind(StrEnum):
    JOIN = "join"  # one more node
    DRAIN = "drain"  # SIGTERM to a node's agent
    NODE_KILLED = "node-killed"  # kill -9 of a node's agent and worker
    AGENT_KILLED = "agent-killed"  # kill -9 of a node's agent only: torchrun's worker continues
    WORKER_KILLED = "worker-killed"  # kill -9 of a worker; the node stays


LOSSES = (Kind.DRAIN, Kind.NODE_KILLED, Kind.AGENT_KILLED)


@dataclass(frozen=True, slots=True)
class Change:
    """One change on one side."""

    kind: Kind
    side: Side

    def __str__(self) -> str:
        return f"{self.kind} {self.side}"


@dataclass(frozen=True, slots=True)
class Mix:
    """Numbers of nodes of each side; changes move a side by at most one node from them."""

    ours: int
    theirs: int

    def __str__(self) -> str:
        return f"{self.ours}:{self.theirs}"

    def of(self, side: Side) -> int:
        return self.ours if side is Side.OURS else self.theirs


def changes(mix: Mix, count: int, seed: int) -> list[Change]:
    """Return `count` changes, with each kind on each side about equally often.

    A side is never emptied, and never more than one node off its initial number.
    """
    rolls = random.Random(f"{mix} {seed}")
    here = {side: mix.of(side) for side in Side}
    dealt: Counter[Change] = Counter()
    plan: list[Change] = []
    while len(plan) < count:
        possible = [
            Change(kind, side)
            for side in Side
            for kind in Kind
            if _allowed(kind, here[side], mix.of(side))
        ]
        least = min(dealt[change] for change in possible)
        change = rolls.choice([change for change in possible if dealt[change] == least])
        dealt[change] += 1
        plan.append(change)
        here[change.side] += (change.kind is Kind.JOIN) - (change.kind in LOSSES)
    return plan


def _allowed(kind: Kind, here: int, base: int) -> bool:
    match kind:
        case Kind.JOIN:
            return here <= base
        case Kind.DRAIN | Kind.NODE_KILLED | Kind.AGENT_KILLED:
            return here > max(1, base - 1)
        case Kind.WORKER_KILLED:
            return True
