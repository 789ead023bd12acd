"""Replicas over TCP between ranks with gloo: lost nodes, damage, sharded state, silent peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.torch import forked_gang

RANKS = """
import functools, json, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist
from elasticjob.train import SnapshotError, Snapshots
from elasticjob.train.snapshots.ranks import links, replication
from elasticjob.train.snapshots.core.replicas import State
from tests.integration.torch import forked_gang

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # imports its modules before the forks
top = Path(sys.argv[1])

def gang(name, nodes, last, **settings):
    '''Train to step `last` on the nodes; return what each rank restored.'''
    work = lambda rank, world: one(rank, dict(settings), last)
    return forked_gang.gang(top, name, nodes, work)

def one(rank, settings, last):
    stays = settings.pop("stays", last)
    deaf = settings.pop("deaf", None)
    twice = settings.pop("twice", False)
    closes = settings.pop("closes", 0)
    if deaf is not None:
        links.QUIET_SECONDS = 1.0
    if rank == deaf:
        replication.Receiver._serve = lambda self: None
    optimizer = None
    if settings.pop("overlaps", False):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(9))])
        settings["optimizers"] = optimizer
    snapshots = Snapshots(every_steps=1, **settings)
    try:
        found = snapshots.restore()
        if twice:
            found = snapshots.restore()
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("elasticjob-replica-listener") == 1, names
    except SnapshotError as error:
        return str(error)
    told = None
    if found is not None:
        assert bool((found.state["x"] == found.step).all())
        if found.rank_state is not None:
            assert found.rank_state[:2].tolist() == [rank, found.step]
        told = [found.step, found.rank_state is not None, found.place]
    for step in range(1 if found is None else found.step + 1, last + 1):
        dist.barrier()
        if optimizer is not None:
            optimizer.step()
        snapshots.save(step, {"x": torch.full((1000,), step)},
                       torch.full((200_000,), rank).index_fill(0, torch.tensor(1), step))
        copies = snapshots._replication
        while copies is not None and copies.state == State.RUNNING:
            time.sleep(0.01)
        if step == closes:
            snapshots.close()  # the next save begins again
        if step == stays:  # no rank copies a later version
            dist.barrier()
            replication.send = refuse
    snapshots.close()
    return told

def refuse(*_):
    raise OSError("network is unreachable")

def damage(node, name):
    for path in (top / node).glob(name):
        forked_gang.damage(path)

lose = functools.partial(forked_gang.lose, top)

results = {}
exec(sys.argv[2])
print(json.dumps(results))
"""


def run(top: Path, script: str) -> tuple[Any, str]:
    return forked_gang.run(RANKS, top, script)


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


def test_second_restore_ends_the_listener_of_the_first(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", ["a", "b"], 3)
results["again"] = gang("again", ["a", "b"], 6, twice=True)
lose("b")
results["lost"] = gang("lost", ["a", "c"], 6)
""",
    )
    assert found["again"] == [[3, True, "memory"]] * 2
    assert found["lost"] == [[6, True, "memory"]] * 2


def test_save_after_close_is_replicated(tmp_path: Path) -> None:
    found, _ = run(
        tmp_path,
        """
gang("first", "abc", 6, closes=2)
lose("c")
results["lost"] = gang("lost", "abd", 6)
gang("sharded", "fg", 6, closes=2, sharded=True)
lose("f")
results["sharded"] = gang("sharded lost", "hg", 6, sharded=True)
""",
    )
    assert found["lost"] == [[6, True, "memory"]] * 3
    assert found["sharded"] == [[6, True, "memory"]] * 2


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
