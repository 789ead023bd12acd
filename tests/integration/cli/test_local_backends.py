"""`elasticjob run` on torch's backends: etcd's v2 API, and c10d without any etcd."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher.worker_count import usable_cpus
from elasticjob_operator.model.types import Backend
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import binary
from tests.integration.local_rig import PATIENCE_SECONDS, WORKER, LocalRig, until

KINDS = ["C10d", "EtcdV2 3.4", "EtcdV2 3.5.35"]
NEWEST_VERSIONS = pytest.mark.parametrize("rig", ["C10d", "EtcdV2 3.5.35"], indirect=True)
"""Backends of tests in which no operation differs from those of the tests of all versions."""
SLOW_SECONDS = 120.0
"""Timeout: a silent member holds a version of etcd-v2 for ten seconds in every job."""

FAILING = """
import os, time
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ["RANK"] == "1":
    while count != "0" and not os.path.exists("fail-again"):
        time.sleep(0.05)
    raise ValueError(f"the loss is not a number at restart {count}")
while True:
    time.sleep(0.1)
"""


MEETING = """
import importlib, os, pathlib
dist = importlib.import_module("torch.distributed")  # which the standby does not preload then
dist.init_process_group("gloo")
dist.barrier()
pathlib.Path(f"met-{dist.get_rank()}").write_text(os.environ["TORCHELASTIC_USE_AGENT_STORE"])
dist.destroy_process_group()
"""
EARLY = (
    """
import os, time
if os.environ["ELASTICJOB_ROUND"] == "1" and os.environ["RANK"] == "0":
    raise SystemExit
