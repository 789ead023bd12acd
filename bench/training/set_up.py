"""Set-up work of a framework: from the start of its processes to the first step, without imports.

Two workers run without any launcher. `-X importtime` gives the duration of each import, also of
those that the framework makes lazily during its set-up, which a preloaded interpreter saves too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from bench import processes
from bench.etcd_proc import free_port
from bench.settings import REPOSITORY, child_environment
from bench.training.jobs import NODES, POLL_SECONDS, STEP_SECONDS, STEPS, JobFailed
from bench.training.steps import all_stepped, newest_first_step
from elasticjob import layout

_IMPORT = re.compile(r"import time:\s+(\d+) \|")


def import_seconds(lines: Iterable[str]) -> float:
    """Return the sum of the imports' own times in the output of `-X importtime`."""
    matches = map(_IMPORT.match, lines)
    return sum(int(match[1]) for match in matches if match) / 1_000_000


def set_up_seconds(framework: str, interpreter: Path, limit_seconds: float) -> float:
    """Return the seconds from the start to the first step, less the imports of the slowest rank.

    Raises JobFailed without a step in time.
    """
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-") as temporary:
        folder = Path(temporary)
        shutil.copy(REPOSITORY / "examples" / framework / "train.py", folder)
        port, began = free_port(), time.time()
        workers = [_worker(folder, interpreter, rank, port) for rank in range(NODES)]
        try:
            stepped = _first_step(folder, workers, began, limit_seconds)
        finally:
            for worker in workers:
                processes.kill(worker.pid)
                worker.wait()
        logs = [(folder / f"worker-{rank}.log").read_text() for rank in range(NODES)]
        imports = max(import_seconds(log.splitlines()) for log in logs)
    # The remaining step duration is not work.
    return stepped - began - imports - STEP_SECONDS


def _first_step(
    folder: Path, workers: list[subprocess.Popen[bytes]], began: float, limit_seconds: float
) -> float:
    while True:
        files = [folder / f"progress-{rank}" for rank in range(NODES)]
        stepped = all_stepped([newest_first_step([file]) for file in files], began)
        if stepped is not None:
            return stepped
        if any(worker.poll() is not None for worker in workers):
            raise JobFailed(f"a worker ended: {(folder / 'worker-0.log').read_text()[-1000:]}")
        if time.time() > began + limit_seconds:
            raise JobFailed(f"no first step within {limit_seconds:g} s")
        time.sleep(POLL_SECONDS)


def _worker(folder: Path, interpreter: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    environment = child_environment(
        RANK=str(rank),
        LOCAL_RANK="0",
        WORLD_SIZE=str(NODES),
        LOCAL_WORLD_SIZE="1",
        GROUP_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PYTHONPROFILEIMPORTTIME="1",
        **{layout.PROGRESS_FILE: str(folder / f"progress-{rank}")},
    )
    with (folder / f"worker-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [interpreter, "train.py", "--steps", str(STEPS), "--step-seconds", str(STEP_SECONDS)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=processes.die_with_parent,
        )
