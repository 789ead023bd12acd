"""Faults of trainings that call `save` after each micro-batch: no sample is skipped or repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch import forked_gang

SCRIPT = """
import contextlib, functools, json, math, multiprocessing.util, os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elasticjob.train import Snapshots
from elasticjob.train.data import ElasticLoader
from tests.integration.torch import forked_gang

torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports its modules before the forks
top, every, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
kills = json.loads(sys.argv[4])
samples = torch.randn(30, 8, generator=torch.Generator().manual_seed(5))
MICRO = 3

def train(folder, kill, rank, world):
    torch.set_num_threads(1)
    torch.manual_seed(7 + rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = ElasticLoader(samples, global_batch=4, seed=3)
    snapshots = Snapshots(every_steps=every, max_overhead=1.0, replicas=0, optimizers=optimizer)
    snapshots._stop._policy.most = math.inf  # no duration decides
    snapshots._stop._is_worth_it = lambda size: True
    parallel = DistributedDataParallel(model)
    step, micro, losses = 0, 0, []
    if (found := snapshots.restore()) is not None:
        step = found.step
        for name, part in (("model", model), ("optimizer", optimizer), ("data", loader)):
            part.load_state_dict(found.state[name])
        torch.set_rng_state(found.rank_state)
    state = lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "data": loader.state_dict()}
    with (folder / f"losses-{rank}").open("a", buffering=1) as log:
        while step < steps:
            for batch in loader:
                if kill == [step, micro]:
                    if rank == world - 1 and world > 1:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if world == 1:
                        raise ArithmeticError
                waits = parallel.no_sync() if micro < MICRO - 1 else contextlib.nullcontext()
                with waits:
                    loss = parallel(batch).square().mean() / MICRO
                    loss.backward()
                losses.append(loss.item())
                micro += 1
                if micro == MICRO:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    step, micro = step + 1, 0
                    print(json.dumps([step, losses]), file=log)
                    losses = []
                snapshots.save(step, state, torch.get_rng_state)
                if step == steps:
                    break
    snapshots.close()

def work(folder, kill, rank, world):
    try:
        train(folder, kill, rank, world)
    except Exception:
        multiprocessing.util._run_finalizers()  # as at the end of its process
        raise

found = []
for run in ("calm", "killed"):
    folder = top / run
    folder.mkdir()
    for number, kill in enumerate([*(kills if run == "killed" else ()), None]):
        nodes = ["node"] * int(sys.argv[5])
        codes = forked_gang.forked(folder, f"attempt-{number}", nodes,
                                   functools.partial(work, folder, kill))
        assert (codes == [0] * len(nodes)) is (kill is None), (run, number, codes)
    found.append([[json.loads(line) for line in (folder / f"losses-{rank}").open()]
                  for rank in range(len(nodes))])
print(json.dumps(found))
"""
KILLS = [(2, 2), (5, 1), (5, 2), (6, 0), (8, 2)]
"""Steps and micro-batches before which a worker is killed: twice within one step, too."""
STEPS = 10


@pytest.mark.parametrize(("world", "every"), [(1, 1000), (2, 1000), (2, 4)])
def test_losses_after_kills_within_a_step_are_those_of_the_undisturbed_run(
    tmp_path: Path, world: int, every: int
) -> None:
    kills = str([list(each) for each in KILLS])
    found, log = forked_gang.run(SCRIPT, tmp_path, every, STEPS, kills, world)
    calm, killed = found
    assert [step for step, _ in calm[0]] == list(range(1, STEPS + 1)), log
    assert killed == calm, log


UNEVEN = """
import functools, json, math, multiprocessing.util, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from elasticjob.train import Snapshots
from tests.integration.torch import forked_gang

torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])  # imports its modules before the forks
top, stores, reason = Path(sys.argv[1]), sys.argv[2] == "stored", sys.argv[3]
NODES = ["one", "two"]

def work(is_first, rank, world):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = Snapshots(top / "storage" if stores else None, every_steps=1000, max_overhead=1.0,
                          optimizers=optimizer)
    snapshots._stop._policy.most = math.inf  # no duration decides
    snapshots._stop._is_worth_it = lambda size: True
    parallel = DistributedDataParallel(model)
    found = snapshots.restore()
    if not is_first:
        return [found.step, found.state["position"], found.rank_state]
    position = 0
    def save(step, **arguments):
        nonlocal position
        position += 1
        state = lambda: {"model": model.state_dict(), "position": position}
        snapshots.save(step, state, lambda: position, **arguments)
    def backward():
        parallel(torch.randn(4, 8)).square().mean().backward()
    for step in (1, 2, 3):
        optimizer.zero_grad()
        with parallel.no_sync():
            backward()
        save(step - 1)
        backward()
        optimizer.step()
        optimizer.zero_grad()
        save(step)
    if reason == "changed" and rank == 0:  # such as an evaluation with other weights
        with torch.no_grad():
            model.bias.add_(1.0)
            model.bias.sub_(1.0)
    if reason != "empty" or rank == 0:  # no samples in this micro-batch
        with parallel.no_sync():
            backward()
    if stores:
        save(3, store=True)
        snapshots.close()
        return None
    save(3)
    dist.barrier()
    try:
        raise ArithmeticError
    except ArithmeticError:
        multiprocessing.util._run_finalizers()  # as at the end of its process
        os._exit(1)

codes = forked_gang.forked(top, "first", NODES, functools.partial(work, True))
assert (codes == [0, 0]) is stores, codes
if stores:
    forked_gang.lose(top, *NODES)
print(json.dumps(forked_gang.gang(top, "again", NODES, functools.partial(work, False))))
"""


@pytest.mark.parametrize("reason", ["empty", "changed"])
@pytest.mark.parametrize("place", ["stored", "copied"])
def test_states_of_all_ranks_are_of_the_same_call(tmp_path: Path, place: str, reason: str) -> None:
    found, log = forked_gang.run(UNEVEN, tmp_path, place, reason)
    assert found[0] == found[1], log
    step, position, own = found[0]
    assert (step, position) == (3, own), log
