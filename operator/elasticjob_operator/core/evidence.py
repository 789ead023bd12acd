"""Reasons of rounds derived from pods: causes of departures that the rendezvous cannot know."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.core.costs import final_at, lasted_ms
from elasticjob_operator.core.observed import NodeState, Pod, PodEnd
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.core.words import GOING
from elasticjob_operator.model.enums import RendezvousState
from elasticjob_operator.model.status import RoundStatus, Status


def end_of(pod: Pod) -> PodEnd | None:
    """Return the cause of the pod's removal; None if it stays or ends by itself."""
    if pod.end is not None:
        return pod.end
    return PodEnd.NODE_LOST if pod.node_state is NodeState.NOT_READY else None


def reason_of(view: RendezvousView, pods: Iterable[Pod], before: Status) -> str:
    """Return the cause of the departures that led to the current round, or an empty string.

    A reason already known for this round is kept: the pods that showed it are soon deleted.
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
    """Return the known reasons by round number."""
    known = {found.round: found.reason for found in before.rounds if found.reason}
    return known | ({view.round: current} if current else {})


def began_at(found: RoundStatus) -> datetime | None:
    """Return the time of the first symptom behind a round, or of its opening; None if unknown."""
    if found.final_time is None:
        return None
    return found.final_time - timedelta(milliseconds=lasted_ms(found))


def began_anew(view: RendezvousView, before: Status) -> bool:
    """Return True if the view shows a newer incarnation, whose rounds are counted from one.

    Within one incarnation round numbers only grow, and a closed rendezvous stays closed.
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
    """Return the start of the current round: pods created later did not cause it."""
    for found in view.rounds:
        if found.number == view.round and (at := final_at(found)) is not None:
            return at - timedelta(milliseconds=lasted_ms(found))
    return view.since
