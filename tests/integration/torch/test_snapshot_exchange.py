"""Snapshots of several ranks over gloo: newcomers, moved ranks, damage, lost nodes."""

from __future__ import annotations

from pathlib import Path

from tests.integration.torch import forked_gang

RANKS = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import Snapshots
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def gang(name, nodes, last, storage=None):
    '''Train to step `last` on the nodes; return what each rank restored.'''
    return forked_gang.gang(top, name, nodes, lambda rank, world: one(rank, last, storage))

def one(rank, last, storage):
    snapshots = Snapshots(storage, every_steps=1, store_every=2, replicas=0)
    found = snapshots.restore()
    told = None
    if found is not None:
        assert bool((found.state["x"] == found.step).all())
        told = [found.step, found.rank_state, found.place]
    for step in range(1 if found is None else found.step + 1, last + 1):
        dist.barrier()
        snapshots.save(step, {"x": torch.full((1000,), step)}, rank * 100 + step)
    snapshots.close()
    return told

def damage(node, name):
    path = max((top / node).glob(name), key=lambda each: each.stat().st_mtime_ns)
    forked_gang.damage(path)

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
damage("c", "shared.*")
results["damaged copy is sent"] = gang("damaged copy is sent", "cbx", 8)
for node in "bcd":
    damage(node, "shared.*")
results["damaged everywhere"] = gang("damaged everywhere", "cbd", 8, storage)
results["all nodes lost"] = gang("all nodes lost", "efg", 8, storage)
print(json.dumps(results))
"""


def test_gang_restores_the_newest_snapshot_that_its_nodes_hold(tmp_path: Path) -> None:
    found, log = forked_gang.run(RANKS, tmp_path)
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
    # Node c sends its damaged copy to the new node x before it knows; then node b sends its own.
    assert found["damaged copy is sent"] == [[8, None, memory]] * 3
    assert found["damaged everywhere"] == [[7, rank * 100 + 7, memory] for rank in range(3)]
    assert found["all nodes lost"] == [[8, rank * 100 + 8, "storage"] for rank in range(3)]
    assert "checksum mismatch" in log


STREAM = """
import json, sys
from pathlib import Path
import torch
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.memory import part_files
from elasticjob.train.snapshots.ranks import gang as gang_module
from elasticjob.train.snapshots.core.exchange import Exchange
from elasticjob.train.snapshots.ranks.gang import Gang
from elasticjob.train.snapshots.memory.part_files import Body, CorruptSnapshot, overwrite, reading
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])
part = Part(Version(1, 7), SHARED, 0, 0)
content = bytes(range(256)) * 200_000
for name in ("good", "damaged", "empty"):
    overwrite(top / name, part, Body(3, [memoryview(content if name != "empty" else b"abc")]))
with (top / "damaged").open("r+b") as file:
    file.seek(5000)
    file.write(b"x")

def one(rank, world):
    torch.set_default_device("meta")  # as a script does that creates its model there
    gang, told = Gang(), []
    order = []
    def noted(steps):
        for count, step in enumerate(steps):
            order.append(f"read {count}")
            yield step
    def received(size, offset, view):
        order.append(f"arrived {offset // view.nbytes}")
    # A file of one part for each of the slices that travel.
    part_files._SLICE_BYTES = gang_module._SLICE_BYTES = 10_240_000
    gang_module._TRAVELLING = 2
    steps = noted(reading(top / "good", part)) if rank == 1 else None
    gang.stream(steps, 1, received)
    told.append(order)
    for name in ("good", "damaged", "missing", "empty"):
        try:
            body = gang.stream(reading(top / name, part) if rank == 1 else None, 1)
            whole = None if body is None else bytes(body.views[0])
            told.append("all" if whole == content else whole and len(whole))
        except CorruptSnapshot as error:
            told.append(str(error))
        texts = gang.gather(Exchange.READS, f"{name} {rank}".encode())
        told += [bytes(each).decode() for each in texts][:1]
    mine = Body(1, [memoryview(bytearray(b"own"))]) if rank == 0 else None
    moved = gang.move(mine, 0, 2)
    bodies = [gang.broadcast(mine, 0), moved]
    return told + [bytes(each.views[0]).decode() for each in bodies if each is not None]

print(json.dumps(forked_gang.gang(top, "stream", "abc", one)))
"""


def test_ranks_receive_what_a_rank_reads_and_stay_together_after_its_error(tmp_path: Path) -> None:
    found, _ = forked_gang.run(STREAM, tmp_path)
    orders = [each.pop(0) for each in found]
    # The next slice is read while two travel.
    reads = [f"read {count}" for count in range(6)]
    arrivals = [f"arrived {count}" for count in range(5)]
    between = [each for pair in zip(reads[3:], arrivals, strict=False) for each in pair]
    assert orders == [arrivals, [*reads[:3], *between, *arrivals[3:]], arrivals]
    others = ["all", "good 0", 51_200_000, "damaged 0", None, "missing 0", 3, "empty 0", "own"]
    assert found[0] == others
    assert found[2] == [*others, "own"]
    assert found[1][0::2][0] == "all"
    assert "checksum mismatch" in found[1][2]
    assert "cannot be read: No such file" in found[1][4]
    assert found[1][6:] == others[6:]


MIXED = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def one(rank, world):
    storage = str(top / "storage") if rank == 0 else None
    snapshots = Snapshots(storage, every_steps=1, store_every=3, replicas=0)
    snapshots.restore()
    for step in range(1, 9):
        dist.barrier()
        snapshots.save(step, {"x": step})
    snapshots.save(8, {"x": 8}, store=True)
    try:
        snapshots.save(9, {"x": 9}, rank, store=True)
    except SnapshotError as error:
        return str(error)

print(json.dumps(forked_gang.gang(top, "mixed", "ab", one)))
"""


