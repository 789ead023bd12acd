"""Next status of a job, computed in memory and written once after the plan is applied."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.manifests.job_command import (
    decided_launch,
    found_launch,
    program_digest,
)
from elasticjob_operator.domain.manifests.names import selector
from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    Observed,
    Pod,
    PodPhase,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.backends import is_steered, store_absence
from elasticjob_operator.domain.plan.closing_checkpoint import (
    OPEN,
    StoreAccess,
    is_saving,
    save_report,
)
from elasticjob_operator.domain.plan.lifecycle import (
    FINISHED,
    STOPPING,
    SUSPENSION,
    next_phase,
    stop_reason,
    with_own_grace,
)
from elasticjob_operator.domain.plan.sizes import count_pods, wanted_size
from elasticjob_operator.domain.status.conditions import (
    checkpoint_request_time,
    conditions,
    creation_refusal,
    failed_launches,
)
from elasticjob_operator.domain.status.deletion_refusal import deletion_refusal
from elasticjob_operator.domain.status.failures import (
    avoided_nodes,
    first_failure,
    is_new_incarnation,
    is_new_run,
    last_failure,
    round_reason,
    round_reasons,
    stragglers,
)
from elasticjob_operator.domain.status.goodput import (
    carried_over,
    is_same_round,
    of_this_round,
    with_lost_steps,
)
from elasticjob_operator.domain.status.missing_store import missing_store
from elasticjob_operator.domain.status.readiness import final_conditions
from elasticjob_operator.domain.status.rounds import round_status
from elasticjob_operator.domain.status.snapshots import snapshots_status
from elasticjob_operator.domain.status.store_condition import store_refusal
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import (
    MAX_HELD_BACK,
    MAX_MEMBERS,
    MAX_REASONS,
    MAX_ROUNDS,
    MAX_SENTENCES,
    MAX_UNSAVED,
    CauseStatus,
    HeldBackNode,
    Interruptions,
    LaunchStatus,
    MemberStatus,
    PodCounts,
    RendezvousStatus,
    RoundStatus,
    Status,
    StopStatus,
)
from elasticjob_operator.model.types import Launch, LaunchReason, Phase, RendezvousState
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.members import Cause, Counts, Member, MemberState
from elasticjob_rendezvous.protocol.records.roster import natural_order


def next_status(
    job: ElasticJob,
    observed: Observed,
    rendezvous_view: RendezvousView,
    now: datetime,
    access: StoreAccess = OPEN,
) -> Status:
    """Return the status to write at `now` (UTC); equal to the job's own if nothing has changed.

    `rendezvous_view` is `observed.rendezvous`, or a newer view taken after the plan was applied;
    `access` is that of the plan.
    While it is unreadable, the known members, rounds and failures stay; for a finished job
    everything stays.
    """
    view, before = rendezvous_view, job.status
    if _is_data_lost(job, view, observed):
        view = UNREADABLE
    phase = next_phase(job, view, now, observed.pods, observed.bounds, access)
    counted_pods, size = count_pods(job, observed, now), wanted_size(job)
    suspended, finished = phase in SUSPENSION, phase in FINISHED
    # The status of an earlier incarnation does not describe the rounds of this one.
    past = Status() if is_new_incarnation(view, before) else before
    program = program_digest(job)
    run = _new_run(before, program) if is_new_run(view, before) else before
    reason = round_reason(view, observed.pods, past) if view.readable else ""
    latest = last_failure(view, reason, observed.pods, run)
    ready = sum(pod.ready for pod in counted_pods.counted)
    stop = _last_stop(job, observed, view, now, access)
    rounds = before.rounds
    if view.readable:
        rounds = _rounds(view, round_reasons(view, reason, past), past)
        ran = of_this_round(run.snapshots, run.rounds, rounds)
        run = run.model_copy(update={"snapshots": ran})
        rounds = with_lost_steps(rounds, view, run.snapshots)
    absence = None
    if phase not in STOPPING:
        absence = store_absence(job, observed, counted_pods.counted)
    launch = before.launch if before.phase in FINISHED else _launch(job, view)
    status = Status(
        phase=phase,
        launch=launch,
        rendezvous=_rendezvous(view, reason, before),
        nodes=_training_nodes(view, phase, before),
        pods=_pod_counts(observed.pods, 0 if phase in STOPPING else size.nodes),
        ready_nodes=ready,
        wanted_nodes=size.nodes,
        selector=selector(job),
        restarts=view.failures_charged if view.readable else before.restarts,
        avoided_nodes=avoided_nodes(view, before, now, observed.pods),
        stragglers=stragglers(view, before, now) if view.readable else before.stragglers,
        interruptions=(
            _interruptions(view.interruptions) if view.readable else before.interruptions
        ),
        members=_members(view) if view.readable else before.members,
        rounds=rounds,
        snapshots=snapshots_status(view, rounds, run, phase, now, program),
        first_failure=first_failure(run, latest),
        last_failure=latest,
        last_stop=stop,
        checkpoint_request_time=checkpoint_request_time(job, observed, view, phase, now),
        launch_failures=(None if phase in STOPPING else failed_launches(view, counted_pods, size)),
        refusal=None if ready >= size.nodes else creation_refusal(job, observed, phase),
        deletion_refusal=deletion_refusal(observed),
        missing_store=missing_store(absence, before, now),
        store_refusal=store_refusal(observed, phase),
        conditions=(
            # The conditions of a finished job are final: later changes of pods do not matter.
            final_conditions(job, now)
            if before.phase in FINISHED
            else conditions(job, observed, view, counted_pods, size, phase, now, stop, launch)
        ),
        observed_generation=job.metadata.generation,
        start_time=None if suspended else before.start_time or now,
        completion_time=(before.completion_time or now) if finished else None,
    )
    sentences = explanation(job.model_copy(update={"status": status}), observed.pods)
    return status.model_copy(update={"explanation": list(sentences)[:MAX_SENTENCES]})


def _new_run(before: Status, program: str) -> Status:
    """Return the status with which a resumption begins: the step that its program has reached."""
    return Status(snapshots=carried_over(before.snapshots, program))


def _pod_counts(pods: tuple[Pod, ...], desired: int) -> PodCounts:
    active = [pod for pod in pods if pod.active]
    return PodCounts(
        desired=desired,
        active=len(active),
        ready=sum(pod.ready for pod in active),
        pending=sum(pod.launcher_since is None for pod in active),
        terminating=sum(pod.terminating and not (pod.ended or pod.over) for pod in pods),
        failed=sum(pod.phase is PodPhase.FAILED for pod in pods),
    )


def _last_stop(
    job: ElasticJob, observed: Observed, view: RendezvousView, now: datetime, access: StoreAccess
) -> StopStatus | None:
    """Return the last planned stop: the recorded one, or the known one until a round is final.

    A stop while the store refuses writes is recorded later, without the members of its time: its
    report is that of the pass that deleted their pods.
    """
    before, outcome, reason = job.status, view.outcome, stop_reason(job, now)
    known = before.last_stop
    if outcome is not None and outcome.save is not None:
        closed_by = outcome.reason or outcome.kind.value
        stopped = before.phase in STOPPING or closed_by == StopReason.DELETED
        if outcome.save.result is SaveResult.NOT_TRAINING and stopped and known is not None:
            return known if known.reason == closed_by else _stop_status(closed_by, outcome.save)
        return _stop_status(closed_by, outcome.save)
    if reason is None:
        trains = view.readable and view.state is RendezvousState.FINAL
        return None if trains else known
    bounds = with_own_grace(job, observed.bounds)
    refused = is_steered(job) and outcome is None and access.refused
    if known is not None or not refused or is_saving(view, bounds, now, access):
        return known
    report = save_report(view, bounds, refused)
    return None if report.result is SaveResult.NOT_TRAINING else _stop_status(reason.value, report)


def _stop_status(reason: str, save: SaveReport) -> StopStatus:
    return StopStatus(
        reason=reason,
        result=save.kind.value,
        step=save.step if save.step >= 0 else None,
        checkpoint_step=save.checkpoint_step if save.checkpoint_step >= 0 else None,
        unsaved=list(save.unsaved[:MAX_UNSAVED]),
        error=save.error,
    )


def _training_nodes(view: RendezvousView, phase: Phase, before: Status) -> int:
    """Return the number of nodes whose workers run in the final round; for a finished job that of
    its last round."""
    if phase is Phase.SUSPENDED:
        return 0
    if phase in FINISHED:
        return view.nodes if view.readable and view.nodes else before.nodes
    if not view.readable:
        return before.nodes
    if view.state is not RendezvousState.FINAL:
        return 0
    running = MemberState.RUNNING
    return sum(member.state is running and member.round == view.round for member in view.members)


def _is_data_lost(job: ElasticJob, view: RendezvousView, observed: Observed) -> bool:
    """Return True if etcd lost the job's records, so that their absence carries no information.

    The outcome of a finished job stays as it is. The records of an active job are restored by its
    agents within seconds.
    """
    before = job.status
    if before.phase in FINISHED:
        return view.outcome is None
    ran = before.phase in (Phase.RUNNING, Phase.RESTARTING) and before.rendezvous is not None
    reports_soon = any(pod.ready and pod.active for pod in observed.pods)
    return is_steered(job) and ran and view.readable and view.round == 0 and reports_soon


def _rendezvous(view: RendezvousView, reason: str, before: Status) -> RendezvousStatus:
    if not view.readable:
        known = before.rendezvous or RendezvousStatus()
        ended = before.phase in FINISHED
        return known if ended else known.model_copy(update={"state": view.state})
    return RendezvousStatus(
        state=view.state,
        round=view.round,
        nodes=view.nodes,
        waiting=view.waiting,
        waiting_reason=view.waiting_reason or None,
        held_back=[
            HeldBackNode(
                pod=held.name,
                losses=held.times,
                seconds=held.seconds,
                delay_seconds=round(held.delay_seconds),
            )
            for held in view.held_back[:MAX_HELD_BACK]
        ],
        world_size=view.world_size,
        master=view.master,
        cause=_cause(view.cause, reason),
        since=view.since,
    )


def _interruptions(counts: Counts) -> Interruptions:
    return Interruptions(
        losses=counts.losses,
        leaves=counts.leaves,
        preemptions=counts.preemptions,
        joins=counts.joins,
        others=counts.others,
    )


def _cause(cause: Cause | None, reason: str) -> CauseStatus | None:
    if cause is None:
        return None
    members = sorted(cause.members, key=natural_order)[:MAX_MEMBERS]
    return CauseStatus(
        kind=cause.kind.value,
        members=members,
        reason=reason,
        detail=cause.detail,
        reasons=list(cause.reasons[:MAX_REASONS]),
    )


def _launch(job: ElasticJob, view: RendezvousView) -> LaunchStatus | None:
    """Return the launch of the command: the operator's decision, unless a launcher found in the
    files of its pod that the program starts the workers itself.

    Without members, or while the members are those of pods before a suspension, the known finding
    stays as long as it is about the same program. A finding without a digest, as earlier releases
    and their CRD store it, stays until a suspension: the program of a running job cannot change.
    """
    decided = decided_launch(job)
    if decided is None or decided.mode is Launch.PER_NODE or job.spec.launch is not Launch.AUTO:
        return decided
    suspend = job.spec.run_policy.suspend
    if not view.members or suspend:  # the suspension may come with an edit
        known = job.status.launch
        if known is None or known.reason is not LaunchReason.LAUNCHER_FOUND:
            return decided
        unchanged = known.program is None and not suspend
        return known if unchanged or known == found_launch(job, known.message) else decided
    ordered = sorted(view.members, key=lambda member: natural_order(member.name))
    found = next((member.launch for member in ordered if member.launch), "")
    return found_launch(job, found) if found else decided


def _members(view: RendezvousView) -> list[MemberStatus]:
    first = sorted(view.members, key=lambda member: natural_order(member.name))[:MAX_MEMBERS]
    return [_member(member, view.ranks.get(member.id)) for member in first]


def _member(member: Member, rank: int | None) -> MemberStatus:
    return MemberStatus(
        pod=member.name,
        node=member.node or None,
        rank=rank,
        state=member.state.value,
        round=member.round,
        step=None if member.step < 0 else member.step,
        checkpoint_step=None if member.checkpoint_step < 0 else member.checkpoint_step,
        start=None if member.cold is None else "cold" if member.cold else "warm",
        cold_reason=member.cold or None,
    )


def _rounds(view: RendezvousView, reasons: Mapping[int, str], past: Status) -> list[RoundStatus]:
    """Return the rounds in the view, and others from the status: etcd may lose rounds, and the
    records of torch backends disappear with their agents."""
    shown = {found.round: found for found in past.rounds if found.round <= view.round}
    for found in view.rounds:
        shown[found.number] = _with_known(
            round_status(found, reasons.get(found.number, "")), shown.get(found.number)
        )
    return [shown[number] for number in sorted(shown)][-MAX_ROUNDS:]


def _with_known(shown: RoundStatus, known: RoundStatus | None) -> RoundStatus:
    """Return a round with the lost steps that only its entry in the status has."""
    if shown.lost_steps is not None or known is None or known.lost_steps is None:
        return shown
    if not is_same_round(shown, known):
        return shown
    return shown.model_copy(update={"lost_steps": known.lost_steps})
