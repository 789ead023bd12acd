"""Snapshots of FSDP2's distributed tensors, restored by as many, fewer and more ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torch import forked_gang
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(300)  # each rank imports torch

RANKS = """
import functools, json, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.core.replicas import State
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def gang(name, nodes, last, width=7, into=True, **settings):
    '''Train to step `last` on the nodes; return what each rank restored.'''
    work = lambda rank, world: one(rank, world, last, width, into, dict(settings))
    return forked_gang.gang(top, name, nodes, work)

def whole(state):
    '''Return all tensors of the state, whole, in one dict.'''
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key}/{name}": item for name, item in whole(value).items()}
        elif isinstance(value, torch.Tensor):
            found[key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {name: item.clone() for name, item in found.items()}

def one(rank, world, last, width, into, settings):
    torch.manual_seed(0)
    # 7 and 5 rows do not divide by 2, 3 or 4, and a bias of one element leaves ranks without any.
    layers = torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)
    model = torch.nn.Sequential(*layers)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if settings.pop("overlaps", False):
        settings["optimizers"] = optimizer
    snapshots = Snapshots(every_steps=1, sharded=True, **settings)
    current = lambda: dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    try:
        found = snapshots.restore(into=current) if into else snapshots.restore()
    except SnapshotError as error:
        return str(error)
    told, step = None, 0
    if found is not None:
        step = found.step
        expected = torch.load(top / f"step-{step}.pt")
        restored = whole(found.state)
        assert restored.keys() == expected.keys(), (restored.keys(), expected.keys())
        assert all(torch.equal(restored[key], expected[key]) for key in expected)
        if into:
            set_state_dict(model, optimizer, model_state_dict=found.state["model"],
                           optim_state_dict=found.state["optimizer"])
            now = whole(current())
            assert all(torch.equal(now[key], expected[key]) for key in expected)
        told = [step, None if found.rank_state is None else int(found.rank_state), found.place]
    while step < last:
        optimizer.zero_grad()
        model(torch.arange(10.0).reshape(2, 5) / 10 + step).square().sum().backward()
        optimizer.step()
        step += 1
        state = whole(current())
        if rank == 0:
            torch.save(state, top / f"step-{step}.pt")
        dist.barrier()
        snapshots.save(step, current, torch.tensor(rank))
        copies = snapshots._replication
        while copies is not None and copies.state == State.RUNNING:
            pass
        dist.barrier()
    snapshots.close()
    return told

lose = functools.partial(forked_gang.lose, top)

results = {}
exec(sys.argv[2])
print(json.dumps(results))
"""


def run(top: Path, script: str) -> Any:
    return forked_gang.run(RANKS, top, script, seconds=240)[0]


def test_same_ranks_restore_their_shards_and_own_state(tmp_path: Path) -> None:
    script = """
results["first"] = gang("first", ["a", "b", "c"], 3)
results["again"] = gang("again", ["a", "b", "c"], 5, overlaps=True)
results["last"] = gang("last", ["a", "b", "c"], 5)
"""
    assert run(tmp_path, script) == {
        "first": [None] * 3,
        "again": [[3, rank, "memory"] for rank in range(3)],
        "last": [[5, rank, "memory"] for rank in range(3)],
    }


def test_other_numbers_of_ranks_restore_after_the_loss_of_a_node(tmp_path: Path) -> None:
    script = """
gang("first", ["a", "b", "c"], 6)
lose("c")
results["fewer"] = gang("fewer", ["a", "b"], 6)
results["grown"] = gang("grown", ["a", "b", "d", "e"], 9)
lose("b")
results["again"] = gang("again", ["a", "d", "e"], 9)
"""
    found = run(tmp_path, script)
    # The copies of the lost node are of the last version that all ranks confirmed.
    step = found["fewer"][0][0]
    assert step >= 5
    assert found["fewer"] == [[step, None, "memory"]] * 2
    assert found["grown"] == [[step, None, "memory"]] * 4
    last = found["again"][0][0]
    assert last >= 8
    assert found["again"] == [[last, None, "memory"]] * 3


def test_start_without_the_state_of_all_ranks_is_logged(tmp_path: Path) -> None:
    script = """
gang("first", ["a", "b", "c"], 3)
lose("b", "c")
results["again"] = gang("again", ["a", "b"], 1)
"""
    found, log = forked_gang.run(RANKS, tmp_path, script, seconds=240)
    assert found == {"again": [None] * 2}
    text = "no snapshot has the state of all ranks, and training begins at step 0 instead of 3"
    assert log.count(text) == log.count("there is no storage: give Snapshots a folder") == 1


def test_all_nodes_lost_restore_from_storage_at_another_number(tmp_path: Path) -> None:
    script = """
shared = str(top / "storage")
gang("first", ["a", "b", "c"], 4, storage=shared, store_every=2)
lose("a", "b", "c")
results["fewer"] = gang("fewer", ["d", "e"], 4, storage=shared)
"""
    assert run(tmp_path, script) == {"fewer": [[4, None, "storage"]] * 2}


def test_tensors_are_whole_without_a_target(tmp_path: Path) -> None:
    script = """
gang("first", ["a", "b", "c"], 2)
results["whole"] = gang("whole", ["a", "b", "c", "d"], 2, into=False)
"""
    assert run(tmp_path, script) == {"whole": [[2, None, "memory"]] * 4}


def test_another_shape_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    script = """
gang("first", ["a", "b"], 2)
results["wide"] = gang("wide", ["a", "b"], 2, width=8)
"""
    [first, second] = run(tmp_path, script)["wide"]
    assert first == second
    assert "['0.weight'] is a float32 tensor of shape [7, 5] in the snapshot" in first
    assert "shape [8, 5] here" in first


def test_distributed_tensors_need_a_sharded_snapshot() -> None:
    code = """
import torch, torch.distributed as dist
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from elasticjob.train import Snapshots
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
snapshots = Snapshots()
snapshots.restore()
tensor = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (1,)))
snapshots.save(1, {"model": {"weight": tensor}})
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk")}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=240
    )
    assert "state['model']['weight'] is a distributed tensor" in ran.stderr, ran.stderr
    assert "sharded=True" in ran.stderr
