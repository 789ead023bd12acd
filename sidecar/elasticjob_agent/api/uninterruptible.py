"""Workers that are stuck in the kernel, in uninterruptible sleep: no signal ends them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from elasticjob_agent.settings import uninterruptible_seconds

log = logging.getLogger("elasticjob.agent")

_UNINTERRUPTIBLE = "D"


class StuckWorkers(Exception):
    """A worker slept uninterruptibly for longer than it may."""


def timeout_of(given: float | None) -> float:
    """Seconds that a worker may sleep so: as given, else as the variable says; 0 is for ever.

    As in torch, what is negative or no number is 0.
    """
    if given is not None:
        return max(0.0, float(given))
    try:
        return max(0.0, float(uninterruptible_seconds()))
    except ValueError:
        return 0.0


class Sleepers:
    """Since when each worker sleeps uninterruptibly, as far as was seen."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._since: dict[int, float] = {}

    def stuck(self, pids: Collection[int], now: float) -> list[int]:
        """Look at these processes; those that sleep so for too long. `now` is monotonic."""
        if self.timeout_seconds <= 0:
            return []
        asleep = {pid for pid in pids if _state(pid) == _UNINTERRUPTIBLE}
        self._since = {pid: self._since.get(pid, now) for pid in asleep}
        found = [pid for pid, at in self._since.items() if now - at >= self.timeout_seconds]
        for pid in found:
            log.error("worker %d is in uninterruptible sleep for %g s", pid, now - self._since[pid])
        return found


def _state(pid: int) -> str:
    """The letter of a process's state; empty where there is none any more."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
