"""Explanation of a job in every situation: whole sentences, plain words, one story."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.explain.catalog import (
    FAILURE_CLASSES,
    OBSTACLES,
    failure_meaning,
    failure_remedy,
)
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.explain.phrases import listed, named, quoted, unschedulable
from elasticjob_operator.domain.observed.pod_state import without_members
from elasticjob_operator.domain.observed.state import (
    NO_MEMBERS,
    UNREADABLE,
    NodeState,
    Observed,
    Obstacle,
    Pod,
    PodEnd,
    Refusal,
    RendezvousView,
    StopReason,
)
from elasticjob_operator.domain.status.conditions import creation_refusal, refusal_of
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob, RendezvousState
from elasticjob_operator.model.refusals import CreationRefusal
from elasticjob_operator.model.status import (
    Condition,
    FailureStatus,
    LaunchFailures,
    RoundStatus,
    Status,
    StopStatus,
)
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import HeldBack
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveResult
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    OutcomeKind,
)
from tests.paths import ROOT
from tests.unit.operator.builders import (
    NOW,
    ago,
    closed,
    final_round,
    history,
    job,
    member,
    observed,
    pod,
    running,
)
from tests.unit.operator.builders import failure as failure_record

GPU = (
    "0/3 nodes are available: 1 node(s) had untolerated taint {team: b}, 2 Insufficient "
    "nvidia.com/gpu. preemption: 0/3 nodes are available: 3 No preemption victims found."
)
CLAIM = (
    '0/3 nodes are available: persistentvolumeclaim "checkpoints" not found. preemption: 0/3 nodes '
    "are available: 3 Preemption is not helpful for scheduling."
)
GATED = "Scheduling is blocked due to non-empty scheduling gates"
JOB: dict[str, Any] = {"minNodes": 2, "maxNodes": 5}
BEFORE = Status(phase=Phase.RUNNING, start_time=ago(900))
TRAINED = history(1, "start", 5, final_at=ago(600), start_ms=300)
DRAINED = history(
    2,
    "leave",
    4,
    detect_ms=5,
    stop_ms=300,
    join_ms=20,
    confirm_ms=75,
    start_ms=500,
    first_step_ms=250,
    members=("job-4",),
    detail="SIGTERM",
    final_at=ago(120),
)
JOINED = history(
    3, "join", 5, detect_ms=0, stop_ms=0, start_ms=40, members=("job-4",), final_at=ago(60)
)


SEEN_LOST = replace(JOINED, cause=Cause(CauseKind.LOSS, ("job-4",)))


def said(here: Observed, before: Status | None = None, **spec: Any) -> str:
    """Return the operator's explanation of a job, from its observation."""
    a_job = job(status=before, **{**JOB, **spec})
    status = next_status(a_job, here, here.rendezvous, NOW)
    told = a_job.model_copy(update={"status": status})
    assert status.explanation == list(explanation(told, here.pods)), "both tell one story"
    assert next_status(told, here, here.rendezvous, NOW) == status, "nothing changes by telling"
    return " ".join(status.explanation)


def stuck(index: int, obstacle: Obstacle, message: str = "") -> Pod:
    return pod(index).pending(90, node=None, obstacle=obstacle, obstacle_message=message).get()


def waiting(*names: str, round: int = 0) -> RendezvousView:
    members = tuple(member(name, "waiting") for name in names)
    return RendezvousView(members=members, waiting=len(names), round=round)


def forming(cause: Cause, members: dict[str, str], **changes: Any) -> RendezvousView:
    view = RendezvousView(
        state=RendezvousState.JOINABLE,
        round=2,
        cause=cause,
        members=tuple(member(name, state) for name, state in members.items()),
        waiting=sum(state == "waiting" for state in members.values()),
        since=ago(1),
        rounds=(TRAINED,),
    )
    return replace(view, **changes)


def failure(**changes: Any) -> Failure:
    base = failure_record(
        1, "job-1", rank=5, node="node-1", exit_code=1, message="ValueError: no\nmore"
    )
    return replace(base, **changes)


def trained(**changes: Any) -> RendezvousView:
    return final_round(5, 1, rounds=(TRAINED,), **changes)


def with_waiting(count: int, *names: str) -> RendezvousView:
    """Return a final round of `count` members, and these newcomers."""
    view = final_round(count)
    more = tuple(member(name, "waiting") for name in names)
    return replace(view, members=(*view.members, *more), waiting=len(names))


def done_first() -> RendezvousView:
    view = final_round(2)
    first, *rest = view.members
    return replace(view, members=(replace(first, state=MemberState.DONE), *rest))


def refused(obstacle: Obstacle, message: str) -> Observed:
    return Observed(refusal=Refusal(obstacle, message, ago(5)))


# -- before the first round ---------------------------------------------------------

