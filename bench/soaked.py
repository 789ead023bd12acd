"""The job that the soak disturbs: `elasticjob run` on examples/digits, in a folder of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import yaml

from bench import processes
from bench.disturbances import MOST, Disturbance, Kind, Told, told
from bench.settings import REPOSITORY, child_environment
from elasticjob_cli.local.control import call
from elasticjob_cli.local.logs import TRAINER
from elasticjob_cli.local.state import DEFAULT_NAMESPACE, JobFolder

NAME = "soak"
DIGITS = REPOSITORY / "examples" / "digits"
STEPS_OF_FAULT = 60
"""Training steps for each fault in the job: more than pass from one to the next."""
STEPS_AFTER = 10
"""Training steps by which it is seen that training goes on after a fault."""
STEP_SECONDS = 0.1
POLL_SECONDS = 0.05
PATIENCE_SECONDS = 90.0
GONE_SECONDS = 15.0
_STEP = re.compile(rb"^(?:\[\d+\] )?step (\d+) ", re.MULTILINE)


def manifest(folder: Path, faults: int) -> dict[str, Any]:
    """The example's, with as many steps as these faults need."""
    document: dict[str, Any] = yaml.safe_load((DIGITS / "elasticjob.yaml").read_text())
    document["metadata"]["name"] = NAME
    document["spec"] |= {"nodes": MOST - 1, "minNodes": 1, "maxNodes": MOST}
    document["spec"]["maxRestarts"] = faults + 1
    (container,) = document["spec"]["template"]["spec"]["containers"]
    container["args"] = [
        *("--steps", str(STEPS_OF_FAULT * (faults + 1)), "--step-seconds", str(STEP_SECONDS)),
        *("--report-seconds", "0", "--checkpoint-dir", str(folder / "checkpoints")),
    ]
    return document


class Soaked:
    """The running job. What belongs to it is known by the folder in its environment."""

    def __init__(self, folder: Path, document: dict[str, Any]) -> None:
        self._folder = folder
        self._job = JobFolder(DEFAULT_NAMESPACE, NAME)
        self._document = document
        self.wanted: int = document["spec"]["nodes"]

    def __enter__(self) -> Self:
        path = self._folder / "job.yaml"
        path.write_text(json.dumps(self._document))
        (self._folder / "tmp").mkdir()
        self._environment = {
            "XDG_STATE_HOME": str(self._folder / "state"),
            "TMPDIR": str(self._folder / "tmp"),
            # What torch itself leaves, and nobody else.
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "torchinductor"),
        }
        # The trainer runs in its manifest's folder.
        (self._folder / "train.py").write_bytes((DIGITS / "train.py").read_bytes())
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

    # -- what it says

    def told(self) -> Told:
        if not self._job.exists():
            return Told(0, 0, (), ())
        return told(self._job.object().get("status") or {}, self._job.rounds())

    def step(self) -> int:
        """The newest step that any of its workers told of."""
        newest = 0
        for path in self._job.logs.glob(f"*/{TRAINER}"):
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - 4096))
                newest = max([newest, *map(int, _STEP.findall(log.read()))])
        return newest

    def trains(self, nodes: int, after: Disturbance | None = None) -> Told:
        """Wait until so many nodes run, and train on from where they are; the status then."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        aim: tuple[int, int] | None = None  # the round, and the step to be reached in it
        while True:
            now, step = self.told(), self.step()
            whole = len(now.running) == nodes and (after is None or self._over(after, now))
            if not whole or aim is None or aim[0] != now.number:
                aim = (now.number, step + STEPS_AFTER) if whole else None
            elif step >= aim[1]:
                return now
            if self._runner.poll() is not None:
                raise AssertionError(f"the job ended: {self._log()}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{after or 'the start'}: {nodes} nodes do not train: {now}, step {step}; "
                    f"{self._log()}"
                )
            time.sleep(POLL_SECONDS)

    def _over(self, done: Disturbance, now: Told) -> bool:
        """Whether what was hit is gone from the round, or is back in it."""
        gone = {Kind.KILL_NODE, Kind.DRAIN, Kind.STOP_LAUNCHER}
        return done.kind not in gone or done.pod not in now.running or now.number > self._before

    # -- what is done to it

    def do(self, what: Disturbance) -> None:
        self._before = self.told().number
        match what.kind:
            case Kind.SCALE:
                call(self._job, "scale", nodes=what.nodes)
                self.wanted = what.nodes
            case Kind.KILL_ETCD:
                processes.kill(self._etcd())
            case Kind.STOP_LAUNCHER:
                processes.kill(self._launcher(what.pod), signal.SIGTERM)
            case _:
                call(self._job, "fault", kind=what.kind.value, pod=what.pod)

    def _etcd(self) -> int:
        (server,) = [
            pid
            for pid in self._processes()
            if any(word.startswith(b"--listen-peer-urls=") for word in processes.command(pid))
        ]
        return server

    def _launcher(self, pod: str) -> int:
        """The launcher of a pod, of which the agent knows the name and the launcher only the id."""
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

    # -- its end

    def ends(self, seconds: float) -> None:
        """Wait until the job has succeeded."""
        self._runner.wait(timeout=seconds)
        phase = (self._job.object().get("status") or {}).get("phase")
        if phase != "Succeeded":
            raise AssertionError(f"the job ended {phase}: {self._log()}")

    def left(self) -> list[str]:
        """Processes of its that live on after its end, and what is left in its temporary folder."""
        deadline = time.monotonic() + GONE_SECONDS
        while (living := self._processes()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        found = [b" ".join(processes.command(pid)).decode(errors="replace") for pid in living]
        return [*found, *(str(path) for path in (self._folder / "tmp").iterdir())]

    def _processes(self) -> list[int]:
        return processes.marked("XDG_STATE_HOME", self._environment["XDG_STATE_HOME"])

    def _log(self) -> str:
        path = self._folder / "run.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""


def _is_launcher(pid: int) -> bool:
    return any(word.endswith(b"/launcher.pyz") for word in processes.command(pid))


def _variables(pid: int) -> dict[bytes, bytes]:
    pairs = (pair.partition(b"=") for pair in processes.environment(pid))
    return {name: value for name, _, value in pairs}
