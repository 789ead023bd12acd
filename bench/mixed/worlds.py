"""Records written by a mixed gang's workers, grouped into process groups and checked."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

STEPS_ON = 3
"""Number of steps beyond the checkpoint that prove progress."""


class Disagreement(Exception):
    """Members of one process group got different settings; the text names them."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Settings and first step of a worker; `at` is on the machine's monotonic clock."""

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
    """One process group, with the workers that have joined so far."""

    token: str
    workers: tuple[WorkerReport, ...]

    @property
    def at(self) -> float:
        """Time when the last of its workers had found all others."""
        return max(worker.at for worker in self.workers)

    @property
    def members(self) -> set[str]:
        return {worker.member for worker in self.workers}

    @property
    def whole(self) -> bool:
        return len(self.workers) == self.workers[0].world

    def check(self) -> None:
        """Raise Disagreement if sizes, ranks, masters or first steps are inconsistent."""
        for name in ("world", "master", "loaded"):
            if len({getattr(worker, name) for worker in self.workers}) > 1:
                raise Disagreement(f"{name} differs among {self.workers}")
        ranks = [worker.rank for worker in self.workers]
        if len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.workers[0].world)):
            raise Disagreement(f"ranks are not those of one world: {self.workers}")


def worlds(folder: Path) -> list[World]:
    """Return all process groups ever formed, the newest last. Raises Disagreement."""
    found: dict[str, list[WorkerReport]] = defaultdict(list)
    for path in folder.glob("world-*.json"):
        report = WorkerReport(**json.loads(path.read_text()))
        found[report.token].append(report)
    made = [World(token, tuple(workers)) for token, workers in found.items()]
    for world in made:
        world.check()
    return sorted(made, key=lambda world: world.at)


def steps(folder: Path, pid: int) -> int:
    """Return the last step of a worker; 0 before the first."""
    try:
        return int((folder / f"step-{pid}").read_text())
    except FileNotFoundError:
        return 0


def checkpoint(folder: Path) -> int:
    """Return the step of the checkpoint; 0 without one."""
    try:
        return int((folder / "checkpoint").read_text())
    except FileNotFoundError:
        return 0


def training(folder: Path, members: Collection[str], since: float) -> World | None:
    """Return the newest world after `since` with exactly these members, all making progress."""
    for world in reversed(worlds(folder)):
        if world.at <= since:
            return None
        on = all(steps(folder, each.pid) >= each.loaded + STEPS_ON for each in world.workers)
        if world.whole and world.members == set(members) and on:
            return world
    return None
