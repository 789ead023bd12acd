"""Conditions of a job: status, reason, message and transition time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from elasticjob_operator.core import store_status
from elasticjob_operator.core.census import Census
from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.names import pod_name
from elasticjob_operator.core.observed import Observed, Obstacle, Pod
from elasticjob_operator.core.rendezvous_view import RendezvousView, StopReason
from elasticjob_operator.core.sizes import Clamp, WantedSize
from elasticjob_operator.core.store_host import without_store
from elasticjob_operator.core.words import counted
from elasticjob_operator.model.enums import ConditionStatus, ConditionType, Phase, RendezvousState
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import Condition, CreationRefusal, Status
from elasticjob_rendezvous.core.records import OutcomeKind
from elasticjob_rendezvous.core.roster import natural_order

NAMED_PODS = 5
"""Maximum number of pods named in a message, which must stay readable for a thousand pods."""

WORKERS_FAILED = "WorkersFailed"
"""Reason of condition Failed if failures of workers ended the job."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Condition without its times."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


def conditions(
    job: ElasticJob,
    observed: Observed,
    view: RendezvousView,
    census: Census,
    size: WantedSize,
    phase: Phase,
    now: datetime,
) -> list[Condition]:
    """Return all conditions, in the order of `ConditionType`."""
    findings = [
        Finding(ConditionType.CREATED, ConditionStatus.TRUE, "JobCreated", "the job was accepted"),
        pods_ready(job, observed, census, size, phase),
        *_phases(job, view, phase),
        resizing(view, size, phase),
        *_ends(view, phase),
        *_refusals(job, observed),
        Finding(
            ConditionType.RENDEZVOUS_UNAVAILABLE,
            *store_status.state(observed, job.spec.rendezvous.backend, phase, job.status, now),
        ),
    ]
    order = list(ConditionType)
    findings.sort(key=lambda finding: order.index(finding.type))
    return dated(findings, job.status.conditions, job.metadata.generation, now)


def dated(
    findings: Iterable[Finding], before: Iterable[Condition], generation: int, now: datetime
) -> list[Condition]:
    """Return the findings as conditions; the transition time changes only with the status."""
    known = {condition.type: condition for condition in before}
    result = []
    for finding in findings:
        old = known.get(finding.type)
        unchanged = old is not None and old.status is finding.status
        result.append(
            Condition(
                type=finding.type,
                status=finding.status,
                reason=finding.reason,
                message=finding.message,
                observed_generation=generation,
                last_transition_time=old.last_transition_time if old and unchanged else now,
            )
        )
    return result


def pods_ready(
    job: ElasticJob, observed: Observed, census: Census, size: WantedSize, phase: Phase
) -> Finding:
    """Return PodsReady: true if the wanted number of pods is Ready; otherwise the message names
    the other pods and their obstacles."""
    kind = ConditionType.PODS_READY
    if phase in FINISHED or phase is Phase.SUSPENDED:
        return Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}")
    ready = sum(pod.ready for pod in census.counted)
    if ready >= size.nodes:
        return Finding(kind, ConditionStatus.TRUE, "AllReady", f"{ready} of {size.nodes} are ready")
    tally = f"{ready} of {size.nodes} are ready"
    if observed.refusal is not None:
        refusal = observed.refusal
        message = f"{tally}; a pod cannot be created: {refusal.message}"
        return Finding(kind, ConditionStatus.FALSE, refusal.obstacle.value, message)
    blocked = [pod for pod in census.counted if pod.obstacle is not None and not pod.ready]
    if blocked:
        reason = str(blocked[0].obstacle)
        return Finding(kind, ConditionStatus.FALSE, reason, f"{tally}; {_blocked(blocked)}")
    if no_store := without_store(job, observed, census.counted):
        return Finding(kind, ConditionStatus.FALSE, "StoreMissing", f"{tally}; {no_store}")
    waiting = [pod.name for pod in census.counted if not pod.ready]
    names = f"; waiting for {_some(waiting)}" if waiting else ""
    return Finding(kind, ConditionStatus.FALSE, "PodsStarting", tally + names)


_OF_CREATION = (
    Obstacle.QUOTA,
    Obstacle.REFUSED,
    Obstacle.NAME_CONFLICT,
    Obstacle.TEMPLATE_INVALID,
    Obstacle.ENDPOINT,
    Obstacle.BACKEND,
    Obstacle.ANOTHERS_ETCD,
)
"""Obstacles to creating pods; the others are of pods that exist."""


def creation_refusal(observed: Observed, phase: Phase) -> CreationRefusal | None:
    """Return the refusal to create pods for the status; None for a job without pods."""
    refusal = observed.refusal
    if refusal is None or phase in FINISHED or phase is Phase.SUSPENDED:
        return None
    return CreationRefusal(reason=refusal.obstacle.value, message=refusal.message)


