"""Detector of workers stuck in uninterruptible sleep in the kernel, where no signal ends them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from elasticjob_agent.settings import uninterruptible_seconds

log = logging.getLogger("elasticjob.agent")

_UNINTERRUPTIBLE = "D"


class StuckWorkers(Exception):
    """A worker was in uninterruptible sleep for longer than the timeout."""


def timeout_of(given: float | None) -> float:
    """Return the timeout in seconds, as given or else from the environment; 0 is no timeout.

    As in torch, a negative value, or a variable that is no number, is 0.
    """
    if given is not None:
        return max(0.0, float(given))
    try:
        return max(0.0, float(uninterruptible_seconds()))
    except ValueError:
        return 0.0


class Sleepers:
    """Start times of the uninterruptible sleeps of workers, as observed."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._since: dict[int, float] = {}

    def stuck(self, pids: Collection[int], now: float) -> list[int]:
        """Check processes; return those beyond the timeout. `now` is in monotonic seconds."""
        if self.timeout_seconds <= 0:
            return []
        asleep = {pid for pid in pids if _state(pid) == _UNINTERRUPTIBLE}
        self._since = {pid: self._since.get(pid, now) for pid in asleep}
        found = [pid for pid, at in self._since.items() if now - at >= self.timeout_seconds]
        for pid in found:
            log.error("worker %d is in uninterruptible sleep for %g s", pid, now - self._since[pid])
        return found


def _state(pid: int) -> str:
    """Return the state letter of a process from /proc; empty if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]
