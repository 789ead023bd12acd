"""Failures and departures: the reasons of rounds, the first failure, avoided nodes, stragglers.

Agents record failures of workers. The loss or preemption of a node, and an out-of-memory kill
of the whole container, show only in the pod.

A machine that ended two rounds of the job within an hour is avoided for an hour. One whose kernel
does not end the workers of a pod is avoided while it has that pod, and up to an hour longer. New
pods prefer other machines, and surplus pods on it are deleted first. It is only a preference, so
that no pod waits for a machine that does not exist. Stragglers slow down their peers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from elasticjob_operator.domain.explain.catalog import OFFENCES, STUCK_OFFENCE
from elasticjob_operator.domain.explain.phrases import DEPARTURES
from elasticjob_operator.domain.observed.state import NodeState, Pod, PodEnd, RendezvousView
from elasticjob_operator.domain.status.rounds import began_at, final_at
from elasticjob_operator.model.status import (
    MAX_AVOIDED,
    AvoidedNode,
    FailureStatus,
    RoundStatus,
    Status,
    Straggler,
)
from elasticjob_operator.model.types import Phase, RendezvousState
from elasticjob_rendezvous.protocol.records.failures import ECHOES, Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import CauseKind


def removal_cause(pod: Pod) -> PodEnd | None:
    """Return the cause of the pod's removal; None if it stays or ends by itself."""
    if pod.end is not None:
        return pod.end
    return PodEnd.NODE_LOST if pod.node_state is NodeState.NOT_READY else None


def round_reason(view: RendezvousView, pods: Iterable[Pod], before: Status) -> str:
    """Return the cause of the departures that led to the current round, or an empty string.

    A reason already known for this round is kept: the pods that showed it are soon deleted.
    """
    if known := _known_reason(view.round, before):
        return known
    if view.cause is None or view.cause.kind not in DEPARTURES:
        return ""
    began, left = _current_began_at(view), frozenset(view.cause.members)
    found = (
        removal_cause(pod)
        for pod in sorted(pods, key=lambda pod: pod.index)
        if pod.name in left and (began is None or pod.created_at < began)
    )
    return next((end.value for end in found if end is not None), "")


def round_reasons(view: RendezvousView, current: str, before: Status) -> dict[int, str]:
    """Return the known reasons by round number."""
    known = {found.round: found.reason for found in before.rounds if found.reason}
    return known | ({view.round: current} if current else {})


def round_began_at(found: RoundStatus) -> datetime | None:
    """Return the time of the first symptom behind a round, or of its opening; None if unknown."""
    return None if found.final_time is None else began_at(found.final_time, found)


def is_new_incarnation(view: RendezvousView, before: Status) -> bool:
    """Return True if the view shows a newer incarnation, whose rounds are counted from one.

    Within one incarnation round numbers only grow, and a closed rendezvous stays closed.
    """
    known = before.rendezvous
    if known is None or not view.readable:
        return False
    return _reopened(view, before) or known.round > view.round


def is_new_run(view: RendezvousView, before: Status) -> bool:
    """Return True if the view shows a job that was resumed.

    While the job trained, lower round numbers only mean that etcd lost the rounds of the run.
    """
    trained = before.phase in (Phase.RUNNING, Phase.RESTARTING)
    return is_new_incarnation(view, before) and (_reopened(view, before) or not trained)


def _reopened(view: RendezvousView, before: Status) -> bool:
    closed, known = RendezvousState.CLOSED, before.rendezvous
    return known is not None and known.state is closed and view.state is not closed


def _known_reason(number: int, before: Status) -> str:
    current = before.rendezvous
    if current is not None and current.cause is not None and current.round == number:
        return current.cause.reason
    return next((found.reason for found in before.rounds if found.round == number), "")


def _current_began_at(view: RendezvousView) -> datetime | None:
    """Return the start of the current round: pods created later did not cause it."""
    for found in view.rounds:
        if found.number == view.round and (at := final_at(found)) is not None:
            return began_at(at, found)
    return view.since


