"""Snapshots in memory with `elasticjob run`: faults cost at most two steps each, and no bit."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_rig import LocalRig, rig
from tests.paths import ROOT

__all__ = ["rig"]

FAULTS = 10
STEPS_BETWEEN = 4
STEPS = (FAULTS + 1) * STEPS_BETWEEN
SPEC: Any = {"recovery": {"stopGraceSeconds": 3}, "maxRestarts": FAULTS}
WORKER = """
import os, pathlib, runpy
pathlib.Path(f"worker-{os.getpid()}").write_text(os.environ["RANK"])
pathlib.Path(f"folder-{os.getpid()}").write_text(os.environ["ELASTICJOB_SNAPSHOT_FOLDER"])
runpy.run_path("train.py", run_name="__main__")
"""
EXAMPLE = ROOT / "examples" / "snapshots" / "train.py"
LINE = re.compile(r"step (\d+) loss ([-\d.e]+)")


def losses(output: str) -> list[tuple[int, str]]:
    """Return every reported step with its loss, in their order."""
    return [(int(step), loss) for step, loss in LINE.findall(output)]


def train(rig: LocalRig, name: str, nodes: int, *arguments: str) -> Path:
    """Return the manifest of a run of the example with two workers, without periodic storage."""
    shutil.copy(EXAMPLE, rig.job / "train.py")
    (rig.job / "work.py").write_text(WORKER)
    command = ["python3", "work.py", "--steps", str(STEPS), "--folder", f"{name}-snapshots"]
    command += ["--store-every", "1000", *arguments]
    return rig.manifest(
        name, command=command, nodes=nodes, maxNodes=nodes, nprocPerNode=2 // nodes, **SPEC
    )


@pytest.mark.timeout(300)
def test_loss_after_ten_killed_workers_is_that_of_the_undisturbed_run(rig: LocalRig) -> None:
    calm = rig.call("run", train(rig, "calm", 1), "--plain", "--logs")
    assert calm.returncode == 0, calm.stdout + calm.stderr
    expected = dict(losses(calm.stdout))
    assert sorted(expected) == list(range(1, STEPS + 1))

    runner = rig.start(train(rig, "killed", 2, "--step-seconds", "0.05"), "--plain", "--logs")
    assert runner.stdout is not None
    output, faults, killed = "", 0, set[int]()
    for line in runner.stdout:
        output += line
        found = LINE.search(line)
        if found and int(found[1]) >= (faults + 1) * STEPS_BETWEEN and faults < FAULTS:
            victim = rig.workers()[faults % 2]
            if victim not in killed:
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
                faults += 1
    assert runner.wait(timeout=60) == 0, output

    assert faults == FAULTS
    steps = [step for step, _ in losses(output)]
    assert len(steps) - STEPS <= 2 * FAULTS, steps
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert [step for step, loss in losses(output) if expected[step] != loss] == []
    folders = {path.read_text() for path in rig.job.glob("folder-*")}
    assert len(folders) == 3
    assert [folder for folder in folders if not folder or Path(folder).exists()] == []


@pytest.mark.timeout(120)
def test_loss_after_a_node_lost_with_its_memory_is_that_of_the_undisturbed_run(
    rig: LocalRig,
) -> None:
    calm = rig.call("run", train(rig, "calm", 2), "--plain", "--logs")
    assert calm.returncode == 0, calm.stdout + calm.stderr
    expected = dict(losses(calm.stdout))

    manifest = train(rig, "lost", 2, "--step-seconds", "0.1")
    manifest.write_text(manifest.read_text().replace('"minNodes": 1', '"minNodes": 2'))
    runner = rig.start(manifest, "--plain", "--logs")
    assert runner.stdout is not None
    output, is_lost = "", False
    for line in runner.stdout:
        output += line
        found = LINE.search(line)
        if found and int(found[1]) == STEPS // 2 and not is_lost:
            assert rig.call("fault", "kill-node", "lost", "lost-1").returncode == 0
            is_lost = True
    assert runner.wait(timeout=60) == 0, output

    # The random numbers of the lost rank's dropout are in the other node's replica alone.
    assert len({path.read_text() for path in rig.job.glob("folder-*")}) == 5, output
    steps = [step for step, _ in losses(output)]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert [step for step, loss in losses(output) if expected[step] != loss] == []
