"""Planner decisions, case by case."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import FrameType
from typing import Any

import pytest

from elasticjob_operator.domain.observed.etcd_records import outcome_record
from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Observed,
    Obstacle,
    Pod,
    PodPhase,
    Refusal,
    RendezvousView,
    SeenTrouble,
    StopReason,
)
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
from elasticjob_operator.domain.plan.backends import rendezvous_params
from elasticjob_operator.domain.plan.closing_checkpoint import (
    COORDINATOR_SECONDS,
    OPEN,
    WAIT_SECONDS,
    closing_step,
)
from elasticjob_operator.domain.plan.planner import KEPT_FAILED_PODS, MAX_POD_ACTIONS, Plan, plan
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, Phase, RendezvousState
from elasticjob_operator.model.status import RendezvousStatus, Status
from elasticjob_operator.model.types import ConditionType
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import STOP_MARGIN_SECONDS
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.members import MemberState, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import (
    ClosingRequest,
    DrainRequest,
    RendezvousParams,
)
from elasticjob_rendezvous.protocol.store_trouble import (
    ETCD,
    StoreFailure,
    StoreState,
    StoreTrouble,
)
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    job,
    later,
    member,
    observed,
    pod,
    running,
)


def created(found: Plan) -> list[int]:
    return [action.index for action in found.actions if isinstance(action, CreatePod)]


def deleted(found: Plan) -> list[tuple[str, DeleteReason]]:
    return [
        (action.name, action.reason) for action in found.actions if isinstance(action, DeletePod)
    ]


def of(kind: type[Action], found: Plan) -> list[Any]:
    return [action for action in found.actions if isinstance(action, kind)]


def plan_in_status(a_job: ElasticJob, exists: Observed, now: datetime = NOW) -> Plan:
    """Return the plan; that of a suspension which only the status records once it is there."""
    found = plan(a_job, exists, now)
    if found.phase is not Phase.SUSPENDING:
        return found
    assert (found.actions, found.wake_at) == ((), now)
    status = a_job.status.model_copy(update={"phase": found.phase})
    return plan(a_job.model_copy(update={"status": status}), exists, now)


def settled(a_job: ElasticJob, *pods: Pod, view: RendezvousView | None = None) -> Observed:
    """Return the observation with the bounds that an earlier plan of it wrote."""
    first = plan(a_job, observed(*pods, view=view), NOW)
    return observed(*pods, view=view, bounds=first.bounds)


def test_new_job_gets_its_size_parameters_and_then_its_pods() -> None:
    found = plan(job(nodes=None, minNodes=2, maxNodes=5, nodeIncrement=2), observed(), NOW)
    wanted = rendezvous_params(job(minNodes=2, maxNodes=5, nodeIncrement=2), 4, 4)
    assert found.actions == (
        WriteNodes(5),
        WriteParams(1, wanted),
        *(CreatePod(index, f"job-{index}", 1) for index in range(4)),
    )
    assert found.phase is Phase.PENDING
    assert found.wake_at is None


def test_parameters_contain_the_policies_of_the_spec() -> None:
    a_job = job(
        minNodes=2,
        maxNodes=8,
        nodes=6,
        nodeIncrement=2,
        maxRestarts=7,
        rendezvous={
            "joinTimeoutSeconds": 61,
            "lastCallSeconds": 11,
            "keepAliveSeconds": 12,
            "confirmSeconds": 13,
        },
        elasticity={
            "settleSeconds": 14,
            "scaleUp": "AfterCheckpoint",
            "scaleUpMaxWaitSeconds": 120,
        },
        recovery={"stopGraceSeconds": 15},
    )
    bounds = plan(a_job, observed(), NOW).bounds
    assert bounds is not None
    assert (bounds.min_nodes, bounds.max_nodes, bounds.increment, bounds.expected) == (2, 6, 2, 6)
    assert (bounds.max_restarts, bounds.join_timeout_seconds) == (7, 61)
    assert (bounds.last_call_seconds, bounds.keep_alive_seconds) == (11, 12)
    assert (bounds.confirm_seconds, bounds.settle_seconds) == (13, 14)
    assert (bounds.stop_grace_seconds, bounds.marks) == (15, ())
    assert bounds.scale_up_wait_seconds == 120
    assert (bounds.ceiling_nodes, bounds.leave_seconds) == (8, 35)


def test_job_at_its_size_needs_no_action() -> None:
    a_job = job(maxNodes=3)
    assert plan(a_job, settled(a_job, *running(3), view=final_round(3)), NOW).actions == ()


HELD = [
    # existing pods of a job of three nodes; indices of the created pods
    ([], [0, 1, 2]),
    ([pod(1)], [0, 2]),
    ([pod(0), pod(1), pod(2).failed()], [3]),
    ([pod(0).terminating(), pod(1), pod(2)], [3]),
    ([pod(0), pod(1), pod(2).on(NodeState.NOT_READY)], [3]),
    ([pod(0).failed(), pod(1).terminating(), pod(2).on(NodeState.NOT_READY)], [3, 4, 5]),
    ([pod(0), pod(1), pod(5).terminating()], [2]),
    ([pod(0), pod(1), pod(2).succeeded()], []),
    ([pod(0), pod(1), pod(2).on(NodeState.CORDONED)], []),
    ([pod(0), pod(1), pod(7)], []),
    ([pod(0), pod(1), pod(2).pending(9999)], []),
    ([pod(0), pod(0, 1).terminating(), pod(1)], [2]),
]


@pytest.mark.parametrize(("pods", "indices"), HELD)
def test_index_is_reserved_until_its_pod_is_gone(pods: list[Any], indices: list[int]) -> None:
    assert created(plan(job(maxNodes=3), observed(*(one.get() for one in pods)), NOW)) == indices


def test_shrinking_job_requests_drain_before_deleting_pods() -> None:
    a_job = job(maxNodes=4, nodes=2)
    found = plan(a_job, observed(*running(4), view=final_round(4)), NOW)
    reason = DeleteReason.SURPLUS_HIGHEST_RANK
    assert [type(action) for action in found.actions] == [WriteParams, DeletePod, DeletePod]
    assert found.bounds is not None
    assert found.bounds.marks == (DrainRequest("uid-2-0", reason), DrainRequest("uid-3-0", reason))
    assert (found.bounds.max_nodes, found.bounds.expected) == (2, 2)
    assert deleted(found) == [("job-3", reason), ("job-2", reason)]


def test_drain_request_stays_when_the_job_grows_again() -> None:
    shrunk = plan(job(maxNodes=3, nodes=2), observed(*running(3), view=final_round(3)), NOW)
    found = plan(
        job(maxNodes=3), observed(*running(3), view=final_round(3), bounds=shrunk.bounds), NOW
    )
    assert deleted(found) == [("job-2", DeleteReason.MARKED)]
    assert created(found) == [3]
    assert found.bounds is not None
    assert found.bounds.marks == (DrainRequest("uid-2-0", DeleteReason.SURPLUS_HIGHEST_RANK),)


@pytest.mark.parametrize(
    ("known", "mark"),
    [
        ((), DrainRequest("uid-1-0", "EvictionByEvictionAPI", preempted=True)),
        (
            (DrainRequest("uid-1-0", "Terminating"),),
            DrainRequest("uid-1-0", "EvictionByEvictionAPI", True),
        ),
        ((DrainRequest("uid-1-0", "SurplusPending"),), DrainRequest("uid-1-0", "SurplusPending")),
    ],
    ids=["seen at once", "deletion seen first", "chosen by ourselves before"],
)
def test_pod_evicted_by_the_cluster_gets_a_preemption_drain_request(
    known: tuple[DrainRequest, ...], mark: DrainRequest
) -> None:
    evicted = replace(pod(1).terminating().get(), disruption="EvictionByEvictionAPI")
    before = RendezvousParams(1, 2, marks=known)
    seen = observed(pod(0).get(), evicted, view=final_round(2), bounds=before)
    found = plan(job(maxNodes=2), seen, NOW)
    assert found.bounds is not None
    assert found.bounds.marks == (mark,)


def test_pod_deleted_by_others_gets_a_drain_request() -> None:
    pods = (pod(0).get(), pod(1).terminating().get())
    found = plan(job(maxNodes=2), observed(*pods, view=final_round(2)), NOW)
    assert found.bounds is not None
    assert found.bounds.marks == (DrainRequest("uid-1-0", "Terminating"),)
    assert created(found) == [2]
    assert deleted(found) == []


def test_drain_request_is_removed_with_its_pod() -> None:
    before = plan(
        job(maxNodes=2), observed(pod(0).get(), pod(1).terminating().get(), pod(2).get()), NOW
    )
    after = plan(job(maxNodes=2), observed(pod(0).get(), pod(2).get(), bounds=before.bounds), NOW)
    assert after.bounds is not None
    assert after.bounds.marks == ()


def test_pod_that_its_machine_prepares_stays_expected() -> None:
    a_job = job(maxNodes=3, elasticity={"pendingTimeoutSeconds": 60})
    pulls = observed(*running(2), pod(2).pending(3600, preparing=True).get())
    found = plan(a_job, pulls, NOW)
    assert (found.expected, found.wake_at) == (3, None)


def test_pod_that_does_not_start_is_no_longer_expected_after_timeout() -> None:
    a_job = job(maxNodes=3, elasticity={"pendingTimeoutSeconds": 60})
    young = observed(pod(0).get(), pod(1).get(), pod(2).pending(59).get())
    found = plan(a_job, young, NOW)
    assert (found.expected, found.wake_at) == (3, later(1))
    old = observed(pod(0).get(), pod(1).get(), pod(2).pending(60).get())
    found = plan(a_job, old, NOW)
    assert (found.expected, found.wake_at) == (2, None)
    assert created(found) == []


def test_wait_for_quota_is_bounded() -> None:
    a_job = job(maxNodes=3)
    refused = Refusal(Obstacle.QUOTA, "exceeded quota: gpus", ago(270))
    early = plan(a_job, observed(*running(2), refusal=refused), NOW)
    assert (early.expected, early.wake_at) == (3, later(30))
    refused = Refusal(Obstacle.QUOTA, "exceeded quota: gpus", ago(300))
    late = plan(a_job, observed(*running(2), refusal=refused), NOW)
    assert (late.expected, created(late)) == (2, [2])


def test_pod_with_stuck_workers_is_deleted_and_replaced() -> None:
    stuck = replace(pod(1).get(), stuck="process 7 waits", ready=False)
    found = plan(job(maxNodes=3), observed(pod(0).get(), stuck, pod(2).get()), NOW)
    assert (deleted(found), created(found)) == ([("job-1", DeleteReason.STUCK)], [3])
    stuck = replace(stuck, terminating=True)
    again = plan(job(maxNodes=3), observed(*running(1), stuck, pod(2).get(), pod(3).get()), NOW)
    assert (deleted(again), created(again)) == ([], [])


def test_newest_failed_pods_are_kept_for_inspection() -> None:
    failed = [pod(index).failed(100 - index).get() for index in range(KEPT_FAILED_PODS + 2)]
    living = [pod(index).get() for index in (10, 11)]
    found = plan(job(maxNodes=2), observed(*failed, *living), NOW)
    assert sorted(deleted(found)) == [
        ("job-0", DeleteReason.REPLACED),
        ("job-1", DeleteReason.REPLACED),
    ]


def test_terminating_failed_pod_gets_no_drain_request() -> None:
    found = plan(job(maxNodes=1), observed(pod(0).get(), pod(1).failed().terminating().get()), NOW)
    assert found.bounds is not None
    assert found.bounds.marks == ()


def test_deleted_pods_are_not_expected() -> None:
    pods = (pod(0).pending(399).get(), pod(1).pending(5).get())
    found = plan(job(maxNodes=2, nodes=1), observed(*pods), NOW)
    assert deleted(found) == [("job-0", DeleteReason.SURPLUS_PENDING)]
    assert found.expected == 1
    stuck = (pod(0).pending(399).get(), pod(1).pending(399).get())
    assert plan(job(maxNodes=2, nodes=1), observed(*stuck), NOW).expected == 0


def test_job_with_a_done_member_is_not_resized() -> None:
    members = (member("job-0", "done", round=1),)
    view = final_round(2, members=members)
    assert created(plan(job(maxNodes=4), observed(*running(2), view=view), NOW)) == []
    assert deleted(plan(job(maxNodes=4, nodes=1), observed(*running(2), view=view), NOW)) == []
    below = plan(job(minNodes=3, maxNodes=4), observed(*running(2), view=view), NOW)
    assert created(below) == [2]


def test_unreadable_rendezvous_deletes_no_pod() -> None:
    found = plan(job(maxNodes=4, nodes=1), observed(*running(2), view=UNREADABLE), NOW)
    assert found.actions == ()
    growing = plan(job(maxNodes=4), observed(*running(2), view=UNREADABLE), NOW)
    assert growing.actions == (CreatePod(2, "job-2", 1), CreatePod(3, "job-3", 1))


# -- ends ----------------------------------------------------------------------------


UNSUPPORTED = SaveReport(SaveResult.NOT_SUPPORTED, unsaved=("job-0", "job-1"))
NOT_TRAINING = SaveReport(SaveResult.NOT_TRAINING)


def test_suspension_closes_the_rendezvous_before_deleting_pods() -> None:
    a_job = job(maxNodes=2, runPolicy={"suspend": True})
    exists = settled(job(maxNodes=2), *running(2), view=final_round(2))
    found = plan(a_job, exists, NOW)
    assert found.actions == (
        CloseRendezvous(1, OutcomeKind.STOPPED, StopReason.SUSPENDED, save=UNSUPPORTED),
        DeletePod("job-0", "uid-0-0", DeleteReason.SUSPENDED),
        DeletePod("job-1", "uid-1-0", DeleteReason.SUSPENDED),
    )
    assert found.phase is Phase.SUSPENDING


def saving(count: int, **changes: Any) -> RendezvousView:
    """Return a final round of workers that save on request."""
    view = final_round(count)
    members = tuple(replace(one, saves=True, **changes) for one in view.members)
    return replace(view, members=members)


def asked(reason: StopReason, seconds: float = 0) -> RendezvousParams:
    """Return bounds with the request to save, this long ago."""
    outcome = outcome_record(OutcomeKind.STOPPED, reason)
    since_ms = int(ago(seconds).timestamp() * 1000)
    return replace(BOUNDS, closing=ClosingRequest(outcome, since_ms))


BOUNDS = rendezvous_params(job(maxNodes=2), 2, 2)
STOPS = {
    StopReason.SUSPENDED: job(Status(phase=Phase.RUNNING), maxNodes=2, runPolicy={"suspend": True}),
    StopReason.DEADLINE_EXCEEDED: job(
        Status(phase=Phase.RUNNING, start_time=ago(100)),
        maxNodes=2,
        runPolicy={"activeDeadlineSeconds": 100},
    ),
    StopReason.DELETED: job(Status(phase=Phase.RUNNING), maxNodes=2, deleted=True),
}
ENDS_AT = BOUNDS.leave_seconds - STOP_MARGIN_SECONDS + COORDINATOR_SECONDS
"""Time after a request at which the operator closes the job itself."""


@pytest.mark.parametrize("reason", STOPS)
def test_planned_stop_asks_for_a_checkpoint_and_waits(reason: StopReason) -> None:
    a_job, view = STOPS[reason], saving(2)
    first = plan(a_job, observed(*running(2), view=view, bounds=BOUNDS), NOW)
    assert first.actions == (WriteParams(1, asked(reason)),)
    assert (first.phase, first.wake_at) == (Phase.RUNNING, later(ENDS_AT))
    waits = observed(*running(2), view=view, bounds=asked(reason, ENDS_AT - 1))
    again = plan(a_job, waits, NOW)
    assert (again.actions, again.phase, again.wake_at) == ((), Phase.RUNNING, later(1))
    unreadable = plan(a_job, replace(waits, rendezvous=UNREADABLE), NOW)
    assert (unreadable.actions, unreadable.wake_at) == ((), later(1))


@pytest.mark.parametrize("reason", STOPS)
def test_planned_stop_closes_the_job_that_no_coordinator_closes(reason: StopReason) -> None:
    view = saving(2, step=163, checkpoint_step=120)
    late = observed(*running(2), view=view, bounds=asked(reason, ENDS_AT))
    save = SaveReport(SaveResult.TIMED_OUT, 163, 120, ("job-0", "job-1"))
    [close, *deletions] = plan(STOPS[reason], late, NOW).actions
    assert close == CloseRendezvous(1, OutcomeKind.STOPPED, reason, save=save)
    assert len(deletions) == 2


def test_failed_save_is_named_where_no_coordinator_closes_the_job() -> None:
    reason, error = StopReason.SUSPENDED, "rank 0: /claim: No space left on device"
    view = saving(2, step=163, checkpoint_step=120, save_error=error)
    late = observed(*running(2), view=view, bounds=asked(reason, ENDS_AT))
    [close] = of(CloseRendezvous, plan(STOPS[reason], late, NOW))
    assert close.save == SaveReport(SaveResult.TIMED_OUT, 163, 120, ("job-0", "job-1"), error)


def test_checkpoint_that_one_member_has_reported_is_that_of_all() -> None:
    reason = StopReason.SUSPENDED
    view = saving(2, step=163, checkpoint_step=163)
    first, second = view.members
    view = replace(view, members=(first, replace(second, completed=True)))
    late = observed(*running(2), view=view, bounds=asked(reason, ENDS_AT))
    [close] = of(CloseRendezvous, plan(STOPS[reason], late, NOW))
    assert close.save == SaveReport(SaveResult.SAVED, 163, 163)


@pytest.mark.parametrize(
    ("view", "bounds", "result"),
    [
        (final_round(2), BOUNDS, SaveResult.NOT_SUPPORTED),
        (replace(saving(2), state=RendezvousState.JOINABLE), BOUNDS, SaveResult.NOT_TRAINING),
        (replace(saving(2), state=RendezvousState.FROZEN), BOUNDS, SaveResult.NOT_TRAINING),
        (
            replace(saving(2), state=RendezvousState.JOINABLE),
            asked(StopReason.SUSPENDED),
            SaveResult.NOT_TRAINING,
        ),
    ],
    ids=["unsupported", "joinable", "frozen", "joinable after the request"],
)
def test_planned_stop_waits_for_nothing_that_cannot_save(
    view: RendezvousView, bounds: RendezvousParams, result: SaveResult
) -> None:
    found = plan(STOPS[StopReason.SUSPENDED], observed(*running(2), view=view, bounds=bounds), NOW)
    [close] = of(CloseRendezvous, found)
    assert close.save.result is result
    assert len(deleted(found)) == 2
    assert found.phase is Phase.SUSPENDING


def test_job_without_time_to_save_is_closed_at_once() -> None:
    container = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    pod_spec = {"containers": [container], "terminationGracePeriodSeconds": 5}
    a_job = job(maxNodes=2, runPolicy={"suspend": True}, template={"spec": pod_spec})
    found = plan(a_job, observed(*running(2), view=saving(2), bounds=BOUNDS), NOW)
    [close] = of(CloseRendezvous, found)
    assert close.save.result is SaveResult.NO_TIME


@pytest.mark.parametrize("since_ms", [-(10**18), 0, 10**12 * 3, 253402300799000, 10**18])
@pytest.mark.parametrize("leave_seconds", [30.0, 1e300, float("nan"), -1.0])
def test_hostile_request_does_not_delay_the_end(since_ms: int, leave_seconds: float) -> None:
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    hostile = replace(
        BOUNDS, closing=ClosingRequest(outcome, since_ms), leave_seconds=leave_seconds
    )
    exists = observed(*running(2), view=saving(2), bounds=hostile)
    assert of(CloseRendezvous, plan(STOPS[StopReason.SUSPENDED], exists, NOW))
    step = closing_step(saving(2), hostile, StopReason.SUSPENDED, NOW)
    assert step.report is not None


def test_leaving_members_of_a_deleted_job_are_asked() -> None:
    leaving = saving(2, state=MemberState.LEAVING)
    exists = observed(*running(2), view=leaving, bounds=BOUNDS)
    found = plan(STOPS[StopReason.DELETED], exists, NOW)
    assert found.actions == (WriteParams(1, asked(StopReason.DELETED)),)


def test_resumption_withdraws_the_request() -> None:
    a_job = job(Status(phase=Phase.RUNNING), maxNodes=2)
    exists = observed(*running(2), view=saving(2), bounds=asked(StopReason.SUSPENDED))
    assert of(WriteParams, plan(a_job, exists, NOW)) == [WriteParams(1, BOUNDS)]


def test_another_reason_to_stop_keeps_the_time_of_the_request() -> None:
    exists = observed(*running(2), view=saving(2), bounds=asked(StopReason.SUSPENDED, 7))
    found = plan(STOPS[StopReason.DEADLINE_EXCEEDED], exists, NOW)
    assert found.actions == (WriteParams(1, asked(StopReason.DEADLINE_EXCEEDED, 7)),)
    assert found.wake_at == later(ENDS_AT - 7)


def test_torch_backends_are_stopped_without_a_request() -> None:
    policy = {"suspend": True}
    a_job = job(maxNodes=2, runPolicy=policy, rendezvous={"backend": "C10d"})
    found = plan(a_job, observed(*running(2), view=saving(2)), NOW)
    assert [type(action) for action in found.actions] == [DeletePod, DeletePod]


@pytest.mark.parametrize("reason", STOPS)
@pytest.mark.parametrize("bounds", [BOUNDS, None], ids=["known", "unknown"])
def test_planned_stop_waits_for_a_store_that_was_just_lost(
    reason: StopReason, bounds: RendezvousParams | None
) -> None:
    """The operator's watch breaks when etcd elects a leader."""
    lost = observed(*running(2), view=UNREADABLE, bounds=bounds, unreadable_seconds=2.0)
    found = plan(STOPS[reason], lost, NOW)
    assert (found.actions, found.wake_at, found.phase) == ((), later(8), Phase.RUNNING)
    status = next_status(STOPS[reason], lost, UNREADABLE, later(9), found.access)
    assert (status.phase, status.last_stop) == (Phase.RUNNING, None)
    back = observed(*running(2), view=saving(2), bounds=BOUNDS)
    assert plan(STOPS[reason], back, later(2)).actions == (WriteParams(1, asked(reason, -2)),)
    late = plan_in_status(STOPS[reason], replace(lost, unreadable_seconds=10.0), later(8))
    assert [name for name, _ in deleted(late)] == ["job-0", "job-1"]


