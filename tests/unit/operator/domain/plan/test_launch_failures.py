"""Pods that cannot be started: retried with growing delays, and a limited number of times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_operator.domain.observed.state import UNREADABLE, Pod, RendezvousView, StopReason
from elasticjob_operator.domain.plan.actions import (
    CloseRendezvous,
    CreatePod,
    DeletePod,
    WriteParams,
)
from elasticjob_operator.domain.plan.backends import rendezvous_params
from elasticjob_operator.domain.plan.launch_failures import MOST_LAUNCH_FAILURES
from elasticjob_operator.domain.plan.planner import Plan, plan
from elasticjob_operator.domain.status.events import job_events
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import ConditionType
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from tests.unit.operator.builders import (
    NOW,
    ago,
    final_round,
    history,
    job,
    later,
    observed,
    pod,
    running,
)


def stillborn(count: int, seconds: float = 0, first: int = 0) -> tuple[Pod, ...]:
    """Return failed pods; the newest ended this long ago, the others a minute apart before it."""
    return tuple(
        pod(first + n).stillborn(seconds + 60 * (count - 1 - n), "no python3").get()
        for n in range(count)
    )


def planned(*pods: Pod, view: RendezvousView | None = None, at: float = 0) -> Plan:
    a_job = job(minNodes=2, maxNodes=2)
    seen = observed(*pods, view=view, bounds=rendezvous_params(a_job, 2, 2))
    return plan(a_job, seen, later(at))


def created(found: Plan) -> int:
    return sum(isinstance(action, CreatePod) for action in found.actions)


def expected(found: Plan) -> int | None:
    return found.bounds.expected if found.bounds else None


@pytest.mark.parametrize(("failures", "delay"), [(0, 0), (1, 0), (2, 2), (3, 4), (4, 8)], ids=str)
def test_each_launch_failure_in_a_row_doubles_the_wait(failures: int, delay: float) -> None:
    pods = stillborn(failures)
    if delay:
        early = planned(*pods, at=delay - 0.5)
        assert (created(early), early.wake_at, expected(early)) == (0, later(delay), 0)
    assert created(planned(*pods, at=delay)) == 2


@pytest.mark.parametrize("failures", [5, 6, 40, 64, 512], ids=str)
def test_wait_is_bounded_if_many_pods_fail_at_launch(failures: int) -> None:
    a_job = job(minNodes=1, maxNodes=1024)
    pods = (*running(1), *stillborn(failures, seconds=1, first=1))
    seen = observed(*pods, view=final_round(1, since=ago(40000)))
    found = plan(a_job, seen, NOW)
    assert (created(found), found.wake_at) == (0, later(15))
    assert len([one for one in found.actions if isinstance(one, DeletePod)]) == failures - 5


def test_failure_before_the_final_round_no_longer_counts() -> None:
    before = stillborn(3, seconds=61, first=2)  # the round is a minute old
    assert created(planned(*running(1), *before, view=final_round(1))) == 1
    after = stillborn(3, seconds=0, first=2)
    after = tuple(replace(one, ended_at=NOW) for one in after)
    assert created(planned(*running(1), *after, view=final_round(1))) == 0


def test_failure_before_the_last_round_no_longer_counts_while_the_next_one_forms() -> None:
    forming = RendezvousView(rounds=(history(1, final_at=later(-60)),))
    assert created(planned(*stillborn(3, seconds=61), view=forming)) == 2
    late = tuple(replace(one, ended_at=NOW) for one in stillborn(3))
    assert created(planned(*late, view=forming)) == 0


def test_job_without_startable_pods_fails_with_the_reason() -> None:
    found = planned(*stillborn(MOST_LAUNCH_FAILURES))
    (close,) = found.actions
    assert isinstance(close, CloseRendezvous)
    assert (close.kind, close.reason) == (OutcomeKind.STOPPED, StopReason.LAUNCH_FAILED)
    assert close.outcome.detail == (
        "LaunchFailed: job-4 and 4 more could not be started: no python3"
    )


@pytest.mark.parametrize("others", [0, MOST_LAUNCH_FAILURES - 1])
def test_pods_rejected_by_their_machines_delay_the_job_and_do_not_fail_it(others: int) -> None:
    rejected = stillborn(2 * MOST_LAUNCH_FAILURES)
    pods = tuple(replace(one, rejected=one.index >= others) for one in rejected)
    found = planned(*pods)
    assert not any(isinstance(action, CloseRendezvous) for action in found.actions)
    assert (created(found), found.wake_at) == (0, later(120))
    assert created(planned(*pods, at=120)) == 2


@pytest.mark.parametrize(("lasted", "delay"), [(0, 16), (16, 16), (40, 40), (3600, 120)], ids=str)
def test_back_off_after_rejected_pods_is_as_long_as_the_rejections(
    lasted: float, delay: float
) -> None:
    """The first rejected pod is kept, and many more than the job keeps."""
    first = replace(stillborn(1, seconds=lasted)[0], rejected=True)
    many = [pod(1 + n).stillborn(0, "OutOfcpu").get() for n in range(2 * MOST_LAUNCH_FAILURES)]
    pods = (first, *(replace(one, rejected=True) for one in many))
    found = planned(*pods)
    assert (created(found), found.wake_at) == (0, later(delay))
    gone = {one.name for one in found.actions if isinstance(one, DeletePod)}
    kept = tuple(one for one in pods if one.name not in gone)
    assert (len(kept), first in kept) == (MOST_LAUNCH_FAILURES, True)
    again = planned(*kept)
    assert (created(again), again.wake_at) == (0, later(delay))
    assert not any(isinstance(one, DeletePod) for one in again.actions)
    assert created(planned(*kept, at=delay)) == 2


def test_gang_that_waits_for_pods_has_the_short_back_off_after_rejections() -> None:
    """It has trained, and other machines may be free."""
    rejected = [replace(one, rejected=True) for one in stillborn(10, seconds=3600)]
    last = [replace(one, rejected=True) for one in stillborn(1, first=20)]
    view = RendezvousView(rounds=(history(1, final_at=ago(7200)),))
    found = planned(*rejected, *last, view=view)
    assert (created(found), found.wake_at) == (0, later(16))


def test_rejections_before_the_last_round_do_not_delay_the_next_pod() -> None:
    old = [replace(one, rejected=True) for one in stillborn(2, seconds=3600, first=1)]
    new = [replace(one, rejected=True) for one in stillborn(2, seconds=0, first=3)]
    found = planned(*running(1), *old, *new, view=final_round(1, since=ago(100)))
    assert found.wake_at == later(60)


@pytest.mark.parametrize("newest", [False, True])
def test_rejected_pods_do_not_displace_those_that_count_for_the_limit(newest: bool) -> None:
    """Each pass deletes the failed pods beyond those that are kept."""
    most = MOST_LAUNCH_FAILURES
    others = stillborn(most - 1, seconds=60, first=most)
    seconds = 1 if newest else 4000
    rejected = tuple(replace(one, rejected=True) for one in stillborn(most, seconds))
    found = planned(*others, *rejected, at=0)
    assert not any(isinstance(one, DeletePod) for one in found.actions)
    assert created(planned(*others, *rejected, at=120)) == 2
    last = stillborn(1, first=2 * most)
    assert any(
        isinstance(one, CloseRendezvous) for one in planned(*others, *rejected, *last).actions
    )


def test_pods_of_earlier_rounds_do_not_displace_rejected_ones() -> None:
    """The back-off counts the rejected ones: without it, pods would be created at once."""
    earlier = tuple(pod(10 + n).failed(30 + n).get() for n in range(MOST_LAUNCH_FAILURES))
    rejected = tuple(replace(one, rejected=True) for one in stillborn(MOST_LAUNCH_FAILURES + 1))
    found = planned(*earlier, *rejected)
    assert [one.name for one in found.actions if isinstance(one, DeletePod)] == ["job-1"]
    assert (created(found), found.wake_at) == (0, later(120))


def test_training_job_outlives_pods_that_cannot_start() -> None:
    pods = (*running(1), *stillborn(MOST_LAUNCH_FAILURES, first=2))
    found = planned(*pods, view=final_round(1, since=later(-3600)))
    assert not any(isinstance(action, CloseRendezvous) for action in found.actions)


def test_job_with_enough_started_pods_waits_for_them() -> None:
    found = planned(*running(2), *stillborn(MOST_LAUNCH_FAILURES, first=2))
    assert any(isinstance(action, WriteParams) for action in found.actions) or found.bounds
    assert not any(isinstance(action, CloseRendezvous) for action in found.actions)


def test_unreadable_rendezvous_is_not_closed_for_launch_failures() -> None:
    assert planned(*stillborn(MOST_LAUNCH_FAILURES), view=UNREADABLE).actions == ()


@pytest.mark.parametrize(
    ("pods", "reason", "message"),
    [
        (
            stillborn(2),
            "LaunchFailed",
            "0 of 2 are ready; job-1 and 1 more could not be started: no python3",
        ),
        (
            (*running(1), *stillborn(1, first=1)),
            "LaunchFailed",
            "1 of 2 are ready; job-1 could not be started: no python3",
        ),
        (
            (*(pod(index).pending().get() for index in (0, 2)), *stillborn(1, first=1)),
            "PodsStarting",
            "0 of 2 are ready; waiting for job-0, job-2",
        ),
    ],
    ids=["all", "one", "replaced"],
)
def test_status_has_the_end_of_a_pod_until_it_is_replaced(
    pods: tuple[Pod, ...], reason: str, message: str
) -> None:
    a_job, seen = job(minNodes=2, maxNodes=2), observed(*pods)
    status = next_status(a_job, seen, seen.rendezvous, NOW)
    [found] = [one for one in status.conditions if one.type is ConditionType.PODS_READY]
    assert (found.reason, found.message) == (reason, message)
    events = [one.message for one in job_events(Status(), status, ()) if one.reason == reason]
    assert events == ([message] if reason == "LaunchFailed" else [])
    said = " ".join(status.explanation)
    assert (message.rpartition("; ")[2] in said) is (reason == "LaunchFailed")
