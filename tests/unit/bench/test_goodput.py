"""Arithmetic of the benchmark of goodput: distinct and repeated steps, faults, results."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.goodput.__main__ import BASELINE, Kind, Run, parse, results
from bench.goodput.steps import Step, Work, curve, fault_times, read_steps, work
from bench.goodput.systems import SYSTEMS
from bench.peers.trainee import RECORD


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


def test_length_shorter_than_an_interval_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--length", "60"])
    assert "--length must be at least the longest interval, 120" in capsys.readouterr().err


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_command_starts_the_script_of_all_systems(system: object) -> None:
    made = system.with_script(["--model=8MB"], 3)  # type: ignore[attr-defined]
    command = made.command("127.0.0.1:1", "run", 0)
    assert command[-1] == "--model=8MB"
    assert any(word.endswith("trainee.py") for word in command)
    assert ("--nnodes=1:3" in command) != (made.saves == "torchft")
