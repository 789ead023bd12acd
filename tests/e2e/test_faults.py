"""Real training run while nodes join, leave and die: it never ends, never restarts from before its
last checkpoint, and reports the cause of each round.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace, Step
from tests.e2e.manifests import counting, digits, job
from tests.e2e.nodes import Nodes
from tests.e2e.recorder import Recorder
from tests.e2e.report import Report

pytestmark = pytest.mark.timeout(600, func_only=True)

NAME = "train"
CHECKPOINT_STEPS = 5
KEEP_ALIVE_SECONDS = 5
STATUS_LAG_SECONDS = 1.0
"""Guaranteed median seconds from a change in etcd to the status."""
PRE_STOP_SECONDS = 20
LEAVE_SECONDS = PRE_STOP_SECONDS / 2
"""Maximum seconds from a deletion timestamp to the leave in etcd, during the pod's preStop hook."""


@dataclass(frozen=True, slots=True)
class Training:
    """Disturbed job, with its recorder and report."""

    ns: JobNamespace
    recorder: Recorder
    report: Report

    @property
    def status(self) -> Json:
        return self.ns.status(NAME)

    @property
    def round(self) -> int:
        return int(self.status["rendezvous"]["round"])

    def pods_by_node(self) -> dict[str, list[str]]:
        """Return the names of the job's active pods on each node."""
        found: dict[str, list[str]] = {}
        for name, pod in self.ns.active(NAME).items():
            found.setdefault(pod["spec"]["nodeName"], []).append(name)
        return found

    def settled(self, nodes: int) -> None:
        """Wait until the job trains on this number of nodes, after any earlier fault."""
        self.ns.running(NAME, nodes)
        self.ns.until(lambda: len(self.ns.active(NAME)) == nodes, f"{nodes} pods", 60)
        self.ns.advances(NAME, self.ns.latest(NAME))

    def disturbed(
        self, fault: str, act: Callable[[], object], cause: str, charged: int = 0
    ) -> Step:
        """Apply the fault and wait for a round of that cause; return the first step after it."""
        before, uid = self.status, self.ns.job(NAME)["metadata"]["uid"]
        number, restarts = before["rendezvous"]["round"], before["restarts"]
        reached = self.ns.latest(NAME)
        at = time.time()
        act()
        found = self.ns.until(
            lambda: [each for each in self.status["rounds"] if each["round"] > number],
            f"a round after {fault}",
            60,
        )[0]
        final_at = self.recorder.final_at(uid, found["round"])
        step: Step = self.ns.until(
            lambda: next((s for s in self.ns.steps(NAME) if s.at > final_at), None),
            f"a step after {fault}",
            60,
        )
        self.report.add(
            "recoveries",
            fault=fault,
            seconds=round(step.at - at, 2),
            fromFinalSeconds=round(step.at - final_at, 2),
            **found,
        )
        self.ns.until(
            # The cluster's report of an eviction may come after the pod's own.
            lambda: (
                (found["round"], cause)
                in ((each["round"], each["cause"]) for each in self.status["rounds"])
            ),
            f"round {found['round']} is put down to a {cause}: {self.status['rounds']}",
        )
        checkpoint = reached // CHECKPOINT_STEPS * CHECKPOINT_STEPS
        assert step.number > checkpoint, f"step {reached} was reached before, now {step}"
        # A failure preceded by a peer's aborted collective is charged only by a verdict.
        self.ns.until(
            lambda: self.status["restarts"] - restarts == charged, f"{charged} restarts charged"
        )
        return step


@pytest.fixture(scope="module")
def training(ns: JobNamespace, recorder: Recorder, report: Report) -> Training:
    ns.apply(
        job(NAME, digits("--checkpoint-every", CHECKPOINT_STEPS), nodes=2, most=4, maxRestarts=10)
    )
    ns.running(NAME, 2)
    found = Training(ns, recorder, report)
    ns.advances(NAME, 2 * CHECKPOINT_STEPS)
    return found


def test_job_scales_up_during_training(training: Training) -> None:
    training.settled(2)
    scale = ("scale", f"ej/{NAME}", "--replicas=4")
    training.disturbed("scale to 4", lambda: training.ns.kubectl(*scale), "join")
    status = training.ns.running(NAME, 4)
    assert (status["wantedNodes"], status["rendezvous"]["worldSize"]) == (4, 4)
    training.settled(4)


def test_job_scales_down_and_reports_removed_pods(training: Training) -> None:
    training.settled(4)
    scale = ("scale", f"ej/{NAME}", "--replicas=2")
    training.disturbed("scale to 2", lambda: training.ns.kubectl(*scale), "leave")
    training.settled(2)
    said = [text for reason, text in training.ns.events(NAME) if reason == "PodsDeleted"]
    assert "train-2, train-3: more than wanted; had the highest rank" in said[-1]


def test_killed_worker_is_charged_one_restart(training: Training) -> None:
    training.settled(2)
    pods = set(training.ns.active(NAME))
    victim = sorted(pods)[1]
    training.disturbed(
        "worker killed", lambda: training.ns.kill_worker(victim), "failure", charged=1
    )
    failure = training.status["lastFailure"]
    assert (failure["pod"], failure["signal"]) == (victim, 9)
    assert set(training.ns.active(NAME)) == pods, "workers start again where they were"


