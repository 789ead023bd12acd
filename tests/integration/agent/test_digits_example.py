"""Digits example: killed half-way under real torchrun, it resumes and still learns; under
ElasticJob it loses no step to a planned change.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.agent_rig import Gang, gang, until
from tests.integration.launcher_rig import process_tag
from tests.paths import ROOT

__all__ = ["gang", "process_tag"]

TRAIN = ROOT / "examples" / "digits" / "train.py"
PATIENCE_SECONDS = 120.0


def start(
    checkpoints: Path, output: Path, workers: int, *more: str, library: str = ""
) -> subprocess.Popen[bytes]:
    """Start the example under torchrun; `library` is the first place to look for `elasticjob`."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    options = ["--steps=250", f"--checkpoint-dir={checkpoints}", "--report-seconds=0.2", *more]
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *launch, str(TRAIN), *options],
            env={**os.environ, "PYTHONPATH": library},
            stdout=file,
            start_new_session=True,
        )


def workers_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
    return [int(child) for child in children.split()]


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to torchrun and to its workers, which are in sessions of their own."""
    if process.poll() is None:
        for pid in [process.pid, *workers_of(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


def steps_told(output: Path) -> list[int]:
    lines = output.read_text()
    return [int(told) for told in re.findall(r"^(?:\[0\] )?step (\d+) ", lines, re.MULTILINE)]


def step_reached(process: subprocess.Popen[bytes], output: Path, step: int) -> int:
    """Wait until at least this step was reported; return the last one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        assert process.poll() is None, "it ended before it was to be killed"
        assert time.monotonic() < deadline, "no progress"
        shown = max(steps_told(output), default=0)
        if shown >= step:
            return shown
        time.sleep(0.05)


def test_killed_run_resumes_at_another_size_and_learns(tmp_path: Path) -> None:
    checkpoints, outputs = tmp_path / "checkpoints", (tmp_path / "first", tmp_path / "second")
    # First as in an image without the library.
    (tmp_path / "none" / "elasticjob").mkdir(parents=True)
    (tmp_path / "none" / "elasticjob" / "__init__.py").touch()
    library = str(tmp_path / "none")
    disturbed = start(checkpoints, outputs[0], 2, "--step-seconds=0.03", library=library)
    try:
        killed_at = step_reached(disturbed, outputs[0], step=40)
    finally:
        kill(disturbed)
    assert not (checkpoints / "result.json").exists()

    resumed = start(checkpoints, outputs[1], 3)
    try:
        resumed.wait(PATIENCE_SECONDS)
    finally:
        kill(resumed)
    assert resumed.returncode == 0, outputs[1].read_text()

    steps = steps_told(outputs[1])
    assert steps[0] >= killed_at - 5, "it resumed long before the checkpoint"
    result = json.loads((checkpoints / "result.json").read_text())
    assert result["accuracy"] >= 0.95
    assert (result["steps"], result["world_size"]) == (250, 3)
    assert steps[-1] == 250


def test_planned_change_loses_no_step(gang: Gang, tmp_path: Path) -> None:
    options = (
        f"--checkpoint-dir={tmp_path / 'checkpoints'}",
        "--steps=200",
        "--step-seconds=0.03",
        "--report-seconds=0",
        "--checkpoint-every=1000",
    )
    conf = "settle=0,stop_grace=3,leave_grace=25,last_call_timeout=30"
    agents = [gang.agent("1:2", command=(str(TRAIN), *options), conf=conf) for _ in range(2)]
    until(lambda: any(step >= 30 for a in agents for step in steps_told(a.log)), "step 30")
    agents[1].signal(signal.SIGTERM)
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()
    told = [step for agent in agents for step in steps_told(agent.log)]
    assert sorted(told) == list(range(1, 201)), gang.outputs()
    assert gang.round().number == 2
