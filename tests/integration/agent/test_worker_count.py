"""Agents that learn their number of workers from the launcher of their pod."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.integration.agent_rig import PYTHONPATH, Gang, gang, until
from tests.integration.launcher_rig import alive, launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

FROM_A_FILE = """
import pathlib
__version__ = "2.9.0"
class accelerator:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: int(pathlib.Path(__file__).with_name("number").read_text()))
"""
HANGS = """
import pathlib, time
pathlib.Path(__file__).with_name("hangs").touch()
time.sleep(1000)
"""


def torch_of(folder: Path, source: str) -> tuple[Path, dict[str, str]]:
    """Write a package in place of torch; return it and the environment that finds it.

    It shadows torch for the launchers' counts; agents and test workers do not import torch.
    """
    package = folder / "stub" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return package, {"PYTHONPATH": f"{package.parent}:{PYTHONPATH}"}


def test_nodes_with_different_numbers_of_workers_train_together(
    gang: Gang, launcher_file: Path
) -> None:
    pods = gang.pods(2, launcher_file, nproc=("4/2", "1"))
    workers = gang.started(1, 3)
    assert [worker["LOCAL_WORLD_SIZE"] for worker in workers] == ["2", "2", "1"]
    assert [worker["LOCAL_RANK"] for worker in workers] == ["0", "1", "0"]
    gang.fail(2)
    again = gang.started(2, 3)
    assert [worker["LOCAL_WORLD_SIZE"] for worker in again] == ["2", "2", "1"]
    assert {worker["ELASTICJOB_MAX_WORLD_SIZE"] for worker in again} == {"8"}
    gang.finish()
    assert [pod.agent.wait() for pod in pods] == [0, 0], gang.outputs()


def test_restarted_agent_keeps_the_number_that_the_launcher_counted(
    gang: Gang, launcher_file: Path, tmp_path: Path
) -> None:
    package, env = torch_of(tmp_path, FROM_A_FILE)
    (package / "number").write_text("3")
    # The lease outlasts the start of the next agent on a busy machine: the workers are not killed.
    (pod,) = gang.pods(1, launcher_file, 60.0, env=env, nproc=("accelerators",))
    workers = gang.started(1, 3)
    (package / "number").write_text("5")
    pod.agent.signal(signal.SIGKILL)
    pod.agent.wait()
    assert all(alive(worker["pid"]) for worker in workers)
    returned = pod.start_agent()
    returned.says("this node runs 3 workers")
    returned.says("took over round 1: its workers still run")
    gang.fail(1)
    gang.started(2, 3)
    gang.finish()
    assert pod.agent.wait() == 0, gang.outputs()


def test_pod_is_ready_only_after_the_count(gang: Gang, launcher_file: Path, tmp_path: Path) -> None:
    package, env = torch_of(tmp_path, HANGS)
    (pod,) = gang.pods(1, launcher_file, env=env, nproc=("auto",))
    until((package / "hangs").exists, "the count")
    until(pod.control.exists, "the agent's control socket")
    assert not pod.is_ready()
    pod.pre_stop()
    assert pod.agent.wait() == 0, gang.outputs()
    pod.launcher.signal(signal.SIGTERM)
    assert pod.launcher.wait() == 128 + signal.SIGTERM
