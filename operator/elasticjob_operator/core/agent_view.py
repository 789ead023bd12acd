"""The rendezvous of a job whose backend keeps no records for the operator.

What its agents say of it (`agent_status`) ends with them: how the job ended is told by their last
word or, where that was missed, by how its pods ended; what was before is in the status.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from elasticjob_operator.core.census import take_census
from elasticjob_operator.core.grace import winding_down
from elasticjob_operator.core.launches import hopeless, launch_failures
from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.observed import GIVEN_UP, NodeState, Observed, Pod, PodPhase
from elasticjob_operator.core.remembered import remembered
from elasticjob_operator.core.rendezvous_view import (
    NOBODY_YET,
    UNREADABLE,
    MemberView,
    OutcomeKind,
    OutcomeView,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.model.enums import Phase, RendezvousState
from elasticjob_operator.model.job import ElasticJob

DONE = "done"


def agent_view(
    job: ElasticJob, pods: tuple[Pod, ...], found: Records | None, now: datetime
) -> RendezvousView:
    """The rendezvous as its agents and pods tell it.

    `found` is what the agents answered last, None while none of them has.
    """
    before = remembered(job.status)
    if job.status.phase is Phase.SUSPENDED and not job.spec.run_policy.suspend:
        before = NOBODY_YET  # another gang, whose rounds are counted from one
    if job.status.phase in FINISHED:
        return replace(before, state=RendezvousState.CLOSED)
    if job.spec.run_policy.suspend and not any(pod.active for pod in pods):
        return _suspended(before)
    view = _read(before, pods, found)
    if not view.readable:
        return view
    view = replace(view, members=(*view.members, *_done(pods, view.members)))
    if view.outcome is not None:
        return view
    outcome = _outcome(job, pods, view, now)
    if outcome is None:
        return view
    return replace(view, state=RendezvousState.CLOSED, outcome=outcome)


def undecided_until(job: ElasticJob, pods: Iterable[Pod], now: datetime) -> datetime | None:
    """Until when nobody is to replace the pods that failed of late; None when at once.

    An agent that ends with its job looks like one that was lost, until the others have ended too.
    """
    ends = [_ended_at(pod) + winding_down(job) for pod in pods if _gave_up(pod)]
    return max((end for end in ends if end > now), default=None)


def _suspended(before: RendezvousView) -> RendezvousView:
    outcome = OutcomeView(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    return replace(before, state=RendezvousState.CLOSED, members=(), outcome=outcome)


def _read(before: RendezvousView, pods: tuple[Pod, ...], found: Records | None) -> RendezvousView:
    if found is not None:
        return rendezvous_view(found)
    if any(pod.ready and pod.active and _is_reachable(pod) for pod in pods):
        return UNREADABLE
    # No agent is there that could be asked: between two gangs, or before the first.
    return replace(before, state=RendezvousState.JOINABLE, nodes=0, members=())


def _done(pods: Iterable[Pod], members: Iterable[MemberView]) -> tuple[MemberView, ...]:
    """Members that their pods' success tells of, when their agents are gone."""
    told = {member.id for member in members}
    return tuple(
        MemberView(pod.name, DONE, pod.node, id=pod.uid)
        for pod in pods
        if pod.phase is PodPhase.SUCCEEDED and not pod.terminating and pod.uid not in told
    )


def _outcome(
    job: ElasticJob, pods: tuple[Pod, ...], view: RendezvousView, now: datetime
) -> OutcomeView | None:
    """How the job ended, as far as its pods tell; None while it goes on.

    A failure before the first success was survived; after it nobody is left to survive it.
    """
    if any(_takes_part(pod) for pod in pods):
        return None
    succeeded = [pod for pod in pods if pod.phase is PodPhase.SUCCEEDED and not pod.terminating]
    failed = sorted((pod for pod in pods if _gave_up(pod)), key=_ended_at)
    if succeeded:
        first = min(_ended_at(pod) for pod in succeeded)
        failed = [pod for pod in failed if _ended_at(pod) >= first]
        return _failed(failed) if failed else OutcomeView(OutcomeKind.SUCCEEDED)
    newest = max((pod.created_at for pod in pods), default=now)
    if any(_ended_at(pod) >= newest for pod in failed):
        return _failed(failed)
    return _launches(job, pods, view, now)


def _launches(
    job: ElasticJob, pods: tuple[Pod, ...], view: RendezvousView, now: datetime
) -> OutcomeView | None:
    census = take_census(job, Observed(pods), now)
    able = sum(pod.launcher_since is not None for pod in census.counted)
    reason = hopeless(launch_failures(census.failed, view), view, able, job.spec.min_nodes)
    if reason is None:
        return None
    return OutcomeView(OutcomeKind.STOPPED, f"{StopReason.LAUNCH_FAILED}: {reason}")


def _failed(pods: list[Pod]) -> OutcomeView:
    first = pods[0]
    said = f": {first.end_message}" if first.end_message else ""
    return OutcomeView(OutcomeKind.FAILED, f"{first.name} ended first{said}")


def _takes_part(pod: Pod) -> bool:
    """It trains or is on its way out. What is told of a machine that is cut off is old."""
    there = not pod.ended and (pod.launcher_since is not None or pod.terminating)
    return there and _is_reachable(pod)


def _is_reachable(pod: Pod) -> bool:
    return pod.node_state is not NodeState.NOT_READY


def _gave_up(pod: Pod) -> bool:
    """Its agent ended it in failure. One that was killed, or never started, may be replaced."""
    return pod.exit_code in GIVEN_UP and not pod.terminating and not pod.launch_failed


def _ended_at(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at
