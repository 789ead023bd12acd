"""Processes of a pod without Kubernetes: a launcher with its training command, and its agent."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import etcd_proc
from bench.processes import alive, die_with_parent
from bench.settings import OUR_ETCD_VERSION, child_environment, etcd_binary, fresh_id
from elasticjob_agent.zipapp_build import build_zipapp
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.protocol.kv import Put
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.params import RendezvousParams

END_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Pod:
    """Process ids of the pod; `folder` is the training command's working folder."""

    agent: int
    launcher: int
    folder: Path

    @property
    def log(self) -> Path:
        """File with the output of agent, launcher and workers."""
        return self.folder / "log"

    def runs(self) -> bool:
        return alive(self.agent) and alive(self.launcher)


@contextlib.contextmanager
def pod(command: Sequence[str]) -> Iterator[Pod]:
    """Run a gang of one with its own etcd until the end of the block."""
    with contextlib.ExitStack() as stack:
        # Short: a unix socket's path has at most 107 bytes.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ej-")))
        server = etcd_proc.etcd_server(etcd_binary(OUR_ETCD_VERSION), v2=False)
        endpoint = stack.enter_context(server).endpoint
        prefix = job_prefix("default", fresh_id("pod"), 0)
        asyncio.run(_write_bounds(endpoint, prefix))
        environment = _environment(folder, endpoint, prefix)
        output = stack.enter_context((folder / "log").open("wb"))
        zipapp = build_zipapp(folder / "launcher.pyz")
        processes = []
        for arguments in ([str(zipapp), "--", *command], ["-m", "elasticjob_agent"]):
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=die_with_parent,
            )
            processes.append(process)
            stack.callback(_end, process)
        launcher, agent = processes
        yield Pod(agent.pid, launcher.pid, folder)


async def _write_bounds(endpoint: str, prefix: str) -> None:
    """Write the bounds, as the operator does before it creates pods."""
    async with Client((endpoint,)) as client:
        await client.put(Put(Keys(prefix).bounds, encode(RendezvousParams(1, 1))))


def _environment(folder: Path, endpoint: str, prefix: str) -> dict[str, str]:
    key = folder / "job-key"
    key.write_bytes(b"a secret of this run")
    return child_environment(
        ELASTICJOB_PREFIX=prefix,
        ELASTICJOB_MEMBER_ID="pod-0",
        ELASTICJOB_NAME="pod-0",
        ELASTICJOB_ADDRESS="127.0.0.1",
        ELASTICJOB_BIND_ADDRESS="127.0.0.1",
        ELASTICJOB_ENDPOINTS=endpoint,
        ELASTICJOB_JOB_KEY_FILE=str(key),
        ELASTICJOB_SOCKET=str(folder / "launcher.sock"),
        ELASTICJOB_CONTROL=str(folder / "control.sock"),
        ELASTICJOB_LOG_DIR=str(folder / "logs"),
        ELASTICJOB_TERMINATION_LOG=str(folder / "termination-log"),
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Stop a process with SIGTERM, on which the launcher also ends its workers."""
    process.terminate()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=END_SECONDS)
