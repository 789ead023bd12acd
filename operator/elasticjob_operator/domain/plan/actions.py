"""Actions of a plan, and the choice of surplus pods to delete.

Actions are applied in order, up to the first one that fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticjob_operator.domain.observed.etcd_records import outcome_record
from elasticjob_operator.domain.observed.state import NodeState, Pod, RendezvousView, StopReason
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


_ORDER = {
    DeleteReason.SURPLUS_PENDING: 0,
    DeleteReason.SURPLUS_NODE_CORDONED: 1,
    DeleteReason.SURPLUS_NODE_TAINTED: 1,
    DeleteReason.SURPLUS_NOT_IN_ROUND: 2,
    DeleteReason.SURPLUS_NODE_AVOIDED: 3,
    DeleteReason.SURPLUS_STRAGGLER: 3,
    DeleteReason.SURPLUS_HIGHEST_RANK: 4,
}


@dataclass(frozen=True, slots=True)
class Disfavored:
    """Names of machines to avoid and of pods that are stragglers."""

    nodes: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()


def surplus_reason(pod: Pod, rank: int | None, disfavored: Disfavored) -> DeleteReason:
    """Return the reason for which this pod with this group rank would be deleted as surplus."""
    if pod.launcher_since is None:
        return DeleteReason.SURPLUS_PENDING
    if pod.node_state is NodeState.CORDONED:
        return DeleteReason.SURPLUS_NODE_CORDONED
    if pod.node_state is NodeState.TAINTED:
        return DeleteReason.SURPLUS_NODE_TAINTED
    if rank is None:
        return DeleteReason.SURPLUS_NOT_IN_ROUND
    if pod.node in disfavored.nodes:
        return DeleteReason.SURPLUS_NODE_AVOIDED
    if pod.name in disfavored.pods:
        return DeleteReason.SURPLUS_STRAGGLER
    return DeleteReason.SURPLUS_HIGHEST_RANK


NONE_DISFAVORED = Disfavored()


def surplus(
    counted: Iterable[Pod],
    view: RendezvousView,
    number: int,
    given_up: frozenset[str] = frozenset(),
    disfavored: Disfavored = NONE_DISFAVORED,
) -> list[tuple[Pod, DeleteReason]]:
    """Return the `number` pods to delete, cheapest first.

    Pending pods that are given up (uids in `given_up`) precede those that may still start. Ties are
    broken by the highest rank, then by the highest index.
    """

    if number <= 0:
        return []
    ranks = view.ranks_by_name()

    def cost(choice: tuple[Pod, DeleteReason]) -> tuple[int, bool, int, int]:
        pod, reason = choice
        rank = ranks.get(pod.name)
        place = -1 if rank is None else rank
        return _ORDER[reason], pod.uid not in given_up, -place, -pod.index

    choices = ((pod, surplus_reason(pod, ranks.get(pod.name), disfavored)) for pod in counted)
    return sorted(choices, key=cost)[:number]


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
