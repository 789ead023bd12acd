"""Wording about several nodes: one or many, with the disruption of each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_operator.domain.explain.phrases import cause_text
from elasticjob_operator.domain.observed.state import Obstacle, Pod, PodEnd, RendezvousView
from elasticjob_operator.domain.status.events import Event, job_events
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, RendezvousState
from elasticjob_operator.model.status import MAX_REASONS, CauseStatus, Status
from elasticjob_rendezvous.protocol.records.members import ABORTED, Cause, CauseKind
from tests.unit.operator.builders import NOW, ago, final_round, history, job, observed, pod, running

EVICTION, PREEMPTION = "EvictionByEvictionAPI", "PreemptionByScheduler"
OLD_ABORTED = "its peers' collectives broke"
LONG = "a" * 55  # maximum length of a job's name


def cause(kind: str, count: int, *reasons: str, reason: str = "") -> str:
    """Return the text of a cause, which is the same for a status of the previous release."""
    members = [f"job-{index}" for index in range(count)]
    texts = [OLD_ABORTED if found == ABORTED else found for found in reasons]
    old = CauseStatus(kind=kind, members=members, detail="; ".join(texts), reason=reason)
    new = old.model_copy(update={"reasons": list(reasons), "detail": ""})
    assert cause_text(new) == cause_text(old)
    return cause_text(new)


@pytest.mark.parametrize(
    ("reasons", "one", "two"),
    [
        ("SIGTERM", "it was asked to end", "they were asked to end"),
        ("Terminating", "its pod is deleted", "their pods are deleted"),
        (EVICTION, "its node was drained", "their nodes were drained"),
        (PREEMPTION, "for a pod of higher priority", "for pods of higher priority"),
        ("DeletionByTaintManager", "its node was tainted", "their nodes were tainted"),
        ("DeletionByPodGC", "its node is gone", "their nodes are gone"),
        ("TerminationByKubelet", "by its node", "by their nodes"),
        (f"Terminating {ABORTED}", "its pod is deleted; its peers' collectives broke",
         "their pods are deleted; their peers' collectives broke"),
        (ABORTED, "its peers' collectives broke", "their peers' collectives broke"),
        ("unknown", "unknown", "unknown"),
    ],
)  # fmt: skip
def test_phrases_for_one_and_two_members(reasons: str, one: str, two: str) -> None:
    assert cause("leave", 1, *reasons.split()) == f"job-0 left ({one})"
    assert cause("leave", 2, *reasons.split()) == f"job-0 and job-1 left ({two})"


def test_text_of_a_failure_is_shown_as_it_is() -> None:
    said = CauseStatus(kind="failure", members=["job-0"], detail=f"SIGTERM; {OLD_ABORTED}")
    assert cause_text(said) == f"a worker of job-0 failed (SIGTERM; {OLD_ABORTED})"


def test_reasons_beyond_the_length_of_the_list_are_taken_from_the_detail() -> None:
    reasons = [f"r{number:02}" for number in range(MAX_REASONS + 2)]
    many = CauseStatus(
        kind="leave", members=["job-0"], detail="; ".join(reasons), reasons=reasons[:MAX_REASONS]
    )
    assert reasons[-1] in cause_text(many)


def test_reasons_that_the_previous_release_left_in_the_status_are_ignored() -> None:
    left = CauseStatus(
        kind="failure", members=["job-0"], detail="rank 0 exited", reasons=["SIGTERM"]
    )
    assert cause_text(left) == "a worker of job-0 failed (rank 0 exited)"


def test_several_members_that_left_for_different_reasons() -> None:
    assert cause("leave", 3, EVICTION, "SIGTERM") == (
        "job-0, job-1 and job-2 left (their nodes were drained, or they were asked to end)"
    )


@pytest.mark.parametrize(
    ("reason", "reasons", "text"),
    [
        (PodEnd.DRAINED, EVICTION, "the nodes of job-0 and job-1 were drained"),
        (PodEnd.DRAINED, f"{EVICTION} SIGTERM", "the nodes of job-0 and job-1 were drained"),
        (PodEnd.DRAINED, PREEMPTION,
         "job-0 and job-1 were preempted (for pods of higher priority)"),
        (PodEnd.DRAINED, f"{EVICTION} {PREEMPTION}",
         "job-0 and job-1 were preempted (their nodes were drained, or for pods of higher "
         "priority)"),
        (PodEnd.EVICTED, "TerminationByKubelet",
         "job-0 and job-1 were evicted, because their nodes ran short of something"),
    ],
)  # fmt: skip
def test_pod_end_of_one_member_is_not_attributed_to_another(
    reason: PodEnd, reasons: str, text: str
) -> None:
    assert cause("preemption", 2, *reasons.split(), reason=reason.value) == text


def test_workers_of_several_nodes() -> None:
    assert cause("failure", 1) == "a worker of job-0 failed"
    assert cause("failure", 2) == "workers of job-0 and job-1 failed"


def _sentences(
    view: RendezvousView, pods: tuple[Pod, ...], a_job: ElasticJob, before: Status | None = None
) -> tuple[Status, tuple[Event, ...]]:
    a_job = a_job.model_copy(update={"status": before or Status()})
    status = next_status(a_job, observed(*pods, view=view), view, NOW)
    return status, job_events(a_job.status, status, ())


def _grown(number: int, *, joined: int, nodes: int = 16) -> RendezvousView:
    names = tuple(f"job-{index}" for index in range(nodes - joined, nodes))
    rounds = (
        history(1, "start", nodes - joined),
        history(2, "join", nodes, join_ms=5, start_ms=40, members=names, final_at=ago(9)),
    )
    shown = Cause(CauseKind.JOIN, names) if number == 2 else Cause(CauseKind.LEAVE, ("job-0",))
    return final_round(nodes, number, rounds=rounds, cause=shown)


def test_all_sixteen_members_are_counted_beyond_the_ten_listed() -> None:
    a_job = job(maxNodes=16)
    status, events = _sentences(_grown(2, joined=14), running(16), a_job)
    assert "job-2, job-3, job-4, job-5, job-6 and 9 more joined" in status.explanation[1]
    told = [one.message for one in events if one.message.startswith("round 2 is final")]
    assert "job-2, job-3, job-4, job-5, job-6 and 9 more joined" in told[0]
    later, _ = _sentences(_grown(3, joined=14), running(16), a_job, status)
    assert "job-6 and at least 5 more joined" in later.explanation[1]
    few, _ = _sentences(_grown(3, joined=9), running(16), a_job, status)
    assert "job-11 and 4 more joined" in few.explanation[1]


def test_single_node_is_singular() -> None:
    status, _ = _sentences(final_round(1), running(2), job(maxNodes=1))
    said = {found.type.value: found.message for found in status.conditions}
    assert said["Running"] == "round 1 with 1 node"
    shrinking, _ = _sentences(final_round(2), running(2), job(maxNodes=1))
    said = {found.type.value: found.message for found in shrinking.conditions}
    assert said["Resizing"] == "from 2 to 1 node"
    frozen = RendezvousView(state=RendezvousState.FROZEN, round=1, nodes=1)
    status, _ = _sentences(frozen, running(1), job(maxNodes=1))
    assert status.explanation[0] == "Not training yet: 1 node is confirming the round."


def test_sixteen_pods_with_one_obstacle_share_a_message() -> None:
    short = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. " + "No victims found. " * 9
    stuck = tuple(
        replace(
            pod(index).pending(5, node=None).get(),
            name=f"{LONG}-{index}",
            obstacle=Obstacle.UNSCHEDULABLE,
            obstacle_message=short,
        )
        for index in range(16)
    )
    status, events = _sentences(RendezvousView(), stuck, job(maxNodes=16))
    [said] = [one.message for one in events if one.reason == "Unschedulable"]
    assert said.count("Insufficient") == 1
    assert f"{LONG}-4 and 11 more: Unschedulable" in said
    assert len(said) < 1024, "an event can say all of it"
    assert status.explanation[0].endswith("and 11 more are Pending: Insufficient nvidia.com/gpu.")
