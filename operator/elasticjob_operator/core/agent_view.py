"""Rendezvous view of a job whose backend keeps no records for the operator.

It is built from the agents' reports (`agent_status`), which end with the agents. The outcome comes
from their last report or, if that was missed, from the ends of the pods; the history is read back
from the job's status.
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
    RendezvousView,
    StopReason,
)
from elasticjob_operator.model.enums import Phase, RendezvousState
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.records import Member, MemberState, Outcome, OutcomeKind


def agent_view(
    job: ElasticJob, pods: tuple[Pod, ...], found: Records | None, now: datetime
) -> RendezvousView:
    """Return the view of the rendezvous derived from agents and pods.

    `found` holds the latest reports of the agents, None before the first one.
    """
    before = remembered(job.status)
    if job.status.phase is Phase.SUSPENDED and not job.spec.run_policy.suspend:
        before = NOBODY_YET  # a new incarnation, whose rounds are counted from one
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
    """Return the time before which recently failed pods must not be replaced; None for now.

    An agent that ends with its job looks like a lost one until the other agents have ended too.
    """
    ends = [_ended_at(pod) + winding_down(job) for pod in pods if _gave_up(pod)]
    return max((end for end in ends if end > now), default=None)


def _suspended(before: RendezvousView) -> RendezvousView:
    outcome = Outcome(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED.value)
    return replace(before, state=RendezvousState.CLOSED, members=(), outcome=outcome)


def _read(before: RendezvousView, pods: tuple[Pod, ...], found: Records | None) -> RendezvousView:
    if found is not None:
        return rendezvous_view(found)
    if any(pod.ready and pod.active and _is_reachable(pod) for pod in pods):
        return UNREADABLE
    # No agent can be asked: between two incarnations, or before the first.
    return replace(before, state=RendezvousState.JOINABLE, nodes=0, members=())


def _done(pods: Iterable[Pod], members: Iterable[Member]) -> tuple[Member, ...]:
    """Return members in state done for succeeded pods whose agents are gone."""
    told = {member.id for member in members}
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
        if pod.phase is PodPhase.SUCCEEDED and not pod.terminating and pod.uid not in told
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
    failed = sorted((pod for pod in pods if _gave_up(pod)), key=_ended_at)
    if succeeded:
        first = min(_ended_at(pod) for pod in succeeded)
        failed = [pod for pod in failed if _ended_at(pod) >= first]
        return _failed(failed) if failed else Outcome(OutcomeKind.SUCCEEDED)
    newest = max((pod.created_at for pod in pods), default=now)
    if any(_ended_at(pod) >= newest for pod in failed):
        return _failed(failed)
    return _launches(job, pods, view, now)


def _launches(
    job: ElasticJob, pods: tuple[Pod, ...], view: RendezvousView, now: datetime
) -> Outcome | None:
    census = take_census(job, Observed(pods), now)
    able = sum(pod.launcher_since is not None for pod in census.counted)
    reason = hopeless(launch_failures(census.failed, view), view, able, job.spec.min_nodes)
    if reason is None:
        return None
    return Outcome(OutcomeKind.STOPPED, reason, reason=StopReason.LAUNCH_FAILED.value)


def _failed(pods: list[Pod]) -> Outcome:
    first = pods[0]
    said = f": {first.end_message}" if first.end_message else ""
    return Outcome(OutcomeKind.FAILED, f"{first.name} ended first{said}")


def _takes_part(pod: Pod) -> bool:
    """Return True if the pod trains or is terminating. The status of a pod on an unreachable
    machine is stale and does not count."""
    there = not pod.ended and (pod.launcher_since is not None or pod.terminating)
    return there and _is_reachable(pod)


def _is_reachable(pod: Pod) -> bool:
    return pod.node_state is not NodeState.NOT_READY


def _gave_up(pod: Pod) -> bool:
    """Return True if its agent ended it in failure. A pod that was killed or never started may
    be replaced."""
    return pod.exit_code in GIVEN_UP and not pod.terminating and not pod.launch_failed


def _ended_at(pod: Pod) -> datetime:
    return pod.ended_at or pod.created_at
