"""What the workers of a gang wrote, read and judged: who is in which world since when."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path


class MalformedEvent(Exception):
    """A line that no worker of the benchmark would write; the text names the file."""


@dataclass(frozen=True, slots=True)
class FirstAllReduce:
    """A worker's first all-reduce is complete; `at` is on the machine's monotonic clock."""

    at: float
    pid: int
    member: int  # the agent that it belongs to, by the order of their start
    rank: int
    world: int


def read_events(folder: Path) -> list[FirstAllReduce]:
    """Every worker's event so far, by time."""
    events = [
        _parsed(line, path)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(events, key=lambda event: event.at)


def latest(events: Iterable[FirstAllReduce]) -> dict[int, FirstAllReduce]:
    """The last event of each member."""
    return {event.member: event for event in sorted(events, key=lambda event: event.at)}


def recovered_at(
    events: Iterable[FirstAllReduce], since: float, members: Collection[int]
) -> float | None:
    """When the last of these members was in the new world, which is exactly theirs; else None.

    Each needs an event after the fault, and those must be one world: of the right size, with ranks
    that are a bijection. A world that was formed and then left again does not count.
    """
    last = latest(event for event in events if event.at > since)
    found = [last[member] for member in members if member in last]
    if len(found) < len(members) or any(event.world != len(members) for event in found):
        return None
    if sorted(event.rank for event in found) != list(range(len(members))):
        return None
    return max(event.at for event in found)


def last_step(folder: Path, pid: int) -> float | None:
    """When a worker last completed an all-reduce; None where it never said."""
    try:
        (at,) = struct.unpack("d", (folder / f"{pid}.last").read_bytes())
    except (FileNotFoundError, struct.error):
        return None
    return float(at)


def _parsed(line: str, path: Path) -> FirstAllReduce:
    try:
        content = json.loads(line)
        return FirstAllReduce(
            at=float(content["at"]),
            pid=int(content["pid"]),
            member=int(content["member"]),
            rank=int(content["rank"]),
            world=int(content["world"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedEvent(f"{path}: not an event of a worker: {line[:200]}") from error
