"""Conditions of a job: status, reason, message and transition time."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from elasticjob_operator.domain.explain.phrases import (
    is_unreachable,
    pods_left,
    saving_text,
    stop_report,
)
from elasticjob_operator.domain.manifests.job_command import is_decided_by_pods
from elasticjob_operator.domain.manifests.names import pod_name
from elasticjob_operator.domain.manifests.template_warnings import TemplateWarning, warnings_of
from elasticjob_operator.domain.observed.state import (
    Observed,
    Obstacle,
    Pod,
    Refusal,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.backends import is_steered, store_absence
from elasticjob_operator.domain.plan.closing_checkpoint import MOST_SECONDS
from elasticjob_operator.domain.plan.launch_failures import (
    launch_failure_text,
    launch_failures,
)
from elasticjob_operator.domain.plan.lifecycle import FINISHED, STOPPING, awaits_resumption
from elasticjob_operator.domain.plan.sizes import Clamp, CountedPods, WantedSize
from elasticjob_operator.domain.status.deletion_refusal import (
    REFUSED,
    REMEDY,
    deletion_refusal,
    refusal_text,
)
from elasticjob_operator.domain.status.missing_store import awaited_text
from elasticjob_operator.domain.status.nodes_condition import nodes_finding
from elasticjob_operator.domain.status.readiness import Finding, summary, with_transition_times
from elasticjob_operator.domain.status.rounds import utc_time
from elasticjob_operator.domain.status.snapshots import memory_finding, storage_finding
from elasticjob_operator.domain.status.store_condition import STORE_CONDITION, store_condition
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.refusals import CreationRefusal
from elasticjob_operator.model.status import (
    Condition,
    LaunchFailures,
    LaunchStatus,
    Status,
    StopStatus,
)
from elasticjob_operator.model.types import (
    ConditionStatus,
    ConditionType,
    Launch,
    Phase,
    RendezvousState,
)
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import counted

NAMED_PODS = 5
"""Maximum number of pods named in a message, which must stay readable for a thousand pods."""

WORKERS_FAILED = "WorkersFailed"
"""Reason of condition Failed if failures of workers ended the job."""


def conditions(
    job: ElasticJob,
    observed: Observed,
    view: RendezvousView,
    counted_pods: CountedPods,
    size: WantedSize,
    phase: Phase,
    now: datetime,
    stop: StopStatus | None = None,
    launch: LaunchStatus | None = None,
) -> list[Condition]:
    """Return all conditions, in the order of `ConditionType`.

    `stop` is the last planned stop, and `launch` that of the next status.
    """
    findings = [
        *summary(
            phase, resizing(view, size, phase), end_reason(view), _refusal(job, observed, phase)
        ),
        Finding(ConditionType.CREATED, ConditionStatus.TRUE, "JobCreated", "the job was accepted"),
        pods_ready(job, observed, view, counted_pods, size, phase, launch),
        *_phase_findings(job, observed, view, phase, stop),
        resizing(view, size, phase),
        *_end_findings(view, phase, stop),
        *_refusal_findings(job, observed),
        *nodes_finding(job, observed),
        *_warning_findings(job),
        *memory_finding(job, view),
        *storage_finding(job, view),
        Finding(
            STORE_CONDITION,
            *store_condition(observed, job.spec.rendezvous.backend, phase, job.status, now),
        ),
    ]
    order = list(ConditionType)
    findings.sort(key=lambda finding: order.index(finding.type))
    return with_transition_times(findings, job.status.conditions, job.metadata.generation, now)


def _refusal(job: ElasticJob, observed: Observed, phase: Phase) -> Refusal | None:
    """Return the refusal to create pods; None for a job that wants none."""
    wanted = phase not in STOPPING or awaits_resumption(job, phase)
    return observed.refusal if wanted else None


def pods_ready(
    job: ElasticJob,
    observed: Observed,
    view: RendezvousView,
    counted_pods: CountedPods,
    size: WantedSize,
    phase: Phase,
    launch: LaunchStatus | None,
) -> Finding:
    """Return PodsReady: true if the wanted number of pods is Ready; otherwise the message names
    the other pods and their obstacles."""
    kind, refusal = ConditionType.PODS_READY, _refusal(job, observed, phase)
    if phase in STOPPING and refusal is None:
        return Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}")
    ready = sum(pod.ready for pod in counted_pods.counted)
    if ready >= size.nodes:
        text = f"{ready} of {size.nodes} are ready"
        if ready > size.nodes:  # surplus pods stay while the rendezvous cannot be read
            verb = "is" if size.nodes == 1 else "are"
            text = f"{ready} are ready, {counted(size.nodes, 'node')} {verb} wanted"
        return Finding(kind, ConditionStatus.TRUE, "AllReady", text)
    tally = f"{ready} of {size.nodes} are ready"
    if refusal is not None:
        message = f"{tally}; a pod cannot be created: {refusal.message}"
        return Finding(kind, ConditionStatus.FALSE, refusal.obstacle.value, message)
    blocked = [pod for pod in counted_pods.counted if pod.obstacle is not None and not pod.ready]
    if blocked:
        reason = str(blocked[0].obstacle)
        return Finding(kind, ConditionStatus.FALSE, reason, f"{tally}; {_blocked_text(blocked)}")
    if failed := failed_launches(view, counted_pods, size):
        text = launch_failure_text(failed.pod, failed.count, failed.message)
        return Finding(kind, ConditionStatus.FALSE, LAUNCH_FAILED, f"{tally}; {text}")
    absence = store_absence(job, observed, counted_pods.counted)
    if absence is not None and (awaited := awaited_text(absence)):
        return Finding(kind, ConditionStatus.FALSE, "StoreMissing", f"{tally}; {awaited}")
    waiting = [pod.name for pod in counted_pods.counted if not pod.ready]
    names = f"; waiting for {_names_text(waiting)}" if waiting else ""
    runs = any(pod.launcher_since is not None and not pod.ready for pod in counted_pods.counted)
    hint = _torchrun_hint(job, view, launch) if runs else ""
    return Finding(kind, ConditionStatus.FALSE, "PodsStarting", tally + names + hint)


LAUNCH_FAILED = "LaunchFailed"
"""Reason of condition PodsReady while pods that failed at launch are not replaced yet."""


def failed_launches(
    view: RendezvousView, pods: CountedPods, size: WantedSize
) -> LaunchFailures | None:
    """Return the pods that failed at launch, while a pod is missing; None without any."""
    failures = launch_failures(pods.failed, view)
    if not failures or len(pods.counted) >= size.nodes:
        return None
    last = failures[-1]
    message = last.end_message or "no reason is known"
    return LaunchFailures(pod=last.name, count=len(failures), message=message)


def _torchrun_hint(job: ElasticJob, view: RendezvousView, launch: LaunchStatus | None) -> str:
    """Return the condition under which a running pod joins the job, if torchrun in its command or
    in its program decides it."""
    if launch is not None and launch.mode is Launch.PER_NODE:
        return (
            "; a pod joins once torchrun in its command asks for a round: if the command starts "
            "none, set spec.launch to PerWorker"
        )
    # The finding of a pod is known with its first member, which torchrun makes.
    if view.readable and not view.members and is_decided_by_pods(job):
        return "; if the program starts torchrun, a pod joins once torchrun asks for a round"
    return ""


_OF_CREATION = (
    Obstacle.QUOTA,
    Obstacle.REFUSED,
    Obstacle.AGENT_RESOURCES,
    Obstacle.OWNER_REMOVED,
    Obstacle.NAMESPACE_ENDS,
    Obstacle.NAME_CONFLICT,
    Obstacle.TEMPLATE_INVALID,
    Obstacle.ENDPOINT,
    Obstacle.SECRET,
    Obstacle.BACKEND,
    Obstacle.FOREIGN_ETCD,
    Obstacle.NOT_SERVED,
)
"""Obstacles to creating pods; the others are of pods that exist."""


def creation_refusal(job: ElasticJob, observed: Observed, phase: Phase) -> CreationRefusal | None:
    """Return the refusal to create pods for the status; None for a job that wants none."""
    refusal = _refusal(job, observed, phase)
    if refusal is None:
        return None
    return CreationRefusal(reason=refusal.obstacle.value, message=refusal.message)


def refusal_of(status: Status) -> tuple[Obstacle, str] | None:
    """Return the obstacle to creating pods and its message from a status.

    The previous release wrote it only into condition PodsReady, behind the number of ready pods.
    """
    if status.refusal is not None:
        known = {obstacle.value: obstacle for obstacle in Obstacle}
        reason = status.refusal.reason
        return known.get(reason, Obstacle.REFUSED), status.refusal.message  # a newer operator's
    for found in status.conditions:
        for obstacle in _OF_CREATION:
            if found.type is ConditionType.PODS_READY and found.reason == obstacle.value:
                return obstacle, found.message.partition(": ")[2] or found.message
    return None


def _refusal_findings(job: ElasticJob, observed: Observed) -> list[Finding]:
    """Return NameConflict and TemplateInvalid, each only if it is or has been true."""
    before = {condition.type for condition in job.status.conditions}
    refusal, others = observed.refusal, observed.foreign - observed.predecessors
    found = []
    for kind, obstacle in (
        (ConditionType.NAME_CONFLICT, Obstacle.NAME_CONFLICT),
        (ConditionType.TEMPLATE_INVALID, Obstacle.TEMPLATE_INVALID),
    ):
        if refusal is not None and refusal.obstacle is obstacle:
            message = refusal.message
        elif kind is ConditionType.NAME_CONFLICT and others:
            foreign_pods = [pod_name(job.metadata.name, index) for index in others]
            message = f"{_names_text(foreign_pods)}: taken by a pod of another owner; skipped"
        else:
            if kind in before:
                found.append(Finding(kind, ConditionStatus.FALSE, "Resolved"))
            continue
        found.append(Finding(kind, ConditionStatus.TRUE, obstacle.value, message))
    return found


MAX_WARNINGS_TEXT = 2000
"""Maximum length of the warnings in a condition or event, in characters."""
NO_WARNINGS = "NoWarnings"


def warnings_text(found: Iterable[TemplateWarning]) -> str:
    """Return as many warnings as fit, each with its field, and the number of the others."""
    texts, length = [str(warning.problem) for warning in found], 0
    for count, text in enumerate(texts):
        length += len(text) + 2
        if count and length > MAX_WARNINGS_TEXT:
            more = len(texts) - count
            return "; ".join(texts[:count]) + f"; and {counted(more, 'more warning')}"
    return "; ".join(texts)


def _warning_findings(job: ElasticJob) -> list[Finding]:
    """Return TemplateWarnings, only if it is or has been true. Its reason lists the kinds."""
    kind, found = ConditionType.TEMPLATE_WARNINGS, warnings_of(job)
    if found:
        reason = ",".join(sorted({warning.kind for warning in found}))
        return [Finding(kind, ConditionStatus.TRUE, reason, warnings_text(found))]
    if any(condition.type is kind for condition in job.status.conditions):
        return [Finding(kind, ConditionStatus.FALSE, NO_WARNINGS)]
    return []


def _blocked_text(pods: list[Pod]) -> str:
    """Return the obstacles of pods; pods with the same obstacle and message are grouped."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        groups.setdefault((str(pod.obstacle), pod.obstacle_message), []).append(pod.name)
    texts = [
        f"{_names_text(names)}: {obstacle}" + (f" ({message})" if message else "")
        for (obstacle, message), names in groups.items()
    ]
    more = len(texts) - NAMED_PODS
    return "; ".join(texts[:NAMED_PODS]) + (f"; and {more} more obstacles" if more > 0 else "")


