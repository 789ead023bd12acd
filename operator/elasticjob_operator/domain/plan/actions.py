"""Actions of a plan, and the reasons for which it deletes pods.

Actions are applied in order, up to the first one that fails.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from elasticjob_operator.domain.observed.etcd_records import outcome_record
from elasticjob_operator.domain.observed.state import StopReason
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


class DeleteReason(StrEnum):
    """Reason for deleting a pod. Surplus reasons are in the order in which pods are chosen."""

    SURPLUS_PENDING = "SurplusPending"
    SURPLUS_NODE_CORDONED = "SurplusNodeCordoned"
    SURPLUS_NODE_TAINTED = "SurplusNodeTainted"
    SURPLUS_NOT_IN_ROUND = "SurplusNotInRound"
    SURPLUS_NODE_AVOIDED = "SurplusNodeAvoided"
    SURPLUS_STRAGGLER = "SurplusStraggler"
    SURPLUS_HIGHEST_RANK = "SurplusHighestRank"
    MARKED = "Marked"  # chosen by an earlier plan that was not completed
    REPLACED = "Replaced"  # failed; newer failed pods are kept for their logs
    STUCK = "Stuck"  # its workers wait in the kernel and cannot be ended
    SUSPENDED = "Suspended"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    JOB_DELETED = "JobDeleted"
    JOB_FINISHED = "JobFinished"


@dataclass(frozen=True, slots=True)
class WriteNodes:
    """Set the absent `spec.nodes`, through the scale subresource on a cluster."""

    nodes: int


@dataclass(frozen=True, slots=True)
class WriteParams:
    """Put the `bounds` record of `incarnation`; a number above the observed one starts a new
    incarnation.

    `revision` is that of the record that was observed, 0 for none: only this one is replaced.
    """

    incarnation: int
    bounds: RendezvousParams
    revision: int = 0


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Close the rendezvous with this outcome from any state; a no-op once it is closed."""

    incarnation: int
    kind: OutcomeKind
    reason: StopReason
    message: str = ""
    save: SaveReport | None = None

    @property
    def outcome(self) -> Outcome:
        """Record to write."""
        return replace(outcome_record(self.kind, self.reason, self.message), save=self.save)


@dataclass(frozen=True, slots=True)
class RemoveMembers:
    """Remove members whose pods are gone, so that no other member waits for their leases."""

    incarnation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod with this index, whose agent joins this incarnation."""

    index: int
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod with this uid, with its own grace period, never by force."""

    name: str
    uid: str
    reason: DeleteReason


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself: ttlSecondsAfterFinished has passed."""


Action = (
    WriteNodes | WriteParams | CloseRendezvous | RemoveMembers | CreatePod | DeletePod | DeleteJob
)
