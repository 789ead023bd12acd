"""Plan of an active job: the actions that turn its observed state into the wanted one.

Level-triggered: it depends only on the present state. Planning again after a plan was applied
yields no further actions, and the next pass completes one that failed half-way.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice

from elasticjob_operator.core.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeletePod,
    RemoveMembers,
    WriteBounds,
    WriteNodes,
)
from elasticjob_operator.core.agent_view import undecided_until
from elasticjob_operator.core.backends import is_steered, keeps_store
from elasticjob_operator.core.bounds import bounds_of, marks
from elasticjob_operator.core.census import Census, gives_up_at, take_census
from elasticjob_operator.core.endings import Plan, earliest, ending, finished, in_order
from elasticjob_operator.core.launches import (
    MOST_LAUNCH_FAILURES,
    held_until,
    hopeless,
    launch_failures,
)
from elasticjob_operator.core.lifecycle import (
    FINISHED,
    deadline,
    deadline_exceeded,
    next_phase,
    suspended_at,
)
from elasticjob_operator.core.names import pod_name
from elasticjob_operator.core.observed import NodeState, Observed, Pod
from elasticjob_operator.core.offenders import avoided, flagged
from elasticjob_operator.core.rendezvous_view import StopReason
from elasticjob_operator.core.sizes import WantedSize, wanted_size
from elasticjob_operator.core.store_host import stale_store, with_store
from elasticjob_operator.core.victims import DeleteReason, Poor, surplus
from elasticjob_operator.model.enums import Phase
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.records import MemberState, OutcomeKind

KEPT_FAILED_PODS = MOST_LAUNCH_FAILURES
"""Maximum number of failed pods kept for their logs; each holds an index. Older ones are
deleted."""


def plan(job: ElasticJob, observed: Observed, now: datetime) -> Plan:
    """Return the plan of the job for its observed state at `now` (UTC)."""
    phase = next_phase(job, observed.rendezvous, now)
    if job.metadata.deletion_timestamp is not None:
        return ending(job, observed, phase, StopReason.DELETED)
    if job.status.phase in FINISHED or observed.rendezvous.ended:
        return finished(job, observed, phase, now)
    if job.spec.run_policy.suspend:
        return ending(job, observed, phase, StopReason.SUSPENDED)
    if deadline_exceeded(job, now):
        return ending(job, observed, phase, StopReason.DEADLINE_EXCEEDED)
    if observed.rendezvous.suspended or (
        not is_steered(job) and job.status.phase is Phase.SUSPENDED
    ):
        return _resuming(job, observed, phase, now)
    return _active(job, observed, phase, now)


def _resuming(job: ElasticJob, observed: Observed, phase: Phase, now: datetime) -> Plan:
    """Return the plan that starts a new incarnation, once no pod of the old one can still write a
    checkpoint.

    Pods on an unreachable machine do not count: their leases have expired, and their workers have
    stopped. Neither do ended pods whose object only a finalizer keeps.
    """
    old = [pod for pod in in_order(observed) if not _is_fresh(job, pod)]
    there = (pod for pod in old if pod.node_state is not NodeState.NOT_READY)
    remaining = [pod for pod in there if not (pod.over and pod.terminating)]
    if remaining:
        actions = [
            DeletePod(pod.name, pod.uid, DeleteReason.SUSPENDED)
            for pod in remaining
            if not pod.terminating
        ]
        return Plan(tuple(actions), phase, wanted_size(job.spec))
    if not is_steered(job) and (not observed.pods or len(old) < len(observed.pods)):
        # The incarnation is that of the pods; without pods, an unused one.
        return _active(job, observed, phase, now)
    fresh = Observed(observed.pods, incarnation=observed.incarnation + 1, refusal=observed.refusal)
    return _active(job, fresh, phase, now)


def _is_fresh(job: ElasticJob, pod: Pod) -> bool:
    """Return True if the pod was created since the suspension by a pass that failed to write its
    status.

    Only torch backends need this: with etcd the suspension is recorded in the rendezvous, and a
    new incarnation has its own.
    """
    since = suspended_at(job)
    if is_steered(job) or since is None or pod.terminating:
        return False
    return pod.created_at >= since


def _active(job: ElasticJob, observed: Observed, phase: Phase, now: datetime) -> Plan:
    size, view = wanted_size(job.spec), observed.rendezvous
    census = take_census(job, observed, now)
    failures = launch_failures(census.failed, view)
    able = sum(pod.launcher_since is not None for pod in census.counted)
    reason = hopeless(failures, view, able, job.spec.min_nodes) if is_steered(job) else None
    if reason is not None:
        return _failing(observed, phase, size, reason)
    held = held_until(failures)
    if held is not None and held <= now:
        held = None
    steered = is_steered(job)
    if not steered:
        held = _latest(held, undecided_until(job, observed.pods, now))
    missing = size.nodes - len(census.counted)
    given_up = frozenset(pod.uid for pod in census.given_up)
    victims: list[tuple[Pod, DeleteReason]] = []
    if not view.finishing and (view.readable or not steered):
        able_to_go = [pod for pod in census.counted if not keeps_store(job, pod.index)]
        slower = flagged(job.status.stragglers, now)
        poor = Poor(frozenset(avoided(job.status, now)), slower)
        victims = surplus(able_to_go, view, -missing, given_up, poor)
    elif view.finishing:
        # New members cannot join; only a job below its minimum needs pods to go on.
        missing = min(missing, job.spec.min_nodes - len(census.counted))
    bounds = bounds_of(
        job,
        size.nodes,
        _expected(job, observed, census, victims, now, held is not None),
        marks(observed, census.marked, victims),
    )
    actions: list[Action] = []
    if job.spec.nodes is None:
        actions.append(WriteNodes(size.asked))
    if steered:
        if view.readable and observed.bounds != bounds:
            actions.append(WriteBounds(observed.incarnation, bounds))
        actions += _gone_members(observed)
    if held is None:
        if not view.finishing:
            missing = with_store(job, census, missing)
        actions += [
            CreatePod(index, pod_name(job.metadata.name, index), observed.incarnation)
            for index in islice(census.free_indices(), max(missing, 0))
        ]
    actions += [DeletePod(pod.name, pod.uid, reason) for pod, reason in victims]
    actions += _leftovers(census, view.readable)
    if held is None:
        actions += stale_store(job, census)
    wake_at = earliest(held, _wake_at(job, observed, census, now))
    return Plan(tuple(actions), phase, size, bounds, wake_at)


def _failing(observed: Observed, phase: Phase, size: WantedSize, reason: str) -> Plan:
    """Return the plan that closes a job that cannot form a round; the next pass finishes it."""
    if not observed.rendezvous.readable:
        return Plan((), phase, size)
    close = CloseRendezvous(
        observed.incarnation, OutcomeKind.STOPPED, StopReason.LAUNCH_FAILED, reason
    )
    return Plan((close,), phase, size)


def _gone_members(observed: Observed) -> list[Action]:
    """Return the removal of members whose pods have ended or no longer exist. A member on a silent
    machine stays until its lease expires."""
    alive = {pod.uid for pod in observed.pods if not pod.over}
    gone = [
        member.id
        for member in observed.rendezvous.members
        if member.id and member.id not in alive and member.state is not MemberState.DONE
    ]
    return [RemoveMembers(observed.incarnation, tuple(sorted(gone)))] if gone else []


def _leftovers(census: Census, readable: bool) -> list[DeletePod]:
    """Return deletions of pods that an earlier plan marked, and of the oldest failed pods."""
    chosen = [pod for pod in census.marked if not pod.terminating] if readable else []
    newest = sorted(census.failed, key=lambda pod: (pod.created_at, pod.index), reverse=True)
    old = [pod for pod in newest[KEPT_FAILED_PODS:] if pod not in chosen]
    return [
        *(DeletePod(pod.name, pod.uid, DeleteReason.MARKED) for pod in chosen),
        *(DeletePod(pod.name, pod.uid, DeleteReason.REPLACED) for pod in old),
    ]


def _expected(
    job: ElasticJob,
    observed: Observed,
    census: Census,
    victims: list[tuple[Pod, DeleteReason]],
    now: datetime,
    held: bool,
) -> int:
    """Return the number of members that can join: remaining pods that are not given up, and pods
    being created."""
    wanted = wanted_size(job.spec).nodes
    going = {pod.uid for pod, _ in victims}
    given_up = {pod.uid for pod in census.given_up}
    able = sum(pod.uid not in going | given_up for pod in census.counted)
    missing = max(wanted - len(census.counted), 0)
    refused_until = _refusal_gives_up_at(job, observed)
    if not held and (refused_until is None or refused_until > now):
        able += missing
    return min(able, wanted)


def _refusal_gives_up_at(job: ElasticJob, observed: Observed) -> datetime | None:
    if observed.refusal is None:
        return None
    patience = timedelta(seconds=job.spec.elasticity.pending_timeout_seconds)
    return observed.refusal.since + patience


def _wake_at(job: ElasticJob, observed: Observed, census: Census, now: datetime) -> datetime | None:
    patience = [gives_up_at(job, pod) for pod in census.counted]
    dues = [deadline(job), _refusal_gives_up_at(job, observed), *patience]
    return earliest(*(due for due in dues if due is not None and due > now))


def _latest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)