_CLASS_BY_END = {
    PodEnd.OUT_OF_MEMORY: FailureClass.HOST_OUT_OF_MEMORY,
    PodEnd.PREEMPTED: FailureClass.PREEMPTED,
    PodEnd.EVICTED: FailureClass.PREEMPTED,
    PodEnd.NODE_LOST: FailureClass.NODE_LOST,
    PodEnd.NODE_TAINTED: FailureClass.NODE_LOST,
}
_UNSPECIFIC = frozenset(
    {FailureClass.SIGNAL, FailureClass.PEER_ABORT, FailureClass.USER_ERROR, FailureClass.NODE_LOST}
)
"""Classes an agent may assign if its launcher ended or a worker was signalled; the pod's end is
more precise."""
_IMPOSED = frozenset({PodEnd.PREEMPTED, PodEnd.EVICTED})
"""Ends imposed by the cluster, even if the node left in good order."""


def latest_failure(status: Status) -> FailureStatus | None:
    """Return the latest failure in a status; previous releases wrote it as `firstFailure`."""
    return status.last_failure or status.first_failure


def first_failure(before: Status, latest: FailureStatus | None) -> FailureStatus | None:
    """Return the first failure of the run.

    While it is also the latest one, more precise details of it replace those known.
    """
    known, newest = before.first_failure, latest_failure(before)
    if known is None or latest is None or newest is None:
        return known or latest
    return latest if known.round == newest.round == latest.round else known


def last_failure(
    view: RendezvousView, reason: str, pods: Iterable[Pod], before: Status
) -> FailureStatus | None:
    """Return the culprit of the latest failure.

    `reason` is the `PodEnd` of the members whose departure caused the current round, or empty.
    """
    known = latest_failure(before)
    recorded = view.first_failure
    worker = (
        None if recorded is None else _worker_failure(recorded, {pod.name: pod for pod in pods})
    )
    if worker is not None and _is_echo(worker, known, view):
        worker = None
    if worker is not None and known is not None and _is_same_worker(known, worker):
        worker = known if recorded is None or known.class_ != recorded.kind else worker
    lost = _lost_node(view, reason, pods, before)
    if known is not None and view.readable and known.round > view.round and (worker or lost):
        known = None  # etcd lost the rounds after which these are counted
    found = [failure for failure in (known, worker, lost) if failure]
    # Within a round a worker's own failure takes precedence over one derived from a pod's end.
    latest = max(found, key=lambda one: (one.round, one is worker, one is known), default=None)
    if latest is None or latest.class_ != FailureClass.NODE_LOST or latest.returned is not None:
        return latest
    return latest.model_copy(update={"returned": _has_returned(latest, view, pods)})


def _has_returned(failure: FailureStatus, view: RendezvousView, pods: Iterable[Pod]) -> bool | None:
    """Return True if the agent of a lost node registered again, False if its pod has ended or is
    deleted, None while neither is known.

    A pod that the API server shows as running proves nothing: its machine may be gone.
    """
    id = view.lost.get((failure.round, failure.pod))
    if id is not None and any(member.id == id for member in view.members):
        return True
    known = [pod for pod in pods if (pod.name == failure.pod if id is None else pod.uid == id)]
    if any(pod.active for pod in known):
        return None
    return False if view.readable else None


def _is_echo(worker: FailureStatus, known: FailureStatus | None, view: RendezvousView) -> bool:
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


def _is_same_worker(one: FailureStatus, other: FailureStatus) -> bool:
    return (one.round, one.pod, one.rank) == (other.round, other.pod, other.rank)


def failure_of(shown: FailureStatus) -> Failure | None:
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


def _worker_failure(failure: Failure, pods: dict[str, Pod]) -> FailureStatus:
    """Return the recorded failure, with class and message of the pod's end if that is more
    precise."""
    pod = pods.get(failure.name)
    end = None if pod is None or not pod.ended else removal_cause(pod)
    unspecific = failure.kind in _UNSPECIFIC and not failure.traceback
    known = _CLASS_BY_END.get(end) if end is not None and unspecific else None
    return FailureStatus(
        round=failure.round,
        pod=failure.name,
        node=failure.node or None,
        rank=failure.rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
        class_=(known or failure.kind).value,
        message=failure.message if known is None or pod is None else pod.end_message,
        traceback=failure.traceback,
    )


