"""Records of one job without etcd v3, assembled from its agents' reports. No I/O.

Reports end with their agents. The outcome therefore comes from the last report or, if that was
missed, from the ends of the pods, and the history of rounds from the job's status. A torch backend
(etcd-v2, c10d) shows the departure of a node only as "a node is waiting": the pods show which node
left or was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any

from elasticjob_operator.domain.observed.etcd_records import Records, rendezvous_view
from elasticjob_operator.domain.observed.state import (
    GIVEN_UP,
    NO_MEMBERS,
    UNREADABLE,
    NodeState,
    Observed,
    Pod,
    PodPhase,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.launch_failures import launch_failures, launch_limit_reason
from elasticjob_operator.domain.plan.lifecycle import FINISHED, shutdown_time
from elasticjob_operator.domain.plan.sizes import count_pods
from elasticjob_operator.domain.status.failures import failure_of, latest_failure
from elasticjob_operator.domain.status.rounds import cause_of, history
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import Phase, RendezvousState
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import HeldBack
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
)
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.records.timings import History


def rendezvous_from_status(status: Status) -> RendezvousView:
    """Return the view that was written to the status.

    It lacks the outcome, which only the conditions hold, and the members, which only agents report.
    """
    found: dict[str, Any] = _fields(RendezvousView, status.rendezvous) if status.rendezvous else {}
    found["held_back"] = tuple(
        HeldBack(node.pod, node.losses, node.seconds, node.delay_seconds)
        for node in (status.rendezvous.held_back if status.rendezvous is not None else ())
    )
    if status.rendezvous is not None and status.rendezvous.cause is not None:
        cause = status.rendezvous.cause
        found["cause"] = cause_of(cause.kind, cause.members, cause.detail, cause.reasons)
    if failure := latest_failure(status):
        found["first_failure"] = failure_of(failure)
    return RendezvousView(
        **found,
        rounds=tuple(round_ for round_ in map(history, status.rounds) if round_ is not None),
        failures_charged=status.restarts,
        interruptions=Counts(**_fields(Counts, status.interruptions)),
    )


def _fields(kind: type[Any], shown: Any) -> dict[str, Any]:
    """Return the fields of this class that the status shows and sets, with lists as tuples."""
    values = {one.name: getattr(shown, one.name, None) for one in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def agent_view(
    job: ElasticJob, pods: tuple[Pod, ...], found: Records | None, now: datetime
) -> RendezvousView:
    """Return the view of the rendezvous derived from agents and pods.

    `found` holds the latest reports of the agents, None before the first one.
    """
    before = rendezvous_from_status(job.status)
    if job.status.phase is Phase.SUSPENDED and not job.spec.run_policy.suspend:
        before = NO_MEMBERS  # a new incarnation, whose rounds are counted from one
    if job.status.phase in FINISHED:
        return replace(before, state=RendezvousState.CLOSED)
    resumes = job.status.phase is Phase.SUSPENDING and not job.spec.run_policy.suspend
    if resumes or (job.spec.run_policy.suspend and not any(pod.active for pod in pods)):
        return _suspended(before)
    view = _reported(before, pods, found)
    if not view.readable:
        return view
    view = replace(view, members=(*view.members, *_done_members(pods, view.members)))
    if view.outcome is not None:
        return view
    outcome = _outcome(job, pods, view, now)
    if outcome is None:
        return view
    return replace(view, state=RendezvousState.CLOSED, outcome=outcome)


def undecided_until(job: ElasticJob, pods: Iterable[Pod], now: datetime) -> datetime | None:
    """Return the time before which recently failed pods must not be replaced; None for now.

    An agent that ends with its job looks like a lost one until the other agents have ended too.
    """
    ends = [_ended_at(pod) + shutdown_time(job) for pod in pods if _has_given_up(pod)]
    return max((end for end in ends if end > now), default=None)


def _suspended(before: RendezvousView) -> RendezvousView:
    outcome = Outcome(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED.value)
    return replace(before, state=RendezvousState.CLOSED, members=(), outcome=outcome)


def _reported(
    before: RendezvousView, pods: tuple[Pod, ...], found: Records | None
) -> RendezvousView:
    if found is not None:
        return rendezvous_view(found)
    if any(pod.ready and pod.active and _is_reachable(pod) for pod in pods):
        return UNREADABLE
    # No agent can be asked: between two incarnations, or before the first.
    return replace(before, state=RendezvousState.JOINABLE, nodes=0, members=())


def _done_members(pods: Iterable[Pod], members: Iterable[Member]) -> tuple[Member, ...]:
    """Return members in state done for succeeded pods whose agents are gone."""
    reported = {member.id for member in members}
    return tuple(
        Member(
            id=pod.uid,
            session="",
            name=pod.name,
            address="",
            agent_port=0,
            node=pod.node or "",
            state=MemberState.DONE,
        )
        for pod in pods
        if pod.phase is PodPhase.SUCCEEDED and not pod.terminating and pod.uid not in reported
    )


def _outcome(
    job: ElasticJob, pods: tuple[Pod, ...], view: RendezvousView, now: datetime
) -> Outcome | None:
    """Return the outcome of the job as its pods show it; None while it runs.

    The job recovered from a failure before the first success; after it no round can be formed.
    """
    if any(_takes_part(pod) for pod in pods):
        return None
    succeeded = [pod for pod in pods if pod.phase is PodPhase.SUCCEEDED and not pod.terminating]
    failed = sorted((pod for pod in pods if _has_given_up(pod)), key=_ended_at)
    if succeeded:
        first = min(_ended_at(pod) for pod in succeeded)
        failed = [pod for pod in failed if _ended_at(pod) >= first]
        return _failed_outcome(failed) if failed else Outcome(OutcomeKind.SUCCEEDED)
    newest = max((pod.created_at for pod in pods), default=now)
    if any(_ended_at(pod) >= newest for pod in failed):
        return _failed_outcome(failed)
    return _launches(job, pods, view, now)


def _launches(
    job: ElasticJob, pods: tuple[Pod, ...], view: RendezvousView, now: datetime
) -> Outcome | None:
    counted_pods = count_pods(job, Observed(pods), now)
    able = sum(pod.launcher_since is not None for pod in counted_pods.counted)
    reason = launch_limit_reason(
        launch_failures(counted_pods.failed, view), view, able, job.spec.min_nodes
    )
    if reason is None:
        return None
    return Outcome(OutcomeKind.STOPPED, reason, reason=StopReason.LAUNCH_FAILED.value)


def _failed_outcome(pods: list[Pod]) -> Outcome:
    first = pods[0]
    reason = f": {first.end_message}" if first.end_message else ""
    return Outcome(OutcomeKind.FAILED, f"{first.name} ended first{reason}")


def _takes_part(pod: Pod) -> bool:
    """Return True if the pod trains or is terminating. The status of a pod on an unreachable
    machine is stale and does not count."""
    there = not pod.ended and (pod.launcher_since is not None or pod.terminating)
    return there and _is_reachable(pod)


def _is_reachable(pod: Pod) -> bool:
    return pod.node_state is not NodeState.NOT_READY


def _has_given_up(pod: Pod) -> bool:
    """Return True if its agent ended it in failure. A pod that was killed or never started may
    be replaced."""
    return pod.exit_code in GIVEN_UP and not pod.terminating and not pod.launch_failed


def _ended_at(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at


_DEPARTURES = (CauseKind.LEAVE, CauseKind.LOSS)
KEPT_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Participant:
    """Pod that takes part, and the last round in which it was observed."""

    pod: str
    round: int


@dataclass(frozen=True, slots=True)
class Departure:
    """Pod that no longer takes part; `round` was its last one."""

    pod: str
    round: int
    kind: CauseKind


@dataclass(frozen=True, slots=True)
class PodHistory:
    """Pods that take part, and pods that no longer do, by uid."""

    participants: Mapping[str, Participant] = field(default_factory=dict)
    departures: Mapping[str, Departure] = field(default_factory=dict)

    def seen(self, pods: Iterable[Pod], view: RendezvousView) -> PodHistory:
        """Return the history updated by an observation of the job."""
        oldest = view.round - KEPT_ROUNDS
        kept = {uid: one for uid, one in self.departures.items() if one.round >= oldest}
        present = {pod.uid: pod for pod in pods}
        rounds = {member.id: member.round for member in view.members}
        participants: dict[str, Participant] = {}
        for uid, pod in present.items():
            before, kind = self.participants.get(uid), _departure_kind(pod)
            if kind is None and pod.launcher_since is not None:
                last = max(rounds.get(uid, 0), before.round if before else 0)
                participants[uid] = Participant(pod.name, last)
            elif kind is not None and before is not None:
                kept[uid] = Departure(pod.name, before.round, kind)
        for uid in self.participants.keys() - present.keys():
            gone = self.participants[uid]
            kept[uid] = Departure(gone.pod, gone.round, CauseKind.LOSS)
        return PodHistory(participants, kept)


def with_causes(
    view: RendezvousView, before: RendezvousView, gone: Iterable[Departure]
) -> RendezvousView:
    """Return the view with causes corrected by departures; `before` is the view shown last."""
    known = {
        found.number: found.cause for found in before.rounds if found.cause.kind in _DEPARTURES
    }
    by_round: dict[int, list[Departure]] = {}
    for departure in gone:
        by_round.setdefault(departure.round + 1, []).append(departure)
    rounds = tuple(_corrected_round(found, known, by_round) for found in view.rounds)
    return replace(view, rounds=rounds, cause=_corrected_cause(view, before, by_round))


def _departure_kind(pod: Pod) -> CauseKind | None:
    """Return the kind of departure; None while the pod takes part or if it ended with its job."""
    if pod.terminating and pod.node_state is not NodeState.NOT_READY:
        return CauseKind.LEAVE
    killed = pod.phase is PodPhase.FAILED and pod.exit_code not in GIVEN_UP
    return CauseKind.LOSS if killed or pod.node_state is NodeState.NOT_READY else None


def _corrected_cause(
    view: RendezvousView, before: RendezvousView, gone: dict[int, list[Departure]]
) -> Cause | None:
    if view.cause is None or not _is_uncertain(view.cause.kind):
        return view.cause
    if found := _explaining(gone.get(view.round, []), view.cause.kind, view.cause.members):
        return Cause(_kind(found), _names(found))
    shown = before.cause
    same = before.round == view.round and shown is not None and shown.kind in _DEPARTURES
    return shown if same else view.cause


def _corrected_round(
    found: History, known: dict[int, Cause], gone: dict[int, list[Departure]]
) -> History:
    if not _is_uncertain(found.cause.kind):
        return found
    if those := _explaining(gone.get(found.number, []), found.cause.kind, found.cause.members):
        return replace(found, cause=replace(found.cause, kind=_kind(those), members=_names(those)))
    if shown := known.get(found.number):
        return replace(found, cause=shown)
    return found


def _is_uncertain(cause: CauseKind) -> bool:
    """Return True if a departure may have caused this: agents only see joins and failures."""
    return cause in (CauseKind.JOIN, CauseKind.FAILURE)


def _explaining(
    gone: list[Departure], cause: CauseKind, members: tuple[str, ...]
) -> list[Departure]:
    """Return the departures that explain the cause: they abort a peer's collective, but do not
    explain a failure of a departed pod itself."""
    own = cause is CauseKind.FAILURE and any(departure.pod in members for departure in gone)
    return [] if own else gone


def _kind(gone: list[Departure]) -> CauseKind:
    lost = any(departure.kind is CauseKind.LOSS for departure in gone)
    return CauseKind.LOSS if lost else CauseKind.LEAVE


def _names(gone: list[Departure]) -> tuple[str, ...]:
    return tuple(sorted((departure.pod for departure in gone), key=natural_order))