def _names_text(names: list[str]) -> str:
    shown = sorted(names, key=natural_order)[:NAMED_PODS]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


_MAX_REQUEST_AGE = timedelta(seconds=MOST_SECONDS)
"""Maximum plausible age of a request for a checkpoint."""
SAVING = "SavingCheckpoint"
"""Reason of condition Running while the workers save before the job is stopped."""


def shows_saving(status: Status) -> bool:
    """Return True if a status shows that the workers save before the job is stopped."""
    return _saving_condition(status) is not None


def _saving_condition(status: Status) -> Condition | None:
    return next(
        (
            condition
            for condition in status.conditions
            if condition.type is ConditionType.RUNNING and condition.reason == SAVING
        ),
        None,
    )


def checkpoint_request_time(
    job: ElasticJob, observed: Observed, view: RendezvousView, phase: Phase, now: datetime
) -> datetime | None:
    """Return the time of the request for a checkpoint before a planned stop; None without one.

    Without a plausible time in the request, which the job's etcd user may overwrite, it is that of
    the first status that shows it.
    """
    if phase is not Phase.RUNNING:
        return None
    closing = observed.bounds.closing if observed.bounds is not None else None
    if closing is not None and view.outcome is None:
        requested = utc_time(closing.since_ms)
        if requested is not None and now - _MAX_REQUEST_AGE <= requested <= now:
            return requested
    elif not _was_requested_before(job.status, observed, view):
        return None
    return job.status.checkpoint_request_time or now


