"""The rendezvous of a job as the plan and the status see it, free of how it is stored.

Whoever reads the rendezvous (etcd's records, an agent's own view) maps it into this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from elasticjob_operator.model.enums import RendezvousState


class OutcomeKind(StrEnum):
    """How the rendezvous was closed."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timedOut"
    STOPPED = "stopped"  # from outside; the detail is a StopReason when the plan did it


class StopReason(StrEnum):
    """Why the plan closes a rendezvous. Written as the detail of the outcome."""

    SUSPENDED = "Suspended"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DELETED = "Deleted"
    LAUNCH_FAILED = "LaunchFailed"


@dataclass(frozen=True, slots=True)
class OutcomeView:
    """The end of the rendezvous."""

    kind: OutcomeKind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CauseView:
    """Why a round began. `kind` is the rendezvous' own word (start, join, loss, …)."""

    kind: str
    members: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class MemberView:
    """One member. `rank` is its place in the current round, None while it has none; `id` is the
    uid of its pod.

    `state` is what its agent says: waiting, running, stopping, leaving or done. `step` and
    `checkpoint_step` are what its script told, if it does, some seconds ago; `busy_ms` what a step
    takes it without its waiting for others, 0 where it does not tell.
    """

    pod: str
    state: str
    node: str | None = None
    rank: int | None = None
    round: int = 0
    id: str = ""
    step: int | None = None
    checkpoint_step: int | None = None
    busy_ms: int = 0
    start: str | None = None
    cold_reason: str | None = None


@dataclass(frozen=True, slots=True)
class RoundView:
    """One round, when it became final, and what it cost in milliseconds; None is unknown."""

    round: int
    cause: str
    nodes: int
    detect_ms: int | None = None
    stop_ms: int | None = None
    join_ms: int | None = None
    confirm_ms: int | None = None
    start_ms: int | None = None
    first_step_ms: int | None = None
    members: tuple[str, ...] = ()
    detail: str = ""
    final_at: datetime | None = None
    backoff_ms: int | None = None
    cold_nodes: int | None = None
    cold_reason: str | None = None


@dataclass(frozen=True, slots=True)
class FailureView:
    """The culprit of the latest failure: the first worker that failed."""

    round: int
    pod: str
    node: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    kind: str = ""
    message: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class OffenceView:
    """A machine did something to the job at a UTC time: a class of failure, or `NodeLost`."""

    node: str
    at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class InterruptionsView:
    """How many rounds ended for each reason that costs no restart."""

    losses: int = 0
    leaves: int = 0
    preemptions: int = 0
    joins: int = 0
    others: int = 0


@dataclass(frozen=True, slots=True)
class RendezvousView:
    """One look at the rendezvous. The default is one that nobody has entered yet.

    Args:
        state: UNKNOWN when it cannot be read; the plan then writes nothing to it.
        round: number of the round; 0 before the first.
        nodes, world_size, master: of the round; master is the pod of rank 0.
        waiting: members that wait for the next round; `waiting_reason` says why they must.
        since: UTC time of the last transition.
        members: in any order.
        rounds: oldest first; any number.
        failures_charged: failures charged to the budget.
        interruptions: what else ended rounds.
        offences: what machines did, of the rounds that are remembered, oldest first.
        outcome: set when the state is closed.
    """

    state: RendezvousState = RendezvousState.JOINABLE
    round: int = 0
    nodes: int = 0
    waiting: int = 0
    waiting_reason: str = ""
    world_size: int = 0
    master: str | None = None
    cause: CauseView | None = None
    since: datetime | None = None
    members: tuple[MemberView, ...] = ()
    rounds: tuple[RoundView, ...] = ()
    failures_charged: int = 0
    interruptions: InterruptionsView = InterruptionsView()
    offences: tuple[OffenceView, ...] = ()
    first_failure: FailureView | None = None
    outcome: OutcomeView | None = None

    @property
    def readable(self) -> bool:
        return self.state is not RendezvousState.UNKNOWN

    @property
    def suspended(self) -> bool:
        """Closed by a suspension: a later incarnation may go on."""
        return self.outcome is not None and self.outcome == OutcomeView(
            OutcomeKind.STOPPED, StopReason.SUSPENDED
        )

    @property
    def ended(self) -> bool:
        """Closed for good."""
        return self.outcome is not None and not self.suspended

    @property
    def finishing(self) -> bool:
        """A member is done: newcomers could not enter a round any more."""
        return any(member.state == "done" for member in self.members)

    def rank_of(self, pod: str) -> int | None:
        """The pod's place in the current round, or None."""
        return next((member.rank for member in self.members if member.pod == pod), None)


NOBODY_YET = RendezvousView()
"""The view before the first member came."""
UNREADABLE = RendezvousView(state=RendezvousState.UNKNOWN)
"""The view while the rendezvous cannot be read."""
