"""Evidence from pods about a round and a failure: it is kept after the pods are gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Observed,
    Pod,
    PodEnd,
    RendezvousView,
)
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import RendezvousState
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import Phase
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from tests.unit.operator.builders import (
    NOW,
    ago,
    failure,
    final_round,
    history,
    job,
    member,
    observed,
    pod,
    running,
)

FIRST = history(1, "start", 3, final_at=ago(600), start_ms=10)
LEFT = Cause(CauseKind.LEAVE, ("job-2",), "SIGTERM")
SECOND = history(2, "leave", 2, stop_ms=400, members=("job-2",), final_at=ago(60))
THIRD = history(3, "join", 3, members=("job-2",), final_at=ago(30))
BEFORE = Status(phase=Phase.RUNNING, start_time=ago(900))


def drained(generation: int = 0, seconds: float = 300) -> Pod:
    made = pod(2, generation).terminating().taken(PodEnd.DRAINED, "drain").get()
    return replace(made, created_at=ago(seconds))


def next_of(here: Observed, before: Status = BEFORE) -> Status:
    return next_status(job(status=before, maxNodes=3), here, here.rendezvous, NOW)


def opening(cause: Cause = LEFT) -> Observed:
    view = final_round(2, 2, cause=cause, rounds=(FIRST,), since=ago(61))
    view = replace(view, state=RendezvousState.JOINABLE, members=view.members[:0])
    return observed(*running(2), drained(), view=view)


def test_round_keeps_its_reason_after_pod_is_gone() -> None:
    open_ = next_of(opening())
    assert open_.rendezvous is not None
    assert open_.rendezvous.cause is not None
    assert open_.rendezvous.cause.reason == "Drained"
    sealed = final_round(2, 2, cause=LEFT, rounds=(FIRST, SECOND))
    after = next_of(observed(*running(2), view=sealed), open_)
    assert [found.reason for found in after.rounds] == ["", "Drained"]
    grown = final_round(
        3, 3, cause=Cause(CauseKind.JOIN, ("job-2",)), rounds=(FIRST, SECOND, THIRD)
    )
    later = next_of(observed(*running(3), view=grown), after)
    assert [found.reason for found in later.rounds] == ["", "Drained", ""]


def test_pod_younger_than_the_round_does_not_explain_it() -> None:
    sealed = final_round(2, 2, cause=LEFT, rounds=(FIRST, SECOND))
    after = next_of(observed(*running(2), drained(1, seconds=60.2), view=sealed))
    assert after.rounds[-1].reason == ""
    assert next_of(observed(*running(2), drained(0), view=sealed)).rounds[-1].reason == "Drained"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (None, "NodeLost"),
        (PodEnd.NODE_LOST, "NodeLost"),
        (PodEnd.PREEMPTED, "Preempted"),
        (PodEnd.EVICTED, "Preempted"),
        (PodEnd.OUT_OF_MEMORY, "HostOutOfMemory"),
    ],
)
def test_loss_is_a_node_failure_with_the_reason_of_the_pod_end(
    end: PodEnd | None, kind: str
) -> None:
    lost = pod(2).over().get()
    if end is not None:
        lost = pod(2).over().taken(end, "said").get()
    view = replace(opening(Cause(CauseKind.LOSS, ("job-2",))).rendezvous, first_failure=None)
    status = next_of(observed(*running(2), lost, view=view))
    failure = status.first_failure
    assert failure is not None
    assert (failure.round, failure.pod, failure.class_) == (1, "job-2", kind)
    assert status.restarts == 0
    gone = next_of(observed(*running(2), view=view), status)
    assert gone.first_failure == failure, "it stays when the pod is gone"


def lost_node(*pods: Pod, known: Status = BEFORE, **fields: Any) -> bool | None:
    """Return the fate of job-2, which was lost in round 1, with these pods."""
    view = opening(Cause(CauseKind.LOSS, ("job-2",))).rendezvous
    view = replace(view, lost={(1, "job-2"): pod(2).get().uid}, **fields)
    failure = next_of(observed(*running(2), *pods, view=view), known).last_failure
    assert failure is not None
    return failure.returned


@pytest.mark.parametrize(
    ("pods", "returned"),
    [
        ([pod(2).get()], None),
        ([pod(2).on(NodeState.NOT_READY).get()], None),
        ([pod(2).over().get()], False),
        ([pod(2).terminating().get()], False),
        ([], False),
        ([pod(2, 1).get()], False),
    ],
    ids=["it is listed", "its node is not ready", "ended", "deleted", "gone", "replaced"],
)
def test_pod_of_a_lost_node_is_replaced_if_it_has_ended(
    pods: list[Pod], returned: bool | None
) -> None:
    """A pod that is listed as running proves nothing: its machine may be gone."""
    assert lost_node(*pods) is returned


def test_agent_of_a_lost_node_returns_if_it_registers_from_the_same_pod() -> None:
    found = lost_node(pod(2).get(), members=(member("job-2", "waiting"),))
    assert found is True
    replaced = replace(member("job-2", "waiting"), id=pod(2, 1).get().uid)
    assert lost_node(pod(2, 1).get(), members=(replaced,)) is False


def test_fate_of_a_lost_node_stays_once_it_is_known() -> None:
    view = opening(Cause(CauseKind.LOSS, ("job-2",))).rendezvous
    view = replace(view, lost={(1, "job-2"): pod(2).get().uid})
    back = replace(view, members=(member("job-2", "waiting"),))
    status = next_of(observed(*running(3), view=back))
    later = next_of(observed(*running(2), view=view), status)
    assert later.last_failure is not None
    assert later.last_failure.returned is True


def test_planned_leave_is_no_failure() -> None:
    assert next_of(opening()).first_failure is None


WORKER = failure(
    1, "job-2", FailureClass.SIGNAL, rank=2, node="node-2", signal=9, message="launcher is gone"
)


def test_out_of_memory_kill_corrects_failure_class_of_agent() -> None:
    killed = pod(2).over().taken(PodEnd.OUT_OF_MEMORY, "its memory limit is 8Gi").get()
    view = final_round(3, 1, rounds=(FIRST,), first_failure=WORKER)
    status = next_of(observed(*running(2), killed, view=view))
    failure = status.first_failure
    assert failure is not None
    assert (failure.class_, failure.message) == ("HostOutOfMemory", "its memory limit is 8Gi")
    assert next_of(observed(*running(2), view=view), status).first_failure == failure


def test_traceback_of_worker_is_not_corrected() -> None:
    killed = pod(2).over().taken(PodEnd.PREEMPTED, "by big").get()
    spoke = replace(WORKER, kind=FailureClass.USER_ERROR, traceback="Traceback\nValueError: x")
    view = final_round(3, 1, rounds=(FIRST,), first_failure=spoke)
    failure = next_of(observed(*running(2), killed, view=view)).first_failure
    assert failure is not None
    assert failure.class_ == "UserError"


def test_later_worker_failure_replaces_lost_node() -> None:
    lost = next_of(
        observed(*running(2), pod(2).on(NodeState.NOT_READY).get(),
                 view=opening(Cause(CauseKind.LOSS, ("job-2",))).rendezvous)
    )  # fmt: skip
    assert lost.first_failure is not None
    assert lost.first_failure.node == "node-2"
    later = replace(WORKER, round=2, name="job-0", kind=FailureClass.USER_ERROR)
    after = next_of(
        observed(*running(2), view=final_round(2, 2, rounds=(FIRST, SECOND), first_failure=later)),
        lost,
    )
    assert after.first_failure == lost.first_failure
    assert after.last_failure is not None
    assert (after.last_failure.round, after.last_failure.class_) == (2, "UserError")


@pytest.mark.parametrize(
    "suspended",
    [
        RendezvousView(state=RendezvousState.CLOSED, round=2),
        replace(UNREADABLE, round=2),
    ],
    ids=["seen closed", "not seen"],
)
def test_earlier_incarnation_is_ignored(suspended: RendezvousView) -> None:
    """A resumed job counts its rounds from one again."""
    lost = next_of(opening(Cause(CauseKind.LOSS, ("job-2",))))
    drained_ = next_of(opening())
    assert drained_.rendezvous is not None
    for before in (lost, drained_):
        asleep = job(before, maxNodes=3, runPolicy={"suspend": True})
        paused = next_status(asleep, observed(view=suspended), suspended, NOW)
        assert paused.first_failure == before.first_failure
        empty = next_of(observed(view=RendezvousView()), paused)
        assert empty.first_failure is None
        sealed = final_round(2, 2, cause=LEFT, rounds=(FIRST, SECOND))
        again = next_of(observed(*running(2), view=sealed), empty)
        assert [found.reason for found in again.rounds] == ["", ""]


def test_unreadable_rendezvous_keeps_first_failure() -> None:
    lost = next_of(opening(Cause(CauseKind.LOSS, ("job-2",))))
    assert next_of(observed(view=UNREADABLE), lost).first_failure == lost.first_failure
