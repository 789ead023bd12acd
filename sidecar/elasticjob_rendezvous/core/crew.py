"""Worker group of this node, from the reports of its agent. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.local import Local, Workers
from elasticjob_rendezvous.core.records import Round


@dataclass(slots=True)
class Crew:
    """State of the worker group.

    `local` is the agent's last report; workers that it was ordered to start count as starting.
    """

    local: Local = field(default_factory=Local)
    _promised: int = 0
    _told: bool = False
    _found_round: int = 0
    _over_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if no worker runs here."""
        return self.local.workers is Workers.NONE

    def tell(self, local: Local) -> None:
        """Take in a report of the agent; its first one shows workers that it found at its start."""
        if not self._told and local.workers is not Workers.NONE:
            self._found_round = local.round
        self._told = True
        self.local = self._with_promise(local)

    def promise(self, number: int) -> None:
        """Count workers of round `number` as starting from now on, whatever the last report was."""
        self._promised = max(self._promised, number)
        self.local = self._with_promise(self.local)

    def _with_promise(self, local: Local) -> Local:
        if self._promised <= local.round or local.workers is not Workers.NONE:
            return local
        return replace(
            local, workers=Workers.STARTING, round=self._promised, failure=None, done=False
        )

    def is_late(self, at: Round | None, grace_seconds: float, now: float, alarm: Alarm) -> bool:
        """Return True if the workers should have stopped long ago, given the current round `at`.

        That is so for workers that were running at the agent's start although their round was
        over, and once the grace period has passed since this member saw their round end.
        """
        number = self.local.round
        if at is None or self.idle:
            return False
        if at.number <= number:
            self._found_round = 0
            self._over_since = None
            return False
        if self._found_round == number:
            return True
        if self._over_since is None:
            self._over_since = now
        return alarm.passed(self._over_since + grace_seconds, now)
