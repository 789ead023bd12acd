"""Test rig for the local cluster: `elasticjob` as its users run it, in isolation.

Each test has a state folder of its own, which also identifies its processes: each of them carries
it in its environment, whatever its current parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration.etcd_server import pause
from tests.paths import ROOT

PYTHONPATH = os.pathsep.join(
    str(ROOT / part) for part in ("operator", "sdk", "rendezvous", "sidecar", "cli")
)
PATIENCE_SECONDS = 120.0
CALL_SECONDS = 240.0
"""Timeout of a command, such as a whole run whose workers import torch on a busy machine."""

WORKER = """
import json, os, pathlib, signal, subprocess, sys, time
folder, env = pathlib.Path.cwd(), os.environ
print("rank", env["RANK"], "of", env["WORLD_SIZE"], "round", env["ELASTICJOB_ROUND"], flush=True)
if (folder / "stubborn").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if (folder / "daemon").exists():  # a child that leaves its group and its session
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
(folder / f"worker-{os.getpid()}").write_text(env["RANK"])
while not (folder / "finish").exists():
    if (folder / "talk").exists():
        print("x" * 1000, flush=True)
    if env["RANK"] == "0":
        draft = pathlib.Path(env["ELASTICJOB_PROGRESS_FILE"] + ".draft")
        try:
            draft.write_text(json.dumps({"step": 7}))
            draft.replace(env["ELASTICJOB_PROGRESS_FILE"])
        except OSError:
            pass
    time.sleep(0.02)
"""

SPEC: dict[str, Any] = {
    "minNodes": 1,
    "maxNodes": 3,
    "nodes": 2,
    "nprocPerNode": 1,
    "maxRestarts": 2,
    "recovery": {"stopGraceSeconds": 3},
    "rendezvous": {"keepAliveSeconds": 10},
    "elasticity": {"settleSeconds": 0},
}


def until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS) -> Any:
    """Poll `condition` until it returns a true value and return it; name `what` on a timeout."""
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() < began + seconds, f"waited {seconds:g} s in vain for {what}"
        pause(began)
    return value


def read_all(terminal: int) -> bytes:
    """Return what is written to a terminal until its last process has closed it."""
    chunks = []
    while True:
        try:
            chunks.append(os.read(terminal, 65536))
        except OSError:
            os.close(terminal)
            return b"".join(chunks)


class LocalRig:
    """Isolated use of `elasticjob` on this machine."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.job = folder / "job"
        self.tmp = folder / "tmp"
        for made in (self.state, self.job, self.tmp):
            made.mkdir()
        (self.job / "work.py").write_text(WORKER)
        self.env = {
            **{name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
            "PYTHONPATH": PYTHONPATH,
            "XDG_STATE_HOME": str(self.state),
            "TMPDIR": str(self.tmp),
            "PYTHONUNBUFFERED": "1",
        }
        self.runners: list[subprocess.Popen[str]] = []
        self.run_dirs: set[Path] = set()

    def manifest(self, name: str = "job", command: list[str] | None = None, **spec: Any) -> Path:
        """Write a manifest (JSON is YAML) and return its path."""
        container: dict[str, Any] = {"name": "trainer", "image": "none"}
        container["command"] = command or ["python3", "work.py"]
        document = {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name},
            "spec": {**SPEC, **spec, "template": {"spec": {"containers": [container]}}},
        }
        path = self.job / f"{name}.yaml"
        path.write_text(json.dumps(document, indent=2))
        return path

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "elasticjob_cli.main", *map(str, arguments)]

    def call(
        self, *arguments: object, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*arguments),
            env={**self.env, **(env or {})},
            cwd=self.job,
            capture_output=True,
            text=True,
            timeout=CALL_SECONDS,
            check=False,
        )

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start `elasticjob run` in the background."""
        return self.start_other("run", *arguments)

    def start_other(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a long-running command in the background."""
        runner = subprocess.Popen(
            self.command(*arguments),
            env=self.env,
            cwd=self.job,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.runners.append(runner)
        return runner

    def object(self, name: str = "job") -> dict[str, Any]:
        """Return the object as last written, empty before the first write."""
        path = self.state / "elasticjob" / "default" / name / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def status(self, name: str = "job") -> dict[str, Any]:
        return self.object(name).get("status", {})

    def running(
        self, nodes: int, after: int = 0, seconds: float = PATIENCE_SECONDS
    ) -> dict[str, Any]:
        """Wait until a round later than `after` runs on `nodes` nodes; return the status."""

        def look() -> dict[str, Any] | None:
            status = self.status()
            rendezvous = status.get("rendezvous") or {}
            number = rendezvous.get("round", 0)
            members = [m for m in status.get("members", ()) if m["state"] == "running"]
            here = [m for m in members if m["round"] == number]
            good = rendezvous.get("state") == "final" and number > after
            return status if good and len(here) == nodes == rendezvous["nodes"] else None

        found: dict[str, Any] = until(look, f"{nodes} running nodes after round {after}", seconds)
        self.note_run_dirs()
        return found

    def note_run_dirs(self) -> None:
        """Record the temporary folders of the runs known now."""
        for path in self.state.glob("elasticjob/*/*/run.json"):
            self.run_dirs.add(Path(json.loads(path.read_text())["control"]).parent)

    def round(self) -> int:
        return int(self.status()["rendezvous"]["round"])

    def workers(self) -> dict[int, int]:
        """Return the pids of the living workers, by rank."""
        found = {}
        for path in self.job.glob("worker-*"):
            pid = int(path.name.removeprefix("worker-"))
            if Path("/proc", str(pid), "environ").exists() and (text := path.read_text()):
                found[int(text)] = pid
        return found

    def finish(self) -> None:
        (self.job / "finish").touch()

    def processes(self, among: Iterable[int] = ()) -> dict[int, str]:
        """Return every living process of this rig, with its command line.

        `among` limits the search, for loops: the machine has hundreds of processes.
        """
        marker = f"XDG_STATE_HOME={self.state}".encode()
        found = {}
        entries = [Path("/proc", str(pid)) for pid in among] or Path("/proc").iterdir()
        for entry in entries:
            try:
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace")
            except OSError:
                continue
        return found

    def nothing_left(self) -> None:
        """Check that no process and no temporary folder of this rig is left."""
        self.note_run_dirs()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while found := self.processes():
            assert time.monotonic() < deadline, f"processes start again and again: {found}"
            until(lambda: not self.processes(found), f"the end of {found}")
        # If the rig's temporary folder is too deep for sockets, /tmp is used instead.
        left = [folder for folder in (*self.run_dirs, *self.tmp.iterdir()) if folder.exists()]
        assert not left

    def close(self) -> None:
        for runner in self.runners:
            if runner.poll() is None:
                runner.kill()
            runner.communicate(timeout=PATIENCE_SECONDS)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    """Yield a rig of the test's own, and check that nothing is left running."""
    corner = LocalRig(tmp_path)
    yield corner
    corner.close()
