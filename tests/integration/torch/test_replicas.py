"""Replicas over TCP between ranks with gloo: lost nodes, damage, sharded state, silent peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.paths import ROOT

RANKS = """
import json, os, shutil, sys, time, traceback
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train import links, replication
from elasticjob.train.replicas import State

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports its modules before the forks
top = Path(sys.argv[1])
links.QUIET_SECONDS = 1.0

def gang(name, nodes, last, **settings):
    '''Train to step `last` on the nodes; return what each rank restored.'''
    pids = []
    for rank, node in enumerate(nodes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ["LOCAL_RANK"] = str(nodes[:rank].count(node))
                one(name, rank, len(nodes), top / node, last, settings)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    return [json.loads((top / f"{name}-{rank}").read_text()) for rank in range(len(nodes))]

def one(name, rank, world, folder, last, settings):
    folder.mkdir(exist_ok=True)
    os.environ["ELASTICJOB_SNAPSHOT_FOLDER"] = str(folder)
    dist.init_process_group("gloo", init_method=f"file://{top}/store-{name}", rank=rank,
                            world_size=world)
    stays = settings.pop("stays", last)
    deaf = settings.pop("deaf", None)
    if rank == deaf:
        replication.Receiver._serve = lambda self: None
    optimizer = None
    if settings.pop("overlaps", False):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(9))])
        settings["optimizers"] = optimizer
    snapshots = Snapshots(every_steps=1, **settings)
    try:
        found = snapshots.restore()
    except SnapshotError as error:
        (top / f"{name}-{rank}").write_text(json.dumps(str(error)))
        return
    told = None
    if found is not None:
        assert bool((found.state["x"] == found.step).all())
        if found.rank_state is not None:
            assert found.rank_state[:2].tolist() == [rank, found.step]
        told = [found.step, found.rank_state is not None, found.place]
    (top / f"{name}-{rank}").write_text(json.dumps(told))
    for step in range(1 if found is None else found.step + 1, last + 1):
        dist.barrier()
        if optimizer is not None:
            optimizer.step()
        snapshots.save(step, {"x": torch.full((1000,), step)},
                       torch.full((200_000,), rank).index_fill(0, torch.tensor(1), step))
        copies = snapshots._replication
        while step <= stays and copies is not None and copies.state == State.RUNNING:
            time.sleep(0.01)
        if step == stays:  # no rank copies a later version
            dist.barrier()
            replication.send = refuse
    snapshots.close()
    dist.barrier()
    dist.destroy_process_group()

def refuse(*_):
    raise OSError("network is unreachable")

def damage(node, name):
    for path in (top / node).glob(name):
        path.write_bytes(path.read_bytes()[:-1] + b"!")

def lose(*nodes):
    for node in nodes:
        shutil.rmtree(top / node)

results = {}
exec(sys.argv[2])
print(json.dumps(results))
"""


def run(top: Path, script: str) -> tuple[Any, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1"}
    for name in ("ELASTICJOB_SNAPSHOT_FOLDER", "MASTER_ADDR"):
        env.pop(name, None)
    ran = subprocess.run(
        [sys.executable, "-c", RANKS, str(top), script],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


def test_state_of_a_lost_node_is_restored_from_its_replica(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", "abc", 5)
lose("c")
results["lost"] = gang("lost", "dab", 8)
lose("d")
results["newcomer"] = gang("newcomer", "abe", 9)
lose("a", "e")
results["two lost"] = gang("two lost", "bfg", 9)
""",
    )
    assert found["lost"] == [[5, True, "memory"]] * 3
    assert found["newcomer"] == [[8, True, "memory"]] * 3
    # Two losses exceed one replica: the shared state is restored without the ranks' own.
    assert found["two lost"] == [[9, False, "memory"]] * 3


def test_snapshots_copied_during_the_next_step_are_replicated(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", "abc", 5, overlaps=True)
lose("b")
results["lost"] = gang("lost", "adc", 5, overlaps=True)
""",
    )
    assert found["lost"] == [[5, True, "memory"]] * 3


def test_two_nodes_lost_at_once_are_restored_from_two_replicas(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", "abcd", 4, replicas=2)
lose("a", "c")
results["lost"] = gang("lost", "bdef", 4, replicas=2)
""",
    )
    assert found["lost"] == [[4, True, "memory"]] * 4


def test_node_with_several_ranks_is_restored_from_its_replica(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", "aabb", 4, sharded=True)
lose("b")
results["lost"] = gang("lost", "aacc", 6, sharded=True)
lose("a")
results["other lost"] = gang("other lost", "ddcc", 6, sharded=True)
""",
    )
    assert found["lost"] == [[4, True, "memory"]] * 4
    assert found["other lost"] == [[6, True, "memory"]] * 4


def test_damaged_replica_is_refused(tmp_path: Path) -> None:
    found, log = run(
        tmp_path,
        """
gang("first", "abc", 4)
lose("c")
for node in "ab":
    damage(node, "replica-2.*")
results["lost"] = gang("lost", "abd", 4)
""",
    )
    assert found["lost"] == [[4, False, "memory"]] * 3
    assert "checksum mismatch" in log


def test_sharded_state_goes_back_to_the_newest_version_with_replicas(tmp_path: Path) -> None:
    found, log = run(
        tmp_path,
        """
gang("first", "abc", 9, sharded=True, stays=4)
lose("c")
results["lost"] = gang("lost", "abd", 6, sharded=True)
results["other size"] = gang("other size", "ab", 6, sharded=True)
""",
    )
    # Steps 5 to 9 were not copied to other nodes.
    assert found["lost"] == [[4, True, "memory"]] * 3
    assert len(found["other size"]) == 2
    assert "sharded state of 3 ranks and cannot be restored by 2" in found["other size"][0]
    assert log.count("network is unreachable") == 3


def test_training_goes_on_if_a_peer_does_not_answer(tmp_path: Path) -> None:
    found, log = run(
        tmp_path,
        """
gang("first", "abc", 6, deaf=1)
results["same"] = gang("same", "abc", 6)
""",
    )
    assert found["same"] == [[6, True, "memory"]] * 3
    assert log.count("cannot copy a snapshot to another node: rank 1: timed out") == 1