def _was_requested_before(before: Status, observed: Observed, view: RendezvousView) -> bool:
    """Return True if a previous process requested a checkpoint, and this one cannot read it."""
    return shows_saving(before) and observed.bounds is None and not view.readable


def _phase_findings(
    job: ElasticJob,
    observed: Observed,
    view: RendezvousView,
    phase: Phase,
    stop: StopStatus | None,
) -> list[Finding]:
    def finding(kind: ConditionType, of: Phase, reason: str, message: str = "") -> Finding:
        if phase is of:
            return Finding(kind, ConditionStatus.TRUE, reason, message)
        return Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}")

    running = f"round {view.round} with {counted(view.nodes, 'node')}" if view.round else ""
    closing = observed.bounds.closing if observed.bounds is not None else None
    before = _saving_condition(job.status)
    reason, suspended = "RoundFinal", "runPolicy.suspend is true"
    if not job.spec.run_policy.suspend:
        known = "its suspension is recorded" if view.readable else "its etcd can be read"
        suspended = (
            f"the job is resumed once {known if is_steered(job) else 'its pods have stopped'}"
        )
    if closing is not None and view.outcome is None:
        reason, running = SAVING, f"{running}; {saving_text(closing.outcome.reason)}"
    elif before is not None and _was_requested_before(job.status, observed, view):
        reason, running = SAVING, before.message
    report = stop_report(stop)
    if stop is not None and report is not None and stop.reason == StopReason.SUSPENDED:
        suspended = f"{suspended}; {report.text}"
    return [
        finding(ConditionType.RUNNING, Phase.RUNNING, reason, running),
        finding(ConditionType.RESTARTING, Phase.RESTARTING, "RoundForming", _cause_text(view)),
        _suspended(observed, phase, suspended),
    ]


