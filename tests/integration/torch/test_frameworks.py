"""Examples with training frameworks on the local cluster: faults, scaling, and no lost step."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.frameworks import LAUNCHERS, interpreter
from elasticjob_agent.worker_files import read_progress
from tests.integration.local_rig import LocalRig, until
from tests.paths import ROOT

STEPS = 170
"""More steps than are done before the test sets the job's size for the last time."""
SLOW_SECONDS = 180.0

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    corner = LocalRig(tmp_path)
    corner.env["OMP_NUM_THREADS"] = "1"  # more threads than processors slow each other down
    yield corner
    corner.close()


def step(rig: LocalRig) -> int:
    """Return the step that every worker of the newest round has reported; -1 if one has not.

    The status tells of steps every 30 s only.
    """
    logs = rig.state / "elasticjob" / "default" / "job" / "logs"
    files = list(logs.glob(f"*/workers/*/round_{rig.round()}/0/progress"))
    found = [read_progress(path) for path in files]
    return min((-1 if one is None else one.step for one in found), default=-1)


def saved(folder: Path) -> int:
    """Return the step of the newest checkpoint in the folder."""
    last = re.compile(r"step-(?P<snapshot>\d{12})-|(?P<other>\d+)(\.ckpt|\.pt)?$")
    found = [last.search(path.name) for path in folder.glob("[cs]*")]
    return max((int(match["snapshot"] or match["other"]) for match in found if match), default=0)


@pytest.mark.parametrize("framework", LAUNCHERS)
def test_example_survives_a_killed_worker_and_scales_without_losing_a_step(
    rig: LocalRig, framework: str
) -> None:
    for path in (ROOT / "examples" / framework).iterdir():
        shutil.copy(path, rig.job)
    program = [*LAUNCHERS[framework], "train.py"]
    command = [
        str(interpreter(framework)),
        *program,
        "--steps",
        str(STEPS),
        "--step-seconds",
        "0.2",
    ]
    rig.start(rig.manifest(command=command, nodes=2, minNodes=1, maxNodes=2), "--plain")
    rig.running(2, 0, SLOW_SECONDS)
    folder = rig.job / "checkpoints"
    until(lambda: saved(folder) >= 50 and step(rig) > 55, "a periodic checkpoint", SLOW_SECONDS)

    assert rig.call("fault", "kill-worker", "job", "job-1").returncode == 0
    status = rig.running(2, 1, SLOW_SECONDS)
    assert status["restarts"] == 1
    # The agents, which read the files now and then, know by then that the script can save.
    until(lambda: 55 < step(rig) < STEPS, "steps after the checkpoint", SLOW_SECONDS)

    before = step(rig)
    assert rig.call("scale", "job", "--nodes", "1").returncode == 0
    rig.running(1, 2, SLOW_SECONDS)
    asked = saved(folder)
    assert asked >= before, "saved when asked, and not at the last multiple of 50"
    until(lambda: step(rig) > asked, "steps of the smaller gang", SLOW_SECONDS)

    runner = rig.runners[-1]
    output, _ = runner.communicate(timeout=SLOW_SECONDS)
    assert runner.returncode == 0, output
    logs = rig.call("logs", "job").stdout
    assert f"done at step {STEPS}" in logs
