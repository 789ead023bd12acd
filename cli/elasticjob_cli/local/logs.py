"""Reader of the logs of a local job's pods and workers.

`<logs>/<pod>/trainer.log` is a container's output, as `kubectl logs --timestamps` would show it;
`<logs>/<pod>/workers/…/round_<n>/<local rank>/{stdout,stderr}.log` is each worker's output.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput
from elasticjob_cli.log_lines import without_time
from elasticjob_rendezvous.protocol.records.roster import natural_order

TRAINER = "trainer.log"
AGENT = "agent.log"
WORKERS = "workers"
CHUNK = 1 << 20
LONGEST_LINE = 1000
MISSING = "[elasticjob] lines may be missing here: only part of a large output is kept"


class Tail:
    """Reader of the lines appended to a file, which may not exist yet and may be rotated.

    Rotated files beside it, `.head` or `.1`, are read first. A line marks places where a part may
    be missing. The file stays open between reads, so that it is read to its end after a rename and
    its inode is not reused meanwhile.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._older = path.with_name(path.name + ".1")
        self._head = path.with_name(path.name + ".head")
        self._fd = -1
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Yield every complete line since the last call."""
        if self._fd < 0:
            yield from self._read_next(self._head)
            yield from self._read_older()
        elif (inode := _inode(self.path)) is None or inode == os.fstat(self._fd).st_ino:
            yield from self._read()
            return
        else:
            yield from self._read()
            mine = os.fstat(self._fd).st_ino
            if mine != _inode(self._older):
                yield from self._read_older(always=mine != _inode(self._head))
        yield from self._read_next(self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_older(self, always: bool = False) -> Iterator[str]:
        """Read the rotated file `.1`; earlier ones may have been overwritten."""
        if always or self._older.exists():
            yield from self.remainder()
            yield MISSING
        yield from self._read_next(self._older)

    def _read_next(self, path: Path) -> Iterator[str]:
        """Switch to this file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.close()
            self._fd = fd
            yield from self._read()

    def _read(self) -> Iterator[str]:
        """Continue reading the open file."""
        if os.fstat(self._fd).st_size < os.lseek(self._fd, 0, os.SEEK_CUR):
            os.lseek(self._fd, 0, os.SEEK_SET)  # it was truncated
            self._rest = b""
        while chunk := os.read(self._fd, CHUNK):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)

    def remainder(self) -> Iterator[str]:
        """Yield the last line without a line ending, once the file is complete."""
        if self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def last_line(*files: Path) -> str:
    """Return `: ` and the last line of the first file that has one; empty without any."""
    for file in files:
        tail = Tail(file)
        lines = [line for line in (*tail.lines(), *tail.remainder()) if line.strip()]
        tail.close()
        if lines:
            last = without_time(lines[-1]) if file.name == TRAINER else lines[-1]
            return f": {last.strip()[:LONGEST_LINE]}"
    return ""


def pods_with_output(logs: Path) -> list[str]:
    """Return the names of pods with output, in natural order."""
    return sorted((path.parent.name for path in logs.glob(f"*/{TRAINER}")), key=natural_order)


def find_worker(rounds: list[dict[str, Any]], rank: int, number: int | None) -> dict[str, Any]:
    """Return a rank's pod, round and local rank; by default in its last round.

    Raises `BadInput` that lists the existing ranks or rounds.
    """
    if not rounds:
        raise BadInput("there are no ranks yet: the job has not had a round")
    chosen = [item for item in rounds if number in (None, item["round"])]
    if not chosen:
        there = ", ".join(str(item["round"]) for item in rounds)
        raise BadInput(f"there is no round {number}; rounds: {there}")
    for item in reversed(chosen):
        for assignment in item["seats"]:
            if assignment["baseRank"] <= rank < assignment["baseRank"] + assignment["slots"]:
                local_rank = rank - assignment["baseRank"]
                return {"pod": assignment["pod"], "round": item["round"], "localRank": local_rank}
    most = max(item["worldSize"] for item in chosen) - 1
    raise BadInput(f"there is no rank {rank}; ranks are 0 to {most}")


def worker_logs(logs: Path, assignment: dict[str, Any]) -> tuple[Path, Path]:
    """Return the files of one worker's standard output and error."""
    inside = f"round_{assignment['round']}/{assignment['localRank']}"
    found = sorted((logs / assignment["pod"] / WORKERS).glob(f"**/{inside}"))
    folder = found[-1] if found else logs / assignment["pod"] / WORKERS / inside
    return folder / "stdout.log", folder / "stderr.log"


def command_logs(logs: Path, pod: str) -> tuple[Path, ...]:
    """Return the files of the newest output of a pod's command that starts the workers itself."""
    found = sorted((logs / pod / WORKERS).glob("*/command"))
    return tuple(folder / name for folder in found[-1:] for name in ("stdout.log", "stderr.log"))