NODE_UNREACHABLE = "NodeUnreachable"
"""Reason of condition Suspended while a pod stays whose machine does not answer."""


def _suspended(observed: Observed, phase: Phase, message: str) -> Finding:
    """Return Suspended: true, with this message, once no pod is left."""
    kind, pods = ConditionType.SUSPENDED, observed.pods
    if phase is Phase.SUSPENDED:
        return Finding(kind, ConditionStatus.TRUE, phase.value, message)
    if phase is Phase.SUSPENDING:
        text = f"waiting for the end of {_names_text([pod.name for pod in pods])}"
        if reasons := pods_left(pods):
            text += f": {reasons}"
        reason = NODE_UNREACHABLE if any(map(is_unreachable, pods)) else phase.value
        if (refused := deletion_refusal(observed)) is not None:
            reason, text = REFUSED, f"{text}; {refusal_text(refused)}; {REMEDY}"
        return Finding(kind, ConditionStatus.FALSE, reason, text)
    return Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}")


def _cause_text(view: RendezvousView) -> str:
    if view.cause is None:
        return ""
    members = f" of {_names_text(list(view.cause.members))}" if view.cause.members else ""
    detail = f": {view.cause.detail}" if view.cause.detail else ""
    return f"{view.cause.kind}{members}{detail}"


