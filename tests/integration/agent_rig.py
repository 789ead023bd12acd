"""What the agent's tests share: `elasticjob agent` processes, and workers that obey files.

A worker writes a file when it starts and counts its steps in another; it fails or finishes when a
file tells it to. So a test sees every worker of every round without torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.core.codec import decode
from elasticjob_rendezvous.core.records import Round
from tests.integration.etcd_server import EtcdServer

ROOT = Path(__file__).parents[2]
PYTHONPATH = ":".join(str(ROOT / part) for part in ("operator", "sidecar", "cli"))
PATIENCE_SECONDS = 20.0
STEADY = "last_call_timeout=15,settle=0.3,keep_alive_seconds=2,confirm=2,stop_grace=3"
QUICK = "last_call_timeout=0.5,settle=0.3,keep_alive_seconds=2,confirm=2,stop_grace=3"

WORKER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
env = os.environ
rank, number = env["RANK"], env["ELASTICJOB_ROUND"]

def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

names = [name for name in env if name.isupper()]
write(folder / f"started-{number}-{rank}", json.dumps({"pid": os.getpid(), **{n: env[n] for n in names}}))
step = 0
while True:
    step += 1
    write(folder / f"steps-{os.getpid()}", str(step))
    if (folder / "finish").exists():
        sys.exit(0)
    order = folder / f"fail-{rank}"
    if order.exists():
        order.unlink()
        raise ValueError("told to fail by a file")
    time.sleep(0.02)
"""


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """What `condition` gives once it is true; fails saying what was awaited."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.01)
    return value


@dataclass
class AgentProcess:
    """One `elasticjob agent`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{self.name} still runs:\n{self.output()}") from error

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Gang:
    """The agents of one run, their workers' folder and their rendezvous."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        self.folder = folder / "workers"
        self.folder.mkdir()
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.etcd = etcd
        self.run_id = f"run-{uuid.uuid4().hex[:10]}"
        self.agents: list[AgentProcess] = []

    def agent(
        self,
        nnodes: str,
        *options: str,
        command: tuple[str, ...] = (),
        conf: str = QUICK,
        name: str = "",
        env: dict[str, str] | None = None,
    ) -> AgentProcess:
        name = name or f"node-{len(self.agents)}"
        log = self.folder.parent / f"{name}-{len(self.agents)}.log"
        arguments = [
            f"--nnodes={nnodes}",
            f"--rdzv-endpoint=127.0.0.1:{self.etcd.port}",
            f"--rdzv-id={self.run_id}",
            f"--rdzv-conf={conf}",
            f"--name={name}",
            *options,
            *(command or (str(self.script), str(self.folder))),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "elasticjob_cli", "agent", *arguments],
                env={**os.environ, "PYTHONPATH": PYTHONPATH, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.agents.append(AgentProcess(name, process, log))
        return self.agents[-1]

    def started(self, number: int, world: int) -> list[dict[str, Any]]:
        """The environments of a round's workers, in rank order, once all have started."""

        def all_there() -> list[dict[str, Any]]:
            paths = [self.folder / f"started-{number}-{rank}" for rank in range(world)]
            if not all(path.exists() for path in paths):
                return []
            return [json.loads(path.read_text()) for path in paths]

        try:
            found: list[dict[str, Any]] = until(all_there, f"{world} workers of round {number}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error
        assert {worker["WORLD_SIZE"] for worker in found} == {str(world)}
        return found

    def steps(self, worker: dict[str, Any]) -> int:
        return int((self.folder / f"steps-{worker['pid']}").read_text())

    def stepping(self, worker: dict[str, Any]) -> None:
        """Wait until that worker has made a step from now on."""
        now = self.steps(worker)
        until(lambda: self.steps(worker) > now, f"a step of rank {worker['RANK']}")

    def fail(self, rank: int) -> None:
        (self.folder / f"fail-{rank}").touch()

    def finish(self) -> None:
        (self.folder / "finish").touch()

    def round(self) -> Round:
        key = f"/elasticjob/default/{self.run_id}/0/round"
        value = self.etcd.ctl("get", "--print-value-only", key)
        return decode(Round, key, value.encode())

    def outputs(self) -> str:
        return "\n".join(f"--- {agent.name}\n{agent.output()}" for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


@pytest.fixture
def gang(mark: str, tmp_path: Path, newest_etcd: EtcdServer) -> Iterator[Gang]:
    """A run of one's own on the shared etcd; its agents end with the test, and leave nothing."""
    gang = Gang(tmp_path, newest_etcd)
    yield gang
    gang.close()
