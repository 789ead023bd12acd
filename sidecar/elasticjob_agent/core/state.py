"""State of the agent. Values only; the other core modules decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.worker_runtime import Hello, WorkerExited
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Left, Refused, Run
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Snapshots
from elasticjob_rendezvous.protocol.worker_group import STUCK_EXIT_CODE, Local


class ExitCode(IntEnum):
    """Exit code of the agent's process."""

    OK = 0  # the job succeeded, or this node left on request
    FAILED = 1  # the job failed, or this node's launcher was lost
    USAGE = 2  # bad options, settings or files
    RENDEZVOUS = 3  # refused, closed before this agent joined, or the join timed out
    STOPPED = 4  # the job was stopped from outside
    STUCK = STUCK_EXIT_CODE  # workers of this node wait in the kernel and cannot be ended
    INTERNAL = 70  # a bug in the agent


LEFTOVER_SECONDS = 0.2
"""Grace period for leftover processes of the workers to exit by themselves."""

LEFT_CODE = 143
"""Exit code of the launcher of a node that left: ended on request, not succeeded."""


class StopCause(StrEnum):
    """Reason for stopping a round's workers."""

    FAILURE = "failure"  # one of them failed: the rest cannot continue
    PEER_FAILURE = "peerFailure"  # kill directive: another node's worker failed
    URGENT = "urgent"  # kill directive for another reason, such as a lost node
    PLANNED = "planned"  # stop directive with a grace period
    HANG = "hang"  # no progress: the workers dump their stacks first
    LEAVE = "leave"  # this node leaves
    LEFTOVERS = "leftovers"  # all workers exited, some of their child processes did not
    END = "end"  # the job is over


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Latest stop order for a worker group. A later order may shorten the grace, not extend it.

    Attributes:
        copies: True if the workers make stop copies before they end.
        ends_step: True if the workers first finish their step, so that those of other nodes can
            finish theirs.
    """

    cause: StopCause
    grace_seconds: float
    copies: bool = True
    ends_step: bool = True

    @property
    def dump(self) -> bool:
        """True if workers dump their stacks before they end."""
        return self.cause is StopCause.HANG


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """Exit of a worker, with the cause of the stop in progress when the exit was reported."""

    exit: WorkerExited
    during: StopCause | None = None


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """Checkpoint request to a worker group.

    Args:
        point: save point at which all ranks save; 0 until the ranks have agreed on one.
        before: the workers' progress at the time of the request, then of their answers.
        passed: highest save point that any worker has passed; -1 until the workers answer.
    """

    point: int
    before: Mapping[int, WorkerProgress]
    passed: int = -1


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Worker group: the workers of one round on this node, from the start order on.

    Args:
        round: round number.
        slots: number of workers.
        base_rank: rank of local rank 0; None if an earlier agent started the workers and left
            no record of their ranks.
        began: time of the start order, monotonic seconds.
        started: True once the worker runtime has reported the start.
        start_ms: duration of the start.
        cold_reason: reason for a cold start; empty if the workers were forked.
        exits: worker exits in order of arrival.
        reports: contents of the error files found, by local rank.
        order: the stop order in effect, if any.
        failure: the first failure in the group.
        succeeded: True once the workers of a node's command succeeded; the command continues.
        ended_at: exit time of the last worker, monotonic seconds.
        empty: True once no process of the group is left.
        progress: latest progress report of each worker that has reported, by local rank.
        first_step_ms: time from the start to the first step of the slowest worker; 0 if unknown.
        resumed_at: time at which all workers had saved a first snapshot, or could have, monotonic
            seconds; None before.
        advanced_at: time of the last report with new progress, monotonic seconds.
        busy_seconds: smoothed time per step excluding waits for peers, by local rank, for
            workers that report it.
        request: the checkpoint request, if any.
        cut_off: True if the worker runtime ended the workers without an order.
    """

    round: int
    slots: int
    base_rank: int | None
    began: float
    started: bool = False
    start_ms: int = 0
    cold_reason: str = ""
    exits: tuple[WorkerEnded, ...] = ()
    reports: Mapping[int, bytes] = field(default_factory=dict)
    order: StopOrder | None = None
    failure: Failure | None = None
    succeeded: bool = False
    ended_at: float | None = None
    empty: bool = False
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)
    first_step_ms: int = 0
    resumed_at: float | None = None
    advanced_at: float | None = None
    busy_seconds: Mapping[int, float] = field(default_factory=dict)
    request: CheckpointRequest | None = None
    cut_off: bool = False

    @property
    def leftovers_at(self) -> float | None:
        """Time at which to stop processes that outlive all workers; None if not applicable."""
        if self.ended_at is None or self.empty or self.order is not None:
            return None
        return self.ended_at + LEFTOVER_SECONDS

    @property
    def all_ended(self) -> bool:
        return len({ended.exit.local_rank for ended in self.exits}) >= self.slots

    @property
    def done(self) -> bool:
        """True if every worker succeeded by itself and no process is left.

        An exit code of 0 after a stop or save request does not count as success.
        """
        return self._succeeded and not self._reached_save_point

    @property
    def saved_and_exited(self) -> bool:
        """True if every worker exited with 0 after a save request."""
        return self._succeeded and self._reached_save_point

    @property
    def _succeeded(self) -> bool:
        return (
            self.empty
            and self.all_ended
            and self.failure is None
            and all(ended.exit.exit_code == 0 and ended.during is None for ended in self.exits)
        )

    @property
    def _reached_save_point(self) -> bool:
        """True if a worker reached the agreed save point.

        A worker whose progress has no save points (text form, checkpoint file) counts from the
        request on.
        """
        request = self.request
        return request is not None and any(
            progress.is_asked and (progress.points >= request.point > 0 or progress.points == 0)
            for progress in self.progress.values()
        )


