"""Single run of the corpus: a gang of nodes with two workers each, through one failure.

The first round ends with the failure of one rank after all workers have used the package, the
second with their success; local rank 0 of each node ends first. `run_job` returns the `Run` to
compare.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from elasticjob_launcher.zygote.process import BOOT_LINE
from tests.corpus.manifest import Subject
from tests.integration.etcd_server import EtcdServer

NODES, SLOTS, ROUNDS = 2, 2, 2
PATIENCE_SECONDS = 400.0
"""Maximum wait for a round; on a busy machine the largest packages take minutes to import."""
LEARNED_SECONDS = 3.6
"""Seconds after a start until a fork of the standby loads the modules that workers imported."""
LEFT_SECONDS = 3.0
MARK = "CORPUS_MARK"
CONF = "last_call_timeout=5,settle=0.1,keep_alive_seconds=10,confirm=5,stop_grace=5"
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "COMET_OPTIMIZER_ID": "",
    "RAY_USAGE_STATS_ENABLED": "0",
    "NO_ALBUMENTATIONS_UPDATE": "1",
}
STANDBY_LIMIT = {"ELASTICJOB_STANDBY_SECONDS": "300"}
"""Compared is the behaviour of warm workers, not the time until they are warm."""
_STORE_THREAD = "tcpstore"
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "ELASTICJOB_ETCD_DIR")


@dataclass
class Run:
    """Observations of one job. `workers` has each record by `<round>-<rank>-<stage>`."""

    folder: str
    exits: list[int]
    workers: dict[str, dict[str, Any]]
    files: dict[str, list[str]]
    processes: list[str]
    output: dict[str, str]
    standby: str
    refused: list[str]
    cold: list[str]
    seconds: float
    trouble: str = ""
    warm: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Job:
    """Folder and agents of a job."""

    folder: Path
    nodes: int = NODES
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    agents: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def part(self, name: str) -> Path:
        return self.folder / name


def run_job(
    package: Subject, interpreter: Path, etcd: EtcdServer, warm: bool, nodes: int = NODES
) -> Run:
    """Run the package's script in a gang whose workers are forked from a standby if `warm`."""
    with _folder() as folder:
        job = _Job(folder, nodes)
        for name in ("records", "home", "tmp", "work", "agents", "code"):
            job.part(name).mkdir()
        shutil.copy(Path(__file__).with_name("probe.py"), job.part("code") / "corpus_probe.py")
        (job.part("code") / "train.py").write_text(package.script())
        began = time.monotonic()
        files: dict[str, list[str]] = {}
        trouble = ""
        try:
            for node in range(job.nodes):
                job.agents.append(_agent(job, interpreter, etcd, node, warm))
            for number in range(1, ROUNDS + 1):
                last = _all_used(job, number)
                files[f"round {number}"] = _files(job)
                if warm and number < ROUNDS:
                    time.sleep(max(0.0, last + LEARNED_SECONDS - time.time()))
                    _await_learned(job)
                (job.part("records") / f"go-{number}").touch()
            for agent in job.agents:
                agent.wait(PATIENCE_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            trouble = str(error)
        finally:
            seconds = time.monotonic() - began
            exits = [_ended(agent) for agent in job.agents]
            left = _left(job)
        files["end"] = _files(job)
        return _run(job, exits, files, left, seconds, trouble)


@contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="corpus-")).resolve()  # short: sockets may lie in it
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _agent(
    job: _Job, interpreter: Path, etcd: EtcdServer, node: int, warm: bool
) -> subprocess.Popen[bytes]:
    environment = {
        **{name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        **OFFLINE,
        **STANDBY_LIMIT,
        "HOME": str(job.part("home")),
        "TMPDIR": str(job.part("tmp")),
        MARK: job.mark,
        "CORPUS_RECORDS": str(job.part("records")),
    }
    command = [
        *(sys.executable, "-m", "elasticjob_cli", "agent"),
        *(f"--nnodes={job.nodes}", f"--nproc-per-node={SLOTS}", f"--name=node-{node}"),
        *(f"--rdzv-endpoint=127.0.0.1:{etcd.port}", f"--rdzv-id=corpus-{job.mark}"),
        *(f"--rdzv-conf={CONF}", f"--log-dir={job.part('agents')}/logs-{node}"),
        *(f"--warm-start={'auto' if warm else 'never'}", "--max-restarts=1", "--no-python"),
        *(str(interpreter), str(job.part("code") / "train.py")),
    ]
    with (job.part("agents") / f"node-{node}.log").open("wb") as log:
        return subprocess.Popen(
            command, env=environment, cwd=job.part("work"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip


def _until(job: _Job, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        ended = [agent.returncode for agent in job.agents if agent.poll() is not None]
        if ended:
            raise TimeoutError(f"agents ended with {ended} before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:g} s in vain for {what}")
        time.sleep(0.05)


def _all_used(job: _Job, number: int) -> float:
    """Wait until all workers of the round have used the package; return the last import's time.

    Raise TimeoutError if that cannot happen, for example because the gang lost etcd.
    """
    paths = [
        job.part("records") / f"{number}-{rank}-used.json" for rank in range(job.nodes * SLOTS)
    ]

    def all_used() -> bool:
        if number < (newest := _newest_round(job)):
            raise TimeoutError(f"round {newest} began before all workers used it in round {number}")
        return all(path.exists() for path in paths)

    _until(job, all_used, f"round {number}")
    imported = (path.with_name(path.name.replace("used", "imported")) for path in paths)
    return max(path.stat().st_mtime for path in imported)


def _newest_round(job: _Job) -> int:
    """Return the last round that a worker has recorded; 0 before the first record."""
    names = (path.name for path in job.part("records").glob("*.json"))
    return max((int(name.partition("-")[0]) for name in names), default=0)


def _files(job: _Job) -> list[str]:
    """Return all files in the folders that programs write into, except Python's compiled files."""
    found = []
    for part in ("home", "tmp", "work"):
        for path in job.part(part).rglob("*"):
            if "__pycache__" not in path.parts:
                kind = "/" if path.is_dir() and not path.is_symlink() else ""
                found.append(f"{path.relative_to(job.folder)}{kind}")
    return sorted(found)


def _ended(agent: subprocess.Popen[bytes]) -> int:
    """Return an agent's exit status; terminate a running agent, and with it its workers."""
    if agent.poll() is not None:
        return agent.returncode
    agent.terminate()
    try:
        return agent.wait(20)
    except subprocess.TimeoutExpired:
        agent.kill()
        return agent.wait()


def _await_learned(job: _Job) -> None:
    """Wait until each node has one standby again: its fork replaced it, or had to end."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _standbys(job.mark) > job.nodes:
        if time.monotonic() > deadline:
            raise TimeoutError("a standby still loads the modules of its workers")
        time.sleep(0.05)


def _standbys(mark: str) -> int:
    """Return the number of standbys, without the processes that serve torch's store."""
    pids = [pid for pid, line in _marked(mark).items() if BOOT_LINE in line]
    return sum(not any(_STORE_THREAD in name for name in thread_names(pid)) for pid in pids)


def thread_names(pid: int) -> list[str]:
    """Return the names of a process's threads; none if it has ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            found.append((task / "comm").read_text().strip())
    return found


def _left(job: _Job) -> list[str]:
    """Return command lines of processes that still outlive the job after a moment; kill them."""
    deadline = time.monotonic() + LEFT_SECONDS
    while (left := _marked(job.mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return sorted(left.values())


def _marked(mark: str) -> dict[int, str]:
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
        except OSError:
            continue
    return found


def _run(
    job: _Job,
    exits: list[int],
    files: dict[str, list[str]],
    left: list[str],
    seconds: float,
    trouble: str,
) -> Run:
    workers = {
        path.stem: json.loads(path.read_text()) for path in job.part("records").glob("*.json")
    }
    logs = [path.read_text(errors="replace") for path in sorted(job.part("agents").glob("*.log"))]
    lines = [line for log in logs for line in log.splitlines()]
    standby = [line.partition("[standby] ")[2] for line in lines if "[standby] " in line]
    refused = [line.partition("not preloaded: ")[2] for line in lines if "not preloaded: " in line]
    starts = [
        found[1] for line in lines if (found := re.search(r"workers? runs? after .*?, (.*)", line))
    ]
    if trouble:
        trouble = f"{trouble}\n" + "\n".join(lines)[-6000:]
    return Run(
        folder=str(job.folder),
        exits=exits,
        workers=workers,
        files=files,
        processes=left,
        output=_output(job),
        standby="\n".join(standby),
        refused=sorted(set(refused)),
        cold=sorted({start for start in starts if start != "warm"}),
        warm=starts.count("warm"),
        seconds=seconds,
        trouble=trouble,
    )


def _output(job: _Job) -> dict[str, str]:
    """Return the output of each worker, by `<round>-<node>-<local rank>-<stream>`."""
    found = {}
    for path in job.part("agents").glob("logs-*/**/std*.log"):
        name = str(path.relative_to(job.part("agents")))
        found[name] = path.read_text(errors="replace")
    return found
