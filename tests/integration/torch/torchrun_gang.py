"""Unmodified torchrun beside ElasticJob's agents, in gangs that share one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.processes import end_marked, kill
from tests.integration.agent_rig import PYTHONPATH, STEADY, AgentProcess, Gang, until
from tests.integration.etcd_server import EtcdServer
from tests.integration.torch.forked_program import forking_server

SLOW_SECONDS = 240.0
"""Timeout of a start, perhaps on a busy machine."""
_MARK = "TORCHRUN_OF_TEST"
"""Variable that a torchrun's workers inherit."""


class MixedGang(Gang):
    """Gang whose members are torchrun's agents or ours. A torchrun's workers may outlive it.

    `forked` are the words between `python` and a program that has torch imported already.
    """

    def __init__(self, folder: Path, etcd: EtcdServer, forked: tuple[str, ...]) -> None:
        super().__init__(folder, etcd)
        self.forked = forked

    def torchrun(
        self,
        nnodes: str,
        *options: str,
        name: str = "",
        command: tuple[str, ...] = (),
        conf: str = STEADY,
    ) -> AgentProcess:
        name = name or f"node-{len(self.agents)}"
        log = self.folder.parent / f"{name}-{len(self.agents)}.log"
        arguments = [
            f"--nnodes={nnodes}",
            "--rdzv-backend=elasticjob",
            f"--rdzv-endpoint=127.0.0.1:{self.etcd.port}",
            f"--rdzv-id={self.run_id}",
            f"--rdzv-conf={conf},node_name={name}",
            "--max-restarts=3",
            *options,
            *(command or (str(self.script), str(self.folder))),
        ]
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *self.forked, "-m", "torch.distributed.run", *arguments],
                env={
                    **os.environ,
                    "PYTHONPATH": PYTHONPATH,
                    "OMP_NUM_THREADS": "1",
                    _MARK: str(log),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.agents.append(AgentProcess(name, process, log))
        return self.agents[-1]

    def workers(self) -> list[dict[str, Any]]:
        """Return the environment of every worker that ever started."""
        return [json.loads(path.read_text()) for path in self.folder.glob("started-*")]

    def kill_node(self, agent: AgentProcess) -> None:
        """Send SIGKILL to an agent and to its workers, which would survive it otherwise."""
        children = _children(agent.process.pid)
        agent.process.kill()
        agent.process.wait()
        for pid in children:
            kill(pid)
        end_marked(_MARK, str(agent.log), SLOW_SECONDS)

    def close(self) -> None:
        for agent in self.agents:
            if agent.process.poll() is None:
                self.kill_node(agent)
        super().close()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for task in tasks for word in task.read_text().split()]


def ended(pid: int) -> None:
    """Wait until that process is gone."""
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")


@pytest.fixture
def gang(tmp_path: Path, newest_etcd: EtcdServer) -> Iterator[MixedGang]:
    """Yield a run of the test's own on the shared etcd; its agents end with the test."""
    with forking_server() as forked:
        gang = MixedGang(tmp_path, newest_etcd, forked)
        yield gang
        gang.close()
