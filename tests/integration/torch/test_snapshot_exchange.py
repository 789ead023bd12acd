"""Snapshots of several ranks over gloo: newcomers, moved ranks, damage, lost nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT

RANKS = """
import json, os, sys, tempfile, traceback
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import Snapshots

top = Path(sys.argv[1])

def gang(name, nodes, last, storage=None):
    '''Train to step `last` on the nodes; return what each rank restored.'''
    pids = []
    for rank, node in enumerate(nodes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                one(name, rank, len(nodes), top / node, last, storage)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
    return [json.loads((top / f"{name}-{rank}").read_text()) for rank in range(len(nodes))]

def one(name, rank, world, folder, last, storage):
    folder.mkdir(exist_ok=True)
    os.environ["ELASTICJOB_SNAPSHOT_FOLDER"] = str(folder)
    dist.init_process_group("gloo", init_method=f"file://{top}/store-{name}", rank=rank,
                            world_size=world)
    snapshots = Snapshots(storage, store_every=2, replicas=0)
    found = snapshots.restore()
    told = None
    if found is not None:
        assert bool((found.state["x"] == found.step).all())
        told = [found.step, found.rank_state, found.place]
    (top / f"{name}-{rank}").write_text(json.dumps(told))
    for step in range(1 if found is None else found.step + 1, last + 1):
        dist.barrier()
        snapshots.save(step, {"x": torch.full((1000,), step)}, rank * 100 + step)
    snapshots.close()
    dist.barrier()
    dist.destroy_process_group()

def damage(node, name):
    path = max((top / node).glob(name), key=lambda each: each.stat().st_mtime_ns)
    path.write_bytes(path.read_bytes()[:-1] + b"!")

storage = str(top / "storage")
results = {
    "first": gang("first", "ab", 3),
    "same": gang("same", "ab", 4),
    "moved": gang("moved", "ba", 5),
    "newcomer": gang("newcomer", "cb", 6),
    "larger": gang("larger", "cbd", 7),
}
damage("c", "shared.*")
results["damaged copy"] = gang("damaged copy", "cbd", 8)
for node in "bcd":
    damage(node, "shared.*")
results["damaged everywhere"] = gang("damaged everywhere", "cbd", 8, storage)
results["all nodes lost"] = gang("all nodes lost", "efg", 8, storage)
print(json.dumps(results))
"""


def test_gang_restores_the_newest_snapshot_that_its_nodes_hold(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "sdk"), "OMP_NUM_THREADS": "1"}
    env.pop("ELASTICJOB_SNAPSHOT_FOLDER", None)
    ran = subprocess.run(
        [sys.executable, "-c", RANKS, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    memory = "memory"
    assert found["first"] == [None, None]
    assert found["same"] == [[3, 3, memory], [3, 103, memory]]
    # The rank's own state follows the rank to its new node.
    assert found["moved"] == [[4, 4, memory], [4, 104, memory]]
    # Node c is new; the own state of the rank on the lost node is missing, so no rank loads one.
    assert found["newcomer"] == [[5, None, memory]] * 2
    assert found["larger"] == [[6, None, memory]] * 3
    # Node c has a damaged copy of step 7 and receives it from another node.
    assert found["damaged copy"] == [[7, rank * 100 + 7, memory] for rank in range(3)]
    assert found["damaged everywhere"] == [[7, rank * 100 + 7, memory] for rank in range(3)]
    assert found["all nodes lost"] == [[8, rank * 100 + 8, "storage"] for rank in range(3)]
    assert "checksum mismatch" in ran.stderr
