"""Events of a job: each one once, with its cause."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_operator.domain.explain.phrases import cause_text
from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Obstacle,
    Refusal,
    RendezvousView,
    SeenTrouble,
    StopReason,
)
from elasticjob_operator.domain.plan.actions import (
    Action,
    CreatePod,
    DeletePod,
    DeleteReason,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.backends import rendezvous_params
from elasticjob_operator.domain.plan.closing_checkpoint import store_access
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.status.events import (
    Event,
    EventType,
    job_events,
    settled_rounds,
    stepped_rounds,
    template_warnings,
    without_recent_changes,
)
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model.status import (
    CauseStatus,
    FailureStatus,
    RoundStatus,
    Status,
    StopStatus,
)
from elasticjob_operator.model.types import ConditionType, Phase
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, OutcomeKind
from elasticjob_rendezvous.protocol.store_trouble import ETCD, StoreState, StoreTrouble
from tests.unit.operator.builders import (
    NOW,
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

Json = dict[str, Any]


def told(before: Status, after: Status, *applied: Action) -> list[tuple[str, str]]:
    return [(said.reason, said.message) for said in job_events(before, after, applied)]


def status_of(view: RendezvousView, before: Status | None = None) -> Status:
    here = observed(*running(2), view=view)
    return next_status(job(status=before, maxNodes=2), here, view, NOW)


FIRST = history(1, "start", 2, detect_ms=5, stop_ms=120, join_ms=80)
SECOND = history(
    3, "leave", 2, detect_ms=5, stop_ms=120, join_ms=80, members=("job-2",), detail="drained"
)


def test_unchanged_status_gives_no_event() -> None:
    status = status_of(final_round(2, rounds=(FIRST,)))
    assert told(status, status) == []


def test_new_round_gives_event_with_cause_members_and_times() -> None:
    before = status_of(final_round(2, rounds=(FIRST,)))
    after = status_of(final_round(2, 3, rounds=(FIRST, SECOND)), before)
    assert told(before, after) == [
        (
            "RoundFinal",
            "round 3 is final with 2 nodes: job-2 left (drained); "
            "detect 5 ms, stop 120 ms, join 80 ms",
        )
    ]


def test_recovery_gives_one_event_with_all_parts() -> None:
    before = status_of(final_round(2, 3, rounds=(FIRST, SECOND)))
    runs = replace(SECOND, confirm_ms=45, start_ms=650)
    after = status_of(final_round(2, 3, rounds=(FIRST, runs)), before)
    assert told(before, after) == [
        (
            "Recovered",
            "round 3: job-2 left (drained); trains again on 2 nodes after 0.9 s: "
            "detect 5 ms, stop 120 ms, join 80 ms, confirm 45 ms, start 650 ms",
        )
    ]
    cold = replace(runs, cold_nodes=1, cold_reason="the command changed")
    (said,) = told(before, status_of(final_round(2, 3, rounds=(FIRST, cold)), before))
    assert said[1].endswith(
        "start 650 ms; workers started cold on 1 of 2 nodes: the command changed"
    )
    stepped = replace(runs, first_step_ms=200)
    later = status_of(final_round(2, 3, rounds=(FIRST, stepped)), after)
    assert told(after, later) == []
    assert [found.round for found in stepped_rounds(after, later)] == [3]
    assert stepped_rounds(later, later) == []


@pytest.mark.parametrize(
    ("cause", "stop", "text"),
    [
        (CauseKind.START, StopReason.SUSPENDED, "the job resumes"),
        (None, StopReason.SUSPENDED, "the job resumes"),
        (CauseKind.START, None, "the job starts"),
        (None, None, "a new round is being formed"),
    ],
)
def test_restart_by_a_resumption_that_no_status_preceded_says_so(
    cause: CauseKind | None, stop: StopReason | None, text: str
) -> None:
    """Its first round is no sign of it: etcd may have lost the records of all its nodes."""
    before = status_of(final_round(2, 3, rounds=(FIRST, SECOND)))
    if stop is not None:
        last = StopStatus(reason=stop, result=SaveResult.NOT_TRAINING)
        before = before.model_copy(update={"last_stop": last})
    forming = RendezvousView(round=1, cause=None if cause is None else Cause(cause))
    assert ("Restarting", text) in told(before, status_of(forming, before))


def test_first_round_gives_started_event() -> None:
    after = status_of(final_round(2, rounds=(FIRST,)))
    assert [reason for reason, _ in told(Status(), after)] == [
        "LaunchDecided",
        "RoundFinal",
        "Running",
    ]


@pytest.mark.parametrize("kind", list(CauseKind))
def test_every_cause_has_a_phrase(kind: CauseKind) -> None:
    said = cause_text(CauseStatus(kind=kind.value, members=["job-1"], detail="why"))
    assert "(why)" in said
    assert not said.startswith(kind.value)


def test_unknown_cause_of_newer_agent_is_shown_unchanged() -> None:
    assert cause_text(CauseStatus(kind="eclipse", members=["job-1"])) == "eclipse: job-1"


def test_actions_of_one_kind_share_an_event() -> None:
    status = status_of(final_round(2))
    created = [CreatePod(index, f"job-{index}", 1) for index in range(8)]
    deleted = [
        DeletePod("job-10", "u10", DeleteReason.SURPLUS_HIGHEST_RANK),
        DeletePod("job-9", "u9", DeleteReason.SURPLUS_HIGHEST_RANK),
        DeletePod("job-11", "u11", DeleteReason.SURPLUS_PENDING),
    ]
    done: list[Action] = [WriteNodes(8), RemoveMembers(1, ("a", "b")), *created, *deleted]
    assert told(status, status, *done) == [
        ("NodesSet", "spec.nodes follows maxNodes: 8"),
        ("MembersRemoved", "2 members removed from the rendezvous: their pods are gone"),
        ("PodsCreated", "created job-0 … job-7 (8)"),
        ("PodsDeleted", "deleted job-9, job-10: more than wanted; had the highest rank"),
        ("PodsDeleted", "deleted job-11: more than wanted; had not started"),
    ]


@pytest.mark.parametrize("reason", list(DeleteReason))
def test_every_delete_reason_has_a_phrase(reason: DeleteReason) -> None:
    status = status_of(final_round(2))
    ((_, message),) = told(status, status, DeletePod("job-1", "u", reason))
    assert message.startswith("deleted job-1: ")


def test_first_failure_event_has_the_end_of_its_traceback() -> None:
    before = status_of(final_round(2))
    traceback = "\n".join(f"line {number}" for number in range(20))
    first = failure(
        1, "job-1", rank=5, node="node-b", exit_code=1, message="ValueError: no",
        traceback=traceback,
    )  # fmt: skip
    after = status_of(final_round(2, first_failure=first), before)
    (said,) = job_events(before, after, ())
    assert said.type is EventType.WARNING
    assert said.message.splitlines() == [
        "rank 5 (job-1 on node-b) failed in round 1 with exit code 1: UserError: ValueError: no",
        "line 16", "line 17", "line 18", "line 19",
    ]  # fmt: skip
    assert told(after, after) == []


def test_lost_node_is_no_failed_worker() -> None:
    before = status_of(final_round(2))
    lost = FailureStatus(round=2, pod="job-0", node="node-a", class_="NodeLost")
    found = told(before, before.model_copy(update={"first_failure": lost}))
    assert found == [
        (
            "NodeLost",
            "job-0 on node-a was lost in round 2: it disappeared without reporting an error, for "
            "example because its node was lost",
        )
    ]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            True,
            "its agent did not answer for a while, for example because it had too little processor "
            "time or no network, or was restarted; its agent has registered again",
        ),
        (
            False,
            "it disappeared without reporting an error, for example because its node was lost; "
            "another pod takes its place",
        ),
    ],
)
def test_event_of_a_lost_node_names_what_becomes_of_it(returned: bool, said: str) -> None:
    before = status_of(final_round(2))
    lost = FailureStatus(round=2, pod="job-0", class_="NodeLost", returned=returned)
    ((_, message),) = told(before, before.model_copy(update={"last_failure": lost}))
    assert message == f"job-0 was lost in round 2: {said}"


def test_return_of_a_lost_node_is_no_further_event() -> None:
    lost = FailureStatus(round=2, pod="job-0", class_="NodeLost")
    before = status_of(final_round(2)).model_copy(update={"last_failure": lost})
    returned = lost.model_copy(update={"returned": True})
    assert told(before, before.model_copy(update={"last_failure": returned})) == []


def test_failure_event_names_the_signal() -> None:
    before = status_of(final_round(2))
    first = failure(2, "job-0", FailureClass.OUT_OF_MEMORY, exit_code=-9, signal=9)
    ((_, message),) = told(before, status_of(final_round(2, first_failure=first), before))
    assert message == "rank 0 (job-0) failed in round 2 by signal 9: OutOfMemory: no message"


def test_refusal_gives_one_event_while_it_lasts() -> None:
    view = final_round(2)
    before = status_of(view)
    refusal = Refusal(Obstacle.QUOTA, "exceeded quota", ago(1))
    few = replace(observed(*running(1), view=view), refusal=refusal)
    after = next_status(job(status=before, maxNodes=2), few, view, NOW)
    ((reason, message),) = told(before, after)
    assert reason == "QuotaExceeded"
    assert "exceeded quota" in message
    assert told(after, after) == []


def test_invalid_template_gives_its_own_event_only() -> None:
    view = final_round(2)
    refusal = Refusal(Obstacle.TEMPLATE_INVALID, 'unknown field "imagee"', ago(1))
    few = replace(observed(view=view), refusal=refusal)
    after = next_status(job(maxNodes=2), few, view, NOW)
    found = told(status_of(view), after)
    assert ("TemplateInvalid", 'unknown field "imagee"') in found
    assert len(found) == 1


PROBED = {"name": "t", "image": "t:1", "command": ["t"], "readinessProbe": {"exec": {}}}
HOST_IPC = {"hostIPC": True, "containers": [PROBED]}
PROBE = ("ReadinessProbe", "spec.template.spec.containers[0].readinessProbe: ReadinessProbe: ")
IPC = ("HostIPC", "spec.template.spec.hostIPC: HostIPC: ")


def warned(before: Status, spec: Json, generation: int) -> tuple[Status, list[Event]]:
    """Return the next status of a job with this pod spec, and the events for its warnings."""
    made = job(before, maxNodes=2, template={"spec": spec})
    metadata = made.metadata.model_copy(update={"generation": generation})
    made = made.model_copy(update={"metadata": metadata})
    after = next_status(made, observed(*running(2)), RendezvousView(), NOW)
    return after, list(template_warnings(made, before, after))


def test_each_kind_of_warning_gives_one_event_in_a_generation() -> None:
    first, events = warned(Status(), HOST_IPC, 1)
    assert [(one.reason, one.type) for one in events] == [
        ("HostIPC", EventType.WARNING),
        ("ReadinessProbe", EventType.WARNING),
    ]
    for (reason, text), event in zip((IPC, PROBE), events, strict=True):
        assert event.reason == reason
        assert event.message.startswith(text)
    assert {one.deduplication_key for one in events} == {"generation 1"}
    same, events = warned(first, HOST_IPC, 2)
    assert events == [], "a scaled job has the same warnings"
    fewer, events = warned(same, {"containers": [PROBED]}, 3)
    assert [(one.reason, one.deduplication_key) for one in events] == [
        ("ReadinessProbe", "generation 3")
    ]
    assert warned(fewer, {"containers": [PROBED | {"readinessProbe": None}]}, 4)[1] == []


def test_warnings_of_an_operator_that_died_are_posted_again() -> None:
    status, events = warned(Status(), HOST_IPC, 1)
    assert warned(without_recent_changes(status, ago(60)), HOST_IPC, 1)[1] == events
    later_on = without_recent_changes(status, NOW + timedelta(seconds=1))
    assert warned(later_on, HOST_IPC, 1)[1] == []


def test_outcome_event_has_its_reason() -> None:
    before = status_of(final_round(2))
    view = closed(OutcomeKind.FAILED, "3 restarts are spent")
    after = status_of(view, before)
    ((reason, message),) = told(before, after)
    assert (reason, message) == ("Failed", "WorkersFailed: 3 restarts are spent")


def test_repeated_events_of_a_lost_status_write_are_equal() -> None:
    """Rounds, their failure and the end are repeated, old events and those without occasion not."""
    old = RoundStatus(round=1, cause="start", nodes=2, final_time=ago(900), join_ms=5, start_ms=7)
    new = RoundStatus(round=2, cause="failure", nodes=2, final_time=ago(9), join_ms=5, start_ms=7)
    failure = FailureStatus(round=1, pod="job-1", rank=1, exit_code=1, message="no")
    status = Status(
        phase=Phase.SUCCEEDED, rounds=[old, new], first_failure=failure, completion_time=ago(1)
    )
    first = job_events(Status(rounds=[old], phase=Phase.RUNNING), status, ())
    again = job_events(without_recent_changes(status, ago(60)), status, ())
    assert [said.reason for said in first] == [
        "WorkerFailed", "RoundFinal", "Recovered", "Succeeded",
    ]  # fmt: skip
    assert first == again
    assert all(said.deduplication_key for said in again)
    assert len({(said.reason, said.deduplication_key) for said in again}) == 4
    assert job_events(without_recent_changes(status, ago(0)), status, ()) == ()
    timeless = status.model_copy(update={"rounds": [RoundStatus(round=1, cause="start", nodes=2)]})
    assert [
        said.reason for said in job_events(without_recent_changes(timeless, ago(60)), timeless, ())
    ] == ["Succeeded"]


def test_round_of_resumed_job_has_another_deduplication_key() -> None:
    one, other = (
        job_events(Status(), Status(rounds=[RoundStatus(
            round=1, cause="start", nodes=2, final_time=ago(seconds)
        )]), ())[0].deduplication_key
        for seconds in (9, 90)
    )  # fmt: skip
    assert one != other


def test_round_is_settled_when_its_workers_run_or_a_later_round_exists() -> None:
    def status(*rounds: RoundStatus) -> Status:
        return Status(rounds=list(rounds))

    fresh = RoundStatus(round=1, cause="start", nodes=2, join_ms=5)
    started = RoundStatus(round=1, cause="start", nodes=2, join_ms=5, start_ms=7)
    second = RoundStatus(round=2, cause="loss", nodes=2)
    assert settled_rounds(Status(), status(fresh)) == []
    assert settled_rounds(status(fresh), status(started)) == [started]
    assert settled_rounds(status(started), status(started)) == []
    assert settled_rounds(status(fresh), status(fresh, second)) == [fresh]
    assert settled_rounds(status(started), status(started, second)) == []


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        (SaveReport(SaveResult.SAVED, 163, 163), (EventType.NORMAL, "Saved")),
        (SaveReport(SaveResult.TIMED_OUT, 163, 120), (EventType.WARNING, "NotSaved")),
        (
            SaveReport(SaveResult.TIMED_OUT, 163, 120, ("job-0",), "rank 0: /claim: no space"),
            (EventType.WARNING, "NotSaved"),
        ),
        (SaveReport(SaveResult.NOT_TRAINING), None),
    ],
)
def test_stop_of_the_job_reports_its_checkpoint_once(
    save: SaveReport, expected: tuple[EventType, str] | None
) -> None:
    over = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    assert over.outcome is not None
    view = replace(over, outcome=replace(over.outcome, save=save))
    before = Status(phase=Phase.RUNNING)
    suspended = job(before, runPolicy={"suspend": True})
    after = next_status(suspended, observed(view=view), view, NOW)
    told = [one for one in job_events(before, after, ()) if one.reason in ("Saved", "NotSaved")]
    found = [(one.type, one.reason) for one in told]
    assert found == ([] if expected is None else [expected])
    assert [one.message for one in told] == ([] if expected is None else [save.text])
    assert after.last_stop is not None
    assert (after.last_stop.result, after.last_stop.error) == (save.kind, save.error)
    settled = suspended.model_copy(update={"status": after})
    again = next_status(settled, observed(view=view), view, NOW)
    assert job_events(after, again, ()) == ()


@pytest.mark.parametrize(
    ("reason", "posted"),
    [(StopReason.DELETED, ["Deleting"]), (StopReason.LAUNCH_FAILED, ["Failed"])],
)
def test_deletion_of_a_job_is_no_failure(reason: StopReason, posted: list[str]) -> None:
    """A job that is deleted in the foreground has a status until its pods are gone."""
    before, view = Status(phase=Phase.RUNNING), closed(OutcomeKind.STOPPED, reason=reason)
    after = next_status(job(before, deleted=True), observed(view=view), view, NOW)
    assert after.phase is (Phase.DELETING if reason is StopReason.DELETED else Phase.FAILED)
    found = [one.reason for one in job_events(before, after, ())]
    assert found[-1:] == posted


FULL = StoreTrouble(ETCD, StoreState.REFUSING, "http://etcd:2379", "database space exceeded", 1)
STOPS: dict[StopReason, dict[str, Any]] = {
    StopReason.SUSPENDED: {"runPolicy": {"suspend": True}},
    StopReason.DEADLINE_EXCEEDED: {"runPolicy": {"activeDeadlineSeconds": 100}},
    StopReason.DELETED: {"deleted": True},
}
TRAINS = final_round(2)
TRAINS = replace(
    TRAINS,
    members=tuple(
        replace(one, saves=True, step=163, checkpoint_step=120) for one in TRAINS.members
    ),
)


@pytest.mark.parametrize("reason", STOPS)
def test_checkpoint_that_etcd_refused_to_request_is_reported_once(reason: StopReason) -> None:
    """The rendezvous is closed later, without the members of that time."""
    before = Status(phase=Phase.RUNNING, start_time=ago(100))
    subject, pods = job(before, **STOPS[reason]), running(2)
    bounds = rendezvous_params(subject, 2, 2)
    refused = observed(*pods, view=TRAINS, bounds=bounds, store=SeenTrouble(FULL))
    after = next_status(subject, refused, TRAINS, NOW, store_access(refused, NOW))
    told = [one.message for one in job_events(before, after, ()) if one.reason == "NotSaved"]
    text = "stopped at step 163; the last checkpoint is of step 120: etcd refused the request"
    assert [message.partition(" for a checkpoint")[0] for message in told] == [text]
    assert after.last_stop is not None
    assert (after.last_stop.reason, after.last_stop.result) == (reason, SaveResult.NO_TIME)
    gone = replace(TRAINS, members=())
    over = closed(OutcomeKind.STOPPED, reason=reason)
    assert over.outcome is not None
    save = SaveReport(SaveResult.NOT_TRAINING)
    over = replace(over, outcome=replace(over.outcome, save=save))
    for seen in (
        replace(refused, pods=(), rendezvous=gone),
        observed(view=UNREADABLE, bounds=bounds),
        observed(view=gone, bounds=bounds),
        observed(view=over, bounds=bounds),
    ):
        subject = subject.model_copy(update={"status": after})
        again = next_status(subject, seen, seen.rendezvous, NOW, store_access(seen, NOW))
        assert again.last_stop == after.last_stop
        assert not [one for one in job_events(after, again, ()) if one.reason == "NotSaved"]
        after = again


def test_checkpoint_that_etcd_may_still_be_asked_for_is_not_reported_as_missing() -> None:
    subject = job(Status(phase=Phase.RUNNING), runPolicy={"suspend": True})
    bounds, store = rendezvous_params(subject, 2, 2), SeenTrouble(FULL, seconds=9.0)
    seen = observed(*running(2), view=TRAINS, bounds=bounds, store=store)
    planned = plan(subject, seen, NOW)
    assert [type(action) for action in planned.actions] == [WriteParams]
    for at in (NOW, later(2)):  # the limit passes between the plan and the status
        status = next_status(subject, seen, TRAINS, at, planned.access)
        assert (status.phase, status.last_stop) == (Phase.RUNNING, None)


def test_stop_without_training_replaces_the_report_on_an_earlier_stop() -> None:
    earlier = StopStatus(reason=StopReason.SUSPENDED, result=SaveResult.SAVED, step=7)
    over = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    assert over.outcome is not None
    save = SaveReport(SaveResult.NOT_TRAINING)
    view = replace(over, outcome=replace(over.outcome, save=save))
    before = Status(phase=Phase.PENDING, last_stop=earlier)
    status = next_status(job(before, runPolicy={"suspend": True}), observed(view=view), view, NOW)
    assert status.last_stop == StopStatus(
        reason=StopReason.SUSPENDED, result=SaveResult.NOT_TRAINING
    )


def test_pod_of_a_deleted_node_has_no_event_with_a_remedy() -> None:
    before = Status(phase=Phase.SUSPENDING)
    a_job = job(before, maxNodes=2, runPolicy={"suspend": True})
    here = observed(replace(pod(1).terminating().on(NodeState.NOT_READY).get(), node_gone=True))
    after = next_status(a_job, here, here.rendezvous, NOW)
    assert not any("Unreach" in one.reason for one in job_events(before, after, ()))
    [condition] = [one for one in after.conditions if one.type is ConditionType.SUSPENDED]
    assert "the Node node-1 was deleted" in condition.message
    assert "kubectl" not in condition.message


def test_pod_on_an_unreachable_machine_has_one_event_with_its_remedy() -> None:
    a_job = job(Status(phase=Phase.SUSPENDING), maxNodes=2, runPolicy={"suspend": True})
    leaving = pod(0).terminating().get()
    kept = pod(1).terminating().on(NodeState.NOT_READY).get()
    seen = [observed(leaving, replace(kept, node_state=NodeState.READY))]
    removed = pod(2).over().on(NodeState.NOT_READY).get()  # shown once more by its deletion
    seen += [observed(leaving, removed), observed(leaving, kept), observed(kept), observed(kept)]
    status, emitted = Status(phase=Phase.SUSPENDING), list[Event]()
    for each in seen:
        now_job = a_job.model_copy(update={"status": status})
        after = next_status(now_job, each, each.rendezvous, NOW)
        emitted += [one for one in job_events(status, after, ()) if "Unreach" in one.reason]
        status = after
    [event] = emitted
    assert (event.type, event.reason) == (EventType.WARNING, "NodeUnreachable")
    assert "job-1 on node-1 does not answer" in event.message
    for remedy in ("kubectl delete node node-1", "kubectl delete pod job-1 --force"):
        assert remedy in event.message
        assert remedy in " ".join(status.explanation)
