"""Planned stops of local jobs: the script saves first, and what did not save is said."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]

TRAINER = """
import os, pathlib, signal, sys, time
from elasticjob import train

folder, way = pathlib.Path.cwd(), sys.argv[1]
checkpoint, rank = folder / "checkpoint", os.environ["RANK"]
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
first = step
while not (folder / "finish").exists():
    time.sleep(0.03)
    step += 1
    train.progress(step)
    (folder / f"step-{rank}").write_text(str(step))
    asked = way != "never" and train.should_checkpoint()
    if asked and way == "stuck":
        time.sleep(1000)
    if (asked or step == first + 5) and rank == "0":
        while not (folder / "step-1").exists():
            time.sleep(0.01)  # the other rank would begin at this checkpoint
        time.sleep(0.5 * asked)
        draft = checkpoint.with_name("checkpoint.new")
        draft.write_text(str(step))
        draft.replace(checkpoint)
        train.checkpointed(step)
    elif asked:
        while int(checkpoint.read_text()) < step:
            time.sleep(0.01)
        train.checkpointed(step)
"""


@pytest.fixture
def manifest(rig: LocalRig) -> Any:
    """Return the writer of the manifest of a script that saves in one of the ways."""
    (rig.job / "train.py").write_text(TRAINER)

    def write(way: str = "question", **spec: Any) -> Path:
        return rig.manifest(command=["python3", "train.py", way], **spec)

    return write


def steps(rig: LocalRig) -> list[int]:
    """Return the last step of each rank."""
    return [int(path.read_text() or 0) for path in sorted(rig.job.glob("step-*"))]


def trained(rig: LocalRig, least: int, saves: bool = True) -> None:
    """Wait until both ranks have made so many steps, which the records show."""

    def known() -> bool:
        members = rig.status().get("members", [])
        stepped = [one for one in members if one.get("step")]
        return len(stepped) == 2 and len(steps(rig)) == 2 and min(steps(rig)) >= least

    until(known, f"{least} steps")


def checkpoint(rig: LocalRig) -> int:
    return int((rig.job / "checkpoint").read_text())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_job_saves_its_last_step(
    rig: LocalRig, manifest: Any, signum: signal.Signals
) -> None:
    path = manifest()
    runner = rig.start(path, "--plain")
    trained(rig, 40)

    runner.send_signal(signum)
    said, _ = runner.communicate(timeout=PATIENCE_SECONDS)

    assert runner.returncode == 130, said
    assert [checkpoint(rig)] * 2 == steps(rig), said
    assert "a second signal kills it" in said
    assert f"job: saved at step {checkpoint(rig)}" in said
    status = rig.status()
    assert status["phase"] == "Suspended"
    assert (status["lastStop"]["result"], status["restarts"]) == ("Saved", 0)
    assert f"Saved at step {checkpoint(rig)}." in rig.call("explain", "job").stdout
    [suspended] = [one for one in status["conditions"] if one["type"] == "Suspended"]
    assert suspended["reason"] == "StoppedByUser"
    rig.nothing_left()


def test_interrupted_job_is_run_again_from_its_own_object(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest(), "--plain")
    trained(rig, 40)
    runner.send_signal(signal.SIGINT)
    runner.communicate(timeout=PATIENCE_SECONDS)
    saved = checkpoint(rig)
    kept = rig.call("get", "job", "-o", "json")
    assert not json.loads(kept.stdout)["spec"].get("runPolicy", {}).get("suspend", False)
    again = rig.job / "again.json"
    again.write_text(kept.stdout)
    (rig.job / "step-0").unlink()

    runner = rig.start(again, "--plain")
    until((rig.job / "step-0").exists, "the first step of the second run")
    assert int(until((rig.job / "step-0").read_text, "its number")) > saved
    (rig.job / "finish").touch()
    assert runner.wait(PATIENCE_SECONDS) == 0


def test_second_interrupt_says_what_did_not_save(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest("stuck"), "--plain")
    trained(rig, 40)
    runner.send_signal(signal.SIGINT)
    until(
        lambda: any(c["reason"] == "SavingCheckpoint" for c in rig.status()["conditions"]),
        "the request to save",
    )
    runner.send_signal(signal.SIGINT)
    said, _ = runner.communicate(timeout=PATIENCE_SECONDS)

    assert runner.returncode == 130
    assert "the last checkpoint is of step 5: the requested checkpoint was not complete" in said
    assert "job: Suspended after" in said
    stop = rig.status()["lastStop"]
    assert (stop["result"], stop["checkpointStep"], stop["unsaved"]) == (
        "TimedOut",
        5,
        ["job-0", "job-1"],
    )
    assert stop["step"] > stop["checkpointStep"]
    rig.nothing_left()


def test_script_that_does_not_save_is_stopped_at_once(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest("never"), "--plain")
    trained(rig, 40)
    runner.send_signal(signal.SIGINT)
    said, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert "the last checkpoint is of step 5: the scripts were not asked to save" in said
    assert rig.status()["lastStop"]["result"] == "NotSupported"


def test_save_that_exceeds_the_grace_is_ended(rig: LocalRig, manifest: Any) -> None:
    path = manifest("stuck")
    document = json.loads(path.read_text())
    document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 8
    path.write_text(json.dumps(document))
    runner = rig.start(path, "--plain")
    trained(rig, 40)
    runner.send_signal(signal.SIGINT)
    said, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert "asked to save a checkpoint, within 3 s" in said
    assert rig.status()["lastStop"]["result"] == "TimedOut"


def test_deleted_job_saves_its_last_step(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest(), "--plain")
    trained(rig, 40)
    deleted = rig.call("delete", "job")
    assert (deleted.returncode, runner.wait(PATIENCE_SECONDS)) == (0, 130)
    assert checkpoint(rig) == min(steps(rig)), "the last step that both ranks made"
    rig.nothing_left()


def test_suspended_job_saves_its_last_step(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest(), "--plain")
    trained(rig, 40)
    suspended = rig.call("suspend", "job")
    assert (suspended.returncode, runner.wait(PATIENCE_SECONDS)) == (0, 130)
    assert [checkpoint(rig)] * 2 == steps(rig)
    assert rig.status()["lastStop"]["result"] == "Saved"
    rig.nothing_left()


def test_deadline_is_exceeded_after_the_save(rig: LocalRig, manifest: Any) -> None:
    runner = rig.start(manifest(runPolicy={"activeDeadlineSeconds": 8}), "--plain")
    said, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 1, said
    assert [checkpoint(rig)] * 2 == steps(rig), said
    status = rig.status()
    assert status["phase"] == "Failed"
    [failed] = [one for one in status["conditions"] if one["type"] == "Failed"]
    saved = f"the job was active for too long; saved at step {checkpoint(rig)}"
    assert (failed["reason"], failed["message"]) == ("DeadlineExceeded", saved)


def test_job_of_a_killed_runner_is_interrupted_and_resumes(rig: LocalRig, manifest: Any) -> None:
    path = manifest()
    runner = rig.start(path, "--plain")
    trained(rig, 40)
    runner.kill()
    runner.wait(PATIENCE_SECONDS)
    rig.nothing_left()

    for verb in ("get", "describe", "explain"):
        shown = rig.call(verb, "job")
        assert "elasticjob run" in shown.stdout + shown.stderr, shown
        assert "operator" not in shown.stdout + shown.stderr, shown
        assert "Training on" not in shown.stdout, shown
    assert "Interrupted" in rig.call("get", "job").stdout
    assert "Interrupted" in rig.call("describe", "job").stdout
    again = rig.start(path, "--plain")
    until(lambda: rig.status().get("phase") == "Running", "the second run")
    (rig.job / "finish").touch()
    assert again.wait(PATIENCE_SECONDS) == 0