def _lost_node(
    view: RendezvousView, reason: str, pods: Iterable[Pod], before: Status
) -> FailureStatus | None:
    """Return the failure for a lost or preempted node, none of whose workers failed."""
    cause = view.cause
    if cause is None or not cause.members:
        return None
    end = PodEnd(reason) if reason else None
    left = cause.kind in (CauseKind.LEAVE, CauseKind.PREEMPTION)
    if cause.kind != CauseKind.LOSS and not (left and end in _IMPOSED):
        return None
    known = latest_failure(before)
    name = cause.members[0]
    kind = _CLASS_BY_END.get(end, FailureClass.NODE_LOST) if end else FailureClass.NODE_LOST
    pod = next((pod for pod in pods if pod.name == name and removal_cause(pod) is not None), None)
    number = max((found.number for found in view.rounds if found.number < view.round), default=0)
    member = next((member for member in before.members if member.pod == name), None)
    message = pod.end_message if pod is not None else ""
    node = pod.node if pod is not None else member.node if member is not None else None
    if known is not None and (known.round, known.pod) == (number, name):
        message, node = known.message or message, known.node or node
    return FailureStatus(
        round=number, pod=name, node=node, class_=kind.value, message=message or cause.detail
    )


WINDOW = timedelta(hours=1)
MIN_OFFENCES = 2
STRAGGLER_RATIO = 1.5
"""Minimum ratio of a straggler's own work per step to the median of its peers."""
MIN_PEERS = 2
FLAGGED_AFTER = timedelta(seconds=30)


def avoided_nodes(
    view: RendezvousView, before: Status, now: datetime, pods: Iterable[Pod] = ()
) -> list[AvoidedNode]:
    """Return the machines to avoid, latest end first; known ones stay until they expire."""
    recent = [offence for offence in view.offences if now - offence.at < WINDOW]
    found = {node.node: node for node in before.avoided_nodes if node.until > now}
    for name, count in Counter(offence.node for offence in recent).items():
        if count < MIN_OFFENCES:
            continue
        mine = [offence for offence in recent if offence.node == name]
        until = max(offence.at for offence in mine) + WINDOW
        if name not in found or until > found[name].until:
            what = ", ".join(
                dict.fromkeys(OFFENCES.get(offence.what, offence.what) for offence in mine)
            )
            found[name] = AvoidedNode(node=name, until=until, reason=f"{count} times: {what}")
    for name in _stuck_nodes(pods):
        if name not in found:
            found[name] = AvoidedNode(node=name, until=now + WINDOW, reason=STUCK_OFFENCE)
    worst = sorted(found.values(), key=lambda node: (node.until, node.node), reverse=True)
    return worst[:MAX_AVOIDED]


def avoided_names(status: Status, now: datetime, pods: Iterable[Pod] = ()) -> tuple[str, ...]:
    """Return the names of the machines that are avoided at `now`.

    `pods` are newer than the status: a pod is replaced in the pass that sees its workers stuck.
    """
    known = [node.node for node in status.avoided_nodes if node.until > now]
    return tuple(dict.fromkeys([*known, *_stuck_nodes(pods)]))


def _stuck_nodes(pods: Iterable[Pod]) -> list[str]:
    """Return the machines whose kernel does not end the workers of a pod."""
    return sorted({pod.node for pod in pods if pod.stuck and pod.node and not pod.ended})


def stragglers(view: RendezvousView, before: Status, now: datetime) -> list[Straggler]:
    """Return the nodes of this round whose own work per step takes longer than their peers'."""
    timed = [each for each in view.members if each.round == view.round and each.busy_ms > 0]
    known = {
        straggler.pod: straggler for straggler in before.stragglers if straggler.round == view.round
    }
    times = sorted(each.busy_ms for each in timed)
    if len(times) <= MIN_PEERS:
        return []
    found = []
    for member in timed:
        if member.busy_ms < _median_of_others(times, member.busy_ms) * STRAGGLER_RATIO:
            continue
        earlier = known.get(member.name)
        since = now if earlier is None else earlier.since
        node = member.node or None
        found.append(Straggler(pod=member.name, node=node, round=view.round, since=since))
    return sorted(found, key=lambda each: each.pod)[:MAX_AVOIDED]


def _median_of_others(ordered: Sequence[int], one: int) -> float:
    """Return the median of these at least two numbers in order, without one of them."""
    left_out, others = bisect_left(ordered, one), len(ordered) - 1
    pair = ((others - 1) // 2, others // 2)
    return sum(ordered[at + (at >= left_out)] for at in pair) / 2


def lasting_stragglers(members: Iterable[Straggler], now: datetime) -> frozenset[str]:
    """Return the pods that have been stragglers for at least `FLAGGED_AFTER`."""
    return frozenset(member.pod for member in members if now - member.since >= FLAGGED_AFTER)
