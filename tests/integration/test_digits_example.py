"""The digits example under real torchrun: killed half-way, it resumes and still learns."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
PATIENCE_SECONDS = 60.0


def start(checkpoints: Path, progress: Path, workers: int, *more: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    options = ["--steps=250", f"--checkpoint-dir={checkpoints}", "--report-seconds=0.2", *more]
    return subprocess.Popen(
        [sys.executable, *launch, str(TRAIN), *options],
        env=os.environ | {"ELASTICJOB_PROGRESS_FILE": str(progress)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def workers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(child) for child in children.split()]


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to torchrun and to its workers, which are in sessions of their own."""
    if process.poll() is None:
        for pid in [process.pid, *workers_of(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE_SECONDS)


def step_reached(process: subprocess.Popen[str], progress: Path, step: int) -> int:
    """Wait until the progress file shows at least this step; return the step that it shows."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert process.poll() is None, "it ended before it was to be killed"
        assert time.monotonic() < deadline, "no progress"
        shown = json.loads(progress.read_text())["step"] if progress.exists() else 0
        if shown >= step:
            return int(shown)
        time.sleep(0.05)


@pytest.mark.timeout(180)
def test_killed_half_way_it_resumes_at_another_size_and_learns(tmp_path: Path) -> None:
    checkpoints, progress = tmp_path / "checkpoints", tmp_path / "progress.json"
    disturbed = start(checkpoints, progress, 2, "--step-seconds=0.03")
    try:
        killed_at = step_reached(disturbed, progress, step=40)
    finally:
        kill(disturbed)
    assert not (checkpoints / "result.json").exists()

    progress.unlink()
    resumed = start(checkpoints, progress, 3)
    try:
        output, _ = resumed.communicate(timeout=PATIENCE_SECONDS)
    finally:
        kill(resumed)
    assert resumed.returncode == 0, output

    first_line = next(line for line in output.splitlines() if line.startswith("step "))
    assert int(first_line.split()[1]) >= killed_at - 5, "it resumed long before the checkpoint"
    result = json.loads((checkpoints / "result.json").read_text())
    assert result["accuracy"] >= 0.95
    assert (result["steps"], result["world_size"]) == (250, 3)
    assert json.loads(progress.read_text())["step"] == 250
