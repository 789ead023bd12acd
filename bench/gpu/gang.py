"""Gangs of the GPU check with one worker on each node: `elasticjob run`, or torchrun's agents."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from bench import processes
from bench.etcd_proc import free_port
from bench.gpu.checks import Case, Fault, Result, System, judged, lost, recovered_at
from bench.peers.commands import OWN_STORE
from bench.settings import child_environment, fresh_id
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.control_client import send_command
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, JobFolder

SCRIPT = Path(__file__).with_name("train.py")
NAME = "gpu-check"
STEADY_STEPS = 200
"""Steps before the fault: ten seconds, in which the next interpreter is preloaded."""
POLL_SECONDS = 0.02
END_SECONDS = 20.0
STATUS_SECONDS = 10.0
_MARK = "BENCH_GPU"
_LOG_CHARACTERS = 2000


class NoRecovery(Exception):
    """Gang that ended or did not reach a state in time; the text has the end of its log."""


class Gang:
    """Gang of a case under `elasticjob run`, in a folder of its own.

    `interpreter` runs the training script and has torch.
    """

    def __init__(self, case: Case, folder: Path, interpreter: str, device: str) -> None:
        self._case, self._folder = case, folder
        self._interpreter, self._device = interpreter, device
        self._mark = fresh_id("gpu")
        self._runners: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        (self._folder / "steps").mkdir()
        (self._folder / "tmp").mkdir()
        shutil.copy(SCRIPT, self._folder / "train.py")
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        processes.end_marked(_MARK, self._mark, END_SECONDS)
        for runner in self._runners:
            runner.wait(timeout=END_SECONDS)

    def _start(self) -> None:
        (self._folder / "job.yaml").write_text(json.dumps(self._manifest()))
        state = str(self._folder / "state")
        os.environ["XDG_STATE_HOME"] = state  # where this process looks for the job
        self._job = JobFolder(DEFAULT_NAMESPACE, NAME)
        command = [sys.executable, "-m", "elasticjob_cli", "run", "--plain", "--logs", "job.yaml"]
        self._spawn(command, XDG_STATE_HOME=state)

    def _spawn(self, command: list[str], **environment: str) -> None:
        environment |= {"TMPDIR": str(self._folder / "tmp"), _MARK: self._mark}
        with (self._folder / "run.log").open("ab") as log:
            runner = subprocess.Popen(
                command,
                cwd=self._folder,
                env=child_environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=processes.die_with_parent,
            )
        self._runners.append(runner)

    def keep_log(self, path: Path) -> None:
        """Copy the output of the runner and the workers."""
        shutil.copy(self._folder / "run.log", path)

    def recovery(self, limit_seconds: float) -> Result:
        """Apply the fault to a steady training; measure until every rank steps again."""
        case = self._case
        try:
            self._wait(self._is_steady, "a steady training", limit_seconds)
            before = max(line["round"] for line in self._steps()[0])
            since = time.time()
            self._apply(case.fault)
            at = self._recovered(since, before, 0, limit_seconds)
            full = self._recovered(since, before, case.nodes, limit_seconds)
            return self._judged(before, at - since, full - since)
        except NoRecovery as failure:
            return Result(case, error=str(failure))

    def _judged(self, before: int, seconds: float, full_seconds: float) -> Result:
        found = self._wait(
            lambda: self._round(before + 1), f"round {before + 1} in the status", STATUS_SECONDS
        )
        steps = lost(self._steps(), before) if self._case.snapshots else None
        return judged(self._case, seconds, full_seconds, found, self._failure(before), steps)

    def _recovered(self, since: float, before: int, ranks: int, limit_seconds: float) -> float:
        """Return the Unix time of the recovery; `ranks` as in `recovered_at`."""
        subject = f"a step of all {ranks} ranks" if ranks else "a step of every rank"
        at = self._wait(
            lambda: recovered_at(self._steps(), since, before, ranks), subject, limit_seconds
        )
        return float(at)

    def _apply(self, fault: Fault) -> None:
        match fault:
            case Fault.OUT_OF_MEMORY | Fault.ABORT:
                (self._folder / fault).touch()
            case Fault.JOIN:
                self._send("scale", nodes=self._case.nodes)
            case _:
                self._send("fault", kind=fault, pod=f"{NAME}-{self._case.nodes - 1}")

    def _send(self, verb: str, **arguments: Any) -> None:
        try:
            send_command(self._job, verb, **arguments)
        except CommandError as error:
            raise NoRecovery(f"{verb}: {error}") from error

    def _is_steady(self) -> bool:
        steps = self._steps()
        return all(
            len([line for line in steps.get(rank, ()) if line["world"] == self._case.least])
            >= STEADY_STEPS
            for rank in range(self._case.least)
        )

    def _steps(self) -> dict[int, list[dict[str, Any]]]:
        """Return the complete lines of every rank."""
        found = {}
        for path in (self._folder / "steps").glob("*.jsonl"):
            lines = path.read_text().split("\n")[:-1]
            found[int(path.stem)] = [json.loads(line) for line in lines]
        return found

    def _status(self) -> dict[str, Any]:
        return (self._job.object().get("status") or {}) if self._job.exists() else {}

    def _round(self, number: int) -> dict[str, Any]:
        rounds = self._job.rounds() if self._job.exists() else []
        return next((each for each in rounds if each["round"] == number), {})

    def _failure(self, number: int) -> str:
        """Return the message of the failure that ended this round; empty if there is none."""
        failure = self._status().get("lastFailure") or {}
        return str(failure.get("message") or "") if failure.get("round") == number else ""

    def _wait(self, condition: Callable[[], Any], subject: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            if any(runner.poll() is not None for runner in self._runners):
                raise NoRecovery(f"the job ended before {subject}: {self._log()}")
            if time.monotonic() > deadline:
                raise NoRecovery(f"{subject}: not within {seconds:g} s: {self._log()}")
            time.sleep(POLL_SECONDS)
        return value

    def _log(self) -> str:
        return (self._folder / "run.log").read_text(errors="replace")[-_LOG_CHARACTERS:]

    def _manifest(self) -> dict[str, Any]:
        case = self._case
        command = [self._interpreter, *self._script()]
        container = {"name": "trainer", "image": "unused:1", "command": command}
        return {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": NAME},
            "spec": {
                "minNodes": 1,
                "maxNodes": case.nodes,
                "nodes": case.least,
                "nprocPerNode": 1,
                "maxRestarts": 10,
                "elasticity": {"settleSeconds": 0},
                "recovery": {"warmStart": "Auto" if case.warm else "Never"},
                "template": {"spec": {"containers": [container]}},
            },
        }

    def _script(self) -> list[str]:
        """Return the command line of the training script."""
        case = self._case
        command = ["train.py", "--device", self._device, "--backend", case.backend]
        variants = {"--compile": case.compiled, "--snapshots": case.snapshots}
        return command + [option for option, is_set in variants.items() if is_set]


class TorchrunGang(Gang):
    """Gang of a case under torchrun with its `c10d` rendezvous, an agent for each node."""

    def _start(self) -> None:
        endpoint, run_id = f"127.0.0.1:{free_port()}", fresh_id("gpu")
        for member in range(self._case.nodes):
            command = [self._interpreter, "-m", "torch.distributed.run"]
            command += [f"--nnodes={self._case.nodes}", "--nproc-per-node=1", "--max-restarts=10"]
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}"]
            command += [f"--rdzv-conf=is_host={str(member == 0).lower()}", "--local-addr=127.0.0.1"]
            self._spawn([*command, *self._script()], **OWN_STORE)

    def _apply(self, fault: Fault) -> None:
        if fault is not Fault.KILL_WORKER:
            raise NoRecovery(f"{fault} is not measured for {System.TORCHRUN}")
        os.kill(self._steps()[self._case.nodes - 1][-1]["pid"], signal.SIGKILL)

    def _judged(self, before: int, seconds: float, full_seconds: float) -> Result:
        return Result(self._case, seconds, full_seconds)


def gang(case: Case, folder: Path, interpreter: str, device: str) -> Gang:
    """Return the gang of a case."""
    kind = Gang if case.system is System.OURS else TorchrunGang
    return kind(case, folder, interpreter, device)