@pytest.mark.parametrize("reason", STOPS)
def test_requested_checkpoint_has_its_time_after_a_restart_of_the_operator(
    reason: StopReason,
) -> None:
    """The new process can read no request; the status of the old one shows that there is one."""
    requested = observed(*running(2), view=saving(2), bounds=asked(reason))
    status = next_status(STOPS[reason], requested, requested.rendezvous, NOW)
    lost, seconds = observed(*running(2), view=UNREADABLE), 0.0
    while seconds < ENDS_AT:
        a_job = STOPS[reason].model_copy(update={"status": status})
        seen = replace(lost, unreadable_seconds=seconds)
        found = plan(a_job, seen, later(seconds))
        assert (found.actions, found.wake_at) == ((), later(ENDS_AT))
        status = next_status(a_job, seen, UNREADABLE, later(seconds), found.access)
        seconds += 7
    late = replace(lost, unreadable_seconds=ENDS_AT)
    assert len(deleted(plan_in_status(a_job, late, later(ENDS_AT)))) == 2


@pytest.mark.parametrize("reason", STOPS)
@pytest.mark.parametrize("released", ["now", "before"])
def test_time_of_a_requested_checkpoint_does_not_begin_anew_with_each_process(
    reason: StopReason, released: str
) -> None:
    """Each process counts the time of an outage of etcd from its own start."""
    requested = observed(*running(2), view=saving(2), bounds=asked(reason))
    status = next_status(STOPS[reason], requested, requested.rendezvous, NOW)
    if released == "before":
        status = status.model_copy(update={"checkpoint_request_time": None})
    lost = observed(*running(2), view=UNREADABLE, unreadable_seconds=1.0)
    for seconds in (0, ENDS_AT - 1):
        a_job = STOPS[reason].model_copy(update={"status": status})
        found = plan(a_job, lost, later(seconds))
        assert found.actions == ()
        ends = max(min(seconds + ENDS_AT - 1, ENDS_AT), seconds + WAIT_SECONDS - 1)
        assert found.wake_at == later(ends)
        status = next_status(a_job, lost, UNREADABLE, later(seconds), found.access)
        assert status.checkpoint_request_time == NOW
    a_job = STOPS[reason].model_copy(update={"status": status})
    assert plan(a_job, lost, later(ENDS_AT)).actions == (), "as without a checkpoint: 10 s"
    lost = replace(lost, unreadable_seconds=WAIT_SECONDS)
    late = plan_in_status(a_job, lost, later(ENDS_AT))
    assert [name for name, _ in deleted(late)] == ["job-0", "job-1"]


