"""Readiness of a job: the conditions that kstatus reads of any object.

Argo CD, Flux and kpt use kstatus: an object is InProgress while `Reconciling`, Failed while
`Stalled`, and otherwise Current if `Ready`. All three are always present.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from elasticjob_operator.domain.observed.state import Obstacle, Refusal
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import Condition
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase


@dataclass(frozen=True, slots=True)
class Finding:
    """Condition without its times."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


def with_transition_times(
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


_STALLING = (
    Obstacle.NAME_CONFLICT,
    Obstacle.TEMPLATE_INVALID,
    Obstacle.ENDPOINT,
    Obstacle.SECRET,
    Obstacle.BACKEND,
    Obstacle.FOREIGN_ETCD,
    Obstacle.RECORDS,
)
"""Obstacles that last until a user changes the job, or an administrator the operator. A quota, a
webhook and the scheduler may yield without a change of either."""


def stalled(job: ElasticJob) -> Condition | None:
    """Return condition Stalled if it is true at the job's present generation, else None."""
    for found in job.status.conditions:
        if (
            found.type is ConditionType.STALLED
            and found.status is ConditionStatus.TRUE
            and found.observed_generation == job.metadata.generation
        ):
            return found
    return None


_READY = {
    Phase.RUNNING: "Training",
    Phase.SUSPENDED: "Suspended",
    Phase.SUCCEEDED: "Succeeded",
}
"""Reason of condition Ready in the phases that fulfil the job's spec."""


def summary(
    phase: Phase, resizing: Finding, end: tuple[str, str], refusal: Refusal | None
) -> list[Finding]:
    """Return Ready, Reconciling and Stalled; at most one of the last two is true.

    `resizing` is condition Resizing, `end` the reason and message of a failed job, and `refusal`
    an obstacle to creating pods that the job wants.
    """
    stall: tuple[str, str] | None = None
    if phase is Phase.FAILED:
        stall = end
    elif refusal is not None and refusal.obstacle in _STALLING:
        stall = refusal.obstacle.value, refusal.message
    change: tuple[str, str] | None = None
    if stall is None and phase not in _READY:
        change = f"Job{phase.value}", ""
    elif stall is None and resizing.status is ConditionStatus.TRUE:
        change = resizing.reason, resizing.message
    ready = (_READY[phase], "") if phase in _READY else None
    return [
        _finding(ConditionType.READY, ready, stall or (f"Job{phase.value}", "")),
        _finding(ConditionType.RECONCILING, change, ("Settled", "")),
        _finding(ConditionType.STALLED, stall, ("NotStalled", "")),
    ]


def _finding(kind: ConditionType, true: tuple[str, str] | None, false: tuple[str, str]) -> Finding:
    """Return the condition with the reason and message for which it is true, or else false."""
    status = ConditionStatus.FALSE if true is None else ConditionStatus.TRUE
    return Finding(kind, status, *(true or false))


def final_conditions(job: ElasticJob, now: datetime) -> list[Condition]:
    """Return the conditions of a finished job: those at its end, for its present generation.

    Ready, Reconciling and Stalled are added to a status that an earlier release wrote.
    """
    generation, known = job.metadata.generation, job.status.conditions
    kept = [condition.model_copy(update={"observed_generation": generation}) for condition in known]
    if any(condition.type is ConditionType.STALLED for condition in known):
        return kept
    failed = next(
        (condition for condition in known if condition.type is ConditionType.FAILED), None
    )
    end = (failed.reason, failed.message) if failed is not None else (Phase.FAILED.value, "")
    at_rest = Finding(ConditionType.RESIZING, ConditionStatus.FALSE, "")
    added = summary(job.status.phase or Phase.FAILED, at_rest, end, None)
    since = job.status.completion_time or now
    return [*with_transition_times(added, (), generation, since), *kept]
