"""Snapshots in training with accumulation, mixed precision, compilation and other ways."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.torch import forked_gang
from tests.integration.torch.training_steps import KILLS, STEPS

SCRIPT = """
import json, sys
from pathlib import Path
from tests.integration.torch.training_variants import compared

top, world, *ways = sys.argv[1:]
found = compared(Path(top), "run", ways, int(world))
print(json.dumps([[list(run.items()) for run in runs] for runs in found]))
"""
WAYS = {
    "accumulation, statistics, average, schedule": (
        2,
        ["accumulate", "batchnorm", "ema", "scheduler", "foreach", "skip"],
    ),
    "mixed precision, recomputation, two optimizers": (
        2,
        ["autocast", "checkpointing", "second", "no overlap"],
    ),
    "three ranks, gradients in a fixed order": (3, ["fixed order"]),
    "fused optimizer, model from meta, mixed precision": (1, ["fused", "meta", "autocast", "ema"]),
    "compilation, layers frozen midway, schedule": (1, ["compile", "freeze", "scheduler"]),
}


@pytest.mark.parametrize("name", WAYS)
def test_losses_after_kills_are_those_of_the_undisturbed_run(tmp_path: Path, name: str) -> None:
    world, ways = WAYS[name]
    found, log = forked_gang.run(SCRIPT, tmp_path, world, *ways)
    assert len(found) == world
    for calm, killed in (map(dict, runs) for runs in found):
        assert list(calm) == list(killed) == list(range(1, STEPS + 1)), log
        assert len({loss for losses in calm.values() for loss in losses}) == STEPS
        assert [step for step in calm if {*killed[step]} != {*calm[step]}] == [], log
        assert sum(map(len, killed.values())) <= STEPS + 2 * len(KILLS)
