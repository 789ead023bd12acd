"""Snapshots in memory with `elasticjob run`: faults cost at most two steps each, and no bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher.snapshot_folder import SnapshotFolder
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until
from tests.integration.torch.forked_gang import undisturbed_output
from tests.paths import ROOT

__all__ = ["rig"]

FAULTS = 10
STEPS_BETWEEN = 4
STEPS = (FAULTS + 1) * STEPS_BETWEEN
SPEC: Any = {"recovery": {"stopGraceSeconds": 3}, "maxRestarts": FAULTS}
HOOKS = """
def observed(progress):
    import os, pathlib
    pathlib.Path(f"worker-{os.getpid()}").write_text(os.environ["RANK"])
    pathlib.Path(f"folder-{os.getpid()}").write_text(os.environ["ELASTICJOB_SNAPSHOT_FOLDER"])
    awaited = pathlib.Path("awaited-step")

    def waits(step):  # from the awaited step on, for the next fault
        try:
            return step >= int(awaited.read_text())
        except FileNotFoundError:
            return False

    def waiting_progress(step, **values):
        progress(step, **values)
        while waits(step):
            time.sleep(0.02)

    return waiting_progress


def main() -> None:
    job.progress = observed(job.progress)
"""
"""Begin of the example's main function in the tests."""
EXAMPLE = ROOT / "examples" / "snapshots" / "train.py"
LINE = re.compile(r"step (\d+) loss ([-\d.e]+)")


def losses(output: str) -> list[tuple[int, str]]:
    """Return every reported step with its loss, in their order."""
    return [(int(step), loss) for step, loss in LINE.findall(output)]


def words(folder: Path, *arguments: str) -> list[str]:
    """Write the example and return its command, without periodic storage.

    The script has the example's own imports: the standby preloads them.
    """
    text, main = EXAMPLE.read_text(), "def main() -> None:\n"
    assert text.count(main) == 1
    (folder / "work.py").write_text(text.replace(main, HOOKS.lstrip()))
    return ["work.py", "--steps", str(STEPS), "--store-every", "1000", *arguments]


def train(rig: LocalRig, name: str, *arguments: str) -> Path:
    """Return the manifest of a run of the example on two nodes."""
    command = ["python3", *words(rig.job, *arguments)]
    return rig.manifest(name, command=command, nodes=2, maxNodes=2, nprocPerNode=1, **SPEC)


def undisturbed_losses(rig: LocalRig) -> dict[int, str]:
    """Return the loss of each step of a run of the example without a job."""
    folder = rig.job / "undisturbed"
    folder.mkdir()
    expected = dict(losses(undisturbed_output(folder, *words(folder))))
    assert sorted(expected) == list(range(1, STEPS + 1))
    return expected


@pytest.mark.timeout(300)
def test_loss_after_ten_killed_workers_is_that_of_the_undisturbed_run(rig: LocalRig) -> None:
    expected = undisturbed_losses(rig)
    awaited, draft = rig.job / "awaited-step", rig.job / "awaited-step.new"

    def await_fault(number: int) -> None:
        """Let the ranks wait for a fault, which may be late, before the step of the next one."""
        draft.write_text(str((number + 2) * STEPS_BETWEEN - 1))
        draft.replace(awaited)

    await_fault(0)
    runner = rig.start(train(rig, "killed", "--step-seconds", "0.05"), "--plain", "--logs")
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
                await_fault(faults)
    assert runner.wait(timeout=PATIENCE_SECONDS) == 0, output

    assert faults == FAULTS
    steps = [step for step, _ in losses(output)]
    assert len(steps) - STEPS <= 2 * FAULTS, steps
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert [step for step, loss in losses(output) if expected[step] != loss] == []
    folders = {path.read_text() for path in rig.job.glob("folder-*")}
    assert len(folders) == 2
    assert [folder for folder in folders if not folder or Path(folder).exists()] == []


