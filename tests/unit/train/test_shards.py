"""Shards of distributed tensors in one process: a restore of all of them, and placements."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elasticjob import layout
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.core.agreement import SHARED, Part, Version
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.state.codec import Sharded, encode
from elasticjob.train.snapshots.state.sharding import split


def parts(ranks: int) -> list[Part]:
    version = Version(5, 7)
    return [Part(version, rank, ranks, 4, reshards=True) for rank in (*range(ranks), SHARED)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_process_without_a_group_restores_the_shards_of_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    assert not dist.is_initialized()
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))
    first, second, shared = parts(2)
    values = torch.arange(4.0)
    for rank, part in enumerate((first, second)):
        shard = [0, (2 * rank,), values[2 * rank : 2 * rank + 2]]
        MemoryBuffers(tmp_path, rank).commit(part, encode({"shards": [shard], "state": rank}))
    described = {"w": Sharded(0, "float32", (4,)), "step": 5}
    MemoryBuffers(tmp_path, 0).commit(shared, encode(described))
    with torch.device(device):
        found = Snapshots(sharded=True).restore()
    assert found is not None
    assert (found.step, found.state["step"], found.rank_state) == (5, 5, None)
    assert torch.equal(found.state["w"], values)


@pytest.fixture
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_partial_placement_is_refused_with_its_path(mesh: dist.DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def placed(placement: Shard | Replicate | Partial) -> dict[str, list[DTensor]]:
        return {"w": [DTensor.from_local(torch.ones(2), mesh, [placement])]}

    with pytest.raises(TypeError, match=r"state\['w'\]\[0\] .*partial.*redistribute\(\) first"):
        split(placed(Partial()), None)
    for placement in (Shard(0), Replicate()):
        assert split(placed(placement), None) is not None


def test_shared_part_of_sharded_state_keeps_the_versions_of_modules(mesh: dist.DeviceMesh) -> None:
    from torch.distributed.tensor import DTensor, Shard

    module = torch.nn.BatchNorm1d(2)
    weight = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    module.weight = torch.nn.Parameter(weight)
    state = module.state_dict()
    parted = split({"model": state}, None)
    assert parted is not None
    assert parted.shared["model"]._metadata == state._metadata
    assert isinstance(parted.shared["model"]["weight"], Sharded)
