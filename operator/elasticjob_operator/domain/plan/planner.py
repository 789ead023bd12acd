"""Plan of a job: the actions that turn its observed state into the desired state.

Level-triggered: it depends only on the present state. Planning again after a plan was applied
yields no further actions, and the next pass completes one that failed half-way. A plan creates
and deletes a bounded number of pods; the next one, due at once, continues.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice

from elasticjob_operator.domain.manifests.names import pod_name
from elasticjob_operator.domain.observed.agent_records import undecided_until
from elasticjob_operator.domain.observed.state import Observed, Pod, StopReason
from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    DeleteReason,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.backends import (
    drain_requests,
    is_steered,
    keeps_store,
    pods_with_store_host,
    rendezvous_params,
    stale_store_host,
)
from elasticjob_operator.domain.plan.closing_checkpoint import (
    NOT_TRAINING,
    OPEN,
    WAIT_SECONDS,
    StoreAccess,
    closing_seconds,
    closing_step,
    store_access,
)
from elasticjob_operator.domain.plan.launch_failures import (
    MOST_LAUNCH_FAILURES,
    MOST_REJECTION_SECONDS,
    first_rejected,
    launch_backoff_until,
    launch_failures,
    launch_limit_reason,
)
from elasticjob_operator.domain.plan.lifecycle import (
    FINISHED,
    SUSPENSION,
    cleanup_at,
    deadline,
    expires_at,
    failed_by_deadline,
    lacks_record,
    may_write,
    next_phase,
    stop_reason,
    suspended_at,
    with_own_grace,
)
from elasticjob_operator.domain.plan.sizes import (
    CountedPods,
    WantedSize,
    count_pods,
    gives_up_at,
    wanted_size,
)
from elasticjob_operator.domain.plan.surplus import Disfavored, surplus
from elasticjob_operator.domain.status.conditions import shows_saving
from elasticjob_operator.domain.status.failures import avoided_names, lasting_stragglers
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.types import CleanPodPolicy, Phase, RendezvousState
from elasticjob_rendezvous.protocol.records.members import MemberState, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

_DELETE_REASONS = {
    StopReason.SUSPENDED: DeleteReason.SUSPENDED,
    StopReason.DEADLINE_EXCEEDED: DeleteReason.DEADLINE_EXCEEDED,
    StopReason.DELETED: DeleteReason.JOB_DELETED,
}
MAX_POD_ACTIONS = 512
"""Maximum number of pods that one plan creates and deletes, which bounds the cost of a plan for any
size of a job."""
KEPT_FAILED_PODS = MOST_LAUNCH_FAILURES
"""Maximum number of failed pods kept for their logs, and of pods rejected by their machines; each
holds an index. Older ones are deleted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions that are due now, and the time of the next reconcile.

    Args:
        actions: actions, in order of execution.
        phase: current phase of the job.
        size: wanted size.
        bounds: bounds for the members; None while no member may join.
        wake_at: time at which the plan changes without any event; None for never.
        access: access to the store on which a planned stop was decided; the status follows it.
    """

    actions: tuple[Action, ...]
    phase: Phase
    size: WantedSize
    bounds: RendezvousParams | None = None
    wake_at: datetime | None = None
    access: StoreAccess = OPEN

    @property
    def expected(self) -> int | None:
        """Number of members that can join; None while no member may join."""
        return self.bounds.expected if self.bounds else None


def plan(job: ElasticJob, observed: Observed, now: datetime) -> Plan:
    """Return the plan of the job for its observed state at `now` (UTC)."""
    access = _access(job, observed, now)
    found = replace(_limited(_plan(job, observed, now, access), now), access=access)
    size, over = found.size, found.phase in FINISHED
    if over or job.metadata.deletion_timestamp is not None or job.spec.nodes == size.requested:
        return found
    # The scale subresource needs a value, also while the job is suspended.
    write = WriteNodes(size.requested)
    if job.spec.run_policy.suspend:
        return replace(found, actions=(*found.actions, write))  # which must not delay the end
    return replace(found, actions=(write, *found.actions))


def _access(job: ElasticJob, observed: Observed, now: datetime) -> StoreAccess:
    """Return the access to the store of the job at a planned stop.

    A checkpoint that a previous process requested, whose request this one could not read, gets its
    time, from the request on.
    """
    if observed.bounds is not None or not shows_saving(job.status):
        return store_access(observed, now)
    seconds = max(WAIT_SECONDS, closing_seconds(rendezvous_params(job, 1, 1)))
    return store_access(observed, now, seconds, job.status.checkpoint_request_time)


def _limited(found: Plan, now: datetime) -> Plan:
    """Return the plan up to its `MAX_POD_ACTIONS`th pod, due again at once if it has more.

    A beginning of a plan is safe at any length: plans are also interrupted by errors.
    """
    on_pods = (at for at, one in enumerate(found.actions) if isinstance(one, CreatePod | DeletePod))
    end = next(islice(on_pods, MAX_POD_ACTIONS, None), None)
    return found if end is None else replace(found, actions=found.actions[:end], wake_at=now)


def _plan(job: ElasticJob, observed: Observed, now: datetime, access: StoreAccess) -> Plan:
    view, reason = observed.rendezvous, stop_reason(job, now)
    phase = next_phase(job, view, now, observed.pods, observed.bounds, access)
    if reason is StopReason.DELETED:
        return plan_end(job, observed, phase, reason, now, access)
    if job.status.phase in FINISHED or view.ended:
        return _plan_finished(job, observed, phase, now, access)
    if reason is None and lacks_record(job, view, observed.pods, observed.bounds):
        reason = StopReason.SUSPENDED
    if reason is not None:
        return plan_end(job, observed, phase, reason, now, access)
    if observed.rendezvous.suspended or (not is_steered(job) and job.status.phase in SUSPENSION):
        return _plan_resumption(job, observed, phase, now)
    return _plan_active(job, observed, phase, now)


def plan_end(
    job: ElasticJob,
    observed: Observed,
    phase: Phase,
    reason: StopReason,
    now: datetime,
    access: StoreAccess,
) -> Plan:
    """Return the plan that closes the rendezvous after a checkpoint, then deletes the pods.

    In this order a leaving member starts no round. The pods are deleted even if the store has been
    unreadable or has refused writes for `WAIT_SECONDS`: no member remains that could disagree. The
    rendezvous is closed once that is possible. A checkpoint requested before gets its time. A
    suspension is then in the status before the pods are deleted.
    """
    view = observed.rendezvous
    actions: list[Action] = []
    bounds = with_own_grace(job, observed.bounds)
    if is_steered(job) and view.outcome is None:
        requested = bounds is not None and bounds.closing is not None
        step = NOT_TRAINING
        if requested or any(not pod.over for pod in observed.pods):
            step = closing_step(view, bounds, reason, now, access)
        if step.bounds is not None:
            request = WriteParams(observed.incarnation, step.bounds, observed.bounds_revision)
            return Plan((request,), phase, wanted_size(job), None, step.wake_at)
        if step.wake_at is not None:
            return Plan((), phase, wanted_size(job), None, step.wake_at)
        if view.readable and bounds is not None and not access.refused:
            stopped, save = OutcomeKind.STOPPED, step.report
            actions.append(CloseRendezvous(observed.incarnation, stopped, reason, save=save))
        elif (
            phase in SUSPENSION
            and job.status.phase not in SUSPENSION
            and observed.pods
            and not (view.readable and bounds is None)
        ):
            # Only the status records the suspension: it precedes the deletion of the pods.
            return Plan((), phase, wanted_size(job), None, now)
    everything = reason is not StopReason.DEADLINE_EXCEEDED
    actions += [
        DeletePod(pod.name, pod.uid, _DELETE_REASONS[reason])
        for pod in _by_index(observed)
        if pod.active or (everything and not pod.terminating)
    ]
    return Plan(tuple(actions), phase, wanted_size(job))


def _plan_finished(
    job: ElasticJob, observed: Observed, phase: Phase, now: datetime, access: StoreAccess
) -> Plan:
    """Return the plan of a finished job: cleanPodPolicy after a grace period for the agents' own
    end, then ttlSecondsAfterFinished."""
    size = wanted_size(job)
    expiry, cleanup = expires_at(job), cleanup_at(job)
    if expiry is not None and expiry <= now:
        return Plan((DeleteJob(),), phase, size)
    if failed_by_deadline(job):
        close = plan_end(job, observed, phase, StopReason.DEADLINE_EXCEEDED, now, access)
        if close.actions or close.wake_at is not None:
            return close
    policy = job.spec.run_policy.clean_pod_policy
    unneeded = [
        pod
        for pod in _by_index(observed)
        if (policy is CleanPodPolicy.RUNNING and (pod.active or _outlives_trainer(pod)))
        or (policy is CleanPodPolicy.ALL and not pod.terminating)
    ]
    if not unneeded:
        return Plan((), phase, size, None, expiry)
    if cleanup is None or cleanup > now:
        # Delete not even a pod that seems never to have run: its observed state may be older than
        # the job's end, and its logs would be lost.
        return Plan((), phase, size, None, earliest(expiry, cleanup))
    actions = tuple(DeletePod(pod.name, pod.uid, DeleteReason.JOB_FINISHED) for pod in unneeded)
    return Plan(actions, phase, size, None, expiry)


def _outlives_trainer(pod: Pod) -> bool:
    """Return True if other containers outlive the trainer and the pod is not being deleted."""
    return pod.lingering and not pod.terminating


def _plan_resumption(job: ElasticJob, observed: Observed, phase: Phase, now: datetime) -> Plan:
    """Return the plan that starts a new incarnation, once no pod of the old one can still write a
    checkpoint."""
    old = [pod for pod in _by_index(observed) if not _is_fresh(job, pod)]
    remaining = [pod for pod in old if may_write(pod)]
    if remaining:
        actions = [
            DeletePod(pod.name, pod.uid, DeleteReason.SUSPENDED)
            for pod in remaining
            if not pod.terminating
        ]
        return Plan(tuple(actions), phase, wanted_size(job))
    if phase is Phase.SUSPENDED:  # the next pass resumes the job, once the status shows this
        return Plan((), phase, wanted_size(job))
    if not is_steered(job) and (not observed.pods or len(old) < len(observed.pods)):
        # The incarnation is that of the pods; without pods, an unused one.
        return _plan_active(job, observed, phase, now)
    fresh = Observed(observed.pods, incarnation=observed.incarnation + 1, refusal=observed.refusal)
    return _plan_active(job, fresh, phase, now)


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


def _plan_active(job: ElasticJob, observed: Observed, phase: Phase, now: datetime) -> Plan:
    size, view = wanted_size(job), observed.rendezvous
    counted_pods = count_pods(job, observed, now)
    failures = launch_failures(counted_pods.failed, view)
    able = sum(pod.launcher_since is not None for pod in counted_pods.counted)
    reason = (
        launch_limit_reason(failures, view, able, job.spec.min_nodes) if is_steered(job) else None
    )
    if reason is not None:
        return _plan_failure(observed, phase, size, reason)
    # A gang that has trained and cannot form waits for its pods: their machines may be others.
    waits = bool(view.rounds) and view.state is not RendezvousState.FINAL
    held = launch_backoff_until(failures, 0.0 if waits else MOST_REJECTION_SECONDS)
    if held is not None and held <= now:
        held = None
    steered = is_steered(job)
    if not steered:
        held = _latest(held, undecided_until(job, observed.pods, now))
    missing = size.nodes - len(counted_pods.counted)
    victims = _surplus_pods(job, observed, counted_pods, -missing, now)
    if view.finishing:
        # New members cannot join; only a job below its minimum needs pods to continue.
        missing = min(missing, job.spec.min_nodes - len(counted_pods.counted))
    bounds = rendezvous_params(
        job,
        size.nodes,
        _expected_members(job, observed, counted_pods, victims, now, held is not None),
        drain_requests(observed, counted_pods.marked, victims),
    )
    actions: list[Action] = []
    if steered:
        if view.readable and observed.bounds != bounds:
            write = WriteParams(observed.incarnation, bounds, observed.bounds_revision)
            actions.append(write)
        actions += _gone_members(observed)
    if held is None:
        actions += _creations(job, observed, counted_pods, missing)
    actions += [DeletePod(pod.name, pod.uid, reason) for pod, reason in victims]
    actions += _leftover_deletions(counted_pods, failures, view.readable)
    if held is None:
        actions += stale_store_host(job, counted_pods)
    wake_at = earliest(held, _wake_at(job, observed, counted_pods, now))
    return Plan(tuple(actions), phase, size, bounds, wake_at)


def _surplus_pods(
    job: ElasticJob, observed: Observed, counted_pods: CountedPods, excess: int, now: datetime
) -> list[tuple[Pod, DeleteReason]]:
    """Return the pods to delete so that the job shrinks by `excess`, with their reasons.

    There are none while the rendezvous ends, or while one that the operator steers is unreadable.
    """
    view = observed.rendezvous
    if view.finishing or (is_steered(job) and not view.readable):
        return []
    able_to_go = [pod for pod in counted_pods.counted if not keeps_store(job, pod.index)]
    slower = lasting_stragglers(job.status.stragglers, now)
    avoided = frozenset(avoided_names(job.status, now, observed.pods))
    given_up = frozenset(pod.uid for pod in counted_pods.given_up)
    return surplus(able_to_go, view, excess, given_up, Disfavored(avoided, slower))


def _creations(
    job: ElasticJob, observed: Observed, counted_pods: CountedPods, missing: int
) -> list[CreatePod]:
    """Return the creations of missing pods, and of the one that hosts the store of the job."""
    if not observed.rendezvous.finishing:
        missing = pods_with_store_host(job, counted_pods, missing)
    indices = islice(counted_pods.free_indices(), max(min(missing, MAX_POD_ACTIONS + 1), 0))
    name = job.metadata.name
    return [CreatePod(index, pod_name(name, index), observed.incarnation) for index in indices]


def _plan_failure(observed: Observed, phase: Phase, size: WantedSize, reason: str) -> Plan:
    """Return the plan that closes a job that cannot form a round; the next pass finishes it."""
    if not observed.rendezvous.readable:
        return Plan((), phase, size)
    close = CloseRendezvous(
        observed.incarnation, OutcomeKind.STOPPED, StopReason.LAUNCH_FAILED, reason
    )
    return Plan((close,), phase, size)


def _gone_members(observed: Observed) -> list[Action]:
    """Return the removal of members whose pods have ended or no longer exist. A member on a silent
    machine stays until its lease expires, one whose pod was not looked up until a later pass."""
    alive = observed.unchecked | {pod.uid for pod in observed.pods if not pod.over}
    gone = [
        member.id
        for member in observed.rendezvous.members
        if member.id and member.id not in alive and member.state is not MemberState.DONE
    ]
    return [RemoveMembers(observed.incarnation, tuple(sorted(gone)))] if gone else []


def _leftover_deletions(
    counted_pods: CountedPods, failures: list[Pod], readable: bool
) -> list[DeletePod]:
    """Return deletions of pods that an earlier plan marked, of pods that cannot end their workers,
    and of the oldest failed pods. `failures` are the launch failures, oldest first."""
    chosen = [pod for pod in counted_pods.marked if not pod.terminating] if readable else []
    newest = sorted(counted_pods.failed, key=lambda pod: (pod.created_at, pod.index), reverse=True)
    leaving = {pod.uid for pod in chosen}
    # The limit counts no rejected pods, but the back-off does: neither kind displaces the other.
    # The back-off also needs the first rejected pod.
    first = first_rejected(failures)
    rejected = [pod for pod in newest if pod.rejected and pod is not first]
    rejected = rejected if first is None else [first, *rejected]
    others = [pod for pod in newest if not pod.rejected]
    old = [
        pod
        for pod in (*rejected[KEPT_FAILED_PODS:], *others[KEPT_FAILED_PODS:])
        if pod.uid not in leaving
    ]
    return [
        *(DeletePod(pod.name, pod.uid, DeleteReason.MARKED) for pod in chosen),
        *(
            DeletePod(pod.name, pod.uid, DeleteReason.STUCK)
            for pod in counted_pods.stuck
            if pod.uid not in leaving
        ),
        *(DeletePod(pod.name, pod.uid, DeleteReason.REPLACED) for pod in old),
    ]


def _expected_members(
    job: ElasticJob,
    observed: Observed,
    counted_pods: CountedPods,
    victims: list[tuple[Pod, DeleteReason]],
    now: datetime,
    held: bool,
) -> int:
    """Return the number of members that can join: remaining pods that are not given up, and pods
    being created."""
    wanted = wanted_size(job).nodes
    going = {pod.uid for pod, _ in victims}
    given_up = {pod.uid for pod in counted_pods.given_up}
    able = sum(pod.uid not in going | given_up for pod in counted_pods.counted)
    missing = max(wanted - len(counted_pods.counted), 0)
    refused_until = _refusal_gives_up_at(job, observed)
    if not held and (refused_until is None or refused_until > now):
        able += missing
    return min(able, wanted)


def _refusal_gives_up_at(job: ElasticJob, observed: Observed) -> datetime | None:
    if observed.refusal is None:
        return None
    pending_timeout = timedelta(seconds=job.spec.elasticity.pending_timeout_seconds)
    return observed.refusal.since + pending_timeout


def _wake_at(
    job: ElasticJob, observed: Observed, counted_pods: CountedPods, now: datetime
) -> datetime | None:
    pending_timeout = [gives_up_at(job, pod) for pod in counted_pods.counted]
    deadlines = [deadline(job), _refusal_gives_up_at(job, observed), *pending_timeout]
    return earliest(*(due for due in deadlines if due is not None and due > now))


def _by_index(observed: Observed) -> list[Pod]:
    return sorted(observed.pods, key=lambda pod: (pod.index, pod.uid))


def earliest(*moments: datetime | None) -> datetime | None:
    return min((moment for moment in moments if moment is not None), default=None)


def _latest(*moments: datetime | None) -> datetime | None:
    return max((moment for moment in moments if moment is not None), default=None)
