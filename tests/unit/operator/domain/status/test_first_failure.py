"""First and latest failure in the status, also when agents took their records with them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.domain.observed.state import UNREADABLE, RendezvousView, StopReason
from elasticjob_operator.domain.status.failures import last_failure
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import Phase
from elasticjob_operator.model.status import FailureStatus, Status
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from tests.unit.operator.builders import (
    NOW,
    closed,
    failure,
    final_round,
    history,
    job,
    observed,
    running,
)

KILLED = FailureStatus(round=1, pod="job-1", rank=1, signal=9, class_="Signal")


def shown(kind: FailureClass, number: int, cause: str, known: FailureStatus | None) -> str:
    """Return the pod of the shown failure, when job-0 recorded one of that class."""
    rounds = (history(number, "start", 2), history(number + 1, cause, 2))
    first = failure(number, "job-0", kind, exit_code=1)
    view = final_round(2, number + 1, rounds=rounds, first_failure=first)
    found = last_failure(view, "", (), Status(first_failure=known))
    return "" if found is None else found.pod


@pytest.mark.parametrize("kind", [FailureClass.PEER_ABORT, FailureClass.COLLECTIVE_TIMEOUT])
def test_consequence_does_not_replace_known_first_failure(kind: FailureClass) -> None:
    assert shown(kind, 1, "failure", KILLED) == "job-1"
    assert shown(kind, 1, "failure", None) == "job-0"
    assert shown(kind, 2, "failure", KILLED) == "job-0", "of a later round"


@pytest.mark.parametrize("cause", ["leave", "loss"])
def test_consequence_of_a_leave_is_no_failure(cause: str) -> None:
    assert shown(FailureClass.PEER_ABORT, 2, cause, None) == ""
    assert shown(FailureClass.PEER_ABORT, 2, cause, KILLED) == "job-1"
    assert shown(FailureClass.USER_ERROR, 2, cause, KILLED) == "job-0"


# -- the first failure of the run, and the latest one


def run_of(*views: RendezvousView, status: Status | None = None, suspend: bool = False) -> Status:
    """Return the status after these observations of a running job."""
    found = status or Status()
    for view in views:
        a_job = job(found, maxNodes=2, runPolicy={"suspend": suspend})
        pods = () if suspend else running(2)
        found = next_status(a_job, observed(*pods, view=view), view, NOW)
    return found


def failed(number: int, pod: str = "job-1", **changes: Any) -> RendezvousView:
    """Return the view of the round after a failure in round `number`."""
    known = failure(number, pod, rank=1, **changes)
    rounds = (history(number, "start", 2), history(number + 1, "failure", 2))
    return final_round(2, number + 1, rounds=rounds, first_failure=known)


def places(status: Status) -> tuple[tuple[int, str] | None, tuple[int, str] | None]:
    """Return round and pod of the first and of the latest failure."""
    first, last = (
        None if found is None else (found.round, found.pod)
        for found in (status.first_failure, status.last_failure)
    )
    return first, last


def test_first_failure_stays_while_later_ones_follow() -> None:
    status = run_of(failed(1), failed(2, "job-0"), failed(5))
    assert places(status) == ((1, "job-1"), (5, "job-1"))


def test_more_precise_first_failure_replaces_it_until_another_follows() -> None:
    vague = run_of(failed(1, kind=FailureClass.SIGNAL))
    precise = run_of(failed(1, kind=FailureClass.SIGNAL, message="boom"), status=vague)
    assert precise.first_failure == precise.last_failure
    assert precise.first_failure is not None
    assert precise.first_failure.message == "boom"
    after = run_of(failed(2, message="other"), status=precise)
    assert after.first_failure == precise.first_failure


def test_unreadable_and_suspended_job_keeps_both_failures() -> None:
    status = run_of(failed(1), failed(2, "job-0"))
    stopped = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    for view, suspend in ((UNREADABLE, False), (stopped, True), (UNREADABLE, True)):
        status = run_of(view, status=status, suspend=suspend)
        assert places(status) == ((1, "job-1"), (2, "job-0"))


def test_resumed_run_begins_without_failures() -> None:
    stopped = closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED)
    suspended = run_of(stopped, status=run_of(failed(1), failed(2, "job-0")), suspend=True)
    resumed = run_of(RendezvousView(), status=suspended)
    assert places(resumed) == (None, None)
    assert places(run_of(failed(1, "job-0"), status=resumed)) == ((1, "job-0"), (1, "job-0"))


def test_lost_etcd_data_keeps_first_failure_of_the_run() -> None:
    status = run_of(failed(6), failed(7, "job-0"))
    assert status.phase is Phase.RUNNING
    empty = final_round(2, 1, rounds=(history(1, "start", 2),))
    again = run_of(empty, status=status)
    assert places(again) == ((6, "job-1"), (7, "job-0"))
    assert places(run_of(failed(1, "job-0"), status=again)) == ((6, "job-1"), (1, "job-0"))
    assert places(run_of(failed(1), failed(2), status=again)) == ((6, "job-1"), (2, "job-1"))


def test_failure_of_an_earlier_release_is_the_latest_one() -> None:
    """It wrote its latest failure as `firstFailure`."""
    status = run_of(final_round(2, 2), status=Status(phase=Phase.RUNNING, first_failure=KILLED))
    assert (status.first_failure, status.last_failure) == (KILLED, KILLED)