def test_deleted_pod_leaves_and_is_replaced(training: Training) -> None:
    training.settled(2)
    victim = training.status["rendezvous"]["master"]
    uid = training.ns.pods(NAME)[victim]["metadata"]["uid"]
    training.disturbed(
        "pod of rank 0 deleted",
        lambda: training.ns.kubectl("delete", "pod", victim, "--wait=false"),
        "leave",
    )
    training.settled(2)
    uids = {pod["metadata"]["uid"] for pod in training.ns.active(NAME).values()}
    assert uid not in uids
    assert len(uids) == 2


def test_job_leaves_drained_node(training: Training, nodes: Nodes) -> None:
    training.settled(2)
    node = min(training.pods_by_node())
    try:
        training.disturbed("node drained", lambda: nodes.drain(node), "preemption")
        training.ns.until(
            lambda: training.status["interruptions"]["preemptions"] == 1, "a preemption counted"
        )
        training.settled(2)
        told = " ".join(training.status["explanation"])
        assert "Last interruption: " in told
        assert " drained at " in told
        assert node not in training.pods_by_node()
    finally:
        nodes.uncordon(node)


def spread_out(training: Training) -> str:
    """Place pods on both workers; return the node without rank 0."""
    training.settled(2)
    if len(training.pods_by_node()) < 2:
        number = training.round
        training.ns.kubectl("delete", "pod", max(training.ns.active(NAME)), "--wait=false")
        training.ns.running(NAME, 2, after=number)
        training.settled(2)
    members = {member["pod"]: member for member in training.status["members"]}
    other = [m["nodeName"] for m in members.values() if m["rank"] != 0]
    assert len(training.pods_by_node()) == 2, training.pods_by_node()
    return str(other[0])


def test_node_with_killed_processes_is_lost(training: Training, nodes: Nodes) -> None:
    node = spread_out(training)
    training.disturbed(
        "node's processes killed", lambda: nodes.kill_pods(node, training.ns.namespace), "loss"
    )
    assert training.status["lastFailure"]["class"] == "NodeLost"
    nodes.wait_ready(node)
    training.settled(2)


def test_node_without_network_is_lost(training: Training, nodes: Nodes) -> None:
    node = spread_out(training)
    with nodes.cut_off(node):
        began = time.time()
        step = training.disturbed("node cut off", lambda: None, "loss")
        assert step.at - began < KEEP_ALIVE_SECONDS + 1 + 10, "keep-alive, 1 s, a worker's start"
        nodes.wait_not_ready(node)
        training.settled(2)
        assert node not in training.pods_by_node(), "replaced on a node that can be reached"
    nodes.wait_ready(node)
    training.settled(2)
    uids = {pod["metadata"]["uid"] for pod in training.ns.active(NAME).values()}
    training.ns.until(
        lambda: (
            {
                p["metadata"]["uid"]
                for p in training.ns.pods(NAME).values()
                if p["status"]["phase"] == "Running"
            }
            == uids
        ),
        "the pods of the lost node to be gone",
        60,
    )


def test_leave_is_announced_before_the_grace_period_starts(
    ns: JobNamespace, recorder: Recorder, report: Report
) -> None:
    slow = {"lifecycle": {"preStop": {"exec": {"command": ["sleep", f"{PRE_STOP_SECONDS}"]}}}}
    named = {"leave-plain": None, "leave-prestop": slow}
    ns.apply(*(job(name, counting(), nodes=2, trainer=more) for name, more in named.items()))
    for name in named:
        ns.running(name, 2)
        victim = f"{name}-1"
        uid = ns.pods(name)[victim]["metadata"]["uid"]
        ns.kubectl("delete", "pod", victim, "--wait=false")
        took = recorder.leave_seconds(uid)
        report.add("leaves", preStop=name == "leave-prestop", seconds=round(took, 3))
        assert took < LEAVE_SECONDS
    for name in named:
        ns.delete(name, "--wait=false")


def test_status_follows_etcd_within_one_second(
    training: Training, recorder: Recorder, report: Report
) -> None:
    """Rounds of the whole session count."""
    training.settled(2)
    lags = recorder.lags()
    assert len(lags) >= 20
    assert report.spread("statusLag", lags) < STATUS_LAG_SECONDS


def test_node_drain_waits_for_job_at_its_minimum(ns: JobNamespace, nodes: Nodes) -> None:
    ns.apply(job("least", nodes=2, least=2))
    ns.running("least", 2)
    before = ns.status("least")["rendezvous"]["round"]
    node = ns.pods("least")["least-0"]["spec"]["nodeName"]
    try:
        nodes.drain(node)
        status = ns.running("least", 2, after=before)
        assert status["restarts"] == 0
        assert node not in {pod["spec"]["nodeName"] for pod in ns.active("least").values()}
    finally:
        nodes.uncordon(node)
    ns.delete("least", "--wait=false")
