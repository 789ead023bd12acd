"""Plans of mixed gangs, and the verdict on their workers' records."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.interop import parsed_mix
from bench.mixed.backends import BACKENDS
from bench.mixed.plan import LOSSES, Change, Kind, Mix, Side, changes
from bench.mixed.worlds import Disagreement, WorkerReport, training, worlds

MIXES = [Mix(2, 2), Mix(1, 3), Mix(3, 1), Mix(1, 1)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_each_side_keeps_members_near_its_ratio(mix: Mix, seed: int) -> None:
    here = {side: mix.of(side) for side in Side}
    for change in changes(mix, 20, seed):
        here[change.side] += (change.kind is Kind.JOIN) - (change.kind in LOSSES)
        assert all(1 <= here[side] <= mix.of(side) + 1 for side in Side)
        assert all(abs(here[side] - mix.of(side)) <= 1 for side in Side)


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_twenty_changes_cover_every_change_on_both_sides(mix: Mix) -> None:
    plan = changes(mix, 20, 1)
    assert len(plan) == 20
    assert set(plan) == {Change(kind, side) for kind in Kind for side in Side}
    assert plan == changes(mix, 20, 1), "the seed decides"
    assert plan != changes(mix, 20, 2)


def test_mix_one_to_one_is_a_gang_of_four() -> None:
    assert parsed_mix("1:1") == Mix(2, 2)
    assert parsed_mix("1:3") == Mix(1, 3)


def test_torch_side_is_always_plain_torchrun() -> None:
    for backend in BACKENDS.values():
        command = backend.command(Side.THEIRS, "here:1", "run", "node", True, ["train.py"])
        assert command[:2] == ["-m", "torch.distributed.run"]
        assert f"--rdzv-backend={backend.torchrun}" in command
        assert command[-1] == "train.py"
        ours = backend.command(Side.OURS, "here:1", "run", "node", True, ["train.py"])
        assert "torch.distributed.run" not in ours


def report(folder: Path, token: str, member: str, rank: int, steps: int, **other: object) -> None:
    """Write a worker's record."""
    pid = 100 + rank
    values = {"world": 2, "master": "host:1", "loaded": 4, "at": 10.0 + rank, **other}
    event = WorkerReport(token=token, pid=pid, member=member, rank=rank, **values)  # type: ignore[arg-type]
    (folder / f"world-{token}-{member}.json").write_text(json.dumps(asdict(event)))
    (folder / f"step-{pid}").write_text(str(steps))


def test_world_counts_when_it_equals_the_members_and_trains(tmp_path: Path) -> None:
    report(tmp_path, "w", "ours-0", 0, steps=7)
    assert training(tmp_path, ["ours-0", "theirs-1"], 0.0) is None, "one is not there yet"
    report(tmp_path, "w", "theirs-1", 1, steps=6)
    assert training(tmp_path, ["ours-0", "theirs-1"], 0.0) is None, "it takes no steps yet"
    report(tmp_path, "w", "theirs-1", 1, steps=7)
    world = training(tmp_path, ["ours-0", "theirs-1"], 0.0)
    assert world is not None
    assert world.at == 11.0
    assert training(tmp_path, ["ours-0", "theirs-1"], 11.0) is None, "it was there before"
    assert training(tmp_path, ["ours-0", "theirs-1", "ours-2"], 0.0) is None


@pytest.mark.parametrize("different", [{"world": 3}, {"master": "host:2"}, {"loaded": 5}])
def test_members_of_one_world_with_different_values_are_refused(
    tmp_path: Path, different: dict[str, object]
) -> None:
    report(tmp_path, "w", "ours-0", 0, steps=7)
    report(tmp_path, "w", "theirs-1", 1, steps=7, **different)
    with pytest.raises(Disagreement, match=next(iter(different))):
        worlds(tmp_path)


def test_duplicate_rank_is_refused(tmp_path: Path) -> None:
    report(tmp_path, "w", "ours-0", 0, steps=7)
    report(tmp_path, "w", "theirs-1", 0, steps=7)
    with pytest.raises(Disagreement, match="ranks"):
        worlds(tmp_path)