def test_storage_of_one_rank_alone_does_not_part_the_ranks(tmp_path: Path) -> None:
    """All of them make the same exchanges; only a rank's own state needs storage on its rank."""
    found, _ = forked_gang.run(MIXED, tmp_path)
    assert found[0] == found[1]
    assert "rank 1: Snapshots has no storage on this rank" in found[0]
    assert any("000000000008-" in path.name for path in (tmp_path / "storage").iterdir())


CHANGED = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.core.agreement import complete_versions
from elasticjob.train.snapshots.storage.calls import StorageWriter
from elasticjob.train.snapshots.storage.storage_folder import StorageFolder
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])
storage = StorageFolder(top / "storage")

def one(rank, world):
    weight = torch.nn.Parameter(torch.zeros(50_000))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    start = StorageWriter.start
    def change_first(self, parts):
        if rank == 0 and parts[0][0].version.step == 3:
            weight.data.add_(1.0)
        start(self, parts)
    StorageWriter.start = change_first
    snapshots = Snapshots(
        storage.folder, every_steps=1, store_every=3, replicas=0, optimizers=optimizer
    )
    snapshots.restore()
    for step in range(1, 6):
        dist.barrier()
        snapshots.save(step, {"weight": weight}, {"step": step, "weight": weight})
        optimizer.step()
        snapshots._store.end()
    snapshots.close()
    return snapshots._newest.step

newest = forked_gang.gang(top, "changed", "ab", one)
print(json.dumps([newest, [each.step for each in complete_versions(storage.scan().parts)]]))
"""


def test_next_snapshot_is_stored_if_the_state_of_one_rank_changes_during_the_copy(
    tmp_path: Path,
) -> None:
    found, log = forked_gang.run(CHANGED, tmp_path)
    assert found == [[5, 5], [4]]
    assert log.count("no snapshot in storage of step 3") == 1


UNREADABLE = """
import errno, json, os, sys
from pathlib import Path
import torch.distributed as dist
from elasticjob.train import Snapshots
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])

def stored(rank, world):
    snapshots = Snapshots(str(top / "storage"), every_steps=1, replicas=0)
    snapshots.restore()
    for step in (1, 2):
        snapshots.save(step, {"x": step}, store=True)

def loaded(rank, world):
    real = os.preadv
    def timed_out(fd, *arguments):
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(top / "storage"):
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return real(fd, *arguments)
    if rank == 0:
        os.preadv = timed_out
    found = Snapshots(str(top / "storage"), every_steps=1, replicas=0).restore()
    return [found.step, found.state["x"], found.place]

forked_gang.gang(top, "stored", "ab", stored)
print(json.dumps(forked_gang.gang(top, "loaded", "cd", loaded)))
"""


def test_part_that_one_rank_cannot_read_from_storage_is_read_by_another(tmp_path: Path) -> None:
    found, log = forked_gang.run(UNREADABLE, tmp_path)
    assert found == [[2, 2, "storage"]] * 2
    assert "Connection timed out" in log


NOT_SHARED = """
import json, sys
from pathlib import Path
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.storage import calls
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])
calls._CACHE_SECONDS = (0.0, 0.0)

def one(rank, world):
    snapshots = Snapshots(top / f"disk-{rank}", every_steps=1, replicas=0)
    snapshots.restore()
    found = []
    for rank_state in (None, rank):
        try:
            snapshots.save(1, {"x": 1}, rank_state, store=True)
        except SnapshotError as error:
            found.append(str(error))
    return found

print(json.dumps(forked_gang.gang(top, "not shared", "ab", one)))
"""


PERIODIC = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.storage import calls
from tests.integration.torch import forked_gang

top = Path(sys.argv[1])
calls._CACHE_SECONDS = (0.0, 0.0)

def one(rank, world):
    for folder in ("shared", f"disk-{rank}"):
        snapshots = Snapshots(top / folder, every_steps=1, store_every=1, replicas=0)
        snapshots.restore()
        for step in (1, 2, 3):
            snapshots._store.end()
            dist.barrier()
            snapshots.save(step, {"x": step})
            if snapshots._store._lookup is not None:
                snapshots._store._lookup.join()
        snapshots.close()
        for path in (top / "ab"[rank]).glob("*.[01]"):
            path.unlink()
        dist.barrier()

print(json.dumps(forked_gang.gang(top, "periodic", "ab", one)))
"""


def test_storage_that_is_not_shared_is_one_warning_of_other_snapshots(tmp_path: Path) -> None:
    _, log = forked_gang.run(PERIODIC, tmp_path)
    assert log.count("is not a folder that all nodes share") == 1
    assert f"{tmp_path}/disk-1 lacks the part of rank 0" in log


def test_storage_that_is_not_shared_is_an_error_of_a_demanded_snapshot(tmp_path: Path) -> None:
    """With a disk of each node the loss of one node would leave no snapshot."""
    found, _ = forked_gang.run(NOT_SHARED, tmp_path)
    assert found[0] == found[1]
    assert len(found[0]) == 2
    for text in found[0]:
        assert text.startswith(
            f"the snapshot is not in storage: rank 1: {tmp_path}/disk-1 lacks the part that rank 0 "
            "has written: Snapshots needs a folder that all nodes share"
        )