@pytest.mark.parametrize("since_ms", [-(10**18), -(10**14), 1, 10**12 * 3, 10**18])
def test_hostile_time_of_a_request_is_not_in_the_status(since_ms: int) -> None:
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    hostile = replace(BOUNDS, closing=ClosingRequest(outcome, since_ms))
    seen = observed(*running(2), view=saving(2), bounds=hostile)
    first = job(Status(phase=Phase.RUNNING), maxNodes=2)
    status = next_status(first, seen, seen.rendezvous, NOW)
    assert status.checkpoint_request_time == NOW
    again = first.model_copy(update={"status": status})
    assert next_status(again, seen, seen.rendezvous, later(5)) == status


@pytest.mark.parametrize("reason", STOPS)
def test_stop_of_a_job_that_cannot_save_does_not_wait_for_its_store(reason: StopReason) -> None:
    lost = observed(*running(2), view=UNREADABLE, bounds=BOUNDS, unreadable_seconds=2.0)
    over = replace(lost, pods=tuple(replace(one, over=True) for one in lost.pods))
    assert plan(STOPS[reason], over, NOW).access == OPEN
    requested = replace(lost, bounds=asked(reason, ENDS_AT))
    assert len(deleted(plan_in_status(STOPS[reason], requested))) == 2


def test_stop_without_pods_asks_no_member_whose_record_remains() -> None:
    found = plan(STOPS[StopReason.SUSPENDED], observed(view=saving(2), bounds=BOUNDS), NOW)
    save = SaveReport(SaveResult.NOT_TRAINING)
    assert found.actions == (
        CloseRendezvous(1, OutcomeKind.STOPPED, StopReason.SUSPENDED, save=save),
    )


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.SUSPENDED])
def test_resumption_waits_until_etcd_records_the_suspension(phase: Phase) -> None:
    """In the incarnation of the stopped pods they would count as lost."""
    a_job = job(Status(phase=phase), maxNodes=2)
    refused = observed(view=saving(2), bounds=BOUNDS, store=SeenTrouble(FULL))
    found = plan(a_job, refused, NOW)
    assert (found.actions, found.wake_at, found.phase) == ((), None, Phase.SUSPENDED)
    status = next_status(a_job, refused, refused.rendezvous, NOW, found.access)
    assert (status.phase, status.nodes) == (Phase.SUSPENDED, 0)
    told = [one.message for one in status.conditions if one.type is ConditionType.SUSPENDED]
    assert told == ["the job is resumed once its suspension is recorded"]
    assert "once its suspension is complete and recorded" in " ".join(status.explanation)
    leaving = replace(refused, pods=(pod(0).terminating().get(),))
    assert plan(a_job, leaving, NOW).phase is Phase.SUSPENDING
    usable = plan(a_job, replace(refused, store=None), NOW)
    [close] = usable.actions
    assert isinstance(close, CloseRendezvous)
    assert (close.reason, usable.phase) == (StopReason.SUSPENDED, Phase.SUSPENDED)


