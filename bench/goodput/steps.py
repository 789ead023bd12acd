"""Steps recorded by the workers of a run, and the goodput of their number. No I/O but reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.peers.records import RECORD


@dataclass(frozen=True, slots=True)
class Step:
    """Completed step of one worker; `at` is on the machine's monotonic clock."""

    at: float
    number: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a run within its time.

    Args:
        distinct: number of different steps that were completed.
        executed: number of steps that were executed, with those that were repeated.
        full_share: mean of the workers in a distinct step, as a share of the full gang: a system
            that continues with fewer nodes processes fewer samples in a step.
        longest_pause: longest time in seconds without a completed step.
    """

    distinct: int
    executed: int
    full_share: float
    longest_pause: float


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of all workers, by time. An incomplete record at the end is left out."""
    found = []
    for path in folder.glob("*.steps"):
        content = path.read_bytes()
        whole = len(content) // RECORD.size * RECORD.size
        found += [Step(*fields) for fields in RECORD.iter_unpack(content[:whole])]
    return sorted(found, key=lambda step: step.at)


def work(steps: Iterable[Step], start: float, end: float, nodes: int) -> Work:
    """Return the work between two times. A step is executed once by rank 0 of each gang."""
    within = [step for step in steps if start < step.at <= end]
    worlds: dict[int, int] = {}
    for step in within:
        worlds[step.number] = max(worlds.get(step.number, 0), step.world)
    times = [start, *(step.at for step in within), end]
    return Work(
        distinct=len(worlds),
        executed=max(len(worlds), sum(step.rank == 0 for step in within)),
        full_share=sum(worlds.values()) / (nodes * len(worlds)) if worlds else 0.0,
        longest_pause=max(after - before for before, after in pairwise(times)),
    )


def curve(steps: Iterable[Step], start: float, end: float, points: int) -> list[tuple[float, int]]:
    """Return the number of distinct steps over the seconds since the start, at most `points`."""
    seen: set[int] = set()
    found = [(0.0, 0)]
    for step in steps:
        if start < step.at <= end and step.number not in seen:
            seen.add(step.number)
            found.append((round(step.at - start, 3), len(seen)))
    chosen: Sequence[tuple[float, int]] = found[:: max(1, len(found) // points)]
    return [*chosen, (round(end - start, 3), len(seen))]


def fault_times(length: float, interval: float) -> list[float]:
    """Return the seconds of the faults: one in the middle of each full interval; 0 for none."""
    if not interval:
        return []
    return [interval * (number + 0.5) for number in range(int(length // interval))]
