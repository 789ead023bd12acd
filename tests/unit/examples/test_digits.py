"""Elastic parts of the digits example, each by itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.paths import ROOT

DIGITS = ROOT / "examples" / "digits"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_train", DIGITS / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    store = tmp_path / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_ranks_share_a_batch_independent_of_world_size(train: ModuleType, world: int) -> None:
    for step in (0, 13, 14, 29):
        parts = [train.shard(step, 1437, 96, rank, world) for rank in range(world)]
        together = sorted(torch.cat(parts).tolist())
        assert together == sorted(train.shard(step, 1437, 96, 0, 1).tolist())
        assert len(together) == 96


def test_epoch_has_no_duplicate_sample_and_next_has_another_order(train: ModuleType) -> None:
    steps_of_an_epoch = 1437 // 96
    seen = [i for step in range(steps_of_an_epoch) for i in train.shard(step, 1437, 96, 0, 1)]
    assert len({int(i) for i in seen}) == len(seen) == steps_of_an_epoch * 96
    first, again = (train.shard(step, 1437, 96, 0, 1) for step in (0, steps_of_an_epoch))
    assert first.tolist() != again.tolist()


def test_failed_write_keeps_old_content(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "checkpoint.pt"
    train.write_atomically(path, b"old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(train.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.usefixtures("alone")
def test_resume_restores_step_model_optimizer_and_random_state(
    train: ModuleType, tmp_path: Path
) -> None:
    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = train.network()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def advance(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        optimizer.zero_grad()
        model(torch.rand(8, 64)).square().sum().backward()
        optimizer.step()
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    path = tmp_path / "checkpoint.pt"
    model, optimizer = fresh()
    assert train.resume(path, model, optimizer) == 0, "no checkpoint: from the beginning"
    advance(model, optimizer)
    train.save(path, 1, model, optimizer)
    undisturbed = advance(model, optimizer)

    again, its_optimizer = fresh()
    assert train.resume(path, again, its_optimizer) == 1
    assert advance(again, its_optimizer) == undisturbed


def test_snapshots_take_at_most_ten_lines() -> None:
    lines = (DIGITS / "train.py").read_text().splitlines()
    marked = [line for line in lines if line.rstrip().rpartition("  # elastic")[1]]
    assert len(marked) == 9
    assert "| nine, marked `# elastic` |" in (DIGITS / "README.md").read_text()


@pytest.mark.usefixtures("alone")
def test_snapshot_newer_than_the_checkpoint_is_continued(
    train: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker fails after a step that no checkpoint has."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("ELASTICJOB_SNAPSHOT_FOLDER", str(memory))
    monkeypatch.setenv("ELASTICJOB_SNAPSHOTS", '{"everySteps": 1}')
    done: list[int] = []

    def fails(step: int, **_: float) -> None:
        done.append(step)
        if len(done) == 8:
            raise RuntimeError("a failed worker")

    monkeypatch.setattr(train.job, "progress", fails)
    options = train.parse(["--steps", "10", "--checkpoint-dir", str(tmp_path / "checkpoints")])
    with pytest.raises(RuntimeError, match="a failed worker"):
        train.train(options)  # the checkpoint is of step 5, the last snapshot of step 8
    train.train(options)
    assert done == list(range(1, 11))


def test_manifest_uses_this_script_with_existing_options(train: ModuleType) -> None:
    job = yaml.safe_load((DIGITS / "elasticjob.yaml").read_text())
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"]) == ("elasticjob.dev/v1alpha1", "ElasticJob")
    assert spec["minNodes"] <= spec["nodes"] <= spec["maxNodes"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["command"] == ["python3", "train.py"]
    assert train.parse(container["args"]).steps == 300