@pytest.mark.parametrize("phase", [Phase.SUSPENDING, Phase.SUSPENDED])
@pytest.mark.parametrize("refusal", [None, Refusal(Obstacle.SECRET, "no Secret etcd", NOW)])
def test_resumption_waits_for_an_unreadable_etcd_that_may_not_have_recorded_the_suspension(
    phase: Phase, refusal: Refusal | None
) -> None:
    """The Secret of an etcd may be missing: its reason is in the status."""
    a_job = job(Status(phase=phase, rendezvous=RendezvousStatus(round=3)), maxNodes=2)
    lost = observed(view=UNREADABLE, bounds=BOUNDS, refusal=refusal)
    found = plan(a_job, lost, NOW)
    assert (found.actions, found.wake_at, found.phase) == ((), None, Phase.SUSPENDED)
    status = next_status(a_job, lost, lost.rendezvous, NOW, found.access)
    assert status.phase is Phase.SUSPENDED
    told = {one.type: one.message for one in status.conditions}
    assert told[ConditionType.SUSPENDED] == "the job is resumed once its etcd can be read"
    assert "from its last checkpoint once its etcd can be read" in " ".join(status.explanation)
    assert ("no Secret etcd" in told[ConditionType.PODS_READY]) is (refusal is not None)
    assert (status.refusal is None) is (refusal is None)
    assert ("No pods can be created" in " ".join(status.explanation)) is (refusal is not None)
    resumed = replace(lost, pods=(pod(0).get(),))
    assert plan(a_job, resumed, NOW).phase is Phase.PENDING, "of a pass without a status"