@dataclass(frozen=True, slots=True)
class ReportedProgress:
    """Training progress last reported to the rendezvous; `at` is monotonic seconds."""

    round: int
    step: int
    checkpoint_step: int
    at: float
    busy_ms: int = 0
    snapshots: Snapshots | None = None
    stepped: bool = False
    """True once all workers have made their first step."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Constants of an agent's lifetime, from its first `Hello` on.

    Args:
        member, name, node: identity of this agent, for failure records.
        slots: number of workers to run; 0 until the worker runtime has counted them.
        stop_grace_seconds: grace period for workers when this node leaves.
        run_id: the job's ID, for messages.
        warm_start: fork workers from a preloaded interpreter where possible.
        hang_seconds: time without progress after which workers that report steps count as
            hanging; 0 disables the check.
    """

    member: str
    name: str
    node: str
    slots: int
    stop_grace_seconds: float
    run_id: str
    warm_start: bool = False
    hang_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """Final result of the agent: its exit code, the launcher's exit code, and a message."""

    code: ExitCode
    launcher_code: int
    message: str


@dataclass(frozen=True, slots=True)
class State:
    """Complete state of the agent.

    Args:
        directive: latest directive from the rendezvous.
        hello: latest `Hello` of the worker runtime; None before the first connection.
        gone: reason for the permanent loss of the worker runtime; empty otherwise.
        stuck: description of workers that the kernel does not end; empty otherwise.
        group: worker group of the last round that ran here, running or not.
        ran: highest earlier round in which a worker ran here.
        past: round and last step of the last group before `group` that reported a step.
        past_cut_off: round of the last group before `group` that was cut off; 0 without one.
        past_resumed: True if the workers of a group before `group` had saved snapshots here.
        port: port held for the next round; 0 before one is held.
        served: True if a store already listens at `port`.
        prepare_by: deadline up to which this node waits for its preloaded interpreter before it
            takes part; None if it does not wait.
        leaving: reason for which this node leaves; empty if it stays.
        leaving_at: start of the leave, monotonic seconds.
        is_urgent: True after a second leave request: no more grace.
        leave_by, release_by: monotonic deadlines for leaving without confirmation and for the
            launcher's exit.
        ending: the final result once decided; the worker runtime has been released.
        reported: the last `Local` reported to the rendezvous.
        reported_progress: the training progress in `reported`; see `core.reports`.
        over: True once nothing more follows.
    """

    facts: Facts
    directive: Directive | None = None
    hello: Hello | None = None
    gone: str = ""
    stuck: str = ""
    group: WorkerGroup | None = None
    ran: int = 0
    past: tuple[int, int] = (0, -1)
    past_cut_off: int = 0
    past_resumed: bool = False
    port: int = 0
    served: bool = False
    prepare_by: float | None = None
    leaving: str = ""
    leaving_at: float | None = None
    is_urgent: bool = False
    leave_by: float | None = None
    release_by: float | None = None
    ending: Ending | None = None
    reported: Local | None = None
    reported_progress: ReportedProgress | None = None
    over: bool = False

    @property
    def round(self) -> int:
        """Highest round in which a worker ran here or is about to start."""
        return self.ran if self.group is None else max(self.ran, self.group.round)

    @property
    def ended_progress(self) -> tuple[int, int]:
        """Round and last step of the last group that has ended and had reported a step."""
        group = self.group
        if group is None or self.busy:
            return self.past
        step = max((worker.step for worker in group.progress.values()), default=-1)
        return (group.round, step) if step >= 0 else self.past

    @property
    def cut_off_round(self) -> int:
        """Round of the last group that has ended and was cut off, 0 without one."""
        group = self.group
        if group is None or self.busy or not group.cut_off:
            return self.past_cut_off
        return group.round

    @property
    def saved_workers_until(self) -> float | None:
        """Time until which workers that exited after the requested save count as running.

        Their peers may still be saving, and the end of the round follows. None if there are no
        such workers.
        """
        group, directive = self.group, self.directive
        if (
            group is None
            or not group.saved_and_exited
            or group.ended_at is None
            or self.gone
            or self.is_urgent
        ):
            return None
        if not isinstance(directive, Run) or directive.save is None:
            return None
        same = directive.roster.number == group.round
        return group.ended_at + directive.save.seconds if same else None

    @property
    def busy(self) -> bool:
        """True if processes of a round exist, may exist or count as existing."""
        return self.group is not None and (
            not self.group.empty or self.saved_workers_until is not None
        )

    @property
    def may_leave(self) -> bool:
        """True if a leave request has an effect; False once the job or agent is ending anyway."""
        over = isinstance(self.directive, Finish | Left | Refused)
        return not (over or self.gone or self.ending is not None)