def refusal_of(status: Status) -> tuple[Obstacle, str] | None:
    """Return the obstacle to creating pods and its message from a status.

    The previous release wrote it only into condition PodsReady.
    """
    if status.refusal is not None:
        known = {obstacle.value: obstacle for obstacle in Obstacle}
        reason = status.refusal.reason
        return known.get(reason, Obstacle.REFUSED), status.refusal.message  # a newer operator's
    for found in status.conditions:
        for obstacle in _OF_CREATION:
            if found.type is ConditionType.PODS_READY and found.reason == obstacle.value:
                return obstacle, found.message
    return None


def _refusals(job: ElasticJob, observed: Observed) -> list[Finding]:
    """Return NameConflict and TemplateInvalid, each only if it is or has been true."""
    before = {condition.type for condition in job.status.conditions}
    refusal = observed.refusal
    found = []
    for kind, obstacle in (
        (ConditionType.NAME_CONFLICT, Obstacle.NAME_CONFLICT),
        (ConditionType.TEMPLATE_INVALID, Obstacle.TEMPLATE_INVALID),
    ):
        if refusal is not None and refusal.obstacle is obstacle:
            message = refusal.message
        elif kind is ConditionType.NAME_CONFLICT and observed.foreign:
            strangers = [pod_name(job.metadata.name, index) for index in observed.foreign]
            message = f"{_some(strangers)}: taken by a pod of another owner; skipped"
        else:
            if kind in before:
                found.append(Finding(kind, ConditionStatus.FALSE, "Resolved"))
            continue
        found.append(Finding(kind, ConditionStatus.TRUE, obstacle.value, message))
    return found


def _blocked(pods: list[Pod]) -> str:
    """Return the obstacles of pods; pods with the same obstacle and message are grouped."""
    groups: dict[tuple[str, str], list[str]] = {}
    for pod in pods:
        groups.setdefault((str(pod.obstacle), pod.obstacle_message), []).append(pod.name)
    said = [
        f"{_some(names)}: {obstacle}" + (f" ({message})" if message else "")
        for (obstacle, message), names in groups.items()
    ]
    more = len(said) - NAMED_PODS
    return "; ".join(said[:NAMED_PODS]) + (f"; and {more} more obstacles" if more > 0 else "")


def _some(names: list[str]) -> str:
    shown = sorted(names, key=natural_order)[:NAMED_PODS]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _phases(job: ElasticJob, view: RendezvousView, phase: Phase) -> list[Finding]:
    def finding(kind: ConditionType, of: Phase, reason: str, message: str = "") -> Finding:
        if phase is of:
            return Finding(kind, ConditionStatus.TRUE, reason, message)
        return Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}")

    running = f"round {view.round} with {counted(view.nodes, 'node')}" if view.round else ""
    return [
        finding(ConditionType.RUNNING, Phase.RUNNING, "RoundFinal", running),
        finding(ConditionType.RESTARTING, Phase.RESTARTING, "RoundForming", _because(view)),
        finding(ConditionType.SUSPENDED, Phase.SUSPENDED, "Suspended", "runPolicy.suspend is true"),
    ]


def _because(view: RendezvousView) -> str:
    if view.cause is None:
        return ""
    members = f" of {_some(list(view.cause.members))}" if view.cause.members else ""
    detail = f": {view.cause.detail}" if view.cause.detail else ""
    return f"{view.cause.kind}{members}{detail}"


_CLAMPED = {
    Clamp.BELOW_MIN_NODES: "below minNodes",
    Clamp.ABOVE_MAX_NODES: "above maxNodes",
    Clamp.BETWEEN_INCREMENTS: "not a legal size",
}


def resizing(view: RendezvousView, size: WantedSize, phase: Phase) -> Finding:
    """Return Resizing: true if the round's size differs from the wanted one; the message says if
    spec.nodes was clamped."""
    kind = ConditionType.RESIZING
    clamped = ""
    if size.clamp is not None:
        clamped = f"spec.nodes is {size.asked}, {_CLAMPED[size.clamp]}; wanted: {size.nodes}"
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


def end_reason(view: RendezvousView) -> tuple[str, str]:
    """Return reason and message for a job that failed."""
    if view.outcome is None or view.suspended:
        return StopReason.DEADLINE_EXCEEDED.value, "the job was active for too long"
    detail = view.outcome.detail
    match view.outcome.kind:
        case OutcomeKind.TIMED_OUT:
            return "JoinTimeout", detail or "fewer than minNodes joined in time"
        case OutcomeKind.STOPPED:
            return view.outcome.reason or "Stopped", detail
        case OutcomeKind.FAILED | OutcomeKind.SUCCEEDED:
            return WORKERS_FAILED, detail


def _ends(view: RendezvousView, phase: Phase) -> list[Finding]:
    kinds = (ConditionType.SUCCEEDED, ConditionType.FAILED, ConditionType.FINISHED)
    if phase not in FINISHED:
        return [Finding(kind, ConditionStatus.FALSE, f"Job{phase.value}") for kind in kinds]
    succeeded = phase is Phase.SUCCEEDED
    reason, message = ("AllWorkersSucceeded", "") if succeeded else end_reason(view)
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
