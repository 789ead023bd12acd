"""Agents beside launchers, as in pods: an agent dies alone, a launcher takes its workers along."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.agent_rig import Gang, gang, until
from tests.integration.launcher_rig import alive, launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

RESTART_SECONDS = 60.0
"""Lease that outlasts a restart of the agent, and its probes: at its end the workers end."""


@pytest.fixture
def unprivileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start all processes without root's capabilities, which would open every process."""
    start = subprocess.Popen
    words = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()

    def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([*words, *command], **options)

    monkeypatch.setattr(subprocess, "Popen", started)


def readable(path: str) -> bool:
    """Return True if another process of this user can open the file, or list the folder."""
    words = ("ls", path) if path.endswith("/") else ("head", "-c1", path)
    return subprocess.run(words, capture_output=True, timeout=60).returncode == 0


@pytest.mark.usefixtures("unprivileged")
def test_processes_of_same_user_cannot_open_agents_files(gang: Gang, launcher_file: Path) -> None:
    """As the trainer with shareProcessNamespace; the launcher and the workers stay open to it."""
    (pod,) = gang.pods(1, launcher_file)
    (worker,) = gang.started(1, 1)
    open_pids = (pod.launcher.process.pid, worker["pid"])
    for part in ("environ", "root/", "cwd/", "maps"):
        assert not readable(f"/proc/{pod.agent.process.pid}/{part}"), part
        assert all(readable(f"/proc/{pid}/{part}") for pid in open_pids), part
    gang.finish()
    assert pod.agent.wait() == 0, gang.outputs()


def test_restarted_agent_adopts_running_workers(gang: Gang, launcher_file: Path) -> None:
    pods = gang.pods(2, launcher_file, RESTART_SECONDS)
    workers = gang.started(1, 2)
    for pod in pods:
        pod.agent.signal(signal.SIGKILL)
        pod.agent.wait()
        assert alive(workers[0]["pid"])
        assert alive(workers[1]["pid"])
        pod.start_agent().says("took over round 1")
    for worker in workers:
        gang.stepping(worker)
    assert gang.round().number == 1, gang.outputs()
    gang.finish()
    assert [pod.agent.wait() for pod in pods] == [0, 0], gang.outputs()
    assert [pod.launcher.wait() for pod in pods] == [0, 0], gang.outputs()
    assert gang.round().charged == ()
    assert pods[0].termination_log.read_text() == f"job {gang.run_id} succeeded"


def test_restarted_agent_catches_up_with_missed_round(gang: Gang, launcher_file: Path) -> None:
    pods = gang.pods(2, launcher_file, RESTART_SECONDS)
    workers = gang.started(1, 2)
    pods[1].agent.signal(signal.SIGKILL)
    pods[1].agent.wait()
    gang.fail(1)
    until(lambda: not alive(workers[1]["pid"]), "the worker's failure")
    returned = pods[1].start_agent()
    returned.says("took over round 1: its workers ended meanwhile")
    returned.says("ValueError: told to fail by a file")
    # Round 2, or the one after it if the probe of the launcher was quicker than the new agent.
    again = [gang.folder / f"started-{number}-1" for number in (2, 3)]
    until(lambda: any(path.exists() for path in again), "the node's next round")
    gang.finish()
    assert [pod.agent.wait() for pod in pods] == [0, 0], gang.outputs()


def test_etcd_without_v2_api_ends_pod_with_error(gang: Gang, launcher_file: Path) -> None:
    bounds = encode(RendezvousParams(1, 1)).decode()
    given = {"ELASTICJOB_BACKEND": "etcd-v2", "ELASTICJOB_BOUNDS": bounds}
    (pod,) = gang.pods(1, launcher_file, env=given)
    assert (pod.agent.wait(), pod.launcher.wait()) == (3, 3), gang.outputs()
    assert f"{gang.etcd.url} (etcd 3.7" in pod.termination_log.read_text()


def test_lost_launcher_removes_its_node(gang: Gang, launcher_file: Path) -> None:
    pods = gang.pods(2, launcher_file)
    gang.started(1, 2)
    pods[1].launcher.signal(signal.SIGKILL)
    gang.started(2, 1)
    assert pods[1].agent.wait() == 1
    assert "its launcher is gone" in pods[1].termination_log.read_text()
    gang.finish()
    assert pods[0].agent.wait() == 0, gang.outputs()


def test_pod_deletion_is_an_uncharged_leave(gang: Gang, launcher_file: Path) -> None:
    pods = gang.pods(3, launcher_file)
    gang.started(1, 3)
    pods[0].pre_stop()
    assert pods[0].agent.wait() == 0, gang.outputs()
    assert pods[0].launcher.wait() == 143
    workers = gang.started(2, 2)
    pods[2].launcher.signal(signal.SIGTERM)  # SIGTERM to the trainer, without preStop
    assert pods[2].agent.wait() == 0, gang.outputs()
    gang.started(3, 1)
    assert {worker["TORCHELASTIC_RESTART_COUNT"] for worker in workers} == {"0"}
    gang.finish()
    assert pods[1].agent.wait() == 0, gang.outputs()
    assert gang.round().state is RoundState.CLOSED
    assert gang.round().charged == ()


def test_readiness_needs_launcher_and_lease(gang: Gang, launcher_file: Path) -> None:
    [pod] = gang.pods(1, launcher_file, RESTART_SECONDS)
    [worker] = gang.started(1, 1)
    assert pod.is_ready()
    pod.agent.signal(signal.SIGKILL)
    pod.agent.wait()
    assert not pod.is_ready()
    endpoints, pod.env["ELASTICJOB_ENDPOINTS"] = pod.env["ELASTICJOB_ENDPOINTS"], "127.0.0.1:1"
    cut_off = pod.start_agent()
    cut_off.says("took over round 1")
    assert not pod.is_ready(), "it has workers, but no lease"
    gang.stepping(worker)
    cut_off.signal(signal.SIGKILL)
    cut_off.wait()
    pod.env["ELASTICJOB_ENDPOINTS"] = endpoints
    pod.start_agent()
    until(pod.is_ready, "the lease")
    gang.finish()
    assert pod.agent.wait() == 0, gang.outputs()