def test_resumption_before_the_first_round_does_not_wait_for_an_unreadable_etcd() -> None:
    a_job = job(Status(phase=Phase.SUSPENDED, rendezvous=RendezvousStatus()), maxNodes=2)
    assert plan(a_job, observed(view=UNREADABLE), NOW).phase is Phase.PENDING


@pytest.mark.parametrize("view", [UNREADABLE, saving(2)], ids=["lost", "refusing"])
def test_suspension_is_in_the_status_before_pods_are_deleted_without_a_record(
    view: RendezvousView,
) -> None:
    """A resumption may follow before the status of the pass that deletes them is written."""
    a_job = STOPS[StopReason.SUSPENDED]
    store = SeenTrouble(FULL) if view.readable else None
    exists = observed(*running(2), view=view, bounds=BOUNDS, store=store)
    first = plan(a_job, exists, NOW)
    assert (first.actions, first.phase, first.wake_at) == ((), Phase.SUSPENDING, NOW)
    status = next_status(a_job, exists, view, NOW, first.access)
    again = plan(a_job.model_copy(update={"status": status}), exists, NOW)
    assert len(deleted(again)) == 2


def test_resumption_goes_on_with_pods_that_were_not_stopped() -> None:
    a_job = job(Status(phase=Phase.SUSPENDING), maxNodes=2)
    found = plan(a_job, observed(*running(2), view=saving(2), bounds=BOUNDS), NOW)
    assert (found.actions, found.phase) == ((), Phase.RUNNING)


