"""Our node's workers: what their agent tells of them, and what it can't tell yet. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.local import Local, Workers
from elasticjob_rendezvous.core.records import Round


@dataclass(slots=True)
class Crew:
    """`local` is what the agent told last; workers it was ordered to start count as starting."""

    local: Local = field(default_factory=Local)
    _promised: int = 0
    _told: bool = False
    _found_round: int = 0
    _over_since: float | None = None

    @property
    def idle(self) -> bool:
        """Whether no worker runs here."""
        return self.local.workers is Workers.NONE

    def tell(self, local: Local) -> None:
        """Take in what the agent says; its first word is of workers that it found."""
        if not self._told and local.workers is not Workers.NONE:
            self._found_round = local.round
        self._told = True
        self.local = self._with_promise(local)

    def promise(self, number: int) -> None:
        """Workers of round `number` may be started from now on, whatever the agent last said."""
        self._promised = max(self._promised, number)
        self.local = self._with_promise(self.local)

    def _with_promise(self, local: Local) -> Local:
        if self._promised <= local.round or local.workers is not Workers.NONE:
            return local
        return replace(
            local, workers=Workers.STARTING, round=self._promised, failure=None, done=False
        )

    def is_late(self, at: Round | None, grace_seconds: float, now: float, alarm: Alarm) -> bool:
        """Whether our workers should long have stopped, as the round stands (`at`).

        So it is when we found them running at our start though their round was over, and
        when the grace has passed since we saw it end.
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