"""
    + WORKER
)


class Rig(LocalRig):
    """Rig with one backend, on the etcd of one version."""

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder)
        self.backend, _, version = kind.partition(" ")
        if version:
            self.env["PATH"] = f"{binary(version).parent}{os.pathsep}{self.env['PATH']}"

    def job_file(self, **spec: Any) -> Path:
        rendezvous = {"backend": self.backend, "keepAliveSeconds": 5, "lastCallSeconds": 10}
        return self.manifest(**{"rendezvous": rendezvous, **spec})

    def settled(self, nodes: int, after: int = 0) -> dict[str, Any]:
        """Wait as `running` does; a round may be followed by another until all are in one."""
        found = self.running(nodes, after, SLOW_SECONDS)
        until(lambda: len(self.workers()) == nodes, f"{nodes} workers")
        return found


@pytest.fixture(params=KINDS)
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    corner = Rig(tmp_path, request.param)
    yield corner
    corner.close()


@pytest.fixture
def c10d(tmp_path: Path) -> Iterator[Rig]:
    corner = Rig(tmp_path, "C10d")
    yield corner
    corner.close()


def names(status: dict[str, Any]) -> list[str]:
    return [member["pod"] for member in status["members"]]


def test_job_grows_loses_and_drains_nodes_and_succeeds(rig: Rig) -> None:
    runner = rig.start(rig.job_file(), "--plain")
    status = rig.settled(2)
    assert status["rendezvous"]["worldSize"] == 2
    assert status["rendezvous"]["master"] in names(status)
    assert status["rendezvous"]["cause"]["kind"] == "start"

    number = status["rendezvous"]["round"]
    os.kill(rig.workers()[1], signal.SIGKILL)
    status = rig.settled(2, after=number)
    assert status["restarts"] == 1
    assert status["firstFailure"]["signal"] == 9
    assert status["rounds"][-1]["cause"] == "failure"

    number = status["rendezvous"]["round"]
    assert rig.call("scale", "job", "--nodes", "3").returncode == 0
    status = rig.settled(3, after=number)
    assert sorted(m["rank"] for m in status["members"]) == [0, 1, 2]

    number = status["rendezvous"]["round"]
    assert rig.call("fault", "kill-node", "job", "job-1").returncode == 0
    status = rig.settled(3, after=number)
    assert "job-1" not in names(status)

    number = status["rendezvous"]["round"]
    assert rig.call("fault", "drain", "job", "job-2").returncode == 0
    status = rig.settled(3, after=number)
    assert "job-2" not in names(status)
    assert status["restarts"] == 1, "losses and leaves are free"

    number = status["rendezvous"]["round"]
    assert rig.call("scale", "job", "--nodes", "1").returncode == 0
    status = rig.settled(1, after=number)
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    assert rig.status()["phase"] == "Succeeded"
    rounds = json.loads((rig.state / "elasticjob/default/job/rounds.json").read_text())
    assert [item["cause"] for item in rounds][:3] == ["start", "failure", "join"]
    causes = {item["cause"] for item in rounds}
    assert "leave" in causes
    # On etcd-v2 the lost node's successor may be there before its key has expired.
    assert rig.backend == "EtcdV2" or "loss" in causes
    rig.nothing_left()


@NEWEST_VERSIONS
def test_first_round_waits_for_wanted_nodes_only_and_interrupt_drains_job(rig: Rig) -> None:
    rendezvous = {"backend": rig.backend, "lastCallSeconds": 600}
    runner = rig.start(rig.job_file(rendezvous=rendezvous, maxNodes=4, nodes=2), "--plain")
    assert rig.settled(2)["rendezvous"]["round"] == 1
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(PATIENCE_SECONDS) == 130
    assert rig.status()["phase"] == "Suspended"
    assert rig.status()["restarts"] == 0
    rig.nothing_left()


@NEWEST_VERSIONS
def test_launcher_counts_the_workers_of_a_node(rig: Rig) -> None:
    runner = rig.start(rig.job_file(nodes=1, nprocPerNode="cpu"), "--plain")
    rig.running(1, seconds=SLOW_SECONDS)
    until(lambda: len(rig.workers()) == usable_cpus(), "a worker for each CPU")
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    assert runner.stdout is not None
    assert f"1 node, {usable_cpus()} worker" in runner.stdout.read()


def test_failures_are_reported_until_restart_budget_is_exhausted(rig: Rig) -> None:
    (rig.job / "failing.py").write_text(FAILING)
    spec = {"command": ["python3", "failing.py"], "maxRestarts": 1}
    runner = rig.start(rig.job_file(**spec), "--plain")
    status = until(lambda: (s := rig.status()).get("restarts") == 1 and s, "a restart", 60)
    failure = status["firstFailure"]
    assert (failure["rank"], failure["exitCode"]) == (1, 1)
    assert "the loss is not a number at restart 0" in failure["message"]
    assert "ValueError" in failure["traceback"]
    (rig.job / "fail-again").touch()
    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 1, output
    status = rig.status()
    assert (status["phase"], status["rendezvous"]["state"]) == ("Failed", "closed")
    assert "the loss is not a number at restart 0" in status["firstFailure"]["message"]
    assert "the loss is not a number at restart 1" in status["lastFailure"]["message"]
    rig.nothing_left()


@NEWEST_VERSIONS
def test_finished_node_restarts_when_another_node_is_lost(rig: Rig) -> None:
    (rig.job / "early.py").write_text(EARLY)
    runner = rig.start(rig.job_file(command=["python3", "early.py"]), "--plain")

    def at_work() -> str | None:
        members = rig.status().get("members", ())
        states = {member["state"]: member["pod"] for member in members}
        return states.get("running") if "done" in states else None

    lost = until(at_work, "one that is done beside one that is not", SLOW_SECONDS)
    assert rig.call("fault", "kill-node", "job", lost).returncode == 0
    status = rig.settled(2, after=1)
    assert lost not in names(status) or lost == "job-0", "only a store's host keeps its name"
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    assert rig.status()["phase"] == "Succeeded"


def test_job_with_lost_host_does_not_succeed(c10d: Rig) -> None:
    """The others may be done: its own workers were not."""
    (c10d.job / "early.py").write_text(EARLY.replace('"RANK"] == "0"', '"RANK"] == "1"'))
    runner = c10d.start(c10d.job_file(command=["python3", "early.py"]), "--plain")

    def host_at_work() -> bool:
        states = {m["pod"]: m["state"] for m in c10d.status().get("members", ())}
        return states == {"job-0": "running", "job-1": "done"}

    until(host_at_work, "a host that is not done beside one that is", SLOW_SECONDS)
    assert c10d.call("fault", "kill-node", "job", "job-0").returncode == 0
    c10d.settled(2, after=1)
    c10d.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0


@pytest.mark.parametrize("fault", ["kill-node", "kill-agent", "drain"])
def test_job_survives_loss_of_store_host(c10d: Rig, fault: str) -> None:
    runner = c10d.start(c10d.job_file(nodes=3), "--plain")
    status = c10d.settled(3)
    before = status["rendezvous"]["round"]
    pids = set(c10d.workers().values())

    assert c10d.call("fault", fault, "job", "job-0").returncode == 0
    status = c10d.settled(3, after=before)

    assert "job-0" in names(status), "its successor hosts the store"
    assert not pids & set(c10d.workers().values()), "nobody trains on in a round that is over"
    assert status["restarts"] == 0
    rounds = json.loads((c10d.state / "elasticjob/default/job/rounds.json").read_text())
    assert [item["round"] for item in rounds] == sorted({item["round"] for item in rounds})
    c10d.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    c10d.nothing_left()


def test_etcd_without_v2_support_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elasticjob_cli.local import etcd

    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho 'Usage: etcd --unsafe-no-fsync'\n")
    program.chmod(0o755)
    monkeypatch.setattr(etcd, "_programs", lambda: iter([program]))
    assert etcd.find_etcd() == program
    with pytest.raises(etcd.NoEtcdV2, match=r"needs etcd 3\.4 or 3\.5.*cannot \(no --enable-v2\)"):
        etcd.find_etcd(v2=True)
    monkeypatch.setattr(etcd, "_programs", lambda: iter([]))
    with pytest.raises(etcd.NoEtcd):
        etcd.find_etcd(v2=True)


@NEWEST_VERSIONS
def test_workers_meet_at_store_served_by_launcher(rig: Rig) -> None:
    (rig.job / "meet.py").write_text(MEETING)
    job = rig.job_file(command=["python3", "meet.py"], minNodes=2)
    ran = rig.call("run", job, "--plain", "--logs")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [(rig.job / f"met-{rank}").read_text() for rank in range(2)] == ["True", "True"]
    rig.nothing_left()


@pytest.mark.parametrize("kind", KINDS)
def test_agents_meet_with_torchrun_options(
    tmp_path: Path, kind: str, start_etcd: StartEtcd
) -> None:
    rig = Rig(tmp_path, kind)
    if rig.backend == "C10d":
        with socket.create_server(("127.0.0.1", 0)) as held:
            endpoint = f"127.0.0.1:{held.getsockname()[1]}"
    else:
        server = start_etcd(kind.partition(" ")[2], arguments=("--enable-v2",))
        endpoint = f"127.0.0.1:{server.port}"
    rig.finish()
    backend = Backend(rig.backend).agent_name
    options = (
        *("agent", "--nnodes=2:2", f"--rdzv-backend={backend}", "--rdzv-id=run"),
        *(f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", "work.py"),
    )
    agents = [rig.start_other(*options) for _ in range(2)]
    said = [agent.communicate(timeout=PATIENCE_SECONDS)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "rank 0 of 2 round 1" in "".join(said)
    assert all("job run succeeded" in text for text in said)
    rig.close()