def test_job_created_suspended_creates_nothing() -> None:
    assert plan(job(runPolicy={"suspend": True}), observed(), NOW).actions == ()


def test_suspension_does_not_wait_for_unreadable_rendezvous() -> None:
    a_job = job(runPolicy={"suspend": True})
    exists = observed(pod(0).get(), pod(1).terminating().get(), view=UNREADABLE)
    found = plan_in_status(a_job, exists)
    assert found.actions == (DeletePod("job-0", "uid-0-0", DeleteReason.SUSPENDED),)


PHASES = {
    StopReason.SUSPENDED: Phase.SUSPENDING,
    StopReason.DEADLINE_EXCEEDED: Phase.FAILED,
    StopReason.DELETED: Phase.DELETING,
}
FULL = StoreTrouble(
    ETCD,
    StoreState.REFUSING,
    "http://etcd:2379",
    "database space exceeded",
    1,
    StoreFailure.NO_SPACE,
)


@pytest.mark.parametrize("reason", STOPS)
@pytest.mark.parametrize(
    "bounds", [BOUNDS, asked(StopReason.SUSPENDED, ENDS_AT)], ids=["new", "late"]
)
def test_planned_stop_does_not_wait_for_a_store_that_refuses_writes(
    reason: StopReason, bounds: RendezvousParams
) -> None:
    pods = running(2)
    exists = observed(*pods, view=saving(2), bounds=bounds, store=SeenTrouble(FULL))
    found = plan_in_status(STOPS[reason], exists)
    assert [type(action) for action in found.actions] == [DeletePod, DeletePod]
    assert found.phase is PHASES[reason]
    gone = replace(exists, pods=(), rendezvous=saving(0))
    assert plan(STOPS[reason], gone, NOW).actions == ()
    [close] = plan(STOPS[reason], replace(gone, store=None), later(ENDS_AT)).actions
    assert isinstance(close, CloseRendezvous)


@pytest.mark.parametrize("reason", STOPS)
def test_accepted_request_has_its_time_although_the_store_refuses_writes_since(
    reason: StopReason,
) -> None:
    bounds = asked(StopReason.SUSPENDED, 11)
    exists = observed(*running(2), view=saving(2), bounds=bounds, store=SeenTrouble(FULL))
    found = plan(STOPS[reason], exists, NOW)
    assert (found.actions, found.wake_at) == ((), later(ENDS_AT - 11))
    assert found.phase is Phase.RUNNING


@pytest.mark.parametrize("reason", STOPS)
def test_planned_stop_waits_for_a_store_that_has_refused_writes_for_a_moment(
    reason: StopReason,
) -> None:
    """etcd elects a leader: the checkpoint is requested after that. The operator's clock may be
    behind that of the API server, by which the plan counts."""
    seen = SeenTrouble(FULL, seconds=9.0)  # by the operator's clock
    found = plan(
        STOPS[reason], observed(*running(2), view=saving(2), bounds=BOUNDS, store=seen), NOW
    )
    assert [type(action) for action in found.actions] == [WriteParams]


