"""Pods with `launch: PerNode`: a command runs once, and torchrun in it joins the job."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from elasticjob_agent.zipapp_build import install
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.agent_rig import LEASE_SECONDS, Gang, Pod, until
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import alive, process_tag
from tests.integration.torch.forked_program import forking_server

__all__ = ["gang", "process_tag"]

START_SECONDS = 240.0
"""Timeout of the first round: each torchrun imports torch before anything else."""
TORCHRUN = "python -m torch.distributed.run"

WORKER = """
import json, os, pathlib, sys, time
folder, env = pathlib.Path(sys.argv[1]), os.environ
rank, number = env["RANK"], env["ELASTICJOB_ROUND"]

def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

write(folder / f"started-{number}-{rank}", json.dumps({"pid": os.getpid(), **env}))
import torch, torch.distributed as dist
dist.init_process_group("gloo")
step = 0
while True:
    total = torch.ones(1)
    total += float((folder / "finish").exists())
    dist.all_reduce(total)
    step += 1
    write(folder / f"steps-{os.getpid()}", str(step))
    write(folder / f"reduced-{number}-{rank}", str(time.time()))
    if total.item() > dist.get_world_size():
        break
    order = folder / f"fail-{rank}"
    if order.exists():
        order.unlink()
        raise ValueError("told to fail by a file")
    time.sleep(0.02)
dist.destroy_process_group()
"""

MEETING = """
import json, os, pathlib, sys, time
from elasticjob_rendezvous.tcpstore import TCPStore, TCPStoreServer
folder, env = pathlib.Path(sys.argv[1]), os.environ
rank, number, world = env["RANK"], env["ELASTICJOB_ROUND"], int(env["WORLD_SIZE"])

def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

write(folder / f"started-{number}-{rank}", json.dumps({"pid": os.getpid(), **env}))
if rank == "0" and env["TORCHELASTIC_USE_AGENT_STORE"] != "True":
    server = TCPStoreServer("0.0.0.0", int(env["MASTER_PORT"]))
store = TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]))
if store.add(f"meeting/{number}", 1) == world:
    store.set(f"all/{number}", "here")
store.wait([f"all/{number}"])
write(folder / f"reduced-{number}-{rank}", str(time.time()))
step = 0
while not (folder / "finish").exists():
    step += 1
    write(folder / f"steps-{os.getpid()}", str(step))
    order = folder / f"fail-{rank}"
    if order.exists():
        order.unlink()
        raise ValueError("told to fail by a file")
    time.sleep(0.05)
"""
"""Worker that meets the others at the round's store, without torch and its import."""


class NodeGang(Gang):
    """Gang of pods that run a shell script each."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        super().__init__(folder, etcd)
        self.script.write_text(WORKER)
        self.start_words: Sequence[str] = ()
        self.launcher = folder / "elasticjob" / "launcher.pyz"
        self.launcher.parent.mkdir()
        install(self.launcher)

    def run(
        self,
        count: int,
        line: str = "",
        slots: int = 1,
        bounds: RendezvousParams | None = None,
        nnodes: str = "1:4",
    ) -> list[Pod]:
        return self.pods(
            count,
            self.launcher,
            LEASE_SECONDS,
            self.env(slots, nnodes),
            command=self.shell(line),
            bounds=bounds,
        )

    def add(self, name: str, line: str = "", slots: int = 1) -> Pod:
        return self.pod(name, self.launcher, LEASE_SECONDS, self.env(slots), self.shell(line))

    def env(self, slots: int = 1, nnodes: str = "1:4") -> dict[str, str]:
        return {
            "ELASTICJOB_LAUNCH": "PerNode",
            "ELASTICJOB_INIT": "1",  # ends all processes of the pod with it, as a container does
            "ELASTICJOB_SLOTS": str(slots),
            "ELASTICJOB_NNODES": nnodes,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def shell(self, line: str) -> tuple[str, ...]:
        line = line or f"{TORCHRUN} WORKER"
        words = (*self.start_words, self.script, self.folder)
        line = line.replace("WORKER", " ".join(map(str, words)))
        return ("bash", "-euo", "pipefail", "-c", f"echo preparing; {line}; echo the rest")

    def reduced(self, number: int, world: int, seconds: float = START_SECONDS) -> float:
        """Wait for the first all-reduce of a round, or for the meeting; return the time."""
        self.started(number, world, seconds)
        paths = [self.folder / f"reduced-{number}-{rank}" for rank in range(world)]
        try:
            until(lambda: all(path.exists() for path in paths), "all workers to meet", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error
        return time.monotonic()

    def ends(self, *pods: Pod) -> list[int]:
        try:
            return [pod.launcher.wait() for pod in pods]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error


def explained(pod: Pod) -> str:
    """Return the pod's termination message, which its agent writes at its end."""
    pod.agent.wait()
    return pod.termination_log.read_text()


@pytest.fixture
def gang(process_tag: str, tmp_path: Path, newest_etcd: EtcdServer) -> Iterator[NodeGang]:
    gang = NodeGang(tmp_path, newest_etcd)
    yield gang
    gang.close()


