"""One example on two nodes with one worker each: ElasticJob's local cluster, or two torchruns.

Both systems run the same script with the same options in a folder of its own, with checkpoints that
both nodes share.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from bench import processes
from bench.etcd_proc import free_port
from bench.settings import REPOSITORY, child_environment, fresh_id
from bench.training.steps import newest_first_step
from elasticjob import layout
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.control_client import send_command
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, JobFolder

NODES = 2
STEPS = 1_000_000  # more than any measurement lasts
STEP_SECONDS = 0.1
MAX_RESTARTS = 100
POLL_SECONDS = 0.02
END_SECONDS = 20.0
_MARK = "BENCH_TRAINING"
_LOG_LETTERS = 2000


class JobFailed(Exception):
    """Job that ended, or did not reach a state in time; the text has the end of its log."""


class TrainingJob(ABC):
    """Running job. The victim of faults is the worker of the last node.

    Args:
        folder: the job's folder; it holds the script, its checkpoints and logs.
        program: command line of the script, from the interpreter on.
    """

    def __init__(self, folder: Path, program: list[str]) -> None:
        self.folder = folder
        self.program = program
        self.mark = fresh_id("training")
        self._started: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start the job."""

    @abstractmethod
    def workers_run(self) -> bool:
        """Return True if the worker of every node runs."""

    @abstractmethod
    def kill_worker(self) -> None:
        """Kill the victim. Raises JobFailed if it does not run."""

    @abstractmethod
    def first_steps(self) -> list[float | None]:
        """Return the Unix time of each node's newest first step."""

    def cold_reason(self) -> str | None:
        """Return the reason of the last round's cold starts; None for a warm one or unknown."""
        return None

    def wait(self, condition: Callable[[], Any], subject: str, seconds: float) -> Any:
        """Poll until the condition has a true value; return it. Raises JobFailed."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if any(process.poll() is not None for process in self._started):
                raise JobFailed(f"the job ended before {subject}: {self._log()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"{subject}: not within {seconds:g} s: {self._log()}")
            time.sleep(POLL_SECONDS)
        return value

    def stop(self) -> None:
        """Kill all processes of the job."""
        processes.end_marked(_MARK, self.mark, END_SECONDS)
        for process in self._started:
            process.wait(timeout=END_SECONDS)

    def _run(self, command: list[str], log: str, **environment: str) -> None:
        with (self.folder / log).open("wb") as output:
            self._started.append(
                subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=child_environment(**environment, **{_MARK: self.mark}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=processes.die_with_parent,
                )
            )

    def _log(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(path.read_text(errors="replace")[-_LOG_LETTERS:] for path in logs)


class ElasticJobRun(TrainingJob):
    """`elasticjob run` with the manifest of the example, changed in its size and command."""

    NAME = "job"

    def __init__(
        self, folder: Path, program: list[str], *, warm: bool, document: dict[str, Any]
    ) -> None:
        super().__init__(folder, program)
        self._warm = warm
        self._document = document
        self._store: JobFolder | None = None

    def start(self) -> None:
        (self.folder / "job.yaml").write_text(json.dumps(self._manifest()))
        (self.folder / "tmp").mkdir()
        state = str(self.folder / "state")
        os.environ["XDG_STATE_HOME"] = state  # where this process looks for the job
        self._store = JobFolder(DEFAULT_NAMESPACE, self.NAME)
        command = [sys.executable, "-m", "elasticjob_cli", "run", "--plain", "job.yaml"]
        self._run(command, "run.log", XDG_STATE_HOME=state, TMPDIR=str(self.folder / "tmp"))

    def workers_run(self) -> bool:
        status = self._status()
        members = status.get("members") or ()
        running = [member for member in members if member["state"] == "running"]
        return len(running) == NODES

    def kill_worker(self) -> None:
        assert self._store is not None
        pod = f"{self.NAME}-{NODES - 1}"
        try:
            send_command(self._store, "fault", kind="kill-worker", pod=pod)
        except CommandError as error:
            raise JobFailed(f"the worker of {pod} cannot be killed: {error}") from error

    def first_steps(self) -> list[float | None]:
        assert self._store is not None
        logs = self._store.logs
        return [
            newest_first_step(logs.glob(f"{self.NAME}-{node}/workers/*/round_*/0/progress"))
            for node in range(NODES)
        ]

    def cold_reason(self) -> str | None:
        rounds = self._status().get("rounds") or ()
        return max(rounds, key=lambda each: each["round"]).get("coldReason") if rounds else None

    def _status(self) -> dict[str, Any]:
        if self._store is None or not self._store.exists():
            return {}
        return self._store.object().get("status") or {}

    def _manifest(self) -> dict[str, Any]:
        document = json.loads(json.dumps(self._document))
        document["metadata"]["name"] = self.NAME
        document["spec"] |= {
            "minNodes": NODES,
            "maxNodes": NODES,
            "nodes": NODES,
            "maxRestarts": MAX_RESTARTS,
            "recovery": {"warmStart": "Auto" if self._warm else "Never"},
        }
        (container,) = document["spec"]["template"]["spec"]["containers"]
        container["command"] = self.program
        container.pop("args", None)
        return document  # type: ignore[no-any-return]


class TorchrunNodes(TrainingJob):
    """Two `torchrun --max-restarts` with the c10d backend, one for each node."""

    def start(self) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        for node in range(NODES):
            command = [
                self.program[0],
                *("-m", "torch.distributed.run"),
                f"--nnodes={NODES}",
                "--nproc-per-node=1",
                f"--max-restarts={MAX_RESTARTS}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={endpoint}",
                f"--rdzv-id={self.mark}",
                f"--rdzv-conf=is_host={str(node == 0).lower()}",
                "--local-addr=127.0.0.1",
                *self.program[1:],
            ]
            self._run(
                command,
                f"torchrun-{node}.log",
                TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # see bench.peers.commands
                **{layout.PROGRESS_FILE: str(self._progress(node))},
            )

    def workers_run(self) -> bool:
        return all(self._worker(node) is not None for node in range(NODES))

    def kill_worker(self) -> None:
        if (victim := self._worker(NODES - 1)) is None:
            raise JobFailed(f"node {NODES - 1} has no worker to kill: {self._log()}")
        processes.kill(victim)

    def first_steps(self) -> list[float | None]:
        return [newest_first_step([self._progress(node)]) for node in range(NODES)]

    def _progress(self, node: int) -> Path:
        return self.folder / f"progress-{node}"

    def _worker(self, node: int) -> int | None:
        agent = self._started[node].pid
        for pid in processes.below(agent):
            variables = processes.environment(pid)
            if processes.parent(pid) == agent and b"LOCAL_RANK=0" in variables:
                return pid
        return None


@contextlib.contextmanager
def running(
    framework: str, system: str, interpreter: Path, launcher: list[str]
) -> Iterator[TrainingJob]:
    """Start the example of a framework under a system in a temporary folder; clean up at the end.

    Args:
        system: `warm`, `cold` or `torchrun`.
        launcher: options between interpreter and script in ElasticJob's command, such as
            torchrun's.
    """
    example = REPOSITORY / "examples" / framework
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-") as temporary:
        folder = Path(temporary)
        shutil.copy(example / "train.py", folder)
        script = ["train.py", "--steps", str(STEPS), "--step-seconds", str(STEP_SECONDS)]
        job: TrainingJob
        if system == "torchrun":
            job = TorchrunNodes(folder, [str(interpreter), *script])
        else:
            document = yaml.safe_load((example / "elasticjob.yaml").read_text())
            program = [str(interpreter), *launcher, *script]
            job = ElasticJobRun(folder, program, warm=system == "warm", document=document)
        try:
            job.start()
            yield job
        finally:
            job.stop()
