"""Events written by a gang's workers: parsing, and detection of a complete world."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path


class MalformedEvent(Exception):
    """Line that is not a valid worker event; the text names the file."""


@dataclass(frozen=True, slots=True)
class FirstAllReduce:
    """Completion of a worker's first all-reduce; `at` is on the machine's monotonic clock."""

    at: float
    pid: int
    member: int  # number of its agent, in order of start
    rank: int
    world: int


def read_events(folder: Path) -> list[FirstAllReduce]:
    """Return every worker's events so far, by time."""
    events = [
        _parsed(line, path)
        for path in folder.glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted(events, key=lambda event: event.at)


def latest(events: Iterable[FirstAllReduce]) -> dict[int, FirstAllReduce]:
    """Return the last event of each member."""
    return {event.member: event for event in sorted(events, key=lambda event: event.at)}


def recovered_at(
    events: Iterable[FirstAllReduce], since: float, members: Collection[int]
) -> float | None:
    """Return the time when exactly these members had formed a new world; None if they have not.

    Each needs an event after the fault, and the latest events must form one world: of the right
    size, with ranks that are a bijection. An intermediate world does not count.
    """
    last = latest(event for event in events if event.at > since)
    found = [last[member] for member in members if member in last]
    if len(found) < len(members) or any(event.world != len(members) for event in found):
        return None
    if sorted(event.rank for event in found) != list(range(len(members))):
        return None
    return max(event.at for event in found)


def last_step(folder: Path, pid: int) -> float | None:
    """Return the time of a worker's last all-reduce; None if it has recorded none."""
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
