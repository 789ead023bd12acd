"""Copies at the stop with `elasticjob run`: faults repeat no step, and change no bit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from scripts.environment import locked
from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig
from tests.integration.torch import forked_gang
from tests.paths import ROOT

__all__ = ["rig"]

STEPS_BETWEEN = 6
SPEC: Any = {"recovery": {"stopGraceSeconds": 3}, "maxRestarts": 5}
SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elasticjob import train

steps, raises_at, marker = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path("raised")
killed = [tuple(map(int, each.split(":"))) for each in sys.argv[3:]]  # step and rank of each
awaited = pathlib.Path("awaited-step")  # there the ranks wait until a later one is written
torch.set_num_threads(1)
torch.manual_seed(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
own = torch.get_rng_state if killed else None
pathlib.Path(f"worker-{os.getpid()}").write_text(os.environ["RANK"])
# The statistics change in forward; each rank draws its own samples.
model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.BatchNorm1d(300),
                            torch.nn.Dropout(0.2 if killed else 0.0), torch.nn.Linear(300, 1))
torch.manual_seed(10 + rank)  # each rank draws its own random numbers
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
snapshots = train.Snapshots(every_steps=1000, optimizers=optimizer,
                            max_overhead=0.5)  # so that the state is held on a busy machine too
step, lost = 0, None
if (found := snapshots.restore()) is not None:
    step, lost = found.step, found.lost_steps
    model.load_state_dict(found.state["model"])
    optimizer.load_state_dict(found.state["optimizer"])
    if own:
        torch.set_rng_state(found.rank_state)
if rank == 0:
    print(f"restored {step} lost {lost}", flush=True)
parallel = DistributedDataParallel(model)

def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

def is_awaited():
    try:
        return step >= int(awaited.read_text())
    except FileNotFoundError:
        return False

while step < steps:
    samples = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    if step == raises_at and rank == world - 1 and not marker.exists():
        marker.touch()
        raise RuntimeError("planned")
    loss = parallel(samples).square().mean()
    mark = pathlib.Path(f"killed-{step}")
    if (step, rank) in killed and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    train.progress(step)
    snapshots.save(step, state, own)  # before another collective, in which a rank may wait
    total = loss.detach().clone()
    dist.all_reduce(total)
    print(f"step {step} rank {rank} loss {total.item()!r}", flush=True)
    time.sleep(0.1)
    while is_awaited():
        time.sleep(0.05)
"""
STEPS = 30
Fault = tuple[int, str, int]
"""Step, kind, and rank of the worker or number of the node."""
LINE = re.compile(r"step (\d+) rank (\d+) loss ([-\d.e]+)")


def manifest(
    rig: LocalRig, name: str, steps: int, nodes: int, raises_at: int = -1, killed: str = ""
) -> Path:
    (rig.job / "work.py").write_text(SCRIPT)
    return rig.manifest(
        name, command=["python3", "work.py", str(steps), str(raises_at), *killed.split()],
        nodes=nodes, minNodes=nodes, maxNodes=nodes, nprocPerNode=2 // nodes, **SPEC,
    )  # fmt: skip


def undisturbed(rig: LocalRig, factory: pytest.TempPathFactory, killed: str = "") -> dict[int, str]:
    """Return the loss of each step of an undisturbed run, once for all of pytest's workers.

    Without `killed` the ranks have no state of their own.
    """
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of the run
    found = folder / f"undisturbed-losses{'-own' * bool(killed)}.json"
    with locked(found.with_suffix(".lock")):
        if not found.exists():
            work = rig.job / "undisturbed" / "work.py"
            work.parent.mkdir()
            work.write_text(SCRIPT)
            output = forked_gang.undisturbed_output(work.parent, work, STEPS, -1, *killed.split())
            told = {int(step): loss for step, _, loss in LINE.findall(output)}
            assert sorted(told) == list(range(1, STEPS + 1))
            found.write_text(json.dumps(told))
        return {int(step): loss for step, loss in json.loads(found.read_text()).items()}


