"""Arithmetic of the benchmark of goodput: distinct and repeated steps, faults, results."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bench.goodput import __main__ as goodput
from bench.goodput.__main__ import (
    BASELINE,
    Kind,
    Run,
    added,
    parse,
    read_parts,
    results,
    run_all,
    settings_of,
    slots,
)
from bench.goodput.steps import Step, Work, curve, fault_times, read_steps, work
from bench.goodput.systems import SYSTEMS
from bench.peers.records import RECORD, STARTED


def steps(*numbers: int, world: int = 2) -> list[Step]:
    """Return these steps of all ranks, one step a second."""
    return [
        Step(at + 1.0, number, rank, world)
        for at, number in enumerate(numbers)
        for rank in range(world)
    ]


def test_repeated_steps_are_executed_but_not_distinct() -> None:
    found = work(steps(1, 2, 3, 2, 3, 4), 0.0, 6.0, nodes=2)
    assert (found.distinct, found.executed, found.full_share) == (4, 6, 1.0)
    assert found.longest_pause == 1.0


def test_steps_outside_of_the_time_do_not_count() -> None:
    found = work(steps(1, 2, 3, 4), 1.0, 3.0, nodes=2)
    assert (found.distinct, found.executed) == (2, 2)
    assert work([], 0.0, 5.0, nodes=2) == Work(0, 0, 0.0, 5.0)


def test_steps_of_a_smaller_gang_have_a_smaller_share() -> None:
    found = work([*steps(1, 2), *steps(2, 3, world=1)], 0.0, 5.0, nodes=2)
    assert found.distinct == 3
    assert found.full_share == pytest.approx((2 + 2 + 1) / 6)


def test_curve_counts_distinct_steps_and_reaches_the_end() -> None:
    assert curve(steps(1, 2, 2, 3), 0.0, 10.0, 100) == [(0, 0), (1, 1), (2, 2), (4, 3), (10, 3)]


@pytest.mark.parametrize(
    ("length", "interval", "times"),
    [(90.0, 30.0, [15, 45, 75]), (100.0, 30.0, [15, 45, 75]), (120.0, 120.0, [60])],
)
def test_faults_leave_half_an_interval_to_recover(
    length: float, interval: float, times: list[float]
) -> None:
    assert fault_times(length, interval) == times
    assert fault_times(length, 0.0) == []


def test_incomplete_record_of_a_killed_worker_is_left_out(tmp_path: Path) -> None:
    whole = RECORD.pack(2.0, 7, 0, 2) + RECORD.pack(1.0, 6, 0, 2)
    (tmp_path / "1.steps").write_bytes(whole + b"\0" * 3)
    assert [step.number for step in read_steps(tmp_path)] == [6, 7]


def test_results_are_relative_to_the_undisturbed_run_of_the_model() -> None:
    calm = Run(BASELINE, "8MB", None, 90.0, work=Work(1000, 1000, 1.0, 0.1))
    faults = [(15.0, str(Kind.DRAIN)), (45.0, str(Kind.DRAIN))]
    ours = Run("ours", "8MB", 30.0, 90.0, faults, Work(900, 950, 1.0, 0.5))
    failed = Run("other", "8MB", 30.0, 90.0, error="no step")
    found = results([calm, ours, failed])
    assert found["goodput"] == {"ours/8MB/30s": 0.9, "other/8MB/30s": None}
    assert found["steps_lost"] == {"ours/8MB/30s": 50, "other/8MB/30s": None}
    assert found["seconds_lost_per_fault"]["ours/8MB/30s"] == pytest.approx(4.5)


def part(name: str, steps: int, *runs: tuple[str, str, float, int]) -> list[Run]:
    """Return the runs of a part: an undisturbed one of `steps`, and others with theirs."""
    model = runs[0][1]
    calm = Run(BASELINE, model, None, 90.0, work=Work(steps, steps, 1.0, 0.1), part=name)
    return [
        calm,
        *(
            Run(
                system,
                model,
                interval,
                90.0,
                [(15.0, "drain")],
                Work(done, done, 1.0, 0.1),
                part=name,
            )
            for system, model, interval, done in runs
        ),
    ]


def written(path: Path, runs: list[Run], settings: dict[str, Any]) -> list[Run]:
    path.write_text(json.dumps({**settings, **results(runs)}))
    return read_parts(path, settings)


def test_run_without_faults_has_the_overhead() -> None:
    base = Run(BASELINE, "8MB", None, 60.0, work=Work(1000, 1000, 1.0, 0.1))
    ours = Run("elasticjob-snapshots", "8MB", 0.0, 60.0, work=Work(992, 992, 1.0, 0.1))
    found = results([base, ours])
    assert found["goodput"] == {"elasticjob-snapshots/8MB/0s": 0.992}
    assert parse(["--intervals", "0"]).intervals == [0.0]


def test_parts_are_added_each_with_its_own_undisturbed_run(tmp_path: Path) -> None:
    settings = settings_of(parse(["--length", "120"]))
    path = tmp_path / "goodput.json"
    assert read_parts(path, settings) == []
    first = part("morning", 1000, ("ours", "8MB", 30.0, 900), ("other", "8MB", 30.0, 500))
    known = written(path, first, settings)
    assert known == first
    # A slower machine in the evening: the same share of another undisturbed run.
    second = part("evening", 500, ("ours", "8MB", 120.0, 450))
    third = part("night", 200, ("other", "8MB", 30.0, 50))
    known = written(path, added(known, second), settings)
    found = results(added(known, third))
    assert found["goodput"] == {"ours/8MB/30s": 0.9, "ours/8MB/120s": 0.9, "other/8MB/30s": 0.25}
    calm = [row["part"] for row in found["runs"] if row["system"] == BASELINE]
    assert calm == ["morning", "evening", "night"]
    # A part all of whose runs were repeated is gone, with its undisturbed run.
    again = part("next", 800, ("ours", "8MB", 120.0, 400))
    found = results(added(added(known, third), again))
    assert found["goodput"]["ours/8MB/120s"] == 0.5
    calm = [row["part"] for row in found["runs"] if row["system"] == BASELINE]
    assert calm == ["morning", "night", "next"]


def test_part_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "goodput.json"
    settings = settings_of(parse(["--length", "120"]))
    written(path, part("morning", 1000, ("ours", "8MB", 30.0, 900)), settings)
    with pytest.raises(SystemExit, match=r"was measured with .*120.*give another --output"):
        read_parts(path, settings | {"length_seconds": 600.0})
    path.write_text("{")
    with pytest.raises(SystemExit, match="cannot be read"):
        read_parts(path, settings)


def test_length_shorter_than_an_interval_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--length", "60"])
    assert "--length must be at least the longest interval, 120" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--intervals", "0", "-1"])
    assert "--intervals must not be negative" in capsys.readouterr().err


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_command_starts_the_script_of_all_systems(system: object) -> None:
    made = system.with_script(["--model=8MB"], 3)  # type: ignore[attr-defined]
    command = made.command("127.0.0.1:1", "run", 0)
    assert command[-1] == "--model=8MB"
    assert any(word.endswith("trainee.py") for word in command)
    assert ("--nnodes=1:3" in command) != (made.saves == "torchft")


def test_runs_side_by_side_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 7})
    assert slots(2) == [{2, 3}, {4, 5}]
    assert slots(None) == [{2, 3, 4, 5, 7}]


def run_and_tell_cores(system: str, one: Run, options: argparse.Namespace, logs: Path) -> Run:
    """Return the run with its cores as its error; the first one takes longer."""
    time.sleep(0.2 if one.system == "a" else 0.0)
    one.error = str(sorted(os.sched_getaffinity(0)))
    return one


def test_each_run_is_pinned_to_its_cores_and_returned_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(goodput, "run", run_and_tell_cores)
    available = sorted(os.sched_getaffinity(0))
    planned = [(Run(name, "8MB", 30.0, 90.0), SYSTEMS[0].name) for name in ("a", "b")]
    done = run_all(planned, parse(["--cores", "1"]), tmp_path)
    assert [one.system for one in done] == ["a", "b"]
    assert {one.error for one in done} <= {str([core]) for core in available}
    assert available == sorted(os.sched_getaffinity(0))


def test_more_cores_than_the_process_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--cores", "100000"])
    assert "--cores must be from 1 to" in capsys.readouterr().err


def test_checkpoint_of_the_compared_systems_is_written_and_read(tmp_path: Path) -> None:
    (tmp_path / STARTED).touch()
    path = tmp_path / "checkpoint.pt"
    from bench.peers.trainee import Storage  # it imports torch

    Storage(path, 30.0).save(lambda: {"step": 7}, at_once=True)
    assert Storage(path, 30.0).load() == {"step": 7}
    assert [each.name for each in tmp_path.iterdir() if each.name != STARTED] == [path.name]
