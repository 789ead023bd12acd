"""Planner decisions for rendezvous that the operator cannot steer."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_operator.domain.observed.state import (
    UNREADABLE,
    NodeState,
    Observed,
    Obstacle,
    Pod,
    PodEnd,
    Refusal,
)
from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeletePod,
    DeleteReason,
    RemoveMembers,
    WriteParams,
)
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, Phase
from elasticjob_operator.model.status import Status
from tests.unit.operator.builders import NOW, ago, final_round, job, observed, pod, running

C10D = {"backend": "C10d"}
V2 = {"backend": "EtcdV2", "endpoints": ["http://etcd:2379"]}


def actions(found: ElasticJob, seen: Observed) -> tuple[Action, ...]:
    return plan(found, seen, NOW).actions


def created(done: tuple[Action, ...]) -> list[int]:
    return [action.index for action in done if isinstance(action, CreatePod)]


def deleted(done: tuple[Action, ...]) -> list[str]:
    return [action.name for action in done if isinstance(action, DeletePod)]


def suspended(**spec: Any) -> ElasticJob:
    """Return a job that is suspended in its status but no longer in its spec."""
    asleep = job(runPolicy={"suspend": True}, **spec)
    status = next_status(asleep, observed(), observed().rendezvous, ago(60))
    assert status.phase is Phase.SUSPENDED
    return job(status, **spec)


@pytest.mark.parametrize("rendezvous", [C10D, V2])
@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"runPolicy": {"suspend": True}},
        {"nodes": 2},
        {"runPolicy": {"activeDeadlineSeconds": 1}},
    ],
)
def test_other_backends_get_no_rendezvous_writes(
    rendezvous: dict[str, Any], spec: dict[str, Any]
) -> None:
    found = job(Status(start_time=ago(60)), rendezvous=rendezvous, **spec)
    stranger = replace(final_round(4).members[0], id="uid-of-no-pod")
    seen = observed(*running(4), view=final_round(4, members=(stranger,)))
    for number in range(3):
        done = actions(found, replace(seen, pods=seen.pods[number:]))
        kinds = {type(action) for action in done}
        assert not kinds & {WriteParams, RemoveMembers, CloseRendezvous}


def test_deleted_job_deletes_pods_without_closing() -> None:
    found = job(deleted=True, rendezvous=C10D)
    done = actions(found, observed(*running(2), view=final_round(2)))
    assert deleted(done) == ["job-0", "job-1"]
    assert len(done) == 2


def test_unreadable_rendezvous_does_not_delay_scale_down() -> None:
    done = actions(job(rendezvous=V2, nodes=2), observed(*running(4), view=UNREADABLE))
    assert deleted(done) == ["job-3", "job-2"]


KEEPER = pod(0)


@pytest.mark.parametrize(
    ("pods", "makes", "ends"),
    [
        ((), [0, 1, 2, 3], []),
        (running(4)[1:], [0], []),
        ((pod(0).terminating().get(), *running(4)[1:]), [], []),
        ((pod(0).terminating().get(), *running(3)[1:]), [3], []),
        ((pod(0).on(NodeState.NOT_READY).get(), *running(4)[1:]), [], []),
        ((pod(0).failed().get(), *running(4)[1:]), [], ["job-0"]),
        (running(5)[1:], [0], []),
        (running(5), [], ["job-4"]),
    ],
    ids=[
        "the first pods", "its name is free", "its name is not free", "and another is missing",
        "on a machine that is cut off", "failed", "all places are taken", "one too many",
    ],
)  # fmt: skip
def test_store_pod_keeps_its_name(pods: tuple[Pod, ...], makes: list[int], ends: list[str]) -> None:
    done = actions(job(rendezvous=C10D), observed(*pods, view=final_round(4)))
    assert (created(done), deleted(done)) == (makes, ends)


def test_external_store_needs_no_pod() -> None:
    there = {"backend": "C10d", "endpoints": ["store:29400"]}
    seen = observed(pod(0).terminating().get(), *running(4)[1:], view=final_round(4))
    assert created(actions(job(rendezvous=there), seen)) == [4]


def test_store_pod_is_deleted_last() -> None:
    found = job(rendezvous=C10D, nodes=1)
    going = (replace(pod(0).get(), node_state=NodeState.CORDONED), *running(3)[1:])
    assert deleted(actions(found, observed(*going, view=final_round(3)))) == ["job-2", "job-1"]


def test_status_explains_missing_store() -> None:
    found = job(rendezvous=C10D)
    lost = pod(0).on(NodeState.NOT_READY).get()
    status = next_status(found, observed(lost, *running(4)[1:]), UNREADABLE, NOW)
    [ready] = [one for one in status.conditions if one.type == "PodsReady"]
    assert ready.reason == "StoreMissing"
    assert "its machine node-0 is not ready" in ready.message
    stranger = observed(*running(4)[1:], foreign=frozenset({0}))
    status = next_status(found, stranger, UNREADABLE, NOW)
    [ready] = [one for one in status.conditions if one.type == "PodsReady"]
    assert "a pod of another owner has its name" in ready.message
    ending = replace(stranger, predecessors=frozenset({0}))
    status = next_status(found, ending, UNREADABLE, NOW)
    [ready] = [one for one in status.conditions if one.type == "PodsReady"]
    assert "once the deleted job's pod of this name is gone" in ready.message


def stays(index: int, obstacle: Obstacle, message: str) -> Pod:
    return pod(index).pending(5, obstacle=obstacle, obstacle_message=message).get()


@pytest.mark.parametrize(
    ("seen", "reason", "state", "remedy"),
    [
        (
            observed(stays(0, Obstacle.UNSCHEDULABLE, "0/3 nodes are available: 3 cordoned.")),
            "Unschedulable",
            "is Pending: 0/3 nodes are available: 3 cordoned",
            "Free or add machines that fit",
        ),
        (
            observed(
                stays(0, Obstacle.UNSCHEDULABLE, "pod has unbound immediate PersistentVolumeClaims")
            ),
            "Unschedulable",
            "is Pending: pod has unbound immediate PersistentVolumeClaims",
            "Create or bind the PersistentVolumeClaim, or name another one",
        ),
        (
            observed(pod(0).over().taken(PodEnd.EVICTED, "low on memory").get()),
            "Ended",
            "has ended, and its successor is created once it is gone: low on memory",
            "",
        ),
        (
            observed(pod(0).terminating().get()),
            "Terminating",
            "is being stopped, and its successor",
            "If job-0 stays",
        ),
        (
            observed(pod(0).on(NodeState.NOT_READY).get()),
            "NodeNotReady",
            "is on the machine node-0, which does not answer",
            "Once that machine is known to be off, run `kubectl delete node node-0`",
        ),
        (
            observed(refusal=Refusal(Obstacle.QUOTA, "exceeded quota: pods", NOW)),
            "QuotaExceeded",
            "cannot be created: exceeded quota: pods",
            "Raise the namespace's quota",
        ),
        (
            observed(foreign=frozenset({0})),
            "NameTaken",
            "cannot be created, because a pod of another owner has its name",
            "Delete the other pod job-0",
        ),
    ],
    ids=["unschedulable", "claim", "evicted", "deleted", "lost machine", "refused", "name taken"],
)
def test_missing_store_is_explained_with_its_start_and_remedy(
    seen: Observed, reason: str, state: str, remedy: str
) -> None:
    there = replace(seen, pods=(*seen.pods, *running(4)[1:]))
    before = next_status(job(rendezvous=C10D), there, UNREADABLE, ago(60))
    found = job(before, rendezvous=C10D)
    status = next_status(found, there, UNREADABLE, NOW)
    assert status.missing_store is not None
    assert (status.missing_store.reason, status.missing_store.since) == (reason, ago(60))
    [text] = [text for text in status.explanation if "store of the rendezvous" in text]
    begin = "The store of the rendezvous has been missing since 11:59:00 UTC on 2026-01-31, and "
    assert text.startswith(begin)
    assert f"its pod job-0 {state}" in text
    assert sum(text.startswith(remedy) for text in status.explanation) == 1 or not remedy
    there = replace(there, pods=running(4), refusal=None, foreign=frozenset())
    assert next_status(found, there, UNREADABLE, NOW).missing_store is None
    paused = job(before, rendezvous=C10D, runPolicy={"suspend": True})
    assert next_status(paused, seen, UNREADABLE, NOW).missing_store is None


def test_resumption_waits_until_all_earlier_pods_are_gone() -> None:
    found = suspended(rendezvous=C10D, maxNodes=2)
    old = pod(0).terminating().get()
    assert actions(found, observed(old)) == ()
    left = actions(found, observed(old, pod(1).get()))
    assert deleted(left) == ["job-1"]
    assert [a.reason for a in left if isinstance(a, DeletePod)] == [DeleteReason.SUSPENDED]
    fresh = actions(found, observed(incarnation=7))
    assert [(a.index, a.incarnation) for a in fresh if isinstance(a, CreatePod)] == [(0, 7), (1, 7)]


def test_pods_created_since_resumption_stay_without_status() -> None:
    found = suspended(rendezvous=C10D, maxNodes=2)
    new = replace(pod(0).get(), created_at=NOW - timedelta(seconds=5))
    done = actions(found, observed(new, incarnation=7))
    assert (created(done), deleted(done)) == ([1], [])
    assert [a.incarnation for a in done if isinstance(a, CreatePod)] == [7]


def test_unreachable_pod_is_not_waited_for_and_shares_no_incarnation() -> None:
    found = suspended(rendezvous=V2, maxNodes=2)
    lost = pod(0).on(NodeState.NOT_READY).get()
    done = actions(found, observed(lost, incarnation=7))
    assert [(a.index, a.incarnation) for a in done if isinstance(a, CreatePod)] == [(1, 8), (2, 8)]
