"""Storage-independent view of a job's rendezvous, for the plan and the status.

Every source (etcd records, agents' reports, the job's status) is mapped to this view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from elasticjob_operator.model.enums import RendezvousState
from elasticjob_rendezvous.core.costs import History
from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.records import Cause, Counts, Member, MemberState, Outcome


class StopReason(StrEnum):
    """Reason for which the plan closes a rendezvous."""

    SUSPENDED = "Suspended"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DELETED = "Deleted"
    LAUNCH_FAILED = "LaunchFailed"


@dataclass(frozen=True, slots=True)
class Offence:
    """Failure caused by a machine at a UTC time. `what` is a failure class, such as `NodeLost`."""

    node: str
    at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class RendezvousView:
    """Snapshot of the rendezvous. The default is a rendezvous without members.

    Args:
        state: UNKNOWN if the rendezvous cannot be read; the plan then writes nothing to it.
        round: number of the round; 0 before the first.
        nodes, world_size, master: properties of the round; master is the pod of rank 0.
        waiting: number of members that wait for the next round, for `waiting_reason`.
        since: UTC time of the last transition.
        members: members, in any order.
        ranks: group ranks in the current round by id of the member.
        rounds: cost of any number of rounds, oldest first.
        failures_charged: number of failures charged to the budget.
        interruptions: number of rounds ended for uncharged reasons.
        first_failure: culprit of the latest failure: the first worker that failed.
        offences: failures caused by machines in the rounds still on record, oldest first.
        outcome: set if the state is closed; its `reason` is a `StopReason`, or empty.
    """

    state: RendezvousState = RendezvousState.JOINABLE
    round: int = 0
    nodes: int = 0
    waiting: int = 0
    waiting_reason: str = ""
    world_size: int = 0
    master: str | None = None
    cause: Cause | None = None
    since: datetime | None = None
    members: tuple[Member, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    rounds: tuple[History, ...] = ()
    failures_charged: int = 0
    interruptions: Counts = field(default_factory=Counts)
    offences: tuple[Offence, ...] = ()
    first_failure: Failure | None = None
    outcome: Outcome | None = None

    @property
    def readable(self) -> bool:
        return self.state is not RendezvousState.UNKNOWN

    @property
    def suspended(self) -> bool:
        """True if it was closed by a suspension: a later incarnation may continue."""
        return self.outcome is not None and self.outcome.reason == StopReason.SUSPENDED

    @property
    def ended(self) -> bool:
        """True if it was closed for any other reason: the job has ended."""
        return self.outcome is not None and not self.suspended

    @property
    def finishing(self) -> bool:
        """True if a member is done: new members can no longer join a round."""
        return any(member.state is MemberState.DONE for member in self.members)

    def rank_of(self, pod: str) -> int | None:
        """Return the pod's group rank in the current round, or None."""
        return next((self.ranks.get(one.id) for one in self.members if one.name == pod), None)


NOBODY_YET = RendezvousView()
"""View before the first member joins."""
UNREADABLE = RendezvousView(state=RendezvousState.UNKNOWN)
"""View while the rendezvous cannot be read."""
