"""Choice of the surplus pods to delete when a job has more pods than its wanted size.

Pods that do not train are deleted first, then those on machines that are drained, avoided or slow,
then the pods of the highest ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticjob_operator.domain.observed.state import NodeState, Pod, RendezvousView
from elasticjob_operator.domain.plan.actions import DeleteReason

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