@pytest.fixture(scope="module")
def forked() -> Iterator[tuple[str, str]]:
    """Start the server before any test: it outlives them, and has no tag of theirs."""
    with forking_server() as words:
        yield words


@pytest.fixture
def training(forked: tuple[str, str], gang: NodeGang) -> NodeGang:
    """Return a gang whose workers use torch; they are forks of a server that has imported it."""
    gang.start_words = forked
    return gang


@pytest.fixture
def meeting(gang: NodeGang) -> NodeGang:
    """Return a gang whose workers do without torch: their torchruns alone import it."""
    gang.script.write_text(MEETING)
    return gang


def test_shell_script_on_two_nodes_trains_with_all_workers_and_succeeds(training: NodeGang) -> None:
    pods = training.run(2, slots=2)
    training.reduced(1, 4)
    found = training.started(1, 4)
    assert [worker["LOCAL_RANK"] for worker in found] == ["0", "1", "0", "1"]
    assert {worker["LOCAL_WORLD_SIZE"] for worker in found} == {"2"}
    assert len({worker["ELASTICJOB_PROGRESS_FILE"] for worker in found}) == 4
    assert not any("ELASTICJOB_TORCHRUN" in worker for worker in found)
    training.finish()
    assert training.ends(*pods) == [0, 0], training.outputs()
    for pod in pods:
        assert pod.launcher.output().count("preparing") == 1
        assert "the rest" in pod.launcher.output()


def test_line_for_another_operator_trains_on_all_nodes(training: NodeGang) -> None:
    options = (
        "--nnodes=$WORLD_SIZE --node_rank=$RANK --master_addr=$MASTER_ADDR "
        "--master_port=$MASTER_PORT --nproc_per_node=2"
    )
    pods = training.run(2, line=f"{TORCHRUN} {options} WORKER", slots=2, nnodes="2:2")
    training.reduced(1, 4)
    assert [worker["RANK"] for worker in training.started(1, 4)] == ["0", "1", "2", "3"]
    training.finish()
    assert training.ends(*pods) == [0, 0], training.outputs()
    notice = "variables of other operators, which are set"
    assert [pod.launcher.output().count(notice) for pod in pods] == [1, 1], training.outputs()


def test_killed_worker_is_replaced_by_the_same_torchrun(training: NodeGang) -> None:
    pods = training.run(2)
    training.reduced(1, 2)
    found = training.started(1, 2)
    os.kill(found[1]["pid"], signal.SIGKILL)
    killed = time.monotonic()
    training.started(2, 2)
    started = time.monotonic() - killed
    reduced = training.reduced(2, 2) - killed
    print(f"new workers after {started:.2f} s, the next all-reduce after {reduced:.2f} s")
    assert not any(alive(worker["pid"]) for worker in found)
    training.finish()
    assert training.ends(*pods) == [0, 0], training.outputs()
    assert all(pod.launcher.output().count("preparing") == 1 for pod in pods)


def test_lost_node_is_left_out_and_its_replacement_joins(meeting: NodeGang) -> None:
    first, lost = meeting.run(2)
    meeting.reduced(1, 2)
    for process in (lost.launcher, lost.agent):
        process.process.kill()
    meeting.reduced(2, 1)
    meeting.add("pod-1b")
    meeting.reduced(3, 2)
    meeting.finish()
    assert meeting.ends(first) == [0], meeting.outputs()
    assert first.launcher.output().count("preparing") == 1


def test_leaving_node_stops_its_workers_and_the_others_continue(meeting: NodeGang) -> None:
    first, leaving = meeting.run(2)
    meeting.reduced(1, 2)
    leaving.pre_stop()
    meeting.reduced(2, 1)
    assert meeting.ends(leaving) == [143], meeting.outputs()
    meeting.finish()
    assert meeting.ends(first) == [0], meeting.outputs()


def test_job_grows_and_shrinks_with_its_nodes(training: NodeGang) -> None:
    (first,) = training.run(1)
    training.reduced(1, 1)
    second = training.add("pod-1")
    training.reduced(2, 2)
    second.pre_stop()
    training.reduced(3, 1)
    assert training.ends(second) == [143], training.outputs()
    training.finish()
    assert training.ends(first) == [0], training.outputs()
    assert first.launcher.output().count("preparing") == 1


def test_restarted_agent_adopts_the_workers(meeting: NodeGang) -> None:
    # The workers' deadline follows the lease: it must leave time for a new agent on a busy machine.
    (pod,) = meeting.run(1, bounds=RendezvousParams(1, 4, expected=1, keep_alive_seconds=120.0))
    meeting.reduced(1, 1)
    (worker,) = meeting.started(1, 1)
    pod.agent.process.kill()
    pod.agent.wait()
    meeting.stepping(worker)
    pod.start_agent()
    until(pod.is_ready, "readiness of the new agent")
    meeting.stepping(worker)
    assert meeting.round().number == 1
    meeting.finish()
    assert meeting.ends(pod) == [0], meeting.outputs()


