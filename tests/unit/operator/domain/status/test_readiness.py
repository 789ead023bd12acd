"""Conditions Ready, Reconciling and Stalled, judged by the rules of kstatus."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    Observed,
    Obstacle,
    Refusal,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ConditionType, ElasticJob, Phase, RendezvousState
from elasticjob_operator.model.status import Condition, Status
from elasticjob_operator.model.types import ConditionStatus
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    job,
    later,
    observed,
    pod,
    running,
)

CURRENT, IN_PROGRESS, FAILED = "Current", "InProgress", "Failed"


def kstatus(found: ElasticJob) -> str:
    """Return the result of kstatus for a custom resource.

    The rules are those of checkGenericProperties and checkReadyCondition in
    sigs.k8s.io/cli-utils/pkg/kstatus/status.
    """
    if found.metadata.deletion_timestamp is not None:
        return "Terminating"
    if found.status.observed_generation != found.metadata.generation:
        return IN_PROGRESS
    for one in found.status.conditions:
        if one.type.value == "Reconciling" and one.status.value == "True":
            return IN_PROGRESS
        if one.type.value == "Stalled" and one.status.value == "True":
            return FAILED
    ready = [one for one in found.status.conditions if one.type.value == "Ready"]
    if ready and ready[0].status.value != "True":
        return IN_PROGRESS
    return CURRENT


def refused(obstacle: Obstacle, *pods: Any, **changes: Any) -> Observed:
    return replace(observed(*pods, **changes), refusal=Refusal(obstacle, "said", ago(5)))


SUSPEND: dict[str, Any] = {"runPolicy": {"suspend": True}}
STOPPED = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
LAUNCH = closed(OutcomeKind.STOPPED, "no python3", StopReason.LAUNCH_FAILED)
FORMING = replace(final_round(2), state=RendezvousState.JOINABLE)
UNPLACED = pod(1).pending(9, obstacle=Obstacle.UNSCHEDULABLE, obstacle_message="no gpu").get()

# previous phase, observation, spec, result of kstatus, reason of the condition that says so
SCENARIOS: dict[str, tuple[Phase | None, Observed, dict[str, Any], str, str]] = {
    "new": (None, observed(), {}, IN_PROGRESS, "JobPending"),
    "pods start": (Phase.PENDING, observed(*running(1)), {}, IN_PROGRESS, "JobPending"),
    "unschedulable": (Phase.PENDING, observed(UNPLACED), {}, IN_PROGRESS, "JobPending"),
    "trains": (Phase.PENDING, observed(*running(2), view=final_round(2)), {}, CURRENT, "Training"),
    "trains below the wanted size": (
        Phase.RUNNING,
        observed(*running(1), UNPLACED, view=final_round(1)),
        {},
        IN_PROGRESS,
        "Growing",
    ),
    "shrinks": (
        Phase.RUNNING,
        observed(*running(2), view=final_round(2)),
        {"nodes": 1},
        IN_PROGRESS,
        "Shrinking",
    ),
    "asked for more than maxNodes": (
        Phase.RUNNING,
        observed(*running(2), view=final_round(2)),
        {"nodes": 9},
        CURRENT,
        "Training",
    ),
    "between two rounds": (
        Phase.RUNNING,
        observed(*running(2), view=FORMING),
        {},
        IN_PROGRESS,
        "JobRestarting",
    ),
    "trains, etcd away": (
        Phase.RUNNING,
        observed(*running(2), view=UNREADABLE),
        {},
        CURRENT,
        "Training",
    ),
    "pods being stopped": (
        Phase.RUNNING,
        observed(pod(0).terminating().get(), view=STOPPED),
        SUSPEND,
        IN_PROGRESS,
        "JobSuspending",
    ),
    "suspended": (Phase.SUSPENDING, observed(view=STOPPED), SUSPEND, CURRENT, "Suspended"),
    "created suspended": (None, observed(), SUSPEND, CURRENT, "Suspended"),
    "suspended, and its template was refused": (
        Phase.SUSPENDING,
        refused(Obstacle.TEMPLATE_INVALID, view=STOPPED),
        SUSPEND,
        CURRENT,
        "Suspended",
    ),
    "resumed": (Phase.SUSPENDED, observed(view=STOPPED), {}, IN_PROGRESS, "JobPending"),
    "succeeded": (
        Phase.RUNNING,
        observed(view=closed(OutcomeKind.SUCCEEDED)),
        {},
        CURRENT,
        "Succeeded",
    ),
    "failed": (
        Phase.RUNNING,
        observed(view=closed(OutcomeKind.FAILED, "spent")),
        {},
        FAILED,
        "WorkersFailed",
    ),
    "could not start": (Phase.PENDING, observed(view=LAUNCH), {}, FAILED, "LaunchFailed"),
    "quota exceeded": (
        Phase.PENDING,
        refused(Obstacle.QUOTA),
        {},
        IN_PROGRESS,
        "JobPending",
    ),
    "refused by a webhook": (
        Phase.PENDING,
        refused(Obstacle.REFUSED),
        {},
        IN_PROGRESS,
        "JobPending",
    ),
    "template refused while training": (
        Phase.RUNNING,
        refused(Obstacle.TEMPLATE_INVALID, *running(1), view=final_round(1)),
        {},
        FAILED,
        "TemplateInvalid",
    ),
    **{
        str(obstacle): (Phase.PENDING, refused(obstacle), {}, FAILED, obstacle.value)
        for obstacle in (
            Obstacle.TEMPLATE_INVALID,
            Obstacle.NAME_CONFLICT,
            Obstacle.ENDPOINT,
            Obstacle.BACKEND,
            Obstacle.FOREIGN_ETCD,
        )
    },
}
SPEAKS = {
    CURRENT: ConditionType.READY,
    IN_PROGRESS: ConditionType.RECONCILING,
    FAILED: ConditionType.STALLED,
}


def judged(phase: Phase | None, here: Observed, spec: dict[str, Any]) -> ElasticJob:
    a_job = job(Status(phase=phase), **({"maxNodes": 2} | spec))
    status = next_status(a_job, here, here.rendezvous, NOW)
    return a_job.model_copy(update={"status": status})


def condition(status: Status, kind: ConditionType) -> Condition:
    [found] = [one for one in status.conditions if one.type is kind]
    return found


@pytest.mark.parametrize(
    ("phase", "here", "spec", "result", "reason"), SCENARIOS.values(), ids=SCENARIOS
)
def test_kstatus_of_a_job(
    phase: Phase | None, here: Observed, spec: dict[str, Any], result: str, reason: str
) -> None:
    found = judged(phase, here, spec)
    assert kstatus(found) == result
    assert condition(found.status, SPEAKS[result]).reason == reason


@pytest.mark.parametrize(
    ("phase", "here", "spec", "result", "reason"), SCENARIOS.values(), ids=SCENARIOS
)
def test_every_condition_has_a_reason_and_the_generation(
    phase: Phase | None, here: Observed, spec: dict[str, Any], result: str, reason: str
) -> None:
    found = judged(phase, here, spec).status.conditions
    assert {one.type for one in found} >= set(SPEAKS.values())
    assert all(one.reason and one.observed_generation == 3 for one in found)
    true = [one.type for one in found if one.status is ConditionStatus.TRUE]
    assert not {ConditionType.RECONCILING, ConditionType.STALLED} <= set(true)


def test_edited_spec_is_in_progress_until_it_is_observed() -> None:
    found = judged(Phase.RUNNING, observed(*running(2), view=final_round(2)), {})
    edited = found.metadata.model_copy(update={"generation": 4})
    assert kstatus(found.model_copy(update={"metadata": edited})) == IN_PROGRESS


def test_finished_job_observes_later_generations() -> None:
    ended = judged(Phase.RUNNING, observed(view=closed(OutcomeKind.SUCCEEDED)), {})
    edited = ended.model_copy(
        update={"metadata": ended.metadata.model_copy(update={"generation": 4})}
    )
    status = next_status(edited, observed(), RendezvousView(), later(60))
    assert {one.observed_generation for one in status.conditions} == {4}
    assert [one.last_transition_time for one in status.conditions] == [
        one.last_transition_time for one in ended.status.conditions
    ]
    assert kstatus(edited.model_copy(update={"status": status})) == CURRENT


@pytest.mark.parametrize(
    ("outcome", "result"), [(OutcomeKind.SUCCEEDED, CURRENT), (OutcomeKind.FAILED, FAILED)]
)
def test_job_that_finished_under_an_earlier_release_is_judged(
    outcome: OutcomeKind, result: str
) -> None:
    ended = judged(Phase.RUNNING, observed(view=closed(outcome, "spent")), {})
    old = [one for one in ended.status.conditions if one.type not in SPEAKS.values()]
    stored = ended.model_copy(
        update={"status": ended.status.model_copy(update={"conditions": old})}
    )
    status = next_status(stored, observed(), RendezvousView(), later(60))
    assert kstatus(ended.model_copy(update={"status": status})) == result
    assert status.conditions == ended.status.conditions