_CLAMPED = {
    Clamp.BELOW_MIN_NODES: "below minNodes",
    Clamp.ABOVE_MAX_NODES: "above maxNodes",
    Clamp.BETWEEN_INCREMENTS: "not a legal size",
}


def resizing(view: RendezvousView, size: WantedSize, phase: Phase) -> Finding:
    """Return Resizing: true if the round's size differs from the wanted one.

    The message names a clamped spec.nodes.
    """
    kind = ConditionType.RESIZING
    clamped = ""
    if size.clamp is not None:
        clamped = f"spec.nodes is {size.requested}, {_CLAMPED[size.clamp]}; wanted: {size.nodes}"
    if phase in (Phase.RUNNING, Phase.RESTARTING):
        if not view.readable:
            return Finding(kind, ConditionStatus.UNKNOWN, "RendezvousUnknown", clamped)
        final = view.state is RendezvousState.FINAL
        if final and view.nodes != size.nodes:
            reason = "Growing" if view.nodes < size.nodes else "Shrinking"
            message = f"from {view.nodes} to {counted(size.nodes, 'node')}"
            text = f"{message}; {clamped}" if clamped else message
            return Finding(kind, ConditionStatus.TRUE, reason, text)
        if not final:
            return Finding(kind, ConditionStatus.UNKNOWN, "RoundForming", clamped)
    reason = size.clamp.value if size.clamp is not None else "AtWantedSize"
    if phase not in (Phase.RUNNING, Phase.RESTARTING):
        reason = size.clamp.value if size.clamp is not None else f"Job{phase.value}"
    return Finding(kind, ConditionStatus.FALSE, reason, clamped)


TOO_LONG = "the job was active for too long"


def end_reason(view: RendezvousView) -> tuple[str, str]:
    """Return reason and message for a job that failed."""
    if view.outcome is None or view.suspended:
        return StopReason.DEADLINE_EXCEEDED.value, TOO_LONG
    detail = view.outcome.detail
    match view.outcome.kind:
        case OutcomeKind.TIMED_OUT:
            return "JoinTimeout", detail or "fewer than minNodes joined in time"
        case OutcomeKind.STOPPED:
            reason = view.outcome.reason or "Stopped"
            late = reason == StopReason.DEADLINE_EXCEEDED
            return reason, detail or (TOO_LONG if late else "")
        case OutcomeKind.FAILED | OutcomeKind.SUCCEEDED:
            return WORKERS_FAILED, detail


def _end_findings(view: RendezvousView, phase: Phase, stop: StopStatus | None) -> list[Finding]:
    kinds = (ConditionType.SUCCEEDED, ConditionType.FAILED, ConditionType.FINISHED)
    if phase not in FINISHED:
        return [Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}") for kind in kinds]
    succeeded = phase is Phase.SUCCEEDED
    reason, message = ("AllWorkersSucceeded", "") if succeeded else end_reason(view)
    report = stop_report(stop)
    if stop is not None and report is not None and stop.reason == reason:
        message = f"{message}; {report.text}" if message else report.text
    truth = {ConditionType.SUCCEEDED: succeeded, ConditionType.FAILED: not succeeded}
    return [
        Finding(
            kind,
            ConditionStatus.TRUE if truth.get(kind, True) else ConditionStatus.FALSE,
            reason,
            message,
        )
        for kind in kinds
    ]
