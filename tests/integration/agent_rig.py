"""Test rig for agents: `elasticjob agent` processes, and workers controlled by files.

A worker writes a file when it starts and counts its steps in another; it fails or finishes when a
file requests it. A test thus observes every worker of every round without torch.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.etcd_server import EtcdServer, pause
from tests.paths import ROOT

PYTHONPATH = ":".join(
    str(ROOT / part) for part in ("operator", "sdk", "rendezvous", "sidecar", "cli")
)
PATIENCE_SECONDS = 120.0
"""Timeout of any wait, on a busy machine; no test asserts a time with it."""
LEASE_SECONDS = 10.0
"""Lease where none is to expire: an agent on a busy machine may be silent for several seconds."""
STEADY = "last_call_timeout=60,settle=0.3,keep_alive_seconds=10,confirm=2,stop_grace=3"
TORCHS = "last_call_timeout=0.5,settle=0.3,stop_grace=3"  # accepted by each of torch's backends
QUICK = "last_call_timeout=0.5,settle=0.3,keep_alive_seconds=10,confirm=2,stop_grace=3"

WORKER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
env = os.environ
rank, number = env["RANK"], env["ELASTICJOB_ROUND"]

def write(path, text):
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)

write(folder / f"started-{number}-{rank}", json.dumps({"pid": os.getpid(), **env}))
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
    """Poll `condition` until it returns a true value and return it; name `what` on a timeout."""
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < began + seconds, f"waited {seconds:g} s in vain for {what}"
        pause(began)
    return value


@dataclass
class AgentProcess:
    """Running `elasticjob agent`."""

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

    def says(self, text: str) -> None:
        """Wait until its output contains that text."""
        until(lambda: text in self.output(), f"{text!r} of {self.name}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Gang:
    """Agents of one run, their workers' folder and their rendezvous."""

    def __init__(self, folder: Path, etcd: EtcdServer) -> None:
        self.folder = folder / "workers"
        self.folder.mkdir()
        self.script = folder / "worker.py"
        self.script.write_text(WORKER)
        self.etcd = etcd
        self.run_id = f"run-{uuid.uuid4().hex[:10]}"
        self.agents: list[AgentProcess] = []
        self._pods: list[Pod] = []

    def agent(
        self,
        nnodes: str,
        *options: str,
        command: tuple[str, ...] = (),
        conf: str = "",
        name: str = "",
        env: dict[str, str] | None = None,
    ) -> AgentProcess:
        name = name or f"node-{len(self.agents)}"
        torchs = any(option.startswith("--rdzv-backend=") for option in options)
        conf = conf or (TORCHS if torchs else QUICK)
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

    def started(
        self, number: int, world: int, seconds: float = PATIENCE_SECONDS
    ) -> list[dict[str, Any]]:
        """Return the environments of a round's workers, in rank order, once all have started."""

        def all_there() -> list[dict[str, Any]]:
            paths = [self.folder / f"started-{number}-{rank}" for rank in range(world)]
            if not all(path.exists() for path in paths):
                return []
            return [json.loads(path.read_text()) for path in paths]

        try:
            found: list[dict[str, Any]] = until(
                all_there, f"{world} workers of round {number}", seconds
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.outputs()}") from error
        assert {worker["WORLD_SIZE"] for worker in found} == {str(world)}
        return found

    def steps(self, worker: dict[str, Any]) -> int:
        """Return the worker's number of steps; it reports its start before the first one."""
        path = self.folder / f"steps-{worker['pid']}"
        return int(path.read_text()) if path.exists() else 0

    def stepping(self, worker: dict[str, Any]) -> None:
        """Wait for another step of that worker."""
        now = self.steps(worker)
        until(lambda: self.steps(worker) > now, f"a step of rank {worker['RANK']}")

    def fail(self, rank: int) -> None:
        (self.folder / f"fail-{rank}").touch()

    def finish(self) -> None:
        (self.folder / "finish").touch()

    @property
    def prefix(self) -> str:
        return job_prefix("default", self.run_id, 0)

    def pods(
        self,
        count: int,
        launcher: Path,
        lease_seconds: float = LEASE_SECONDS,
        env: dict[str, str] | None = None,
        nproc: Sequence[str] = (),
        command: tuple[str, ...] = (),
        bounds: RendezvousParams | None = None,
    ) -> list[Pod]:
        """Return pods of one job with an operator's bounds; `env` is added for their processes.

        `nproc` has a word for each pod by which its launcher counts the workers. `command` replaces
        the worker's script.
        """
        bounds = bounds or RendezvousParams(
            1, 4, expected=count, keep_alive_seconds=lease_seconds, stop_grace_seconds=3.0
        )
        self.etcd.ctl("put", Keys(self.prefix).bounds, encode(bounds).decode())
        for index, counted in enumerate(_counted(nproc) or [{}] * count):
            added = {**(env or {}), **counted}
            self.pod(f"pod-{index}", launcher, lease_seconds, added, command)
        return self._pods

    def pod(
        self,
        name: str,
        launcher: Path,
        lease_seconds: float = LEASE_SECONDS,
        env: dict[str, str] | None = None,
        command: tuple[str, ...] = (),
    ) -> Pod:
        """Start another pod of the job."""
        self._pods.append(Pod(self, name, launcher, lease_seconds, env or {}, command))
        return self._pods[-1]

    def round(self) -> Round:
        key = Keys(self.prefix).round
        value = self.etcd.ctl("get", "--print-value-only", key)
        return decode(Round, key, value.encode())

    def outputs(self) -> str:
        return "\n".join(f"--- {agent.name}\n{agent.output()}" for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for pod in self._pods:
            shutil.rmtree(pod.folder)


def _counted(nproc: Sequence[str]) -> list[dict[str, str]]:
    return [{"ELASTICJOB_SLOTS": "launcher", "ELASTICJOB_NPROC": word} for word in nproc]


class Pod:
    """Launcher and its agent, as in a pod: two processes and a socket."""

    def __init__(
        self,
        gang: Gang,
        name: str,
        launcher: Path,
        lease_seconds: float,
        env: dict[str, str],
        command: tuple[str, ...] = (),
    ) -> None:
        self._gang = gang
        self.name = name
        # Short: a unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ej-"))
        self.control = self.folder / "control.sock"
        self.termination_log = self.folder / "termination-log"
        key = self.folder / "job-key"
        key.write_bytes(b"a secret of this run")
        self.env = {
            **os.environ,
            "PYTHONPATH": PYTHONPATH,
            "ELASTICJOB_PREFIX": gang.prefix,
            "ELASTICJOB_MEMBER_ID": f"uid-{name}",
            "ELASTICJOB_NAME": name,
            "ELASTICJOB_ADDRESS": "127.0.0.1",
            "ELASTICJOB_BIND_ADDRESS": "127.0.0.1",
            "ELASTICJOB_ENDPOINTS": f"127.0.0.1:{gang.etcd.port}",
            "ELASTICJOB_JOB_KEY_FILE": str(key),
            "ELASTICJOB_SOCKET": str(self.folder / "launcher.sock"),
            "ELASTICJOB_CONTROL": str(self.control),
            "ELASTICJOB_LOG_DIR": str(self.folder / "logs"),
            "ELASTICJOB_STOP_GRACE_SECONDS": "3",
            "ELASTICJOB_KEEP_ALIVE_SECONDS": str(lease_seconds),
            "ELASTICJOB_TERMINATION_LOG": str(self.termination_log),
            **env,
        }
        worker = command or (sys.executable, str(gang.script), str(gang.folder))
        self.launcher = self._run("launcher", str(launcher), "--", *worker)
        self.agent = self.start_agent()

    def start_agent(self) -> AgentProcess:
        self.agent = self._run("agent", "-m", "elasticjob_agent")
        return self.agent

    def _run(self, what: str, *arguments: str) -> AgentProcess:
        log = self._gang.folder.parent / f"{self.name}-{what}-{len(self._gang.agents)}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self._gang.agents.append(AgentProcess(f"{self.name}'s {what}", process, log))
        return self._gang.agents[-1]

    def is_ready(self) -> bool:
        """Return True if a readiness probe in the agent's container succeeds."""
        command = [sys.executable, "-m", "elasticjob_agent", "ready"]
        done = subprocess.run(command, env=self.env, capture_output=True, timeout=PATIENCE_SECONDS)
        return done.returncode == 0

    def pre_stop(self) -> None:
        """Run the agent container's preStop hook."""
        command = [sys.executable, "-m", "elasticjob_agent", "leave", "the pod is deleted"]
        subprocess.run(command, env=self.env, check=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def gang(process_tag: str, tmp_path: Path, newest_etcd: EtcdServer) -> Iterator[Gang]:
    """Yield a run of the test's own on the shared etcd; its agents end with the test."""
    gang = Gang(tmp_path, newest_etcd)
    yield gang
    gang.close()
