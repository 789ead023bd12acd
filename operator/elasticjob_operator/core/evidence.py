"""What the pods say of a round: why its members went, which the rendezvous alone can't know."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.core.costs import lasted_ms
from elasticjob_operator.core.observed import NodeState, Pod, PodEnd
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.core.words import GOING
from elasticjob_operator.model.enums import RendezvousState
from elasticjob_operator.model.status import RoundStatus, Status


def end_of(pod: Pod) -> PodEnd | None:
    """What takes this pod out of the job; None for one that stays, or ends by itself."""
    if pod.end is not None:
        return pod.end
    return PodEnd.NODE_LOST if pod.node_state is NodeState.NOT_READY else None


def reason_of(view: RendezvousView, pods: Iterable[Pod], before: Status) -> str:
    """Why the members behind the current round went, or an empty string.

    What was known of the same round stays: the pods that said it are soon gone.
    """
    if known := _known(view.round, before):
        return known
    if view.cause is None or view.cause.kind not in GOING:
        return ""
    began = _began(view)
    found = (
        end_of(pod)
        for pod in sorted(pods, key=lambda pod: pod.index)
        if pod.name in view.cause.members and (began is None or pod.created_at < began)
    )
    return next((end.value for end in found if end is not None), "")


def reasons(view: RendezvousView, current: str, before: Status) -> dict[int, str]:
    """The reason of every round of which one is known, by number."""
    known = {found.round: found.reason for found in before.rounds if found.reason}
    return known | ({view.round: current} if current else {})


def began_at(found: RoundStatus) -> datetime | None:
    """When the trouble behind a round first showed, or its opening; None while that is unknown."""
    if found.final_time is None:
        return None
    return found.final_time - timedelta(milliseconds=lasted_ms(found))


def began_anew(view: RendezvousView, before: Status) -> bool:
    """Whether another incarnation is looked at than before: its rounds are counted from one.

    Within one incarnation numbers only grow, and what is closed stays closed.
    """
    known = before.rendezvous
    if known is None or not view.readable:
        return False
    closed = known.state is RendezvousState.CLOSED and view.state is not RendezvousState.CLOSED
    return closed or known.round > view.round


def _known(number: int, before: Status) -> str:
    current = before.rendezvous
    if current is not None and current.cause is not None and current.round == number:
        return current.cause.reason
    return next((found.reason for found in before.rounds if found.round == number), "")


def _began(view: RendezvousView) -> datetime | None:
    """Pods that are younger than this round have nothing to do with its cause."""
    for found in view.rounds:
        if found.round == view.round and found.final_at is not None:
            return found.final_at - timedelta(milliseconds=lasted_ms(found))
    return view.since