def test_planned_stop_is_recorded_if_only_agents_report_a_refusal() -> None:
    pods = running(2)
    seen = SeenTrouble(FULL, tuple(pod.uid for pod in pods))
    exists = observed(*pods, view=saving(2), bounds=BOUNDS, store=seen)
    found = plan(STOPS[StopReason.SUSPENDED], exists, NOW)
    assert found.actions == (WriteParams(1, asked(StopReason.SUSPENDED)),)


SUSPENDED = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)


def test_resumption_starts_a_new_incarnation() -> None:
    a_job = job(Status(phase=Phase.SUSPENDED), maxNodes=2)
    found = plan(a_job, observed(view=SUSPENDED, incarnation=4), NOW)
    assert found.actions == (
        WriteParams(5, rendezvous_params(a_job, 2, 2)),
        CreatePod(0, "job-0", 5),
        CreatePod(1, "job-1", 5),
    )
    assert found.phase is Phase.PENDING


def test_resumption_waits_for_pods_that_may_write_checkpoints() -> None:
    leaving = pod(0).terminating().get()
    assert plan(job(maxNodes=2), observed(leaving, view=SUSPENDED), NOW).actions == ()
    staying = plan(job(maxNodes=2), observed(pod(0).get(), view=SUSPENDED), NOW)
    assert staying.actions == (DeletePod("job-0", "uid-0-0", DeleteReason.SUSPENDED),)


def test_resumption_does_not_wait_for_unreachable_machine() -> None:
    lost = pod(0).terminating().on(NodeState.NOT_READY).get()
    found = plan(job(maxNodes=2), observed(lost, view=SUSPENDED), NOW)
    assert created(found) == [1, 2]


def test_resumption_does_not_wait_for_stuck_workers() -> None:
    """The kubelet cannot remove their pod, and they run no more."""
    stuck = replace(pod(0).terminating().get(), stuck="process 7 waits")
    found = plan(job(maxNodes=2), observed(stuck, view=SUSPENDED), NOW)
    assert created(found) == [1, 2]


def test_resumption_does_not_wait_for_object_with_finalizer() -> None:
    """The object has no running process any more, but its name is still taken."""
    kept = replace(pod(0).terminating().get(), phase=PodPhase.SUCCEEDED, over=True)
    found = plan(job(maxNodes=2), observed(kept, view=SUSPENDED), NOW)
    assert created(found) == [1, 2]
    ended = replace(kept, over=False, lingering=True)
    assert plan(job(maxNodes=2), observed(ended, view=SUSPENDED), NOW).actions == ()
    untold = replace(kept, terminating=False)
    found = plan(job(maxNodes=2), observed(untold, view=SUSPENDED), NOW)
    assert found.actions == (DeletePod("job-0", "uid-0-0", DeleteReason.SUSPENDED),)


def started(seconds: float, **status: Any) -> Status:
    return Status(phase=Phase.RUNNING, start_time=ago(seconds), **status)


def test_deadline_ends_the_job() -> None:
    policy = {"activeDeadlineSeconds": 100}
    exists = settled(job(maxNodes=2), *running(2), view=final_round(2))
    before = plan(job(started(99), maxNodes=2, runPolicy=policy), exists, NOW)
    assert (before.actions, before.wake_at) == ((), later(1))
    found = plan(job(started(100), maxNodes=2, runPolicy=policy), exists, NOW)
    reason = DeleteReason.DEADLINE_EXCEEDED
    assert of(CloseRendezvous, found) == [
        CloseRendezvous(1, OutcomeKind.STOPPED, StopReason.DEADLINE_EXCEEDED, save=UNSUPPORTED)
    ]
    assert deleted(found) == [("job-0", reason), ("job-1", reason)]
    assert found.phase is Phase.FAILED


def test_deleted_job_is_closed_and_its_pods_deleted() -> None:
    exists = settled(job(), *running(1))
    found = plan(job(deleted=True), exists, NOW)
    assert of(CloseRendezvous, found) == [
        CloseRendezvous(1, OutcomeKind.STOPPED, StopReason.DELETED, save=NOT_TRAINING)
    ]
    assert deleted(found) == [("job-0", DeleteReason.JOB_DELETED)]


def finished(seconds: float) -> Status:
    return Status(phase=Phase.SUCCEEDED, start_time=ago(999), completion_time=ago(seconds))


MIXED = (
    pod(0).succeeded().get(),
    pod(1).get(),
    pod(2).failed().get(),
    pod(3).terminating().get(),
    pod(4).pending(5).get(),
    pod(5).succeeded().lingering().get(),
    pod(6).succeeded().lingering().terminating().get(),
)


@pytest.mark.parametrize(
    ("policy", "seconds", "names"),
    [
        ("None", 9999, []),
        ("Running", 0, []),
        ("Running", 14, []),
        ("Running", 15, ["job-1", "job-4", "job-5"]),
        ("All", 14, []),
        ("All", 15, ["job-0", "job-1", "job-2", "job-4", "job-5"]),
    ],
)
def test_finished_job_deletes_its_pods_after_their_grace(
    policy: str, seconds: float, names: list[str]
) -> None:
    a_job = job(finished(seconds), maxNodes=4, runPolicy={"cleanPodPolicy": policy})
    found = plan(a_job, observed(*MIXED, view=closed(OutcomeKind.SUCCEEDED)), NOW)
    assert deleted(found) == [(name, DeleteReason.JOB_FINISHED) for name in names]
    waits = policy != "None" and seconds < 15
    assert found.wake_at == (later(15 - seconds) if waits else None)


