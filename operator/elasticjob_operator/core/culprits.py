"""First failure in the status: a worker's, recorded by its agent, or a node's.

Agents record failures of workers. The loss or preemption of a node, and an out-of-memory kill of
the whole container, show only in the pod.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_operator.core.evidence import end_of
from elasticjob_operator.core.observed import Pod, PodEnd
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.model.status import FirstFailure, Status
from elasticjob_rendezvous.core.failures import ECHOES, Failure, FailureClass
from elasticjob_rendezvous.core.records import CauseKind

_CLASSES = {
    PodEnd.OUT_OF_MEMORY: FailureClass.HOST_OUT_OF_MEMORY,
    PodEnd.PREEMPTED: FailureClass.PREEMPTED,
    PodEnd.EVICTED: FailureClass.PREEMPTED,
    PodEnd.NODE_LOST: FailureClass.NODE_LOST,
    PodEnd.NODE_TAINTED: FailureClass.NODE_LOST,
}
_VAGUE = frozenset(
    {FailureClass.SIGNAL, FailureClass.PEER_ABORT, FailureClass.USER_ERROR, FailureClass.NODE_LOST}
)
"""Classes an agent may assign if its launcher ended or a worker was signalled; the pod's end is
more precise."""
_UNBIDDEN = frozenset({PodEnd.PREEMPTED, PodEnd.EVICTED})
"""Ends imposed by the cluster, even if the node left in good order."""


def first_failure(
    view: RendezvousView, reason: str, pods: Iterable[Pod], before: Status
) -> FirstFailure | None:
    """Return the culprit of the latest failure.

    `reason` is the `PodEnd` of the members whose departure caused the current round, or empty.
    """
    known = before.first_failure
    recorded = view.first_failure
    worker = None if recorded is None else _recorded(recorded, {pod.name: pod for pod in pods})
    if worker is not None and _is_echo(worker, known, view):
        worker = None
    if worker is not None and known is not None and _same(known, worker):
        worker = known if recorded is None or known.class_ != recorded.kind else worker
    found = [failure for failure in (known, worker, _gone(view, reason, pods, before)) if failure]
    # Within a round a worker's own failure takes precedence over one derived from a pod's end.
    return max(found, key=lambda one: (one.round, one is worker, one is known), default=None)


def _is_echo(worker: FirstFailure, known: FirstFailure | None, view: RendezvousView) -> bool:
    """Return True if a worker's collective broke as the effect of a known failure.

    With the torch backends an agent's records disappear with its pod; only the echoes that other
    agents recorded remain.
    """
    if worker.class_ not in ECHOES:
        return False
    if known is not None and known.round == worker.round and known.class_ not in ECHOES:
        return True
    later = [found for found in view.rounds if found.number > worker.round]
    followed = min(later, key=lambda found: found.number, default=None)
    return followed is not None and followed.cause.kind in (CauseKind.LEAVE, CauseKind.LOSS)


def _same(one: FirstFailure, other: FirstFailure) -> bool:
    return (one.round, one.pod, one.rank) == (other.round, other.pod, other.rank)


def failure_of(shown: FirstFailure) -> Failure | None:
    """Return the record of a worker's failure in the status, without its member and time; None
    for a node's failure, of which there is no record."""
    if shown.rank is None:
        return None
    return Failure(
        round=shown.round,
        member="",
        name=shown.pod,
        rank=shown.rank,
        local_rank=-1,
        kind=FailureClass(shown.class_),
        at_ms=0,
        exit_code=shown.exit_code,
        signal=shown.signal,
        message=shown.message,
        traceback=shown.traceback,
        node=shown.node or "",
    )


def _recorded(failure: Failure, pods: dict[str, Pod]) -> FirstFailure:
    """Return the recorded failure, with class and message of the pod's end if that is more
    precise."""
    pod = pods.get(failure.name)
    end = None if pod is None or not pod.ended else end_of(pod)
    vague = failure.kind in _VAGUE and not failure.traceback
    told = _CLASSES.get(end) if end is not None and vague else None
    return FirstFailure(
        round=failure.round,
        pod=failure.name,
        node=failure.node or None,
        rank=failure.rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
        class_=(told or failure.kind).value,
        message=failure.message if told is None or pod is None else pod.end_message,
        traceback=failure.traceback,
    )


def _gone(
    view: RendezvousView, reason: str, pods: Iterable[Pod], before: Status
) -> FirstFailure | None:
    """Return the failure for a lost or preempted node, none of whose workers failed."""
    cause = view.cause
    if cause is None or not cause.members:
        return None
    end = PodEnd(reason) if reason else None
    left = cause.kind in (CauseKind.LEAVE, CauseKind.PREEMPTION)
    if cause.kind != CauseKind.LOSS and not (left and end in _UNBIDDEN):
        return None
    known = before.first_failure
    name = cause.members[0]
    kind = _CLASSES.get(end, FailureClass.NODE_LOST) if end else FailureClass.NODE_LOST
    pod = next((pod for pod in pods if pod.name == name and end_of(pod) is not None), None)
    number = max((found.number for found in view.rounds if found.number < view.round), default=0)
    member = next((member for member in before.members if member.pod == name), None)
    said = pod.end_message if pod is not None else ""
    node = pod.node if pod is not None else member.node if member is not None else None
    if known is not None and (known.round, known.pod) == (number, name):
        said, node = known.message or said, known.node or node
    return FirstFailure(
        round=number, pod=name, node=node, class_=kind.value, message=said or cause.detail
    )
