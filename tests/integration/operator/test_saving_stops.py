"""Operator and real agents on etcd: a suspended, deleted or late job saves its last step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.fake_kubelet import Kubelet, kubelet
from tests.integration.operator_rig import Namespace, Operator, alone_in

ROUND_SECONDS = 60.0
END_SECONDS = 60.0
TRAINER = """
import os, pathlib, sys, time
from elasticjob import train

folder = pathlib.Path(sys.argv[1])
checkpoint, rank = folder / "checkpoint", os.environ["RANK"]
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
(folder / f"first-{rank}").write_text(str(step))
train.should_checkpoint()  # the agent knows that this worker saves before it reports a step
while True:
    time.sleep(0.03)
    step += 1
    train.progress(step)
    (folder / f"step-{rank}").write_text(str(step))
    if train.should_checkpoint():
        if rank == "0":
            while int((folder / "step-1").read_text() or 0) < step:
                time.sleep(0.01)  # as a collective waits for the other rank
            time.sleep(1)
            checkpoint.write_text(str(step))
            train.checkpointed(step)
        else:
            time.sleep(1000)
"""


@pytest.fixture
def ns(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str
) -> Iterator[Namespace]:
    replica = Operator(tmp_path, api_server, newest_etcd, options=alone_in(namespace))
    with replica.running():
        yield Namespace(api_server, namespace)


def create(ns: Namespace, folder: Path, **spec: Any) -> None:
    command = [sys.executable, "-c", TRAINER, str(folder)]
    container = {"name": "trainer", "image": "trainer:1", "command": command}
    ns.create_job(
        minNodes=1,
        maxNodes=2,
        nprocPerNode=1,
        recovery={"warmStart": "Never", "stopGraceSeconds": 5},
        template={"spec": {"containers": [container], "terminationGracePeriodSeconds": 20}},
        **spec,
    )
    ns.await_pods("job-0", "job-1")


def trains(ns: Namespace) -> None:
    """Wait until all members report steps and want to save."""

    def look() -> bool:
        members = ns.status().get("members") or ()
        return [one.get("step", 0) > 0 for one in members] == [True, True]

    wait_until(look, "steps of both nodes", ROUND_SECONDS)


def steps(folder: Path) -> list[int]:
    return [int((folder / f"step-{rank}").read_text()) for rank in range(2)]


def saved(folder: Path) -> int:
    return int((folder / "checkpoint").read_text())


def end(ns: Namespace, pods: Kubelet) -> None:
    """End all pods together, as kubelets do."""
    ends = [threading.Thread(target=pod.terminate) for pod in pods.pods.values()]
    for one in ends:
        one.start()
    for one in ends:
        one.join()


def test_suspended_job_saves_and_resumes_there(
    ns: Namespace, tmp_path: Path, newest_etcd: EtcdServer
) -> None:
    create(ns, tmp_path)
    with kubelet(ns, newest_etcd.url) as pods:
        pods.start("job-0", "job-1")
        trains(ns)
        ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
        ns.await_condition("Running", "SavingCheckpoint")
        assert ns.pods() == ["job-0", "job-1"]
        ns.await_status(phase="Suspended")
        assert steps(tmp_path) == [saved(tmp_path)] * 2
        stop = {"reason": "Suspended", "result": "Saved", "step": saved(tmp_path)}
        found = {**stop, "checkpointStep": saved(tmp_path), "unsaved": [], "error": ""}
        assert ns.status()["lastStop"] == found
        text = f"saved at step {saved(tmp_path)}"
        ns.await_event("Saved", text)
        assert ns.condition("Suspended")["message"] == f"runPolicy.suspend is true; {text}"
        pods.follow()
        ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
        ns.await_pods("job-0", "job-1")
        (tmp_path / "first-0").unlink()
        pods.start("job-0", "job-1")
        wait_until((tmp_path / "first-0").exists, "the second incarnation", ROUND_SECONDS)
        trains(ns)
        assert int((tmp_path / "first-0").read_text()) == saved(tmp_path)
        assert "lastStop" not in ns.status()


def test_deadline_is_exceeded_after_the_save(
    ns: Namespace, tmp_path: Path, newest_etcd: EtcdServer
) -> None:
    create(ns, tmp_path)
    with kubelet(ns, newest_etcd.url) as pods:
        pods.start("job-0", "job-1")
        trains(ns)
        ns.patch_job({"spec": {"runPolicy": {"activeDeadlineSeconds": 1}}})
        ns.await_condition("Running", "SavingCheckpoint")
        wait_until(lambda: ns.status()["phase"] == "Failed", "the deadline", END_SECONDS)
        assert steps(tmp_path) == [saved(tmp_path)] * 2
        failed = ns.condition("Failed")
        text = f"the job was active for too long; saved at step {saved(tmp_path)}"
        assert (failed["reason"], failed["message"]) == ("DeadlineExceeded", text)


@pytest.mark.parametrize("after_seconds", [0.0, 1.5], ids=["at once", "during the save"])
def test_deleted_job_saves_once(
    ns: Namespace, tmp_path: Path, newest_etcd: EtcdServer, after_seconds: float
) -> None:
    """The garbage collector deletes the pods; the operator closes the rendezvous beside it."""
    create(ns, tmp_path)
    with kubelet(ns, newest_etcd.url) as pods:
        pods.start("job-0", "job-1")
        trains(ns)
        ender = threading.Thread(target=end, args=(ns, pods))
        if after_seconds:
            ender.start()
            ender.join(after_seconds)
        ns.server.request("DELETE", ns.path("elasticjobs", "job"), {})
        assert ns.get("elasticjobs", "job") is None, "there is no finalizer"
        if not after_seconds:
            ender.start()
        ender.join(END_SECONDS)
        assert steps(tmp_path) == [saved(tmp_path)] * 2
        # It may open before the operator closes the rendezvous.
        assert "round 2: starting" not in pods.pods["job-0"].log("agent")


def test_deleted_job_is_closed_after_the_save_without_kubelets(
    ns: Namespace, tmp_path: Path, newest_etcd: EtcdServer
) -> None:
    """Pods that are deleted late are asked by the operator alone."""
    create(ns, tmp_path)
    with kubelet(ns, newest_etcd.url) as pods:
        pods.start("job-0", "job-1")
        trains(ns)
        ns.server.request("DELETE", ns.path("elasticjobs", "job"), {})
        agents = [pod.processes[1] for pod in pods.pods.values()]
        wait_until(lambda: all(one.poll() is not None for one in agents), "the end", END_SECONDS)
        assert steps(tmp_path) == [saved(tmp_path)] * 2
        assert "saved at step" in pods.pods["job-0"].log("agent")
