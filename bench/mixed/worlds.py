"""What the workers of a mixed gang wrote, grouped into process groups and judged."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STEPS_ON = 3
"""So many steps beyond the checkpoint show that a world trains."""


class Disagreement(Exception):
    """Members of one process group were told different things; the text says which."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker was told, and where it began; `at` is on the machine's monotonic clock."""

    token: str
    at: float
    pid: int
    member: str
    rank: int
    world: int
    master: str
    loaded: int


@dataclass(frozen=True, slots=True)
class World:
    """One process group, as far as its workers have come."""

    token: str
    workers: tuple[Told, ...]

    @property
    def at(self) -> float:
        """When the last of its workers had found all others."""
        return max(worker.at for worker in self.workers)

    @property
    def members(self) -> set[str]:
        return {worker.member for worker in self.workers}

    @property
    def whole(self) -> bool:
        return len(self.workers) == self.workers[0].world

    def check(self) -> None:
        """Raises Disagreement: sizes, ranks, masters, or the step that they began with."""
        for name in ("world", "master", "loaded"):
            if len({getattr(worker, name) for worker in self.workers}) > 1:
                raise Disagreement(f"{name} differs among {self.workers}")
        ranks = [worker.rank for worker in self.workers]
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.workers[0].world)):
            raise Disagreement(f"ranks are no ranks of one world: {self.workers}")


def worlds(folder: Path) -> list[World]:
    """All process groups that ever came about, the newest last. Raises Disagreement."""
    found: dict[str, list[Told]] = defaultdict(list)
    for path in folder.glob("world-*.json"):
        told = Told(**json.loads(path.read_text()))
        found[told.token].append(told)
    made = [World(token, tuple(workers)) for token, workers in found.items()]
    for world in made:
        world.check()
    return sorted(made, key=lambda world: world.at)


def steps(folder: Path, pid: int) -> int:
    """The last step of a worker; 0 before the first."""
    try:
        return int((folder / f"step-{pid}").read_text())
    except FileNotFoundError:
        return 0


def checkpoint(folder: Path) -> int:
    """The step of the checkpoint; 0 without one."""
    try:
        return int((folder / "checkpoint").read_text())
    except FileNotFoundError:
        return 0


def training(folder: Path, members: Collection[str], since: float) -> World | None:
    """The world since then that is exactly these members, every one of them some steps on."""
    for world in reversed(worlds(folder)):
        if world.at <= since:
            return None
        on = all(steps(folder, each.pid) >= each.loaded + STEPS_ON for each in world.workers)
        if world.whole and world.members == set(members) and on:
            return world
    return None