@pytest.fixture
def losses(rig: LocalRig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return undisturbed(rig, tmp_path_factory)


def await_fault(awaited: Path, faults: list[Fault], done: int) -> None:
    """Let the ranks wait for the next fault: at its step if it is one of a node, else a few steps
    later, before the step of the one after it.
    """
    if done == len(faults):
        awaited.unlink(missing_ok=True)
        return
    step, kind, _ = faults[done]
    if kind == "worker":
        step += STEPS_BETWEEN - 1
    complete = awaited.with_suffix(".new")  # the ranks read at any time
    complete.write_text(str(step))
    complete.replace(awaited)


def disturbed(rig: LocalRig, path: Path, name: str, faults: list[Fault]) -> str:
    """Return the output of a run with these faults. The ranks wait for each, which may be late."""
    await_fault(rig.job / "awaited-step", faults, 0)
    runner = rig.start(path, "--plain", "--logs")
    assert runner.stdout is not None
    output, done = "", 0
    for line in runner.stdout:
        output += line
        found = LINE.search(line)
        if found and done < len(faults) and int(found[1]) >= faults[done][0]:
            _, kind, number = faults[done]
            if kind != "worker":
                assert rig.call("fault", kind, name, f"{name}-{number}").returncode == 0
            else:
                pids = [
                    int(each.name.partition("-")[2])
                    for each in rig.job.glob("worker-*")
                    if each.read_text() == str(number)
                ]
                for pid in pids:
                    if Path(f"/proc/{pid}").exists():
                        os.kill(pid, signal.SIGKILL)
            done += 1
            await_fault(rig.job / "awaited-step", faults, done)
    assert runner.wait(timeout=PATIENCE_SECONDS) == 0, output
    assert done == len(faults), output
    return output


def restorations(output: str, losses: dict[int, str]) -> list[tuple[int, int]]:
    """Return step and lost steps of each restored state; no step may have another loss."""
    told = LINE.findall(output)
    assert [line for line in told if losses[int(line[0])] != line[2]] == [], output
    found = re.findall(r"restored (\d+) lost (\w+)", output)
    assert found[0] == ("0", "None"), output
    return [(int(step), int(lost)) for step, lost in found[1:]]


def assert_no_step_lost_with_workers(restored: list[tuple[int, int]], output: str) -> None:
    # A rank that was killed just after a step may have been one ahead of all others.
    assert all(step > 0 and lost <= 1 for step, lost in restored), output
    assert sum(lost for _, lost in restored) < len(restored), output


@pytest.mark.timeout(300)
def test_killed_workers_of_one_node_repeat_no_step(rig: LocalRig, losses: dict[int, str]) -> None:
    """Rank 0 of the node writes the regular snapshots: the other rank copies in its place."""
    faults: list[Fault] = [(6, "worker", 0), (12, "worker", 1)]
    output = disturbed(rig, manifest(rig, "killed", 18, 1), "killed", faults)
    restored = restorations(output, losses)
    assert len(restored) == len(faults), output
    assert_no_step_lost_with_workers(restored, output)


@pytest.mark.timeout(300)
def test_faults_of_two_nodes_repeat_no_step(rig: LocalRig, losses: dict[int, str]) -> None:
    """A worker raises, two are killed, and a node is lost."""
    path = manifest(rig, "two", 24, 2, raises_at=3)
    faults: list[Fault] = [(6, "worker", 0), (12, "worker", 1), (18, "kill-node", 0)]
    output = disturbed(rig, path, "two", faults)
    assert "planned" in output
    raised, *killed, lost = restorations(output, losses)
    assert raised == (3, 0), output
    assert len(killed) == 2, output
    assert_no_step_lost_with_workers(killed, output)
    assert lost[0] >= 18 - 1, output


@pytest.mark.timeout(300)
def test_killed_workers_with_random_numbers_of_their_own_repeat_no_step(
    rig: LocalRig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each rank is killed once in its forward, after all ranks have saved the step before."""
    losses = undisturbed(rig, tmp_path_factory, "99:0")
    path = manifest(rig, "drawing", 18, 1, killed="6:0 12:1")
    output = disturbed(rig, path, "drawing", [])
    assert restorations(output, losses) == [(6, 0), (12, 0)], output


@pytest.mark.timeout(300)
def test_faults_of_two_nodes_with_random_numbers_of_their_own_repeat_no_step(
    rig: LocalRig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """After both ranks one node is lost, and the other one is drained: the random numbers of the
    lost rank are in the copy on the other node alone."""
    losses = undisturbed(rig, tmp_path_factory, "99:0")
    path = manifest(rig, "own", STEPS, 2, killed="6:0 12:1")
    output = disturbed(rig, path, "own", [(18, "kill-node", 0), (24, "drain", 1)])
    *killed, lost, drained = restorations(output, losses)
    assert killed == [(6, 0), (12, 0)], output
    assert lost[0] >= 18 - 1, output
    assert drained[0] >= 24 - 1, output


KILLING = """
import functools, os, pathlib, runpy, sys, time
import torch
from elasticjob import train

train.Snapshots = functools.partial(train.Snapshots, every_steps=1000, max_overhead=0.5)
kind = sys.argv.pop(1)
real, calls, killed = torch.nn.functional.cross_entropy, [], pathlib.Path("killed")

def cross_entropy(*arguments, **options):
    loss = real(*arguments, **options)
    calls.append(loss)
    print(f"rank {os.environ['RANK']} loss {loss.item()!r}", flush=True)
    reached = pathlib.Path("reached")
    if kind == "kill" and len(calls) == 8 and not killed.exists():
        if os.environ["RANK"] == "0":
            reached.touch()  # its backward then waits for the other rank
        else:
            limit = time.monotonic() + 100
            while not reached.exists() and time.monotonic() < limit:
                time.sleep(0.01)
            killed.touch()
            os.kill(os.getpid(), 9)
    return loss

torch.nn.functional.cross_entropy = cross_entropy
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.timeout(300)
def test_digits_example_repeats_no_step_of_a_killed_worker(rig: LocalRig) -> None:
    """The loss of each rank is that of an undisturbed run, with dropout."""
    (rig.job / "digits.py").write_text(KILLING)
    train = str(ROOT / "examples/digits/train.py")
    options = ["--steps=12", "--step-seconds=0.2", "--checkpoint-every=1000"]

    def words(kind: str) -> list[str]:
        return ["digits.py", kind, train, *options, f"--checkpoint-dir={kind}"]

    def by_rank(output: str) -> dict[str, list[str]]:
        told = re.findall(r"rank (\d) loss ([\d.e-]+)$", output, re.MULTILINE)
        return {rank: [loss for each, loss in told if each == rank] for rank in "01"}

    undisturbed_losses = by_rank(forked_gang.undisturbed_output(rig.job, *words("calm")))
    path = rig.manifest(
        "kill", command=["python3", *words("kill")], nodes=1, minNodes=1, maxNodes=1,
        nprocPerNode=2, **SPEC,
    )  # fmt: skip
    ended = rig.call("run", path, "--plain", "--logs")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    disturbed_losses = by_rank(ended.stdout)
    for rank in "01":
        calm = undisturbed_losses[rank]
        assert len(calm) == 12
        # Both ranks compute the loss of the eighth step before the kill, and again after it.
        assert disturbed_losses[rank] == [*calm[:8], *calm[7:]]