FOREIGN = (
    "--standalone --nproc-per-node=1",
    "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:1 --rdzv-id=x --max-restarts=0",
    "--nnodes=4 --node-rank=0 --master-addr=127.0.0.1 --master-port=1 --monitor-interval=30",
    "--nnodes=1 --max-restarts=0",
)
"""Options of torchrun for other rendezvous, one line for each node."""


def test_options_of_another_rendezvous_do_not_keep_torchrun_from_the_job(meeting: NodeGang) -> None:
    """The worker of each node fails once, after which all torchruns start theirs again."""
    world = len(FOREIGN)
    bounds = RendezvousParams(
        1,
        4,
        expected=world,
        keep_alive_seconds=LEASE_SECONDS,
        stop_grace_seconds=3.0,
        max_restarts=world,
    )
    first, *others = (f"{TORCHRUN} {options} WORKER" for options in FOREIGN)
    pods = meeting.run(1, first, bounds=bounds)
    for index, line in enumerate(others, start=1):
        pods = [*pods, meeting.add(f"pod-{index}", line)]
    meeting.reduced(1, world)
    for rank in range(world):
        meeting.fail(rank)
        meeting.reduced(rank + 2, world)
    meeting.finish()
    assert meeting.ends(*pods) == [0] * world, meeting.outputs()


HANGING = """
import os, time
from elasticjob import train
for step in range(10):
    train.progress(step)
    time.sleep(0.1)
if os.environ["ELASTICJOB_ROUND"] == "1" and os.environ["RANK"] == "1":
    time.sleep(1000)
"""


def test_hanging_workers_are_replaced_and_the_hang_is_the_failure(
    gang: NodeGang, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICJOB_HANG_TIMEOUT_SECONDS", "2")
    gang.script.write_text(HANGING)
    (pod,) = gang.run(1, slots=2)
    assert gang.ends(pod) == [0], gang.outputs()
    assert re.search(r"no progress for 2 s after step \d", pod.agent.output())
    assert gang.round().number == 2


def test_spent_budget_ends_the_job_with_the_workers_traceback(meeting: NodeGang) -> None:
    params = RendezvousParams(
        1, 4, expected=2, keep_alive_seconds=LEASE_SECONDS, stop_grace_seconds=3.0, max_restarts=1
    )
    pods = meeting.run(2, bounds=params)
    meeting.reduced(1, 2)
    meeting.fail(1)
    meeting.reduced(2, 2)
    meeting.fail(1)
    assert meeting.ends(*pods) == [1, 1], meeting.outputs()
    for pod in pods:
        said = explained(pod)
        assert "rank 1" in said
        assert "ValueError: told to fail by a file" in said
        assert "worker.py" in said


def test_command_of_several_nodes_that_never_joins_fails(gang: NodeGang) -> None:
    params = RendezvousParams(1, 4, expected=2, keep_alive_seconds=LEASE_SECONDS, max_restarts=0)
    pods = gang.run(2, "true", bounds=params)
    assert gang.ends(*pods) == [1, 1], gang.outputs()
    assert "without joining the rendezvous" in explained(pods[0])


def test_failing_preparation_counts_as_a_failure_with_its_error(gang: NodeGang) -> None:
    params = RendezvousParams(1, 4, expected=2, keep_alive_seconds=LEASE_SECONDS, max_restarts=1)
    pods = gang.run(2, "python -c 'raise ValueError(13)'", bounds=params)
    assert gang.ends(*pods) == [1, 1], gang.outputs()
    assert "ValueError: 13" in explained(pods[0])


def test_node_joins_with_the_number_of_workers_of_its_torchrun(meeting: NodeGang) -> None:
    (pod,) = meeting.run(1, f"{TORCHRUN} --nproc-per-node=2 WORKER")
    meeting.reduced(1, 2)
    meeting.finish()
    assert meeting.ends(pod) == [0], meeting.outputs()


def test_single_node_may_run_several_torchruns_one_after_the_other(meeting: NodeGang) -> None:
    params = RendezvousParams(1, 1, expected=1, keep_alive_seconds=LEASE_SECONDS)
    line = f"{TORCHRUN} WORKER; {TORCHRUN} WORKER"
    (pod,) = meeting.run(1, line, bounds=params, nnodes="1:1")
    meeting.reduced(1, 1)
    meeting.finish()
    assert meeting.ends(pod) == [0], meeting.outputs()
    assert pod.launcher.output().count("the rest") == 1


def test_second_torchrun_of_a_job_with_several_nodes_fails(meeting: NodeGang) -> None:
    params = RendezvousParams(1, 4, expected=2, keep_alive_seconds=LEASE_SECONDS, max_restarts=0)
    pods = meeting.run(2, f"{TORCHRUN} WORKER; {TORCHRUN} WORKER", bounds=params)
    meeting.reduced(1, 2)
    meeting.finish()
    assert meeting.ends(*pods) == [1, 1], meeting.outputs()
    assert "second torchrun" in explained(pods[0])
