"""Pods with `launch: PerNode`: a command runs once, and torchrun in it joins the job."""

from __future__ import annotations

import os
import sys
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.zipapp_build import install
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.agent_rig import PYTHONPATH, Gang, Pod, until
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import alive, process_tag

START_SECONDS = 60.0
"""Timeout of the first round: each torchrun imports torch before anything else."""
RECOVERY_SECONDS = 3.0
TORCHRUN = "python -m torch.distributed.run"

WORKER = """
import json, os, pathlib, sys, time
import torch, torch.distributed as dist
folder, env = pathlib.Path(sys.argv[1]), os.environ
rank, number = env["RANK"], env["ELASTICJOB_ROUND"]

def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

write(folder / f"started-{number}-{rank}", json.dumps({"pid": os.getpid(), **env}))
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


class NodeGang(Gang):
    """Gang of pods that run a shell script each."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        super().__init__(folder, etcd)
        self.script.write_text(WORKER)
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
        return self.pods(count, self.launcher, 3.0, self.env(slots, nnodes), self.shell(line), bounds)

    def add(self, name: str, line: str = "", slots: int = 1) -> Pod:
        return self.pod(name, self.launcher, 3.0, self.env(slots), self.shell(line))

    def env(self, slots: int = 1, nnodes: str = "1:4") -> dict[str, str]:
        return {
            "ELASTICJOB_LAUNCH": "PerNode",
            "ELASTICJOB_SLOTS": str(slots),
            "ELASTICJOB_NNODES": nnodes,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def shell(self, line: str) -> tuple[str, ...]:
        line = line or f"{TORCHRUN} WORKER"
        line = line.replace("WORKER", f"{self.script} {self.folder}")
        return ("bash", "-euo", "pipefail", "-c", f"echo preparing; {line}; echo the rest")

    def bounds(self, **values: Any) -> None:
        params = RendezvousParams(1, 4, keep_alive_seconds=3.0, stop_grace_seconds=3.0, **values)
        self.etcd.ctl("put", Keys(self.prefix).bounds, encode(params).decode())

    def reduced(self, number: int, world: int, seconds: float = START_SECONDS) -> float:
        """Return the time of the first all-reduce of a round seen here."""
        self.started(number, world, seconds)
        paths = [self.folder / f"reduced-{number}-{rank}" for rank in range(world)]
        try:
            until(lambda: all(path.exists() for path in paths), "an all-reduce", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error
        return time.monotonic()

    def ends(self, *pods: Pod) -> list[int]:
        try:
            return [pod.launcher.wait(30) for pod in pods]
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error


@pytest.fixture
def gang(process_tag: str, tmp_path: Path, newest_etcd: EtcdServer) -> Iterator[NodeGang]:
    gang = NodeGang(tmp_path, newest_etcd)
    yield gang
    gang.close()


def test_shell_script_on_two_nodes_trains_recovers_and_succeeds(gang: NodeGang) -> None:
    pods = gang.run(2, slots=2)
    gang.reduced(1, 4)
    found = gang.started(1, 4)
    assert [worker["LOCAL_RANK"] for worker in found] == ["0", "1", "0", "1"]
    assert {worker["LOCAL_WORLD_SIZE"] for worker in found} == {"2"}
    assert not any("ELASTICJOB_TORCHRUN" in worker for worker in found)
    os.kill(found[1]["pid"], signal.SIGKILL)
    killed = time.monotonic()
    recovered = gang.reduced(2, 4) - killed
    assert recovered < RECOVERY_SECONDS, f"{recovered:.1f} s"
    print(f"recovered in {recovered:.2f} s")
    assert not any(alive(worker["pid"]) for worker in found)
    gang.finish()
    assert gang.ends(*pods) == [0, 0], gang.outputs()
    assert "the rest" in pods[0].launcher.output()
    assert pods[0].launcher.output().count("preparing") == 1
