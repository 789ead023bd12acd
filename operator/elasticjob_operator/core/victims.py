"""Choice of surplus pods to delete, and reasons of deletions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from elasticjob_operator.core.observed import NodeState, Pod
from elasticjob_operator.core.rendezvous_view import RendezvousView


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
class Poor:
    """Names of machines to avoid and of pods that are stragglers."""

    nodes: frozenset[str] = frozenset()
    pods: frozenset[str] = frozenset()


def surplus_reason(pod: Pod, view: RendezvousView, poor: Poor) -> DeleteReason:
    """Return the reason for which this pod would be deleted as surplus."""
    if pod.launcher_since is None:
        return DeleteReason.SURPLUS_PENDING
    if pod.node_state is NodeState.CORDONED:
        return DeleteReason.SURPLUS_NODE_CORDONED
    if pod.node_state is NodeState.TAINTED:
        return DeleteReason.SURPLUS_NODE_TAINTED
    if view.rank_of(pod.name) is None:
        return DeleteReason.SURPLUS_NOT_IN_ROUND
    if pod.node in poor.nodes:
        return DeleteReason.SURPLUS_NODE_AVOIDED
    if pod.name in poor.pods:
        return DeleteReason.SURPLUS_STRAGGLER
    return DeleteReason.SURPLUS_HIGHEST_RANK


NONE_POOR = Poor()


def surplus(
    counted: Iterable[Pod],
    view: RendezvousView,
    number: int,
    given_up: frozenset[str] = frozenset(),
    poor: Poor = NONE_POOR,
) -> list[tuple[Pod, DeleteReason]]:
    """Return the `number` pods to delete, cheapest first.

    Pending pods that are given up (uids in `given_up`) precede those that may still start. Ties are
    broken by the highest rank, then by the highest index.
    """

    def cost(choice: tuple[Pod, DeleteReason]) -> tuple[int, bool, int, int]:
        pod, reason = choice
        rank = view.rank_of(pod.name)
        place = -1 if rank is None else rank
        return _ORDER[reason], pod.uid not in given_up, -place, -pod.index

    choices = sorted(((pod, surplus_reason(pod, view, poor)) for pod in counted), key=cost)
    return choices[: max(number, 0)]
