"""Operator and real agents on torch's backends: the agents follow the operator's objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob_launcher.worker_count import usable_cpus
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.fake_kubelet import Kubelet, kubelet
from tests.integration.operator_rig import Json, Namespace, Operator, alone_in

ROUND_SECONDS = 60.0
"""Timeout: torch's backends take some seconds for a round, on a busy machine."""
WORKER = """
import os, pathlib, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


@pytest.fixture
def v2(start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd("3.5.35", arguments=("--enable-v2",))


@pytest.fixture
def ns(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, v2: EtcdServer, namespace: str
) -> Iterator[Namespace]:
    options = {
        **alone_in(namespace),
        "ELASTICJOB_ALLOWED_ENDPOINTS": v2.url,
    }
    replica = Operator(tmp_path, api_server, newest_etcd, options=options)
    with replica.running():
        yield Namespace(api_server, namespace)


def create(
    ns: Namespace, enough: Path, budget: int = 3, nproc: int | str = 1, **rendezvous: object
) -> None:
    command = [sys.executable, "-c", WORKER, str(enough)]
    container = {"name": "trainer", "image": "trainer:1", "command": command}
    ns.create_job(
        minNodes=1,
        maxNodes=2,
        maxRestarts=budget,
        nprocPerNode=nproc,
        rendezvous={"lastCallSeconds": 2, **rendezvous},
        recovery={"warmStart": "Never"},
        template={"spec": {"containers": [container]}},
    )
    ns.await_pods("job-0", "job-1")


def trains(ns: Namespace, after: int = 0, nodes: int = 2) -> Json:
    """Return the status once all nodes train in a later round."""

    def look() -> bool:
        status = ns.status()
        shown = status.get("rendezvous") or {}
        here_now = [(one["state"], one["round"]) for one in status.get("members") or ()]
        newer = shown.get("state") == "final" and shown["round"] > after
        everybody = [("running", shown.get("round"))] * nodes
        return newer and shown["nodes"] == nodes and here_now == everybody

    try:
        wait_until(look, f"{nodes} to train after round {after}", ROUND_SECONDS)
    except TimeoutError as error:
        raise AssertionError(f"{error}; it is {ns.status()}") from error
    return ns.status()


def finish(ns: Namespace, pods: Kubelet, enough: Path) -> None:
    """End the job; the agents' last report is read before any pod's end is reported."""
    enough.touch()
    wait_until(lambda: ns.status()["phase"] == "Succeeded", "Succeeded", ROUND_SECONDS)
    assert [pod.exit_code() for pod in pods.pods.values()] == [0, 0]
    assert ns.status()["rendezvous"]["state"] == "closed"


def test_c10d_job_survives_loss_of_worker_and_store(ns: Namespace, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    create(ns, enough, backend="C10d")
    with kubelet(ns) as pods:
        pods.start("job-0", "job-1")
        status = trains(ns)
        assert status["rendezvous"]["worldSize"] == 2
        assert status["rendezvous"]["master"] in ("job-0", "job-1")
        assert sorted(one["rank"] for one in status["members"]) == [0, 1]
        pods.pods["job-1"].kill_worker()
        status = trains(ns, after=status["rendezvous"]["round"])
        assert status["restarts"] == 1
        assert (status["firstFailure"]["pod"], status["firstFailure"]["signal"]) == ("job-1", 9)
        pods.replace("job-0")
        status = trains(ns, after=status["rendezvous"]["round"])
        assert status["restarts"] == 1, "a loss costs nothing"
        told = [one["cause"] for one in status["rounds"]]
        assert (told[0], told[-1]) == ("start", "loss")
        assert "failure" in told
        finish(ns, pods, enough)


def test_workers_are_counted_in_the_pods(ns: Namespace, tmp_path: Path) -> None:
    enough, cpus = tmp_path / "enough", usable_cpus()
    create(ns, enough, backend="C10d", nproc="cpu")
    with kubelet(ns) as pods:
        pods.start("job-0", "job-1")
        status = trains(ns)
        assert status["rendezvous"]["worldSize"] == 2 * cpus
        assert sorted(one["rank"] for one in status["members"]) == [0, 1]
        finish(ns, pods, enough)


def test_job_grows_and_shrinks_by_pods_alone(ns: Namespace, tmp_path: Path) -> None:
    """The job's agents are given no size: new pods wait, and removed pods leave."""
    enough = tmp_path / "enough"
    create(ns, enough, backend="C10d")
    with kubelet(ns) as pods:
        pods.start("job-0", "job-1")
        status = trains(ns)
        ns.scale(1)
        pods.follow("job-0")
        status = trains(ns, after=status["rendezvous"]["round"], nodes=1)
        assert status["rounds"][-1]["cause"] == "leave"
        assert status["rounds"][-1]["members"] == ["job-1"]
        ns.scale(2)
        ns.await_pods("job-0", "job-1")
        pods.start("job-1")
        status = trains(ns, after=status["rendezvous"]["round"])
        assert status["rounds"][-1]["cause"] == "join"
        assert status["restarts"] == 0
        finish(ns, pods, enough)


def test_etcd_v2_job_survives_loss_of_worker_and_first_pod(
    ns: Namespace, tmp_path: Path, v2: EtcdServer
) -> None:
    enough = tmp_path / "enough"
    create(ns, enough, backend="EtcdV2", endpoints=[v2.url])
    with kubelet(ns, v2.url) as pods:
        pods.start("job-0", "job-1")
        status = trains(ns)
        pods.pods["job-1"].kill_worker()
        status = trains(ns, after=status["rendezvous"]["round"])
        assert status["restarts"] == 1
        pods.replace("job-0")
        trains(ns, after=status["rendezvous"]["round"])
        finish(ns, pods, enough)


def test_exhausted_restart_budget_fails_job_with_first_failure(
    ns: Namespace, tmp_path: Path
) -> None:
    create(ns, tmp_path / "enough", budget=0, backend="C10d")
    with kubelet(ns) as pods:
        pods.start("job-0", "job-1")
        trains(ns)
        pods.pods["job-1"].kill_worker()
        wait_until(lambda: ns.status()["phase"] == "Failed", "Failed", ROUND_SECONDS)
        assert ns.condition("Failed")["reason"] == "WorkersFailed"
        assert ns.status()["firstFailure"]["pod"] == "job-1"
        assert 0 not in [pod.exit_code() for pod in pods.pods.values()]