@pytest.mark.parametrize(
    ("ttl", "seconds", "actions", "wake_at"),
    [
        (None, 10**6, (), None),
        (100, 99, (), later(1)),
        (100, 100, (DeleteJob(),), None),
        (0, 0, (DeleteJob(),), None),
    ],
)
def test_finished_job_is_deleted_after_its_ttl(
    ttl: int | None, seconds: float, actions: tuple[Action, ...], wake_at: datetime | None
) -> None:
    a_job = job(finished(seconds), runPolicy={"ttlSecondsAfterFinished": ttl})
    found = plan(a_job, observed(view=closed(OutcomeKind.SUCCEEDED)), NOW)
    assert (found.actions, found.wake_at) == (actions, wake_at)


def test_outcome_is_reported_before_the_job_is_deleted() -> None:
    a_job = job(Status(phase=Phase.RUNNING), runPolicy={"ttlSecondsAfterFinished": 0})
    assert plan(a_job, observed(view=closed(OutcomeKind.FAILED)), NOW).actions == ()


@pytest.mark.parametrize("kind", list(OutcomeKind))
def test_ended_job_creates_no_pod(kind: OutcomeKind) -> None:
    found = plan(job(maxNodes=4), observed(view=closed(kind)), NOW)
    assert found.actions == ()
    assert found.phase is (Phase.SUCCEEDED if kind is OutcomeKind.SUCCEEDED else Phase.FAILED)


def test_finished_job_stays_finished_when_its_rendezvous_is_deleted() -> None:
    for view in (RendezvousView(), UNREADABLE, final_round(2)):
        found = plan(job(finished(1), runPolicy={"suspend": True}), observed(view=view), NOW)
        assert (found.actions, found.phase) == ((), Phase.SUCCEEDED)


def test_members_without_pod_are_removed_at_once() -> None:
    members = tuple(
        member(f"job-{index}", state)
        for index, state in enumerate(("running", "running", "running", "done"))
    )
    view = final_round(4, members=members)
    # 0 runs, 1 is on a silent machine, 2 and 3 are gone; 3's success stays recorded.
    seen = observed(pod(0).get(), pod(1).on(NodeState.NOT_READY).get(), view=view)
    (remove,) = of(RemoveMembers, plan(job(), seen, NOW))
    assert remove == RemoveMembers(1, ("uid-2-0",))


def test_terminating_pod_keeps_its_member_until_it_ended() -> None:
    view = final_round(1, members=(member("job-0", "running"),))
    ending = observed(pod(0).terminating().get(), view=view)
    assert of(RemoveMembers, plan(job(), ending, NOW)) == []
    over = observed(pod(0).terminating().over().get(), view=view)
    assert of(RemoveMembers, plan(job(), over, NOW)) == [RemoveMembers(1, ("uid-0-0",))]


def test_name_of_foreign_pod_is_skipped() -> None:
    seen = observed(pod(0).get(), foreign=frozenset({1}))
    assert created(plan(job(maxNodes=3), seen, NOW)) == [2, 3]


def test_large_job_is_created_in_steps_that_follow_at_once() -> None:
    wanted = 2 * MAX_POD_ACTIONS + 10
    a_job = job(minNodes=1, maxNodes=wanted)
    indices: list[int] = []
    steps: list[tuple[int, bool]] = []
    while len(indices) < wanted:
        world = observed(*(pod(index).pending().get() for index in indices))
        found = plan(a_job, replace(world, bounds=plan(a_job, world, NOW).bounds), NOW)
        made = created(found)
        steps.append((len(made), found.wake_at == NOW))
        assert found.expected == wanted, "the first round waits for all of them"
        indices += made
    assert steps == [(MAX_POD_ACTIONS, True), (MAX_POD_ACTIONS, True), (10, False)]
    assert indices == list(range(wanted))


def test_large_job_is_scaled_down_in_steps_with_all_drain_requests_in_the_first() -> None:
    count = MAX_POD_ACTIONS + 100
    world = observed(*running(count))
    found = plan(job(minNodes=1, maxNodes=count, nodes=1), world, NOW)
    write, *deletions = found.actions
    assert isinstance(write, WriteParams)
    assert len(write.bounds.marks) == count - 1
    assert [type(one) for one in deletions] == [DeletePod] * MAX_POD_ACTIONS
    assert found.wake_at == NOW
    gone = {one.uid for one in deletions if isinstance(one, DeletePod)}
    pods = tuple(replace(one, terminating=one.uid in gone) for one in world.pods)
    after = replace(world, pods=pods, bounds=write.bounds)
    rest = plan(job(minNodes=1, maxNodes=count, nodes=1), after, NOW)
    assert {one.uid for one in rest.actions if isinstance(one, DeletePod)} == {
        mark.member for mark in write.bounds.marks
    } - gone
    assert rest.wake_at is None


def operations(function: Callable[[], object]) -> int:
    """Return the number of bytecode instructions of a call, which depends on no machine."""
    count = 0

    def trace(frame: FrameType, event: str, _value: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_cost_of_plan_and_status_is_linear_in_the_number_of_pods() -> None:
    def costs(count: int) -> tuple[int, int]:
        view = final_round(count)
        members = tuple(replace(one, busy_ms=100 + at % 9) for at, one in enumerate(view.members))
        world = observed(*running(count), view=replace(view, members=members))
        smaller = job(minNodes=1, maxNodes=count, nodes=count // 2)
        return (
            operations(lambda: plan(smaller, world, NOW)),
            operations(lambda: next_status(smaller, world, world.rendezvous, NOW)),
        )

    for few, many in zip(costs(100), costs(400), strict=True):
        assert many < 5 * few
