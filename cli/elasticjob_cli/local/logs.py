"""Reading what the pods and workers of a local job wrote.

`<logs>/<pod>/trainer.log` is a container's output, as `kubectl logs` would show it;
`<logs>/<pod>/workers/…/round_<n>/<local rank>/{stdout,stderr}.log` is what each worker wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput
from elasticjob_rendezvous.core.roster import natural_order

TRAINER = "trainer.log"
AGENT = "agent.log"
WORKERS = "workers"
CHUNK = 1 << 20


class Tail:
    """The lines that a growing file gains; it may not exist yet, and may be rotated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._inode = 0
        self._rest = b""

    def lines(self) -> Iterator[str]:
        """Every whole line since the last call."""
        try:
            with self.path.open("rb") as file:
                status = self.path.stat()
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._inode, self._offset = status.st_ino, 0
                file.seek(self._offset)
                while chunk := file.read(CHUNK):
                    self._offset += len(chunk)
                    *whole, self._rest = (self._rest + chunk).split(b"\n")
                    yield from (line.decode(errors="replace") for line in whole)
        except FileNotFoundError:
            return

    def remainder(self) -> Iterator[str]:
        """The rest without an end of line, when nothing more will come."""
        if self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""


def pods(logs: Path) -> list[str]:
    """The pods that wrote anything, in natural order."""
    return sorted((path.parent.name for path in logs.glob(f"*/{TRAINER}")), key=natural_order)


def seat_of(rounds: list[dict[str, Any]], rank: int, number: int | None) -> dict[str, Any]:
    """Where a rank ran: its pod, round and local rank; by default in the last round it was in.

    Raises `BadInput` naming the ranks or rounds there are.
    """
    chosen = [item for item in rounds if number in (None, item["round"])]
    if not chosen:
        there = ", ".join(str(item["round"]) for item in rounds) or "none yet"
        raise BadInput(f"there is no round {number}; rounds: {there}")
    for item in reversed(chosen):
        for seat in item["seats"]:
            if seat["baseRank"] <= rank < seat["baseRank"] + seat["slots"]:
                local_rank = rank - seat["baseRank"]
                return {"pod": seat["pod"], "round": item["round"], "localRank": local_rank}
    most = max(item["worldSize"] for item in chosen) - 1
    raise BadInput(f"there is no rank {rank}; ranks are 0 to {most}")


def worker_logs(logs: Path, seat: dict[str, Any]) -> tuple[Path, Path]:
    """The files of one worker's standard output and error."""
    inside = f"round_{seat['round']}/{seat['localRank']}"
    found = sorted((logs / seat["pod"] / WORKERS).glob(f"**/{inside}"))
    folder = found[-1] if found else logs / seat["pod"] / WORKERS / inside
    return folder / "stdout.log", folder / "stderr.log"