PENDING = {
    "nothing yet": (
        observed(),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); its pods are not "
        "created yet.",
    ),
    "unschedulable": (
        observed(*(stuck(index, Obstacle.UNSCHEDULABLE, GPU) for index in range(5))),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0, job-1, "
        "job-2, job-3 and job-4 are Pending: node(s) had untolerated taint {team: b}, "
        "Insufficient nvidia.com/gpu. Free or add machines that fit, or reduce the template's "
        "requests.",
    ),
    "a claim that does not exist": (
        observed(stuck(0, Obstacle.UNSCHEDULABLE, CLAIM)),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0 is Pending: "
        'persistentvolumeclaim "checkpoints" not found. Create or bind the '
        "PersistentVolumeClaim, or name another one in the job: `kubectl describe pvc` shows its "
        "state.",
    ),
    "scheduling gates": (
        observed(stuck(0, Obstacle.UNSCHEDULABLE, GATED)),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0 is Pending: "
        "Scheduling is blocked due to non-empty scheduling gates. The controller of the pods' "
        "schedulingGates must remove them.",
    ),
    "image": (
        observed(
            stuck(0, Obstacle.IMAGE, "container trainer with image x:1: ErrImagePull: not found")
        ),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0 is without "
        "its image: container trainer with image x:1: ErrImagePull: not found. Correct the "
        "image's name, or add the pull secret it needs.",
    ),
    "config": (
        observed(stuck(0, Obstacle.CONFIG, 'container trainer: secret "data" not found')),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0 is not "
        'startable: container trainer: secret "data" not found. Correct what the template names: '
        "a ConfigMap, a Secret or a volume.",
    ),
    "init": (
        observed(stuck(0, Obstacle.INIT, "init container fetch: exit code 1")),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); job-0 is blocked by "
        "an init container: init container fetch: exit code 1. See that init container's log.",
    ),
    "quota": (
        refused(Obstacle.QUOTA, "exceeded quota: gpus"),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: exceeded quota: gpus. Raise the namespace's quota, or reduce the template's "
        "requests.",
    ),
    "refused": (
        refused(Obstacle.REFUSED, "denied by policy"),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: denied by policy. Change the rejected field, or ask the owner of the policy.",
    ),
    "name conflict": (
        refused(Obstacle.NAME_CONFLICT, "Service job is not this job's"),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: Service job is not this job's. Delete the object of that name, or rename the "
        "job.",
    ),
    "template invalid": (
        refused(Obstacle.TEMPLATE_INVALID, 'unknown field "imagee"'),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        'created: unknown field "imagee". Suspend the job, correct spec.template and resume it.',
    ),
    "endpoint": (
        replace(refused(Obstacle.ENDPOINT, "etcd-x:2379 is not allowed"), rendezvous=UNREADABLE),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: etcd-x:2379 is not allowed. Allow the endpoint in the operator's chart, or "
        "leave rendezvous.endpoints empty.",
    ),
    "backend": (
        replace(refused(Obstacle.BACKEND, "c10d is not served"), rendezvous=UNREADABLE),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: c10d is not served. Use another rendezvous.backend.",
    ),
    "etcd of another": (
        replace(
            refused(Obstacle.FOREIGN_ETCD, "the operator's etcd holds the jobs of another"),
            rendezvous=UNREADABLE,
        ),
        "Not training yet: 0 of 5 nodes have joined (at least 2 are needed); no pods can be "
        "created: the operator's etcd holds the jobs of another. Give this cluster an etcd of "
        "its own, or free that one if the other cluster is gone.",
    ),
    "etcd unreachable": (
        observed(view=UNREADABLE),
        "The operator cannot read the job's state from its etcd: the last known state follows; "
        "running workers continue. Not training yet: 0 of 5 nodes have joined (at least 2 are "
        "needed); its pods are not created yet.",
    ),
    "some have joined, some start": (
        observed(
            *running(2),
            pod(2).pending().get(),
            pod(3).pending(node=None).get(),
            view=waiting("job-0"),
        ),
        "Not training yet: 1 of 5 nodes have joined (at least 2 are needed); job-1 and job-2 are "
        "starting and job-3 waits for a machine.",
    ),
    "enough have joined": (
        observed(*running(3), view=waiting("job-0", "job-1", "job-2")),
        "Not training yet: 3 of 5 nodes have joined (at least 2 are needed). The round starts "
        "with these if no further node joins for 30 s.",
    ),
    "confirming": (
        observed(*running(5), view=RendezvousView(state=RendezvousState.FROZEN, round=1, nodes=5)),
        "Not training yet: 5 nodes are confirming the round.",
    ),
}


def test_pod_that_cannot_end_its_workers_is_named_with_the_reason() -> None:
    stuck = replace(pod(1).terminating().get(), stuck="process 7 waits")
    assert "job-1 on node-1 was given up: process 7 waits." in explanation(
        job(**JOB), (pod(0).get(), stuck)
    )


def test_command_that_starts_no_torchrun_is_explained_with_its_remedy() -> None:
    running_command = pod(1).pending(5, launcher_since=ago(5)).get()
    here = observed(running_command, pod(2).pending(5).get(), view=waiting())
    text = said(here, launch="PerNode")
    assert "no torchrun in the command of job-1 has asked for a round yet" in text
    assert "job-2 is starting" in text
    assert "If the command starts none, set spec.launch to PerWorker" in text
    assert "torchrun" not in said(here, launch="PerWorker")


@pytest.mark.parametrize(("here", "text"), PENDING.values(), ids=PENDING)
def test_before_first_round(here: Observed, text: str) -> None:
    assert said(here) == text


@pytest.mark.parametrize(
    ("rendezvous", "what"),
    [
        (
            {"backend": "EtcdV2", "endpoints": ["http://etcd-v2:2379"]},
            "the rendezvous at http://etcd-v2:2379",
        ),
        ({"backend": "C10d"}, "the store of the rendezvous in job-0"),
    ],
)
def test_before_any_agent_reached_the_store(rendezvous: dict[str, Any], what: str) -> None:
    view = replace(waiting("job-0"), state=RendezvousState.SETUP, round=1)
    assert said(observed(*running(1), view=view), rendezvous=rendezvous) == (
        "Not training yet: 1 of 5 nodes have joined (at least 2 are needed). No agent has reached "
        f"{what} yet."
    )


# -- in a round ---------------------------------------------------------------------

