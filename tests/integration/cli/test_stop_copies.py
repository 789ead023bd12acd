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
    time.sleep(0.2)
    while is_awaited():
        time.sleep(0.05)
"""
STEPS = 18
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
            path = manifest(rig, "calm", STEPS, 1, killed=killed)
            calm = rig.call("run", path, "--plain", "--logs")
            assert calm.returncode == 0, calm.stdout + calm.stderr
            told = {int(step): loss for step, _, loss in LINE.findall(calm.stdout)}
            assert sorted(told) == list(range(1, STEPS + 1))
            found.write_text(json.dumps(told))
        return {int(step): loss for step, loss in json.loads(found.read_text()).items()}


@pytest.fixture
def losses(rig: LocalRig, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return undisturbed(rig, tmp_path_factory)


def await_fault(awaited: Path, faults: list[tuple[str, int]], done: int) -> None:
    """Let the ranks wait for the next fault: at its step if it is one of a node, else before the
    step of the one after it.
    """
    if done == len(faults):
        awaited.unlink(missing_ok=True)
        return
    steps = STEPS_BETWEEN * (done + 1)
    if faults[done][0] == "worker":
        steps += STEPS_BETWEEN - 1
    complete = awaited.with_suffix(".new")  # the ranks read at any time
    complete.write_text(str(steps))
    complete.replace(awaited)


def disturbed(rig: LocalRig, path: Path, name: str, faults: list[tuple[str, int]]) -> str:
    """Return the output of a run with a fault of a rank after every few steps.

    The ranks wait for each fault, which may be late.
    """
    await_fault(rig.job / "awaited-step", faults, 0)
    runner = rig.start(path, "--plain", "--logs")
    assert runner.stdout is not None
    output, done = "", 0
    for line in runner.stdout:
        output += line
        found = LINE.search(line)
        if found and done < len(faults) and int(found[1]) >= (done + 1) * STEPS_BETWEEN:
            kind, rank = faults[done]
            if kind != "worker":
                assert rig.call("fault", kind, name, f"{name}-{rank}").returncode == 0
            else:
                pids = [
                    int(each.name.partition("-")[2])
                    for each in rig.job.glob("worker-*")
                    if each.read_text() == str(rank)
                ]
                for pid in pids:
                    if Path(f"/proc/{pid}").exists():
                        os.kill(pid, signal.SIGKILL)
            done += 1
            await_fault(rig.job / "awaited-step", faults, done)
    assert runner.wait(timeout=PATIENCE_SECONDS) == 0, output
    assert done == len(faults), output
    return output


def assert_nothing_lost(output: str, losses: dict[int, str], faults: int) -> None:
    told = LINE.findall(output)
    assert [line for line in told if losses[int(line[0])] != line[2]] == [], output
    restored = re.findall(r"restored (\d+) lost (\w+)", output)
    assert len(restored) == faults + 1, output
    # A rank that was killed just after a step may have been one ahead of all others.
    assert all(int(step) > 0 and int(lost) <= 1 for step, lost in restored[1:]), restored
    assert sum(int(lost) for _, lost in restored[1:]) < faults, restored


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [2, 1])
def test_killed_workers_repeat_no_step(rig: LocalRig, losses: dict[int, str], nodes: int) -> None:
    """Rank 0 of the node writes the regular snapshots: the other rank copies in its place."""
    faults = [("worker", 0), ("worker", 1)]
    output = disturbed(rig, manifest(rig, "killed", STEPS, nodes), "killed", faults)
    assert_nothing_lost(output, losses, len(faults))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "killed"), [("kill-node", ""), ("kill-node", "99:0"), ("drain", "99:0")]
)
def test_lost_and_drained_nodes_repeat_no_step(
    rig: LocalRig, tmp_path_factory: pytest.TempPathFactory, kind: str, killed: str
) -> None:
    """With `killed` the random numbers of the lost rank are in the copy on the other node alone."""
    losses = undisturbed(rig, tmp_path_factory, killed)
    path = manifest(rig, "lost", 12, 2, killed=killed)
    output = disturbed(rig, path, "lost", [(kind, 0)])
    told = LINE.findall(output)
    assert [line for line in told if losses[int(line[0])] != line[2]] == [], output
    restored = [int(step) for step, _ in re.findall(r"restored (\d+) lost (\w+)", output)]
    assert len(restored) == 2, output
    assert restored[1] >= STEPS_BETWEEN - 1, output


@pytest.mark.timeout(300)
def test_worker_that_raises_repeats_no_step(rig: LocalRig, losses: dict[int, str]) -> None:
    output = disturbed(rig, manifest(rig, "raises", 12, 2, raises_at=7), "raises", [])
    assert "planned" in output
    assert_nothing_lost(output, losses, 1)
    assert re.findall(r"restored (\d+)", output)[1] == "7"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("nodes", [2, 1])
def test_killed_workers_with_random_numbers_of_their_own_repeat_no_step(
    rig: LocalRig, tmp_path_factory: pytest.TempPathFactory, nodes: int
) -> None:
    """Each rank is killed once in its forward, after all ranks have saved the step before."""
    losses = undisturbed(rig, tmp_path_factory, "99:0")
    path = manifest(rig, "drawing", STEPS, nodes, killed="6:0 12:1")
    output = disturbed(rig, path, "drawing", [])
    told = LINE.findall(output)
    assert [line for line in told if losses[int(line[0])] != line[2]] == [], output
    assert re.findall(r"restored (\d+) lost (\w+)", output)[1:] == [("6", "0"), ("12", "0")], output


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
    losses = {}
    for kind in ("calm", "kill"):
        options = ["--steps=12", "--step-seconds=0.3", "--checkpoint-every=1000"]
        command = ["python3", "digits.py", kind, str(ROOT / "examples/digits/train.py"), *options]
        path = rig.manifest(
            kind, command=[*command, f"--checkpoint-dir={kind}"], nodes=1, minNodes=1, maxNodes=1,
            nprocPerNode=2, **SPEC,
        )  # fmt: skip
        ended = rig.call("run", path, "--plain", "--logs")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        told = re.findall(r"rank (\d) loss ([\d.e-]+)$", ended.stdout, re.MULTILINE)
        losses[kind] = {rank: [loss for each, loss in told if each == rank] for rank in "01"}
    for rank in "01":
        calm, disturbed_losses = losses["calm"][rank], losses["kill"][rank]
        assert len(calm) == 12
        # Both ranks compute the loss of the eighth step before the kill, and again after it.
        assert disturbed_losses == [*calm[:8], *calm[7:]]
