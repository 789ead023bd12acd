"""Arithmetic of the benchmark of frameworks: ratios, targets, first steps, set-up work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.frameworks import LAUNCHERS, Measured, Moment, Outcome, System, Table, missed, ratios
from bench.training.set_up import import_seconds
from bench.training.steps import all_stepped, first_step, newest_first_step
from elasticjob import layout
from elasticjob.train import Link
from tests.paths import ROOT


def table(*cells: tuple[str, Moment, System, Sequence[float | None]]) -> Table:
    return {
        (framework, moment, system): Measured(
            framework, moment, system, [Outcome(each) for each in seconds]
        )
        for framework, moment, system, seconds in cells
    }


def test_ratios_are_by_framework_moment_and_mode_and_null_without_recovery() -> None:
    measured = table(
        ("fsdp2", Moment.STEADY, System.WARM, [0.5, 0.4, 0.6]),
        ("fsdp2", Moment.STEADY, System.COLD, [4.0]),
        ("fsdp2", Moment.STEADY, System.TORCHRUN, [5.0]),
        ("fsdp2", Moment.EARLY, System.WARM, [2.0]),
        ("fsdp2", Moment.EARLY, System.TORCHRUN, [5.0, None]),
        ("lightning", Moment.LATER, System.WARM, [1.0]),
    )
    assert ratios(measured) == {
        "fsdp2/steady/warm": 10.0,
        "fsdp2/steady/cold": 1.25,
        "fsdp2/5s/warm": None,
        "lightning/15s/warm": None,
    }


@pytest.mark.parametrize(
    ("warm", "cold", "set_up", "expected"),
    [
        (1.9, 5.0, 0.1, []),
        (2.1, 5.0, 0.1, ["accelerate/steady/warm: 2.10 s, more than 2.00 s"]),
        (2.5, 5.0, 2.0, []),
        (2.7, 5.0, 2.0, ["accelerate/steady/warm: 2.70 s, more than 2.60 s"]),
        (2.1, 5.0, None, ["accelerate/steady/warm: 2.10 s, more than 2.00 s"]),
        (1.5, 1.4, 0.1, ["accelerate/steady/warm: 1.50 s, slower than cold with 1.40 s"]),
        (1.5, None, 0.1, []),
        (None, 1.4, 0.1, ["accelerate/steady/warm: no recovery"]),
    ],
)
def test_missed_targets_of_a_steady_recovery(
    warm: float | None, cold: float | None, set_up: float | None, expected: list[str]
) -> None:
    measured = table(
        ("accelerate", Moment.STEADY, System.WARM, [warm]),
        ("accelerate", Moment.STEADY, System.COLD, [cold]),
    )
    assert missed(measured, {"accelerate": set_up}) == expected


def test_early_recovery_is_only_compared_with_cold() -> None:
    measured = table(
        ("accelerate", Moment.EARLY, System.WARM, [9.0]),
        ("accelerate", Moment.EARLY, System.COLD, [9.5]),
        ("accelerate", Moment.LATER, System.WARM, [9.0]),
    )
    assert missed(measured, {"accelerate": 0.1}) == []


def test_row_has_runs_median_and_reasons_of_cold_starts() -> None:
    row = Measured("fsdp2", Moment.EARLY, System.WARM)
    row.outcomes += [Outcome(1.004), Outcome(3.0, None, "waited 1.2 s"), Outcome(2.0)]
    assert json.loads(json.dumps(row.to_json())) == {
        "framework": "fsdp2",
        "moment": "5s",
        "system": "warm",
        "seconds": 2.0,
        "runs": [1.0, 3.0, 2.0],
        "cold_reasons": ["waited 1.2 s"],
        "error": None,
    }


@pytest.mark.parametrize(
    ("first_steps", "expected"),
    [
        ([10.5, 11.0], 11.0),
        ([10.5, 9.0], None),
        ([10.5, None], None),
        ([10.0, 11.0], None),
        ([], None),
    ],
)
def test_all_stepped_after_the_kill(
    first_steps: Sequence[float | None], expected: float | None
) -> None:
    assert all_stepped(first_steps, since=10.0) == expected


def test_first_step_is_that_of_the_newest_process(tmp_path: Path) -> None:
    old, new = tmp_path / "round_0", tmp_path / "round_1"
    assert first_step(old) is None
    reporters = [Link({layout.PROGRESS_FILE: str(path)}) for path in (old, new)]
    reporters[0].progress(7, {})
    before = newest_first_step([old, new])
    assert before is not None, "the process of the new round has not stepped"
    reporters[0].progress(8, {})
    assert newest_first_step([old, new]) == before, "the second step is not the first"
    reporters[1].progress(7, {})
    assert newest_first_step([old, new]) == first_step(new)


def test_import_seconds_adds_own_times_once() -> None:
    output = """import time: self [us] | cumulative | imported package
import time:       100 |        100 |   zipimport
import time:      2000 |       2100 | site
a line of the script
import time:   1000000 |    1002100 | torch
"""
    assert import_seconds(output.splitlines()) == pytest.approx(1.0021)


@pytest.mark.parametrize("framework", LAUNCHERS)
def test_every_framework_has_an_example(framework: str) -> None:
    for file in ("train.py", "elasticjob.yaml"):
        assert (ROOT / "examples" / framework / file).is_file()