@pytest.mark.timeout(300)
def test_loss_after_a_node_lost_with_its_memory_is_that_of_the_undisturbed_run(
    rig: LocalRig,
) -> None:
    expected = undisturbed_losses(rig)
    manifest = train(rig, "lost", "--step-seconds", "0.3")
    manifest.write_text(manifest.read_text().replace('"minNodes": 1', '"minNodes": 2'))
    runner = rig.start(manifest, "--plain", "--logs")
    assert runner.stdout is not None
    output, is_lost = "", False
    for line in runner.stdout:
        output += line
        found = LINE.search(line)
        if found and int(found[1]) == STEPS // 4 and not is_lost:
            # With the node of rank 0, lines of its last steps may be lost.
            victim = "lost-0" if line.startswith("lost-1 ") else "lost-1"
            workers = list(rig.workers().values())
            for worker in workers:  # else the job may end before the command has an effect
                os.kill(worker, signal.SIGSTOP)
            lost = rig.call("fault", "kill-node", "lost", victim)
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGCONT)
            assert lost.returncode == 0, lost.stderr
            is_lost = True
    assert runner.wait(timeout=PATIENCE_SECONDS) == 0, output

    # The random numbers of the lost rank's dropout are in the other node's replica alone.
    assert len({path.read_text() for path in rig.job.glob("folder-*")}) == 3, output
    steps = [step for step, _ in losses(output)]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert [step for step, loss in losses(output) if expected[step] != loss] == []


JOB = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from elasticjob import train

dist.init_process_group("gloo")
pathlib.Path(f"worker-{os.getpid()}").write_text(os.environ["RANK"])
snapshots = train.Snapshots()
step, found = 0, snapshots.restore()
if found is not None:
    step = found.step
    print("restored", step, found.place, found.lost_steps, flush=True)
size = int(sys.argv[1])
while not pathlib.Path("finish").exists():
    value = torch.ones(1)
    dist.all_reduce(value)
    time.sleep(0.05)
    step += 1
    train.progress(step)
    snapshots.save(step, {"x": torch.full((size,), step)}, torch.get_rng_state())
