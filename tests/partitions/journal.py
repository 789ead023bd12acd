"""Workers' write logs: first and last write by round, and overlaps between rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_TAIL_BYTES = 256


@dataclass(frozen=True, slots=True)
class Writer:
    """Worker with its start and its last write, in seconds of the machine's monotonic clock."""

    round: int
    rank: int
    node: str
    pid: int
    first: float
    last: float

    def __str__(self) -> str:
        return f"rank {self.rank} of round {self.round} on {self.node} (pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Pair in which an older round's worker wrote after a later round's worker had started."""

    older: Writer
    newer: Writer

    @property
    def seconds(self) -> float:
        return self.older.last - self.newer.first

    @property
    def both_rank_0(self) -> bool:
        return self.older.rank == self.newer.rank == 0


class Journal:
    """Folder in which each worker keeps one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._first: dict[str, float] = {}

    def writers(self) -> list[Writer]:
        """Return every worker that has written, earliest first."""
        found = (self._writer(path) for path in self.folder.glob("*-*-*-*"))
        return sorted((one for one in found if one), key=lambda one: one.first)

    def _writer(self, path: Path) -> Writer | None:
        with path.open("rb") as file:
            if path.name not in self._first:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return None
                self._first[path.name] = _seconds(line)
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            whole = file.read().rpartition(b"\n")[0]  # a killed worker's last line may be cut short
            last = _seconds(whole.rpartition(b"\n")[2])
        number, rank, node, pid = path.name.split("-")
        return Writer(int(number), int(rank), node, int(pid), self._first[path.name], last)

    def finish(self) -> None:
        """Tell all workers to end with success."""
        (self.folder / "finish").touch()


def _seconds(line: bytes) -> float:
    return int(line.split()[0]) / 1e9


def overlaps(writers: list[Writer]) -> list[Overlap]:
    """Return all overlapping pairs, the longest overlap first."""
    found = [
        Overlap(older, newer)
        for older in writers
        for newer in writers
        if older.round < newer.round and newer.first <= older.last
    ]
    return sorted(found, key=lambda one: one.seconds, reverse=True)


def writing(writers: list[Writer], seconds: float) -> list[Writer]:
    """Return the workers that wrote within the last seconds."""
    since = time.monotonic() - seconds
    return [one for one in writers if one.last >= since]
