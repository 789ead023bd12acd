"""Worker group of this node, and the reports of its agent. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Restore, Round, Snapshots

STUCK_EXIT_CODE = 5
"""Exit code of an agent that gave up workers in an uninterruptible wait: its pod cannot end."""
STUCK_MESSAGE = "its workers cannot be ended"
"""Message for such a pod if its agent's own cannot be read."""


class Workers(StrEnum):
    NONE = "none"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Local:
    """State of this node as the agent sees it now.

    Args:
        ready: workers could be started (the launcher has connected).
        workers: state of the workers; `round` is their round, and with `NONE` the highest round of
            which a worker ever ran here.
        failure: the first failure of `round`, if it failed.
        done: every worker of `round` ended with success.
        leaving: reason for the announced leave of this node; empty when it stays.
        master_port: a port held for the next round, fresh after each round.
        master_served: a store for the workers listens there already.
        start_ms: duration of the start of the workers of `round`.
        first_step_ms: duration from there until all of them reached their first step; 0 while
            unknown.
        step: the last step that they reported, updated now and then; -1 before the first.
        checkpoint_step: the last step that a checkpoint of theirs contains; -1 for none.
        busy_ms, ended_round, ended_step, cut_off_round: see `members.Member`.
        live_until: deadline of the workers that this agent found, on the machine's monotonic
            clock; None if there were none, or their launcher has no deadline.
        saves, keeps, restore, passed, saved, completed, save_error, cold, lost_steps, lost_ms,
            lost_reason, snapshots: see `members.Member`.
    """

    ready: bool = False
    workers: Workers = Workers.NONE
    round: int = 0
    failure: Failure | None = None
    done: bool = False
    leaving: str = ""
    master_port: int = 0
    start_ms: int = 0
    first_step_ms: int = 0
    step: int = -1
    checkpoint_step: int = -1
    master_served: bool = False
    busy_ms: int = 0
    saves: bool = False
    keeps: bool = False
    restore: Restore = Restore.NONE
    passed: int = -1
    saved: bool = False
    completed: bool = False
    save_error: str = ""
    cold: str | None = None
    live_until: float | None = None
    lost_steps: int = -1
    lost_ms: int = 0
    lost_reason: str = ""
    snapshots: Snapshots | None = None
    ended_round: int = 0
    ended_step: int = -1
    cut_off_round: int = 0


@dataclass(slots=True)
class WorkerGroup:
    """State of the worker group.

    `local` is the agent's last report; workers that it was ordered to start count as starting.
    """

    local: Local = field(default_factory=Local)
    _promised: int = 0
    _reported: bool = False
    _found_round: int = 0
    _over_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if no worker runs here."""
        return self.local.workers is Workers.NONE

    def report(self, local: Local) -> None:
        """Record a report of the agent; the first one shows the workers that it has taken over."""
        if not self._reported and local.workers is not Workers.NONE:
            self._found_round = local.round
        self._reported = True
        self.local = self._with_promise(local)

    def count_as_starting(self, number: int) -> None:
        """Count workers of round `number` as starting until the agent reports that round."""
        self._promised = max(self._promised, number)
        self.local = self._with_promise(self.local)

    def _with_promise(self, local: Local) -> Local:
        if self._promised <= local.round or local.workers is not Workers.NONE:
            return local
        return replace(
            local, workers=Workers.STARTING, round=self._promised, failure=None, done=False
        )

    def is_late(self, at: Round | None, grace_seconds: float, now: float, alarm: Alarm) -> bool:
        """Return True if the workers are overdue to stop, given the current round `at`.

        Those that ran at the agent's start are late at once if their round was over, others when
        the grace period has passed since this member saw their round end.
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
