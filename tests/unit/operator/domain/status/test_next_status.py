"""Status of a job: mirrored fields, counters and conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Observed,
    Obstacle,
    Refusal,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.status.conditions import MAX_WARNINGS_TEXT
from elasticjob_operator.domain.status.events import job_events
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ConditionType, ElasticJob, Phase, RendezvousState
from elasticjob_operator.model.status import (
    MAX_MEMBERS,
    MAX_ROUNDS,
    Condition,
    MemberStatus,
    PodCounts,
    Status,
)
from elasticjob_operator.model.types import ConditionStatus
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    Member,
    OutcomeKind,
)
from tests.unit.operator.builders import (
    NOW,
    PodBuilder,
    ago,
    closed,
    failure,
    final_round,
    history,
    job,
    later,
    observed,
    pod,
    running,
)
from tests.unit.operator.builders import member as member_record


def status_of(a_job: ElasticJob, exists: Observed) -> Status:
    return next_status(a_job, exists, exists.rendezvous, NOW)


def condition(status: Status, kind: ConditionType) -> Condition:
    [found] = [one for one in status.conditions if one.type is kind]
    return found


def true_ones(status: Status) -> set[str]:
    return {one.type.value for one in status.conditions if one.status is ConditionStatus.TRUE}


FAILED = {
    "round": 1,
    "pod": "job-1",
    "nodeName": "node-1",
    "rank": 1,
    "exitCode": 1,
    "class": "UserError",
    "message": "boom",
    "traceback": "Traceback",
}


def test_running_job_status() -> None:
    rounds = (
        history(1, "start", 2, join_ms=180),
        history(
            2,
            "loss",
            2,
            detect_ms=5,
            stop_ms=10,
            join_ms=20,
            confirm_ms=25,
            start_ms=30,
            first_step_ms=35,
            members=("job-10", "job-2"),
            detail="gone",
            final_at=ago(60),
            cold_nodes=1,
            cold_reason="the command changed",
        ),
    )
    first = failure(
        1, "job-1", rank=1, node="node-1", exit_code=1, message="boom", traceback="Traceback"
    )
    view = final_round(
        2,
        2,
        cause=Cause(CauseKind.LOSS, ("job-10", "job-2"), "its lease ran out"),
        rounds=rounds,
        failures_charged=1,
        interruptions=Counts(losses=1, leaves=2, preemptions=3, joins=4, others=5),
        first_failure=first,
    )
    a_job, pods = job(maxNodes=2, nprocPerNode=1), running(2)
    status = status_of(a_job, observed(*pods, view=view))
    described = a_job.model_copy(update={"status": status})
    assert status.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude={"conditions"}
    ) == {
        "phase": "Running",
        "launch": {
            "mode": "PerWorker",
            "reason": "PlainCommand",
            "message": "the command is run once for each worker",
        },
        "rendezvous": {
            "state": "final",
            "round": 2,
            "nodes": 2,
            "waiting": 0,
            "heldBack": [],
            "worldSize": 2,
            "master": "job-0",
            "cause": {
                "kind": "loss",
                "members": ["job-2", "job-10"],
                "reason": "",
                "detail": "its lease ran out",
                "reasons": [],
            },
            "since": "2026-01-31T11:59:00Z",
        },
        "nodes": 2,
        "pods": {
            "desired": 2,
            "active": 2,
            "ready": 2,
            "pending": 0,
            "terminating": 0,
            "failed": 0,
        },
        "readyNodes": 2,
        "wantedNodes": 2,
        "selector": "elasticjob.dev/job-name=job",
        "restarts": 1,
        "interruptions": {
            "losses": 1,
            "leaves": 2,
            "preemptions": 3,
            "joins": 4,
            "others": 5,
        },
        "members": [
            {"pod": "job-0", "nodeName": "node-0", "rank": 0, "state": "running", "round": 2},
            {"pod": "job-1", "nodeName": "node-1", "rank": 1, "state": "running", "round": 2},
        ],
        "rounds": [
            {
                "round": 1,
                "cause": "start",
                "members": [],
                "reason": "",
                "detail": "",
                "reasons": [],
                "nodes": 2,
                "joinMs": 180,
            },
            {
                "round": 2,
                "cause": "loss",
                "members": ["job-2", "job-10"],
                "reason": "",
                "detail": "gone",
                "reasons": [],
                "nodes": 2,
                "finalTime": "2026-01-31T11:59:00Z",
                "detectMs": 5,
                "stopMs": 10,
                "joinMs": 20,
                "confirmMs": 25,
                "startMs": 30,
                "recoveryMs": 90,
                "firstStepMs": 35,
                "coldNodes": 1,
                "coldReason": "the command changed",
            },
        ],
        "explanation": list(explanation(described, pods)),
        "firstFailure": FAILED,
        "lastFailure": FAILED,
        "avoidedNodes": [],
        "stragglers": [],
        "observedGeneration": 3,
        "startTime": "2026-01-31T12:00:00Z",
    }
    assert true_ones(status) == {"Ready", "Created", "PodsReady", "Running"}


def test_members_are_in_natural_order_and_bounded() -> None:
    members = tuple(member(index, "waiting") for index in reversed(range(120)))
    status = status_of(job(), observed(view=RendezvousView(members=members)))
    assert [one.pod for one in status.members] == [f"job-{index}" for index in range(MAX_MEMBERS)]


def test_recent_rounds_are_kept() -> None:
    rounds = tuple(history(number, "join", 2) for number in range(1, 15))
    status = status_of(job(), observed(view=final_round(2, 14, rounds=rounds)))
    assert [one.round for one in status.rounds] == list(range(15 - MAX_ROUNDS, 15))


POD_COUNTS = {
    "ready": (pod(0), PodCounts(active=1, ready=1)),
    "pending": (pod(0).pending(3), PodCounts(active=1, pending=1)),
    "failed": (pod(0).failed(), PodCounts(failed=1)),
    "succeeded": (pod(0).succeeded(), PodCounts()),
    "terminating": (pod(0).terminating(), PodCounts(terminating=1)),
    "ended and terminating": (pod(0).over().terminating(), PodCounts(failed=1)),
    "on a lost machine": (pod(0).on(NodeState.NOT_READY), PodCounts(active=1, ready=1)),
}


@pytest.mark.parametrize(("one", "counts"), POD_COUNTS.values(), ids=POD_COUNTS)
def test_pods_are_counted_by_state(one: PodBuilder, counts: PodCounts) -> None:
    status = status_of(job(maxNodes=4), observed(one.get()))
    assert status.pods == counts.model_copy(update={"desired": 4})
    assert status.wanted_nodes == 4


@pytest.mark.parametrize(
    ("status", "policy", "view"),
    [
        (None, {"suspend": True}, None),
        (Status(phase=Phase.SUCCEEDED), {}, None),
        (None, {}, closed(OutcomeKind.FAILED)),
    ],
    ids=["suspended", "finished", "finishing"],
)
def test_no_pod_is_desired_at_rest(
    status: Status | None, policy: dict[str, Any], view: RendezvousView | None
) -> None:
    counts = status_of(job(status, runPolicy=policy), observed(*running(2), view=view)).pods
    assert counts == PodCounts(desired=0, active=2, ready=2)


def test_ready_nodes_count_towards_the_size() -> None:
    pods = [pod(0).get(), pod(1).pending(3).get(), pod(4).on(NodeState.NOT_READY).get()]
    assert status_of(job(maxNodes=4), observed(*pods)).ready_nodes == 1


@pytest.mark.parametrize(
    ("cold", "start", "reason"),
    [(None, None, None), ("", "warm", None), ("a shell", "cold", "a shell")],
)
def test_member_shows_its_rank_steps_and_start(
    cold: str | None, start: str | None, reason: str | None
) -> None:
    seated = replace(
        member(0), cold=cold, step=120, checkpoint_step=100, node="node-0", lease=7, id="uid-a"
    )
    view = replace(final_round(1, 2), members=(seated, member(1)), ranks={"uid-a": 3})
    first, second = status_of(job(), observed(view=view)).members
    assert first == MemberStatus(
        pod="job-0", node="node-0", rank=3, state="running", round=2, step=120,
        checkpoint_step=100, start=start, cold_reason=reason,
    )  # fmt: skip
    assert second == MemberStatus(pod="job-1", state="running", round=2)


FOUND = "run_all.py, line 2 starts torchrun"


def found_view() -> RendezvousView:
    return replace(final_round(1, 2), members=(replace(member(0), launch=FOUND), member(1)))


def launch_of(status: Status) -> tuple[str, str]:
    assert status.launch is not None
    return status.launch.mode, status.launch.message


def test_launch_is_the_one_that_a_launcher_found_in_its_files() -> None:
    status = status_of(job(), observed(view=found_view()))
    assert launch_of(status) == ("PerNode", FOUND)
    requested = status_of(job(launch="PerWorker"), observed(view=found_view()))
    assert launch_of(requested)[0] == "PerWorker"
    later = status_of(job(status=status), observed(view=final_round(1, 2, members=(member(0),))))
    assert launch_of(later)[0] == "PerWorker"  # another program in the same image


def test_found_launch_survives_suspension_and_resumption() -> None:
    view, nobody = found_view(), replace(final_round(1, 2), members=())
    status = status_of(job(), observed(*running(2), view=view))
    for suspend, pods, shown, phase in (
        (True, running(2), view, Phase.SUSPENDING),
        (True, running(1), UNREADABLE, Phase.SUSPENDING),
        (True, [], nobody, Phase.SUSPENDED),
        (False, [], replace(nobody, round=0), None),
        (False, running(2), UNREADABLE, None),
        (False, running(2), view, Phase.RUNNING),
    ):
        before = status
        now = job(status=status, runPolicy={"suspend": suspend})
        status = next_status(now, observed(*pods, view=shown), shown, NOW)
        assert phase in (None, status.phase)
        assert launch_of(status) == ("PerNode", FOUND)
        reasons = [event.reason for event in job_events(before, status, ())]
        assert "LaunchDecided" not in reasons


@pytest.mark.parametrize("suspend", [False, True])
def test_found_launch_of_an_earlier_release_stays_while_the_job_runs(suspend: bool) -> None:
    """Earlier releases, and their CRD, store no digest of the program."""
    status = status_of(job(), observed(*running(2), view=found_view()))
    assert status.launch is not None
    earlier = status.launch.model_copy(update={"program": None})
    status = status.model_copy(update={"launch": earlier})
    now = job(status=status, runPolicy={"suspend": suspend})
    for view in (replace(final_round(1, 2), members=()), UNREADABLE):
        after = next_status(now, observed(*running(2), view=view), view, NOW)
        decided = [event for event in job_events(status, after, ()) if "Launch" in event.reason]
        mode, events = ("PerWorker", 1) if suspend else ("PerNode", 0)
        assert (launch_of(after)[0], len(decided)) == (mode, events)


def trained(**fields: Any) -> dict[str, Any]:
    """Return a template like that of `job`, with these fields of its pod and trainer."""
    trainer = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    pod_fields = fields.pop("pod", {})
    return {"spec": {"containers": [{**trainer, **fields}], **pod_fields}}


@pytest.mark.parametrize(
    ("edit", "mode"),
    [
        ({"template": trained(image="trainer:2")}, "PerWorker"),
        ({"template": trained(args=["--long"])}, "PerWorker"),
        ({"template": trained(pod={"volumes": [{"name": "x", "emptyDir": {}}]})}, "PerWorker"),
        ({"launch": "PerWorker"}, "PerWorker"),
        ({"setup": ["./prepare.sh"]}, "PerWorker"),
        ({"template": trained(pod={"nodeSelector": {"pool": "spot"}})}, "PerNode"),
        ({"maxRestarts": 7}, "PerNode"),
    ],
    ids=["image", "arguments", "volumes", "launch", "setup", "as Kueue edits", "no program"],
)
@pytest.mark.parametrize("registered", [True, False])
def test_found_launch_is_forgotten_with_another_program(
    edit: dict[str, Any], mode: str, registered: bool
) -> None:
    status = status_of(job(), observed(*running(2), view=found_view()))
    view = found_view() if registered else replace(final_round(1, 2), members=())
    edited = job(status=status, runPolicy={"suspend": True}, **edit)
    assert launch_of(status_of(edited, observed(*running(2), view=view)))[0] == mode


def test_starting_pods_of_a_found_launch_wait_for_torchrun() -> None:
    status = status_of(job(maxNodes=2), observed(*running(2), view=found_view()))
    starting = [replace(pod(n).get(), ready=False) for n in range(2)]
    view = replace(final_round(1, 2), members=())
    told = status_of(job(status=status, maxNodes=2), observed(*starting, view=view))
    found = condition(told, ConditionType.PODS_READY)
    assert "a pod joins once torchrun in its command asks for a round" in found.message
    assert "set spec.launch to PerWorker" in found.message


@pytest.mark.parametrize(
    ("spec", "is_hinted"),
    [({}, True), ({"launch": "PerWorker"}, False), ({"maxNodes": 1, "nprocPerNode": 1}, False)],
    ids=["checked", "requested", "one worker"],
)
def test_starting_pods_whose_program_may_start_torchrun_have_a_hint_without_members(
    spec: dict[str, Any], is_hinted: bool
) -> None:
    a_job = job(**{"maxNodes": 2, **spec})
    starting = [replace(pod(n).get(), ready=False) for n in range(a_job.spec.max_nodes)]
    hint = "; if the program starts torchrun, a pod joins once torchrun asks for a round"
    for members, hinted in (((), is_hinted), ((member(0),), False)):
        here = observed(*starting, view=replace(final_round(1, 2), members=members))
        found = condition(status_of(a_job, here), ConditionType.PODS_READY)
        assert (found.reason, hint in found.message) == ("PodsStarting", hinted)
    waiting = [replace(one, launcher_since=None) for one in starting]
    here = observed(*waiting, view=replace(final_round(1, 2), members=()))
    assert hint not in condition(status_of(a_job, here), ConditionType.PODS_READY).message


def member(index: int, state: str = "running", round: int = 2) -> Member:
    return member_record(f"job-{index}", state, round=round)


@pytest.mark.parametrize(
    ("view", "phase", "nodes"),
    [
        (final_round(3, 2), None, 3),
        (
            replace(final_round(3, 2), members=(member(0), member(1), member(2, state="waiting"))),
            None,
            2,
        ),
        (replace(final_round(3, 2), members=(member(0, round=1),)), None, 0),
        (replace(final_round(3, 2), state=RendezvousState.JOINABLE), Phase.RUNNING, 0),
        (UNREADABLE, Phase.RUNNING, 4),
        (replace(closed(OutcomeKind.SUCCEEDED), nodes=0), Phase.RUNNING, 4),
        (replace(closed(OutcomeKind.SUCCEEDED), nodes=2), Phase.RUNNING, 2),
    ],
    ids=["all run", "one waits", "older round", "re-forming", "unreadable", "unknown end", "ended"],
)
def test_nodes_are_training_nodes(view: RendezvousView, phase: Phase | None, nodes: int) -> None:
    before = Status(phase=phase, nodes=4)
    status = status_of(
        job(before, maxNodes=8), observed(*(pod(n).get() for n in range(6)), view=view)
    )
    assert status.nodes == nodes


@pytest.mark.parametrize(("ready", "reported"), [(1, True), (2, False)])
def test_refusal_is_reported_only_while_pods_are_missing(ready: int, reported: bool) -> None:
    view = final_round(2, 5)
    known = status_of(job(maxNodes=2), observed(*running(2), view=view))
    refusal = Refusal(Obstacle.ENDPOINT, "etcd-x:2379 is not allowed", ago(5))
    blind = replace(observed(*running(ready), view=UNREADABLE), refusal=refusal)
    status = next_status(job(known, maxNodes=2), blind, UNREADABLE, NOW)
    assert (status.refusal is not None) is reported
    unread = any("cannot read the job's state" in sentence for sentence in status.explanation)
    assert unread is not reported


def test_unreadable_rendezvous_keeps_known_status() -> None:
    view = final_round(2, 5, rounds=(history(5, "start", 2),), failures_charged=2)
    known = status_of(job(maxNodes=2), observed(*running(2), view=view))
    blind = next_status(
        job(known, maxNodes=2), observed(*running(2), view=UNREADABLE), UNREADABLE, NOW
    )
    assert blind.rendezvous is not None
    assert known.rendezvous is not None
    assert blind.rendezvous.state is RendezvousState.UNKNOWN
    assert (blind.rendezvous.round, blind.rendezvous.nodes) == (5, 2)
    assert (blind.members, blind.rounds, blind.restarts) == (known.members, known.rounds, 2)
    assert blind.phase is Phase.RUNNING


def test_unchanged_observation_keeps_status() -> None:
    exists = observed(*running(3), view=final_round(3))
    first = status_of(job(maxNodes=3), exists)
    second = next_status(job(first, maxNodes=3), exists, exists.rendezvous, later(500))
    assert second == first


def test_transition_time_changes_only_with_the_status() -> None:
    first = status_of(job(maxNodes=3), observed(*running(1)))
    then = observed(*running(2), view=final_round(2))
    second = next_status(job(first, maxNodes=3), then, then.rendezvous, later(60))
    before, after = (condition(one, ConditionType.PODS_READY) for one in (first, second))
    assert before.message != after.message
    assert after.last_transition_time == before.last_transition_time == NOW
    assert condition(second, ConditionType.RUNNING).last_transition_time == later(60)


def test_warnings_are_a_condition_while_the_template_has_them() -> None:
    trainer = {"name": "t", "image": "t:1", "command": ["t"]}
    template = {"spec": {"hostIPC": True, "activeDeadlineSeconds": 9, "containers": [trainer]}}
    warned = status_of(job(template=template), observed())
    found = condition(warned, ConditionType.TEMPLATE_WARNINGS)
    assert (found.status, found.reason) == ("True", "HostIPC,PodDeadline")
    assert "spec.template.spec.hostIPC: HostIPC: " in found.message
    assert "spec.template.spec.activeDeadlineSeconds: PodDeadline: " in found.message
    gone = status_of(job(warned), observed())
    found = condition(gone, ConditionType.TEMPLATE_WARNINGS)
    assert (found.status, found.reason, found.message) == ("False", "NoWarnings", "")


def test_message_of_many_warnings_is_bounded() -> None:
    trainer = {"name": "t", "image": "t:1", "command": ["t"]}
    volumes = [{"name": f"v{index}", "emptyDir": {"medium": "Memory"}} for index in range(200)]
    template = {"spec": {"containers": [trainer], "volumes": volumes}}
    warned = status_of(job(template=template), observed())
    found = condition(warned, ConditionType.TEMPLATE_WARNINGS)
    assert found.reason == "MemoryVolumeWithoutLimit"
    assert len(found.message) < MAX_WARNINGS_TEXT + 100
    assert found.message.endswith(" more warnings")


def test_every_condition_is_present_with_current_generation() -> None:
    status = status_of(job(), observed())
    always = set(ConditionType) - {
        ConditionType.NAME_CONFLICT,
        ConditionType.TEMPLATE_INVALID,
        ConditionType.NODES_REFUSED,
        ConditionType.TEMPLATE_WARNINGS,
        ConditionType.SNAPSHOTS_IN_MEMORY,
        ConditionType.SNAPSHOTS_IN_STORAGE,
    }
    assert {one.type for one in status.conditions} == always
    assert [one.type for one in status.conditions] == [k for k in ConditionType if k in always]
    assert {one.observed_generation for one in status.conditions} == {3}
    assert all(one.reason for one in status.conditions)


def test_start_and_completion_times() -> None:
    born = status_of(job(runPolicy={"suspend": True}), observed())
    assert (born.phase, born.start_time) == (Phase.SUSPENDED, None)
    begun = status_of(job(born), observed())
    assert (begun.phase, begun.start_time, begun.completion_time) == (Phase.PENDING, NOW, None)
    view = closed(OutcomeKind.SUCCEEDED)
    ended = next_status(job(begun), observed(view=view), view, later(60))
    assert (ended.start_time, ended.completion_time) == (NOW, later(60))
    still = next_status(job(ended), observed(view=view), view, later(600))
    assert still == ended


PODS_READY: list[tuple[Any, str, str]] = [
    # pods or a refusal, of a job of two; the reason; the message
    ([pod(0), pod(1)], "AllReady", "2 of 2 are ready"),
    ([pod(0), pod(1), pod(2)], "AllReady", "3 are ready, 2 nodes are wanted"),
    ([pod(0)], "PodsStarting", "1 of 2 are ready"),
    ([pod(0), pod(1).pending(3)], "PodsStarting", "1 of 2 are ready; waiting for job-1"),
    (
        [
            pod(0),
            pod(1).pending(
                3, obstacle=Obstacle.UNSCHEDULABLE, obstacle_message="no nvidia.com/gpu"
            ),
        ],
        "Unschedulable",
        "1 of 2 are ready; job-1: Unschedulable (no nvidia.com/gpu)",
    ),
    (
        Refusal(Obstacle.QUOTA, "exceeded quota", ago(3)),
        "QuotaExceeded",
        "0 of 2 are ready; a pod cannot be created: exceeded quota",
    ),
]


@pytest.mark.parametrize(("pods", "reason", "message"), PODS_READY)
def test_pods_ready_names_the_pod_and_the_reason(pods: Any, reason: str, message: str) -> None:
    if isinstance(pods, Refusal):
        exists = replace(observed(), refusal=pods)
    else:
        exists = observed(*(one.get() for one in pods))
    found = condition(status_of(job(maxNodes=2), exists), ConditionType.PODS_READY)
    assert (found.reason, found.message) == (reason, message)
    assert (found.status is ConditionStatus.TRUE) == (reason == "AllReady")


def test_pods_ready_names_the_remedy_of_a_command_without_torchrun() -> None:
    here = observed(pod(0).get(), pod(1).pending(3, launcher_since=ago(3)).get())
    messages = {
        launch: condition(
            status_of(job(maxNodes=2, launch=launch), here), ConditionType.PODS_READY
        ).message
        for launch in ("PerNode", "PerWorker")
    }
    assert messages["PerWorker"] == "1 of 2 are ready; waiting for job-1"
    assert messages["PerNode"] == (
        "1 of 2 are ready; waiting for job-1; a pod joins once torchrun in its command asks for a "
        "round: if the command starts none, set spec.launch to PerWorker"
    )


def test_message_stays_short_for_a_large_job() -> None:
    pods = [pod(index).pending(1).get() for index in range(50)]
    found = condition(status_of(job(maxNodes=50), observed(*pods)), ConditionType.PODS_READY)
    assert found.message.endswith("job-0, job-1, job-2, job-3, job-4 and 45 more")


RESIZING = [
    # requested nodes, nodes in the round, status, reason
    (4, 4, ConditionStatus.FALSE, "AtWantedSize"),
    (4, 2, ConditionStatus.TRUE, "Growing"),
    (2, 4, ConditionStatus.TRUE, "Shrinking"),
    (9, 4, ConditionStatus.FALSE, "AboveMaxNodes"),
    (0, 1, ConditionStatus.FALSE, "BelowMinNodes"),
    (9, 2, ConditionStatus.TRUE, "Growing"),
]


@pytest.mark.parametrize(("asked", "nodes", "truth", "reason"), RESIZING)
def test_resizing_reports_clamped_size(
    asked: int, nodes: int, truth: ConditionStatus, reason: str
) -> None:
    a_job = job(maxNodes=4, nodes=asked)
    exists = observed(*running(nodes), view=final_round(nodes))
    found = condition(status_of(a_job, exists), ConditionType.RESIZING)
    assert (found.status, found.reason) == (truth, reason)
    assert (f"spec.nodes is {asked}" in found.message) == (asked not in range(1, 5))


ENDS = [
    (closed(OutcomeKind.SUCCEEDED), Phase.SUCCEEDED, "AllWorkersSucceeded"),
    (closed(OutcomeKind.FAILED, "4 failures, 3 allowed"), Phase.FAILED, "WorkersFailed"),
    (closed(OutcomeKind.TIMED_OUT), Phase.FAILED, "JoinTimeout"),
    (closed(OutcomeKind.STOPPED, "by hand"), Phase.FAILED, "Stopped"),
    (
        closed(OutcomeKind.STOPPED, reason=StopReason.DEADLINE_EXCEEDED),
        Phase.FAILED,
        "DeadlineExceeded",
    ),
]


@pytest.mark.parametrize(("view", "phase", "reason"), ENDS)
def test_each_outcome_is_finished_with_its_reason(
    view: RendezvousView, phase: Phase, reason: str
) -> None:
    status = status_of(job(), observed(view=view))
    assert status.phase is phase
    ready = "Ready" if phase is Phase.SUCCEEDED else "Stalled"
    assert true_ones(status) == {ready, "Created", phase.value, "Finished"}
    assert condition(status, ConditionType.FINISHED).reason == reason
    assert condition(status, ConditionType.FAILED).reason == reason


def test_empty_etcd_with_running_agents_keeps_history() -> None:
    """Nothing is known before they have: no round forms, and no failure is charged again."""
    rounds = (history(1, "start", 2), history(2, "failure", 2, start_ms=5))
    first = failure(1, "job-1", rank=1, node="node-1", exit_code=1, message="boom", traceback="Tr…")
    view = final_round(2, 2, rounds=rounds, failures_charged=1, first_failure=first)
    before = status_of(job(maxNodes=2), observed(*running(2), view=view))
    lost = status_of(job(before, maxNodes=2), observed(*running(2), view=RendezvousView()))
    assert (lost.phase, lost.restarts, lost.rounds) == (Phase.RUNNING, 1, before.rounds)
    assert lost.rendezvous is not None
    assert lost.rendezvous.state is RendezvousState.UNKNOWN
    assert condition(lost, ConditionType.RESIZING).status is ConditionStatus.UNKNOWN
    restored = final_round(2, 2, failures_charged=1)
    after = status_of(job(lost, maxNodes=2), observed(*running(2), view=restored))
    assert after == before, "neither their history nor the failure is told again"
    assert [said.reason for said in job_events(before, lost, ())] == []
    assert [said.reason for said in job_events(lost, after, ())] == []
    alone = status_of(
        job(before, maxNodes=2), observed(pod(0).pending().get(), view=RendezvousView())
    )
    assert alone.phase is Phase.RESTARTING, "nobody is there who could tell"


@pytest.mark.parametrize("later", [RendezvousView(), UNREADABLE], ids=["lost its data", "is gone"])
def test_outcome_outlives_its_etcd(later: RendezvousView) -> None:
    view = replace(
        closed(OutcomeKind.FAILED, "spent"),
        rounds=(history(1, "start", 2), history(2, "failure", 2)),
        failures_charged=2,
        interruptions=Counts(losses=1),
        first_failure=failure(
            2, "job-1", rank=1, node="node-1", exit_code=1, message="boom", traceback="Tr…"
        ),
    )
    ended = status_of(job(status_of(job(), observed(view=view))), observed(view=view))
    assert ended.phase is Phase.FAILED
    assert ended.restarts == 2
    assert status_of(job(ended), observed(view=later)) == ended


def test_deadline_that_could_not_be_written_is_closed_later() -> None:
    policy = {"activeDeadlineSeconds": 100}
    running_status = Status(phase=Phase.RUNNING, start_time=ago(100))
    blind = observed(*running(1), view=UNREADABLE)
    failed = status_of(job(running_status, runPolicy=policy), blind)
    assert condition(failed, ConditionType.FAILED).reason == "DeadlineExceeded"
    bounds = plan(job(), observed(), NOW).bounds
    found = plan(
        job(failed, runPolicy=policy),
        observed(*running(1), view=final_round(1), bounds=bounds),
        NOW,
    )
    assert [type(action).__name__ for action in found.actions] == ["CloseRendezvous", "DeletePod"]


def test_outcome_conditions_are_written_once() -> None:
    view = closed(OutcomeKind.FAILED, "budget spent")
    ended = status_of(job(), observed(view=view))
    swept = next_status(job(ended), observed(), RendezvousView(), later(60))
    assert swept.conditions == ended.conditions
    assert swept.phase is Phase.FAILED


def test_foreign_pod_is_a_condition_while_it_exists() -> None:
    before = status_of(job(), observed(*running(1), foreign=frozenset({2, 1})))
    found = condition(before, ConditionType.NAME_CONFLICT)
    assert (found.status, found.reason) == (ConditionStatus.TRUE, "NameConflict")
    assert found.message == "job-1, job-2: taken by a pod of another owner; skipped"
    after = condition(status_of(job(before), observed(*running(1))), ConditionType.NAME_CONFLICT)
    assert (after.status, after.reason) == (ConditionStatus.FALSE, "Resolved")


def test_pods_of_a_deleted_job_of_the_same_name_are_no_conflict() -> None:
    ending = observed(*running(1), foreign=frozenset({1, 2, 3}), predecessors=frozenset({1, 2, 3}))
    kinds = {found.type for found in status_of(job(), ending).conditions}
    assert ConditionType.NAME_CONFLICT not in kinds
    one = replace(ending, predecessors=frozenset({1, 3}))
    found = condition(status_of(job(), one), ConditionType.NAME_CONFLICT)
    assert found.message == "job-2: taken by a pod of another owner; skipped"


def test_template_refused_by_the_api_server_is_a_condition() -> None:
    refusal = Refusal(Obstacle.TEMPLATE_INVALID, 'unknown field "spec.hostnam"', NOW)
    status = status_of(job(), observed(refusal=refusal))
    found = condition(status, ConditionType.TEMPLATE_INVALID)
    assert (found.status, found.message) == (ConditionStatus.TRUE, 'unknown field "spec.hostnam"')
    assert condition(status, ConditionType.PODS_READY).reason == "TemplateInvalid"


def test_job_whose_pods_could_not_start_has_failure_reason() -> None:
    detail = "job-4 and 4 more could not be started: no python3"
    view = closed(OutcomeKind.STOPPED, detail, StopReason.LAUNCH_FAILED)
    status = status_of(job(), observed(view=view))
    found = condition(status, ConditionType.FAILED)
    assert (status.phase, found.reason) == (Phase.FAILED, "LaunchFailed")
    assert found.message == detail


def test_refused_deletions_are_named_up_to_a_number_and_never_a_suspension() -> None:
    pods = running(12)
    texts = {pod.uid: f'pods "{pod.name}" is forbidden: protected' for pod in pods}
    found = job(nodes=12, maxNodes=12, runPolicy={"suspend": True})
    ending = (*pods[:-1], replace(pods[-1], terminating=True))
    status = status_of(found, replace(observed(*ending), undeletable=texts))
    assert status.phase is Phase.SUSPENDING
    assert status.deletion_refusal is not None
    assert status.deletion_refusal.count == 11
    assert status.deletion_refusal.pods == [f"job-{index}" for index in range(10)]
    suspended = condition(status, ConditionType.SUSPENDED)
    assert (suspended.status, suspended.reason) == (ConditionStatus.FALSE, "DeletionRefused")
    words = 'job-9 and 1 more: pods "job-0" is forbidden: protected; let the webhook, policy or'
    assert words in suspended.message
    assert any(text.startswith("Let the webhook, policy or role") for text in status.explanation)
    left = replace(observed(ending[-1]), undeletable=texts)
    assert status_of(found, left).deletion_refusal is None