RUNNING: dict[str, tuple[Observed, dict[str, Any], str]] = {
    "all": (
        observed(*running(5), view=trained()),
        {},
        "Training on all 5 nodes (round 1, 5 workers).",
    ),
    "none of them registered": (
        observed(*running(5), view=replace(trained(), members=())),
        {},
        "Its 5 nodes are not registered at present (round 1, 5 workers), and the workers end "
        "within half a minute if that lasts: the sidecars are gone, or have too little processor "
        "time or no network.",
    ),
    "only a waiting one registered": (
        observed(
            *running(6),
            view=replace(trained(), members=(member("job-5", "waiting"),), waiting=1),
        ),
        {},
        "Its 5 nodes are not registered at present (round 1, 5 workers), and the workers end "
        "within half a minute if that lasts: the sidecars are gone, or have too little processor "
        "time or no network. job-5 stands by: the job has the wanted number of nodes.",
    ),
    "without a roster": (
        observed(*running(5), view=trained(ranks={})),
        {},
        "Training on all 5 nodes (round 1, 5 workers).",
    ),
    "without a roster, one of them done": (
        observed(
            *running(2),
            view=final_round(
                2, ranks={}, members=(member("job-0", "stopping"), member("job-1", "done"))
            ),
        ),
        {"maxNodes": 2},
        "Training on all 2 nodes (round 1, 2 workers). job-1 has finished, the others not yet.",
    ),
    "the only one": (
        observed(*running(1), view=final_round(1)),
        {"minNodes": 1, "maxNodes": 1},
        "Training on its only node (round 1, 1 worker).",
    ),
    "fewer, after a drain": (
        observed(
            *running(4),
            stuck(4, Obstacle.UNSCHEDULABLE, GPU),
            view=final_round(
                4, 2, cause=Cause(CauseKind.LEAVE, ("job-4",), "SIGTERM"), rounds=(TRAINED, DRAINED)
            ),
        ),
        {},
        "Training on 4 of 5 nodes (round 2, 4 workers) because job-4 is Pending: node(s) had "
        "untolerated taint {team: b}, Insufficient nvidia.com/gpu. Free or add machines that "
        "fit, or reduce the template's requests. Last interruption: job-4 left (it was asked to "
        "end) at 11:57:59 UTC on 2026-01-31, recovered in 0.9 s (detect 5 ms, stop 0.3 s, join "
        "20 ms, confirm 75 ms, start 0.5 s). The first step followed 0.2 s after the start.",
    ),
    "its workers started cold": (
        observed(
            *running(5),
            view=final_round(
                5, 3, rounds=(TRAINED, replace(SEEN_LOST, cold_nodes=5, cold_reason="a shell"))
            ),
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 was lost at "
        "11:59:00 UTC on 2026-01-31, recovered in 40 ms (start 40 ms). Workers started cold on "
        "all 5 nodes: a shell.",
    ),
    "all of them warm": (
        observed(
            *running(5), view=final_round(5, 3, rounds=(TRAINED, replace(SEEN_LOST, cold_nodes=0)))
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 was lost at "
        "11:59:00 UTC on 2026-01-31, recovered in 40 ms (start 40 ms).",
    ),
    "steps that workers reported as lost": (
        observed(
            *running(5),
            view=final_round(5, 3, rounds=(TRAINED, replace(SEEN_LOST, lost_steps=2, lost_ms=400))),
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 was lost at "
        "11:59:00 UTC on 2026-01-31, recovered in 40 ms (start 40 ms), lost 2 steps (0.4 s of "
        "work).",
    ),
    "the reason for lost steps": (
        observed(
            *running(5),
            view=final_round(
                5,
                3,
                rounds=(
                    TRAINED,
                    replace(SEEN_LOST, lost_steps=2, lost_ms=400, lost_reason="NoOptimizers"),
                ),
            ),
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 was lost at "
        "11:59:00 UTC on 2026-01-31, recovered in 40 ms (start 40 ms), lost 2 steps (0.4 s of "
        "work), without a copy at the stop: Snapshots was given no optimizers.",
    ),
    "a minimum of lost steps": (
        observed(
            *running(5), view=final_round(5, 3, rounds=(TRAINED, replace(SEEN_LOST, lost_steps=1)))
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 was lost at "
        "11:59:00 UTC on 2026-01-31, recovered in 40 ms (start 40 ms), lost at least 1 step.",
    ),
    "whole again after a drain": (
        observed(*running(5), view=final_round(5, 3, rounds=(TRAINED, DRAINED, JOINED))),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last interruption: job-4 left (it was "
        "asked to end) at 11:57:59 UTC on 2026-01-31, recovered in 0.9 s (detect 5 ms, stop 0.3 "
        "s, join 20 ms, confirm 75 ms, start 0.5 s). The first step followed 0.2 s after the "
        "start. Since then: job-4 joined at 11:59:00 UTC on 2026-01-31, with a pause of 40 ms "
        "(start 40 ms).",
    ),
    "grown": (
        observed(*running(5), view=final_round(5, 3, rounds=(TRAINED, JOINED))),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last round: job-4 joined at 11:59:00 UTC "
        "on 2026-01-31, with a pause of 40 ms (start 40 ms).",
    ),
    "grown after a newcomer waited for a checkpoint": (
        observed(
            *running(5), view=final_round(5, 3, rounds=(TRAINED, replace(JOINED, detect_ms=30_000)))
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last round: job-4 joined at 11:58:30 UTC "
        "on 2026-01-31, with a pause of 40 ms (start 40 ms).",
    ),
    "its workers start": (
        observed(
            *running(5), view=final_round(5, 3, rounds=(TRAINED, replace(JOINED, start_ms=None)))
        ),
        {},
        "Training on all 5 nodes (round 3, 5 workers). Last round: job-4 joined at 11:59:00 UTC on "
        "2026-01-31.",
    ),
    "quota": (
        replace(
            observed(*running(4), view=final_round(4)),
            refusal=Refusal(Obstacle.QUOTA, "exceeded quota: gpus", ago(5)),
        ),
        {},
        "Training on 4 of 5 nodes (round 1, 4 workers) because no more pods can be created: "
        "exceeded quota: gpus. Raise the namespace's quota, or reduce the template's requests.",
    ),
    "one starts": (
        observed(*running(5), view=final_round(4)),
        {},
        "Training on 4 of 5 nodes (round 1, 4 workers) because job-4 is starting.",
    ),
    "one cannot be reached": (
        observed(*running(4), pod(4).on(NodeState.NOT_READY).get(), view=final_round(4)),
        {},
        "Training on 4 of 5 nodes (round 1, 4 workers) because job-4 cannot be reached: its node "
        "does not answer.",
    ),
    "one is being stopped": (
        observed(*running(4), pod(4).terminating().get(), view=final_round(4)),
        {},
        "Training on 4 of 5 nodes (round 1, 4 workers) because job-4 is being stopped.",
    ),
    "one has joined": (
        observed(*running(5), view=with_waiting(4, "job-4")),
        {},
        "Training on 4 of 5 nodes (round 1, 4 workers). job-4 has joined and will be in the next "
        "round.",
    ),
    "one waits for a checkpoint": (
        observed(*running(5), view=with_waiting(4, "job-4")),
        {"elasticity": {"scaleUp": "AfterCheckpoint"}},
        "Training on 4 of 5 nodes (round 1, 4 workers). job-4 waits for the next checkpoint, for "
        "at most 600 s.",
    ),
    "one waits for another": (
        observed(*running(4), view=with_waiting(3, "job-3")),
        {"minNodes": 1, "nodeIncrement": 2},
        "Training on 3 of 5 nodes (round 1, 3 workers). job-3 waits for more nodes: the job "
        "grows by 2 at a time (nodeIncrement).",
    ),
    "a surplus": (
        observed(*running(5), view=with_waiting(4, "job-4")),
        {"nodes": 4},
        "Training on all 4 nodes (round 1, 4 workers). job-4 stands by: the job has the wanted "
        "number of nodes.",
    ),
    "some are done": (
        observed(*running(2), view=done_first()),
        {"maxNodes": 2},
        "Training on all 2 nodes (round 1, 2 workers). job-0 has finished, the others not yet.",
    ),
    "too many": (
        observed(*running(5), view=trained()),
        {"nodes": 3},
        "Training on 5 nodes (round 1, 5 workers), of which 2 are surplus: 3 are wanted.",
    ),
    "clamped": (
        observed(*running(5), view=trained()),
        {"nodes": 9},
        "Training on all 5 nodes (round 1, 5 workers). spec.nodes asks for 9, which is more than "
        "maxNodes: 5 are wanted instead.",
    ),
}


@pytest.mark.parametrize(("here", "spec", "text"), RUNNING.values(), ids=RUNNING)
def test_during_a_round(here: Observed, spec: dict[str, Any], text: str) -> None:
    assert said(here, **spec) == text


def test_unreachable_etcd_shows_last_known_state() -> None:
    before = next_status(job(**JOB), observed(*running(5), view=trained()), trained(), NOW)
    assert said(observed(*running(5), view=UNREADABLE), before) == (
        "The operator cannot read the job's state from its etcd: the last known state follows; "
        "running workers continue. Training on all 5 nodes (round 1, 5 workers)."
    )


@pytest.mark.parametrize(
    ("backend", "whom"), [("Etcd", "its etcd"), ("EtcdV2", "its agents"), ("C10d", "its agents")]
)
def test_unreachable_source_depends_on_the_backend(backend: str, whom: str) -> None:
    text = said(observed(*running(5), view=UNREADABLE), BEFORE, rendezvous={"backend": backend})
    assert text.startswith(f"The operator cannot read the job's state from {whom}: ")


def test_before_first_reconcile() -> None:
    assert explanation(job(**JOB), ()) == (
        "The operator has not processed the job yet: if this lasts, check that it runs and "
        "serves this namespace.",
    )


def test_deleted_job() -> None:
    assert explanation(job(deleted=True, **JOB), running(2)) == (
        "The job is being deleted, and its pods are being stopped.",
    )


# -- between rounds -----------------------------------------------------------------

LOST = Cause(CauseKind.LOSS, ("job-2",))
RESTARTING: dict[str, tuple[Observed, str]] = {
    "workers stop": (
        observed(
            *running(3),
            view=forming(LOST, {"job-0": "stopping", "job-1": "waiting"}),
        ),
        "Between two rounds, because job-2 was lost: 1 of 3 nodes have joined (at least 2 are "
        "needed); job-0 stops its workers and job-2 is starting. Latest failure, in round 1: "
        "job-2: it disappeared without reporting an error, for example because its node was "
        "lost. Check that machine; no restart is charged.",
    ),
    "its node is not ready": (
        observed(
            *running(2),
            pod(2).on(NodeState.NOT_READY).get(),
            view=forming(LOST, {"job-0": "waiting", "job-1": "waiting"}),
        ),
        "Between two rounds, because job-2's node was lost: 2 of 3 nodes have joined (at least 2 "
        "are needed); job-2 cannot be reached: its node does not answer. Latest failure, in "
        "round 1: job-2 (node-2): it disappeared without reporting an error, for example because "
        "its node was lost. Check that machine; no restart is charged.",
    ),
    "its Node was deleted": (
        observed(
            *running(2),
            replace(pod(2).on(NodeState.NOT_READY).get(), node_gone=True),
            view=forming(LOST, {"job-0": "waiting", "job-1": "waiting"}),
        ),
        "Between two rounds, because job-2's node was lost: 2 of 3 nodes have joined (at least 2 "
        "are needed); job-2 cannot run: the Node node-2 was deleted: Kubernetes removes its pod "
        "within about a minute. Latest failure, in round 1: job-2 (node-2): it disappeared without "
        "reporting an error, for example because its node was lost. Check that machine; no "
        "restart is charged.",
    ),
    "its pod has ended": (
        observed(*running(2), view=forming(LOST, {"job-0": "waiting", "job-1": "waiting"})),
        "Between two rounds, because job-2 was lost: 2 of 3 nodes have joined (at least 2 are "
        "needed). Latest failure, in round 1: job-2: it disappeared without reporting an error, "
        "for example because its node was lost. Check that machine; another pod takes its place, "
        "and no restart is charged.",
    ),
    "its agent has registered again": (
        observed(
            *running(3),
            view=replace(
                forming(LOST, {"job-0": "waiting", "job-1": "waiting", "job-2": "waiting"}),
                lost={(1, "job-2"): "uid-2-0"},
            ),
        ),
        "Between two rounds, because job-2 was lost: 3 of 3 nodes have joined (at least 2 are "
        "needed). Latest failure, in round 1: job-2: its agent did not answer for a while, for "
        "example because it had too little processor time or no network, or was restarted. Check "
        "the load and the network of that machine; its pod ran on, its agent has registered "
        "again, and no restart is charged.",
    ),
    "drained": (
        observed(
            *running(2),
            pod(2).terminating().taken(PodEnd.DRAINED, "EvictionByEvictionAPI").get(),
            view=forming(Cause(CauseKind.LEAVE, ("job-2",), "SIGTERM"), {"job-0": "waiting"}),
        ),
        "Between two rounds, because job-2's node was drained: 1 of 3 nodes have joined (at "
        "least 2 are needed); job-2 is being stopped and job-1 is starting.",
    ),
    "preempted": (
        observed(
            *running(2),
            pod(2).terminating().taken(PodEnd.PREEMPTED, "PreemptionByScheduler: by big").get(),
            view=forming(
                Cause(CauseKind.PREEMPTION, ("job-2",), "PreemptionByScheduler"),
                {"job-0": "waiting"},
            ),
        ),
        "Between two rounds, because job-2 was preempted for pods of higher priority: 1 of 3 "
        "nodes have joined (at least 2 are needed); job-2 is being stopped and job-1 is "
        "starting. Latest failure, in round 1: job-2 (node-2): the cluster needed its resources "
        "for other pods: PreemptionByScheduler: by big. Give the job a higher priority or "
        "machines of its own; another pod takes its place, and no restart is charged.",
    ),
    "a worker failed": (
        observed(
            *running(3),
            view=forming(
                Cause(CauseKind.FAILURE, ("job-1",), "rank 5 on job-1 ended with exit code 1"),
                {"job-0": "waiting", "job-1": "waiting", "job-2": "stopping"},
                first_failure=failure(),
                failures_charged=1,
            ),
        ),
        "Between two rounds, because a worker of job-1 failed (rank 5 on job-1 ended with exit "
        "code 1): 2 of 3 nodes have joined (at least 2 are needed); job-2 stops its workers. "
        "Latest failure, in round 1: rank 5 on job-1 (node-1): the training script failed: "
        "ValueError: no. Correct the script: its whole output is in the pod's log. 1 of 3 "
        "restarts is used.",
    ),
    "confirming": (
        observed(
            *running(3),
            view=forming(
                Cause(CauseKind.JOIN, ("job-2",)), {}, state=RendezvousState.FROZEN, nodes=3
            ),
        ),
        "Between two rounds, because job-2 joined: 3 nodes are confirming the round.",
    ),
    "suspended and resumed before the status showed it": (
        observed(
            view=replace(
                closed(OutcomeKind.STOPPED, reason=StopReason.SUSPENDED),
                cause=Cause(CauseKind.JOIN, ("job-2",)),
            )
        ),
        "Between two rounds, because the job resumes: 0 of 3 nodes have joined (at least 2 are "
        "needed); its pods are not created yet.",
    ),
    "first round of other nodes, not suspended": (
        observed(
            *running(3),
            view=forming(Cause(CauseKind.START), {"job-0": "waiting"}, round=1, rounds=()),
        ),
        "Between two rounds, because the job starts: 1 of 3 nodes have joined (at least 2 are "
        "needed); job-1 and job-2 are starting.",
    ),
}


@pytest.mark.parametrize(("here", "text"), RESTARTING.values(), ids=RESTARTING)
def test_between_two_rounds(here: Observed, text: str) -> None:
    assert said(here, BEFORE, maxNodes=3) == text


@pytest.mark.parametrize(
    "view",
    [
        RendezvousView(),
        forming(Cause(CauseKind.START), {"job-0": "waiting"}, round=1, rounds=()),
    ],
    ids=["before the first pod", "pods"],
)
def test_resumption_without_a_suspended_status_is_known_by_the_last_stop(
    view: RendezvousView,
) -> None:
    stop = StopStatus(reason=StopReason.SUSPENDED, result=SaveResult.NOT_TRAINING)
    before = BEFORE.model_copy(update={"phase": Phase.RESTARTING, "last_stop": stop})
    pods = running(3) if view.members else []
    assert said(observed(*pods, view=view), before, maxNodes=3).startswith(
        "Between two rounds, because the job resumes: "
    )


HELD = HeldBack("job-3", 3, 40, 8.0)


def test_node_lost_again_is_named_with_its_losses_and_its_delay() -> None:
    view = replace(with_waiting(3, "job-3", "job-4"), held_back=(HELD,))
    text = said(observed(*running(5), view=view))
    assert (
        "job-3 was lost 3 times in 40 s without progress, so it waits for 8 s after it "
        "registers, unless other nodes need it. job-4 has joined and will be in the next round."
    ) in text


def test_node_lost_again_then_waits_for_the_checkpoint() -> None:
    view = replace(with_waiting(3, "job-3"), held_back=(HELD,))
    text = said(observed(*running(4), view=view), elasticity={"scaleUp": "AfterCheckpoint"})
    assert (
        "unless other nodes need it. job-3 then waits for the next checkpoint, for at most 600 s."
    ) in text


def test_node_lost_again_stands_by_if_the_job_has_its_nodes() -> None:
    view = replace(with_waiting(3, "job-3"), held_back=(HELD,))
    text = said(observed(*running(4), view=view), nodes=3)
    assert "job-3 stands by" in text
    assert "lost" not in text


# -- after the last round -----------------------------------------------------------


def ended(kind: OutcomeKind, detail: str = "", reason: StopReason | None = None) -> Observed:
    return observed(view=closed(kind, detail, reason))


ENDED: dict[str, tuple[Observed, dict[str, Any], str]] = {
    "succeeded": (
        ended(OutcomeKind.SUCCEEDED),
        {},
        "Succeeded at 12:00:00 UTC on 2026-01-31: every worker ended with success.",
    ),
    "restarts are spent": (
        observed(
            view=replace(
                closed(OutcomeKind.FAILED, "rank 5 on job-1 ended with signal 11 (no restarts)"),
                first_failure=failure(
                    kind=FailureClass.SIGNAL, signal=11, message="killed by SIGSEGV"
                ),
            )
        ),
        {},
        "Failed at 12:00:00 UTC on 2026-01-31: rank 5 on job-1 ended with signal 11 (no "
        "restarts). Latest failure, in round 1: rank 5 on job-1 (node-1): a signal ended it: "
        "killed by SIGSEGV. Native code crashed: see the end of the pod's log, and set "
        "PYTHONFAULTHANDLER=1 to see where.",
    ),
    "nobody came": (
        ended(OutcomeKind.TIMED_OUT, "no round within 600 s: 1 of 2 have come"),
        {},
        "Failed at 12:00:00 UTC on 2026-01-31: no round within 600 s: 1 of 2 have come.",
    ),
    "pods could not be started": (
        ended(
            OutcomeKind.STOPPED,
            "job-4 and 4 more could not be started",
            StopReason.LAUNCH_FAILED,
        ),
        {},
        "Failed at 12:00:00 UTC on 2026-01-31: job-4 and 4 more could not be started.",
    ),
    "too long": (
        ended(OutcomeKind.STOPPED, reason=StopReason.DEADLINE_EXCEEDED),
        {"runPolicy": {"activeDeadlineSeconds": 60}},
        "Failed at 12:00:00 UTC on 2026-01-31: it was active for longer than 60 s "
        "(runPolicy.activeDeadlineSeconds).",
    ),
    "stopped by hand": (
        ended(OutcomeKind.STOPPED, "asked to"),
        {},
        "Failed at 12:00:00 UTC on 2026-01-31: it was stopped from outside (asked to).",
    ),
    "suspended": (
        observed(),
        {"runPolicy": {"suspend": True}},
        "Suspended: it resumes from its last checkpoint once runPolicy.suspend is false again.",
    ),
    "being suspended": (
        observed(*running(2)),
        {"runPolicy": {"suspend": True}},
        "Suspending: it resumes from its last checkpoint once runPolicy.suspend is false again; "
        "job-0 and job-1 are still being stopped.",
    ),
    "being suspended, with pods that cannot go": (
        observed(
            replace(pod(0).terminating().get(), stuck="process 7 waits"),
            pod(1).terminating().on(NodeState.NOT_READY).get(),
            pod(2).over().terminating().get(),
        ),
        {"runPolicy": {"suspend": True}},
        "Suspending: it resumes from its last checkpoint once runPolicy.suspend is false again; "
        "job-0, job-1 and job-2 are still being stopped: the workers of job-0 on node-0 cannot be "
        "ended before their disk answers or the machine restarts; the kubelet of job-1 on node-1 "
        "does not answer (once the machine is known to be off, run `kubectl delete node node-1` or "
        "`kubectl delete pod job-1 --force`); the kubelet or a finalizer keeps job-2, whose "
        "containers have ended; a resumption does not wait for these pods. job-0 on node-0 was "
        "given up: process 7 waits.",
    ),
    "being suspended, with one pod that cannot go": (
        observed(pod(0).over().terminating().get(), pod(1).terminating().get()),
        {"runPolicy": {"suspend": True}},
        "Suspending: it resumes from its last checkpoint once runPolicy.suspend is false again; "
        "job-0 and job-1 are still being stopped: the kubelet or a finalizer keeps job-0, whose "
        "containers have ended; a resumption does not wait for this pod.",
    ),
    "being suspended, with pods of deleted Nodes": (
        observed(
            *(
                replace(pod(index).terminating().on(NodeState.NOT_READY).get(), node_gone=True)
                for index in range(2)
            ),
            pod(2).terminating().on(NodeState.NOT_READY).get(),
        ),
        {"runPolicy": {"suspend": True}},
        "Suspending: it resumes from its last checkpoint once runPolicy.suspend is false again; "
        "job-0, job-1 and job-2 are still being stopped: the Nodes node-0 and node-1 were deleted: "
        "Kubernetes removes their pods within about a minute; the kubelet of job-2 on node-2 "
        "does not answer (once the machine is known to be off, run `kubectl delete node node-2` or "
        "`kubectl delete pod job-2 --force`); a resumption does not wait for these pods.",
    ),
}


@pytest.mark.parametrize(("here", "spec", "text"), ENDED.values(), ids=ENDED)
def test_no_round(here: Observed, spec: dict[str, Any], text: str) -> None:
    assert said(here, BEFORE, **spec) == text


# -- failures -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(FailureClass))
def test_every_failure_class_has_meaning_and_remedy(kind: FailureClass) -> None:
    text = said(observed(*running(5), view=trained(first_failure=failure(kind=kind))))
    found = FailureStatus(round=1, pod="job-1", exit_code=1, class_=kind.value)
    assert f"round 1: rank 5 on job-1 (node-1): {failure_meaning(found)}: ValueError: no." in text
    assert f" {failure_remedy(found)}." in text
    assert failure_remedy(found)[0].isupper()
    assert (
        failure_remedy(found.model_copy(update={"traceback": "T"})) == FAILURE_CLASSES[kind].remedy
    )


@pytest.mark.parametrize(
    ("signum", "traceback", "advice"),
    [
        (7, "", "Give /dev/shm more room"),
        (9, "", "Something on that machine killed it"),
        (11, "", "see the end of the pod's log, and set PYTHONFAULTHANDLER=1 to see where"),
        (11, "Stack (most recent call last):", "Native code crashed: see the end of the pod's log"),
        (15, "", "Another process sent that signal"),
        (2, "", "Another process sent that signal"),
        (25, "", "raise that limit"),
        (40, "", "See the end of the pod's log"),
        (None, "", "See the end of the pod's log"),
    ],
)
def test_remedy_for_a_signal(signum: int | None, traceback: str, advice: str) -> None:
    found = failure(
        kind=FailureClass.SIGNAL,
        signal=signum,
        exit_code=None,
        traceback=traceback,
        message="killed",
    )
    text = said(observed(*running(5), view=trained(first_failure=found)))
    assert f"{advice}" in text
    meant = "its workers were ended from outside" if signum is None else "a signal ended it"
    assert f"(node-1): {meant}: killed." in text
    assert ("PYTHONFAULTHANDLER" in text) is (signum == 11 and not traceback)


def test_signal_reported_as_shell_exit_code() -> None:
    found = failure(
        kind=FailureClass.SIGNAL, exit_code=139, message="exit code 139: a command in it …"
    )
    text = said(observed(*running(5), view=trained(first_failure=found)))
    assert "(node-1): a signal ended it: exit code 139: a command in it …" in text
    assert "Native code crashed" in text


def test_hang_of_all_ranks_advises_to_compare_stacks() -> None:
    found = failure(
        kind=FailureClass.COLLECTIVE_TIMEOUT, signal=6, traceback="Stack (most recent call last):"
    )
    text = said(observed(*running(5), view=trained(first_failure=found)))
    assert "Compare the stacks of all ranks, which are in the pods' logs: " in text


def test_outcome_is_kept_whole_after_a_long_quote() -> None:
    charged = "(4 failures charged, maxRestarts is 3)"
    long = f"rank 5 on job-1 ended with exit code 1: {'x' * 200}… {charged}"
    ended = observed(*running(2), view=closed(OutcomeKind.FAILED, long))
    assert f"{charged}." in said(ended, BEFORE)


@pytest.mark.parametrize("kind", [CauseKind.FAILURE, CauseKind.UNCONFIRMED])
def test_back_off_is_shown_after_a_long_quote(kind: CauseKind) -> None:
    detail = "x" * 250 + "; backing off 4 s after the fourth failure in a row"
    view = forming(Cause(kind, ("job-1",), detail), {"job-0": "waiting"})
    assert "backing off 4 s" in said(observed(*running(2), view=view), BEFORE)


def test_unknown_class_of_newer_agent_is_shown_as_failure() -> None:
    newer = FailureStatus(round=1, pod="job-1", message="ValueError: no", class_="Eclipse")
    before = BEFORE.model_copy(update={"first_failure": newer})
    text = said(observed(*running(5), view=trained()), before)
    assert "a worker failed: ValueError: no. See the pod's log." in text


def test_out_of_memory_container_is_shown_as_out_of_memory() -> None:
    killed = pod(1).over().taken(PodEnd.OUT_OF_MEMORY, "container trainer: out of memory").get()
    view = trained(first_failure=failure(kind=FailureClass.SIGNAL, message="its launcher is gone"))
    text = said(observed(pod(0).get(), killed, view=view))
    assert "the machine's memory ran out: container trainer: out of memory." in text


# -- wording ------------------------------------------------------------------------

JARGON = re.compile(
    r"\b(joinable|frozen|final|closed|lease|roster|coordinator|incarnation|fence|Txn|watch|key|"
    r"rendezvous(?!\.)|scaleDown|peerAbort|None|null|SIGTERM)\b"
)
WHOLE = re.compile(r"^([A-Z0-9]|job-|spec\.).*[.…]$", re.DOTALL)


def everything() -> list[tuple[str, ...]]:
    found = []
    for before, spec, heres in (
        (None, {}, [here for here, _ in PENDING.values()]),
        (BEFORE, {"maxNodes": 3}, [here for here, _ in RESTARTING.values()]),
        (BEFORE, {}, [here for here, _, _ in [*RUNNING.values(), *ENDED.values()]]),
    ):
        for here in heres:
            a_job = job(status=before, **{**JOB, **spec})
            status = next_status(a_job, here, here.rendezvous, NOW)
            found.append(explanation(told(a_job, status), here.pods))
    return found


def told(a_job: ElasticJob, status: Status) -> ElasticJob:
    return a_job.model_copy(update={"status": status})


def test_every_sentence_is_complete_and_without_jargon() -> None:
    sentences = [sentence for explained in everything() for sentence in explained]
    assert len(sentences) > 50
    assert [text for text in sentences if not WHOLE.match(text)] == []
    assert [text for text in sentences if JARGON.search(text)] == []


@pytest.mark.parametrize("member", [True, False])
def test_reader_without_records_calls_no_member_a_failed_launch(member: bool) -> None:
    """The command line cannot tell members among pods that were never Ready; the status does."""
    failed = pod(1).stillborn(5, "container trainer: it ended with exit code 1").get()
    (known,) = without_members([failed], {failed.uid} if member else frozenset())
    a_job = job(maxNodes=2)
    status = next_status(a_job, observed(pod(0).get(), known), NO_MEMBERS, NOW)
    sentences = explanation(told(a_job, status), (pod(0).get(), failed))
    assert ("job-1 could not be started" in " ".join(sentences)) is not member


def test_reader_without_records_counts_no_member_among_failed_launches() -> None:
    failed = [pod(index).stillborn(5 - index, f"end {index}").get() for index in (1, 2, 3)]
    known = without_members(failed, {failed[0].uid, failed[2].uid})
    a_job = job(maxNodes=3)
    status = next_status(a_job, observed(pod(0).get(), *known), NO_MEMBERS, NOW)
    assert status.launch_failures == LaunchFailures(pod="job-2", message="end 2")
    text = " ".join(explanation(told(a_job, status), (pod(0).get(), *failed)))
    assert "job-2 could not be started: end 2" in text
    assert "job-1" not in text
    assert "more" not in text


def test_failed_launches_are_absent_from_the_status_of_a_suspended_job() -> None:
    failed = pod(1).stillborn(5, "end").get()
    a_job = job(maxNodes=2, runPolicy={"suspend": True})
    status = next_status(a_job, observed(pod(0).get(), failed), NO_MEMBERS, NOW)
    assert status.launch_failures is None


@pytest.mark.parametrize("backend", ["C10d", "EtcdV2"])
def test_resumption_of_a_torch_backend_waits_for_no_etcd(backend: str) -> None:
    rendezvous: dict[str, Any] = {"backend": backend}
    if backend == "EtcdV2":
        rendezvous["endpoints"] = ["https://etcd:2379"]
    a_job = job(Status(phase=Phase.SUSPENDING), maxNodes=2, rendezvous=rendezvous)
    refusal = Refusal(Obstacle.SECRET, "no Secret etcd", NOW)
    lost = observed(pod(0).terminating().get(), view=UNREADABLE, refusal=refusal)
    status = next_status(a_job, lost, UNREADABLE, NOW)
    assert status.phase is Phase.SUSPENDING
    text = status.explanation[0]
    assert text.startswith("Suspending: it resumes from its last checkpoint once its pods have ")
    gone = next_status(told(a_job, status), replace(lost, pods=()), UNREADABLE, NOW)
    shown = {one.type: one.message for one in gone.conditions}
    assert shown[ConditionType.SUSPENDED] == "the job is resumed once its pods have stopped"


def test_every_obstacle_has_a_remedy() -> None:
    assert set(OBSTACLES) == set(Obstacle)
    assert all(words.remedy and not words.remedy.endswith(".") for words in OBSTACLES.values())


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (GPU, "node(s) had untolerated taint {team: b}, Insufficient nvidia.com/gpu"),
        ("0/1 nodes are available: 1 Insufficient cpu.", "Insufficient cpu"),
        ("no nodes available to schedule pods", "no nodes available to schedule pods"),
        ("", ""),
    ],
)
def test_scheduler_message_is_shortened(message: str, text: str) -> None:
    assert unschedulable(message) == text


def test_lists_of_names() -> None:
    assert listed([]) == ""
    assert named(["b"]) == "b"
    assert named(["j-10", "j-9"]) == "j-9 and j-10"
    assert named(f"j-{n}" for n in range(8)) == "j-0, j-1, j-2, j-3, j-4 and 3 more"


def test_quote_is_one_line_of_bounded_length() -> None:
    assert quoted("a  b\nc") == "a b"
    assert len(quoted("x" * 1000)) == 240
    assert quoted(" ") == ""
    assert quoted("E: in loading:\n\n\tMissing: x\n\tmore") == "E: in loading: Missing: x"


def test_user_documentation_lists_every_term() -> None:
    table = (ROOT / "docs" / "explain.md").read_text()
    times = [name for name in RoundStatus.model_fields if name.endswith("_ms")]
    words = {str(word) for kind in (FailureClass, CauseKind, PodEnd, Obstacle) for word in kind}
    words |= {name.title().replace("_", "") for name in times}
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert {w[0].upper() + w[1:] for w in words} <= {row[0].upper() + row[1:] for row in rows}


# -- refusal in a status --------------------------------------------------------------------


def test_refusal_of_a_newer_operator_is_explained_without_its_remedy() -> None:
    status = Status(refusal=CreationRefusal(reason="SomethingNew", message="no more today"))
    assert refusal_of(status) == (Obstacle.REFUSED, "no more today")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("QuotaExceeded", (Obstacle.QUOTA, "too many")),
        ("Unschedulable", None),
        ("AllReady", None),
    ],
)
def test_refusal_in_a_status_of_the_previous_release_is_found_by_its_reason(
    reason: str, expected: tuple[Obstacle, str] | None
) -> None:
    found = Condition(
        type=ConditionType.PODS_READY,
        status=ConditionStatus.FALSE,
        reason=reason,
        message="0 of 2 are ready; a pod cannot be created: too many",
        last_transition_time=NOW,
    )
    assert refusal_of(Status(conditions=[found])) == expected


def test_refusal_is_absent_from_the_status_of_a_suspended_job() -> None:
    observation, suspended = refused(Obstacle.QUOTA, "too many"), job(runPolicy={"suspend": True})
    assert creation_refusal(suspended, observation, Phase.SUSPENDED) is None
    assert creation_refusal(job(), Observed(), Phase.PENDING) is None
    for phase in (Phase.PENDING, Phase.SUSPENDED):
        shown = creation_refusal(job(), observation, phase)
        assert shown == CreationRefusal(reason="QuotaExceeded", message="too many")