"""


PLANNED = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from elasticjob import train

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
weight = torch.nn.Parameter(torch.zeros(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
if sys.argv[1] == "sharded":  # the state of each rank is its own, and nothing of it is held
    snapshots = train.Snapshots(every_steps=1000, sharded=True)
else:
    snapshots = train.Snapshots(every_steps=1000, optimizers=optimizer)
if dist.get_rank() == 0:
    pathlib.Path("restores").touch()
while pathlib.Path("wait").exists():
    time.sleep(0.02)
step, found = 0, snapshots.restore()
if found is not None:
    step = found.step
    weight.data.copy_(found.state["weight"])
    own = None if found.rank_state is None else found.rank_state.tolist()
    print(f"restored {step} lost {found.lost_steps} own {own} rank {rank}", flush=True)
began = step
while not pathlib.Path("finish").exists():
    time.sleep(0.05)
    weight.grad = torch.ones(2)
    dist.all_reduce(weight.grad)
    optimizer.step()
    step += 1
    train.progress(step)
    snapshots.save(step, {"x": step, "weight": weight.detach()}, torch.tensor([step, rank]))
    if rank == 0:
        pathlib.Path(f"began-{began}-{os.getpid()}").write_text(str(step))
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("state", ["sharded", "held"])
def test_drains_repeat_no_step_even_before_the_new_round_has_restored(
    rig: LocalRig, state: str
) -> None:
    """There is no storage, and the next regular snapshot is a thousand steps away."""
    (rig.job / "work.py").write_text(PLANNED)
    recovery = {"stopGraceSeconds": 3}
    command = ["python3", "work.py", state]
    runner = rig.start(
        rig.manifest("kept", command=command, recovery=recovery, minNodes=2, maxNodes=2),
        "--plain", "--logs",
    )  # fmt: skip
    restores, wait = rig.job / "restores", rig.job / "wait"

    def train(rounds: int) -> None:
        """Wait for some steps of the last one of these rounds."""
        found = until(
            lambda: len(each := list(rig.job.glob("began-*"))) == rounds and each,
            f"{rounds} rounds",
        )
        newest = max(found, key=lambda path: path.stat().st_ctime_ns)
        first = int(newest.name.split("-")[1])
        # The ranks connect for their own states at the first step.
        until(lambda: int(newest.read_text() or 0) > first + 30, "its steps")

    def drain(victim: str) -> None:
        assert rig.call("fault", "drain", "kept", victim).returncode == 0

    train(1)
    restores.unlink()
    wait.touch()
    drain("kept-0")
    until(restores.exists, "the second round")
    # The memory of the second node is the last one with the snapshot.
    drain("kept-1")
    time.sleep(3)  # longer than the wait for a request to save
    wait.unlink()
    train(3)
    (rig.job / "finish").touch()
    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 0, output
    told = re.findall(r"restored (\d+) lost (\d+) own \[(\d+), (\d)\] rank (\d)", output)
    assert len(told) == 4, output
    assert all(step == own and rank == of for step, _, own, of, rank in told), told
    second, third = told[:2], told[2:]
    assert all(lost == "0" for _, lost, *_ in second), told
    assert min(int(step) for step, *_ in third) >= int(second[0][0]) > 0, told
    # The own state of a rank may not have reached another node so soon after the restore.
    assert state == "held" or all(lost == "0" for _, lost, *_ in third), told


def configured(
    rig: LocalRig, name: str, size: int, warm_start: str = "Auto", **snapshots: Any
) -> Path:
    """Return the manifest of a job whose script takes its settings from the job.

    Without a second round no standby is needed, which would import torch again on each node.
    """
    (rig.job / "work.py").write_text(JOB)
    recovery = {
        "stopGraceSeconds": 3,
        "warmStart": warm_start,
        "snapshots": {"everySteps": 1, **snapshots},
    }
    command = ["python3", "work.py", str(size)]
    return rig.manifest(name, command=command, recovery=recovery, minNodes=2, maxNodes=2)


def test_job_configures_snapshots_and_shows_losses_and_goodput(rig: LocalRig) -> None:
    storage = {"claim": "checkpoints", "everySeconds": 600, "keep": 1}
    manifest = configured(rig, "told", 1000, memoryLimit="64Mi", storage=storage, everySteps=20)
    runner = rig.start(manifest, "--plain", "--logs")
    until(lambda: rig.status("told").get("nodes") == 2, "two nodes")
    healthy = until(
        lambda: (
            (found := rig.status("told").get("snapshots"))
            and found["replicas"] == "Healthy"
            and found
        ),
        "confirmed replicas",
    )
    assert healthy["bytesPerNode"] > 8000
    assert healthy["lostSteps"] == 0
    time.sleep(1)
    assert rig.call("fault", "kill-worker", "told", "told-0").returncode == 0
    after = until(
        lambda: (found := rig.status("told"))["snapshots"]["countedRound"] == 2 and found,
        "the second round",
    )
    lost = after["rounds"][-1]["lostSteps"]
    assert lost <= 21
    assert after["rounds"][-1].get("lostReason") == ("NoOptimizers" if lost else None)
    assert after["snapshots"]["restorableStep"] >= 1
    assert after["snapshots"]["pausedMs"] > 0
    assert 0 <= after["snapshots"]["goodputPercent"] <= 100
    assert condition_of(after, "SnapshotsInMemory")["status"] == "True"
    told = rig.call("explain", "told").stdout
    told = " ".join(told.split())
    reason = r", without a copy at the stop: Snapshots was given no optimizers"
    assert re.search(rf", lost (no step|\d+ steps? \([\d.]+ m?s of work\){reason})", told), told
    assert "Restorable step: " in rig.call("describe", "told").stdout
    # The claim, a folder of this machine here, keeps the last snapshot of the stopped job.
    assert rig.call("suspend", "told").returncode == 0
    until(lambda: rig.status("told").get("phase") == "Suspended", "the suspension")
    stop = rig.status("told")["lastStop"]
    assert stop["result"] == "Saved"
    [stored] = rig.state.glob("elasticjob/.claims/default/checkpoints/told/step-*")
    assert int(stored.name[5:17]) == stop["checkpointStep"] == stop["step"]
    runner.communicate(timeout=PATIENCE_SECONDS)
    rig.start(manifest, "--plain", "--logs")
    resumed = until(
        lambda: re.search(r"restored (\d+) storage", rig.call("logs", "told").stdout), "storage"
    )
    assert int(resumed[1]) == stop["step"]


def test_suspension_does_not_wait_for_storage_that_fails(rig: LocalRig) -> None:
    storage = {"claim": "checkpoints", "everySeconds": 3600, "keep": 1}
    manifest = configured(rig, "full", 1000, "Never", storage=storage)
    document = json.loads(manifest.read_text())
    document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 3600
    manifest.write_text(json.dumps(document))
    runner = rig.start(manifest, "--plain", "--logs")
    folder = rig.state / "elasticjob/.claims/default/checkpoints/full"
    until(
        lambda: (rig.status("full").get("snapshots") or {}).get("storedStep", -1) >= 0,
        "the first snapshot in storage",
    )
    shutil.rmtree(folder)
    folder.write_text("a file in place of the folder")
    assert rig.call("suspend", "full").returncode == 0
    said, _ = runner.communicate(timeout=120)  # a save would have an hour
    stop = rig.status("full")["lastStop"]
    assert (stop["result"], stop["unsaved"]) == ("SaveFailed", ["full-0", "full-1"]), said
    assert stop["error"].startswith(f"rank 0: {folder}: "), stop
    assert f"could not be written: rank 0: {folder}: " in rig.call("explain", "full").stdout


def kill(rig: LocalRig, *parts: str) -> int:
    """Kill the processes with one of these words in their command at once; without words all.

    Returns their number.
    """
    found = rig.processes().items()
    pids = [pid for pid, command in found if not parts or any(one in command for one in parts)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ended with its parent
            os.kill(pid, signal.SIGKILL)
    return len(pids)


@pytest.mark.timeout(500)
def test_steps_lost_with_all_nodes_and_with_the_whole_run_are_counted(rig: LocalRig) -> None:
    storage = {"claim": "checkpoints", "everySeconds": 3600, "keep": 1}
    manifest = configured(rig, "gone", 1000, storage=storage)
    runner = rig.start(manifest, "--plain", "--logs")
    before = until(
        lambda: (
            (found := rig.status("gone").get("snapshots"))
            and (found.get("reachedStep") or 0) >= 20
            and found
        ),
        "steps in the status",
        120,
    )
    # The first snapshot alone is in storage.
    assert (before["beganStep"], before["lostSteps"]) == (0, 0)
    kill(rig, "elasticjob_launcher", "elasticjob_agent", "work.py")
    after = until(
        lambda: (found := rig.status("gone"))["snapshots"]["countedRound"] >= 2 and found,
        "the next round",
        120,
    )
    told = re.search(r"restored (\d+) storage", rig.call("logs", "gone").stdout)
    assert told is not None
    restored = int(told[1])
    lost = after["rounds"][-1]["lostSteps"]
    assert lost >= before["reachedStep"] - restored > 0
    assert after["rounds"][-1].get("lostMs") is None
    assert (after["snapshots"]["lostSteps"], after["snapshots"]["beganStep"]) == (lost, restored)
    assert after["snapshots"]["lostMs"] > 0
    assert f"lost at least {lost} steps" in rig.call("explain", "gone").stdout
    wide = rig.call("rounds", "gone", "-o", "wide").stdout.splitlines()
    assert wide[-1].split()[-1] == str(lost)
    assert rig.call("timeline", "gone", "-o", "svg").returncode == 0
    assert f"{lost} steps lost" in (rig.job / "gone.svg").read_text()

    # The end of the whole run is no different: the next one continues from storage.
    reached = until(
        lambda: (step := rig.status("gone")["snapshots"]["reachedStep"]) > restored + 9 and step,
        "further steps",
        120,
    )
    until(lambda: kill(rig) == 0, "the end of the run")
    runner.communicate(timeout=PATIENCE_SECONDS)
    rig.start(manifest, "--plain", "--logs")
    again = until(
        lambda: (
            (found := rig.status("gone").get("snapshots")) and found["countedRound"] == 1 and found
        ),
        "the first round of the next run",
        120,
    )
    assert again["lostSteps"] >= reached - again["beganStep"] > 0
    assert (again["beganStep"], again["lostMs"]) == (restored, 0)


def test_memory_limit_below_two_snapshots_is_a_condition(rig: LocalRig) -> None:
    manifest = configured(rig, "small", 400_000, "Never", memoryLimit="5M")  # snapshots of 3.2 MB
    rig.start(manifest, "--plain", "--logs")
    found = until(
        lambda: (one := condition_of(rig.status("small"), "SnapshotsInMemory")) and one,
        "the condition",
    )
    assert (found["status"], found["reason"]) == ("False", "MemoryLimitTooSmall")
    assert "recovery.snapshots.memoryLimit (4.8 MiB): set more than 6." in found["message"]
    assert "Snapshots are not in memory" in rig.call("explain", "small").stdout
    assert rig.status("small")["phase"] == "Running"


def test_launcher_without_a_folder_in_memory_is_a_condition(rig: LocalRig) -> None:
    """The variables are those of a launcher on a machine without /dev/shm."""
    manifest = configured(rig, "bare", 1000, "Never")
    failed = SnapshotFolder(Path("/proc/missing")).environment
    work = rig.job / "work.py"
    work.write_text(f"import os\nos.environ.update({failed})\n{work.read_text()}")
    rig.start(manifest, "--plain", "--logs")
    found = until(
        lambda: (one := condition_of(rig.status("bare"), "SnapshotsInMemory")) and one,
        "the condition",
    )
    assert (found["status"], found["reason"]) == ("False", "MemoryUnusable")
    assert "cannot be created or written: ENOENT" in found["message"]
    assert rig.status("bare")["phase"] == "Running"
    logs = rig.call("logs", "bare").stdout
    assert logs.count("cannot create a folder in") == 2, "once on each node"


def condition_of(status: Any, kind: str) -> Any:
    return next((one for one in status.get("conditions", ()) if one["type"] == kind), None)
