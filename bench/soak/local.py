"""Job of the soak test on this machine: `elasticjob run` on examples/digits in its own folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import yaml

from bench import processes
from bench.settings import REPOSITORY, child_environment
from bench.soak.disturbances import ON_THIS_MACHINE, Disturbance, JobState, Kind, job_state
from bench.soak.run import NAME, SCRIPT, Soaked, spec_of, training
from elasticjob_agent.core.log_lines import TOOK_OVER
from elasticjob_cli.local.control_client import send_command
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, JobFolder
from elasticjob_cli.local.logs import AGENT, TRAINER

DIGITS = REPOSITORY / "examples" / "digits"
STEP_SECONDS = 0.1
GONE_SECONDS = 15.0
LAST = "last-step"
END_SECONDS = 120.0
_TAKEN_OVER = f": {TOOK_OVER} ".encode()
"""Log line of an agent that took over its predecessor's workers."""
_STEP = re.compile(rb"^\S+Z (?:\[\d+\] )?step (\d+) ", re.MULTILINE)
"""Report of a step in a container's log, where each line begins with its time."""


def manifest(folder: Path, faults: int) -> dict[str, Any]:
    """Return the example's manifest, changed to train until it gets its last step."""
    document: dict[str, Any] = yaml.safe_load((DIGITS / "elasticjob.yaml").read_text())
    document["metadata"]["name"] = NAME
    document["spec"] |= spec_of(faults)
    (container,) = document["spec"]["template"]["spec"]["containers"]
    where = ("--checkpoint-dir", folder / "checkpoints")
    container |= training(folder / LAST, "--step-seconds", STEP_SECONDS, *where)
    return document


class SoakedHere(Soaked):
    """Local job; its processes are found by the folder in their environment."""

    weights = ON_THIS_MACHINE
    evicts = False
    patience_seconds = 180.0
    poll_seconds = 0.05

    def __init__(self, folder: Path, faults: int) -> None:
        super().__init__()
        self._folder = folder
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        self._job = JobFolder(DEFAULT_NAMESPACE, NAME)
        self._document = manifest(folder, faults)
        self._taken_over = 0

    def __enter__(self) -> Self:
        path = self._folder / "job.yaml"
        path.write_text(json.dumps(self._document))
        (self._folder / "tmp").mkdir()
        self._environment = {
            "XDG_STATE_HOME": str(self._folder / "state"),
            "TMPDIR": str(self._folder / "tmp"),
            # Keep torch's own leftovers out of the check.
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "torchinductor"),
        }
        # The trainer runs in its manifest's folder.
        for script in (SCRIPT, DIGITS / "train.py"):
            shutil.copy(script, self._folder)
        with (self._folder / "run.log").open("wb") as log:
            self._runner = subprocess.Popen(
                [sys.executable, "-m", "elasticjob_cli", "run", str(path)],
                env=child_environment(**self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=processes.die_with_parent,
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.kill()
        self._runner.wait()
        for pid in self._processes():
            processes.kill(pid)

    # -- state

    def job_state(self) -> JobState:
        if not self._job.exists():
            return JobState(0, 0, (), ())
        return job_state(self._job.object().get("status") or {}, self._job.rounds())

    def step(self) -> int:
        newest = 0
        for path in self._job.logs.glob(f"*/{TRAINER}"):
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - 4096))
                newest = max([newest, *map(int, _STEP.findall(log.read()))])
        return newest

    def ended(self) -> bool:
        return self._runner.poll() is not None

    def log(self) -> str:
        path = self._folder / "run.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def keep(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self._job.path, folder)
        shutil.copy(self._folder / "run.log", folder)

    # -- faults

    def apply(self, fault: Disturbance) -> None:
        match fault.kind:
            case Kind.SCALE:
                send_command(self._job, "scale", nodes=fault.nodes)
            case Kind.KILL_ETCD:
                processes.kill(self._etcd())
            case Kind.STOP_LAUNCHER:
                processes.kill(self._launcher(fault.pod), signal.SIGTERM)
            case _:
                self._taken_over = self._takeovers(fault.pod)
                send_command(self._job, "fault", kind=fault.kind.value, pod=fault.pod)

    def back(self, fault: Disturbance) -> bool:
        # A worker that ends without an agent counts as a lost node instead of a failure.
        return fault.kind is not Kind.KILL_AGENT or self._takeovers(fault.pod) > self._taken_over

    def _takeovers(self, pod: str) -> int:
        return (self._job.logs / pod / AGENT).read_bytes().count(_TAKEN_OVER)

    def _etcd(self) -> int:
        (server,) = [
            pid
            for pid in self._processes()
            if any(word.startswith(b"--listen-peer-urls=") for word in processes.command(pid))
        ]
        return server

    def _launcher(self, pod: str) -> int:
        """Return a pod's launcher; only the agent's environment has both the pod's name and uid."""
        known = {pid: _variables(pid) for pid in self._processes()}
        ids = {
            variables.get(b"ELASTICJOB_POD_UID")
            for variables in known.values()
            if variables.get(b"ELASTICJOB_NAME") == pod.encode()
        }
        found = {
            pid
            for pid, variables in known.items()
            if variables.get(b"ELASTICJOB_POD_UID") in ids and _is_launcher(pid)
        }
        return next(pid for pid in found if processes.parent(pid) not in found)

    # -- end of the job

    def let_end(self, step: int) -> None:
        (self._folder / LAST).write_text(str(step))

    def ends(self) -> float:
        self._runner.wait(timeout=END_SECONDS)
        phase = (self._job.object().get("status") or {}).get("phase")
        if phase != "Succeeded":
            raise AssertionError(f"the job ended {phase}: {self.log()}")
        result = json.loads((self._folder / "checkpoints" / "result.json").read_text())
        return float(result["accuracy"])

    def left(self) -> list[str]:
        """Return the processes that outlive the job, and the files in its temporary folder."""
        deadline = time.monotonic() + GONE_SECONDS
        while (living := self._processes()) and time.monotonic() < deadline:
            time.sleep(self.poll_seconds)
        found = [b" ".join(processes.command(pid)).decode(errors="replace") for pid in living]
        return [*found, *(str(path) for path in (self._folder / "tmp").iterdir())]

    def _processes(self) -> list[int]:
        return processes.marked("XDG_STATE_HOME", self._environment["XDG_STATE_HOME"])


def _is_launcher(pid: int) -> bool:
    return any(word.endswith(b"/launcher.pyz") for word in processes.command(pid))


def _variables(pid: int) -> dict[bytes, bytes]:
    pairs = (pair.partition(b"=") for pair in processes.environment(pid))
    return {name: value for name, _, value in pairs}
