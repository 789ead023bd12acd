"""Interval of snapshots by the rate of the faults: a model of costs and faults, and its records."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from elasticjob import layout
from elasticjob.train import Snapshots
from elasticjob.train.snapshots.core.agreement import Part, steps_at_faults, steps_within
from elasticjob.train.snapshots.core.exchange import Exchange, unpack_begins
from elasticjob.train.snapshots.core.interval import (
    AIM,
    COSTS,
    OVERHEAD_AT_FAULTS,
    RECENT,
    REPAYMENT,
    Cost,
    Interval,
    Losses,
    agreed_losses,
)
from elasticjob.train.snapshots.memory.buffers import MemoryBuffers
from elasticjob.train.snapshots.memory.part_files import Body
from elasticjob.train.snapshots.memory.reached_step import ReachedFile, ended_on
from elasticjob.train.snapshots.ranks.gang import Gang

COST, STEP, OVERHEAD = 0.05, 0.125, 0.01
LONG = 25_000.0
NEUTRAL = COST / (2 * (AIM * OVERHEAD) ** 2)
"""Seconds between two faults from which on the overhead alone gives the best interval."""


class Model:
    """Training with faults, in seconds; `interval` is one that adapts, or a number of steps."""

    def __init__(self, interval: Interval | int, step_seconds: float = STEP) -> None:
        self.interval, self.step_seconds = interval, step_seconds
        self.losses, self.known = Losses(), 1
        self.spent = self.repeated = self.trained = 0.0
        self.last = 0

    def round(self, seconds: float, *, is_fault: bool = True) -> None:
        """Train for a time up to a fault, or up to a planned stop that keeps the last step."""
        interval, now, step, taken = self.interval, 0.0, 0, 0.0
        if isinstance(interval, Interval):
            interval.start(0, 0.0, self.known, self.losses, self.step_seconds)
        number = 0
        first = interval if isinstance(interval, int) else interval.first
        due = first
        while True:
            now += (due - step) * self.step_seconds
            if now > seconds:
                break
            step, taken = due, now
            now += COST
            self.spent += COST
            if isinstance(interval, int):
                steps = interval
            else:
                steps = interval.proposed(step, now, Cost(COST, COST) if number else None)
                self.known = steps
            number, due, self.last = number + 1, step + steps, steps
        self.trained += seconds
        if is_fault:
            self.repeated += seconds - taken
        if isinstance(interval, Interval):
            losses = self.losses._replace(seconds=self.losses.seconds + seconds, cost=interval.cost)
            self.losses = agreed_losses([(step, losses)], OVERHEAD, is_fault=is_fault)

    def after(self, rounds: Iterable[float]) -> float:
        """Return the share of the time that is lost in rounds that end with faults."""
        for seconds in rounds:
            self.round(seconds)
        return (self.spent + self.repeated) / self.trained


def adaptive() -> Interval:
    return Interval(None, None, OVERHEAD, OVERHEAD_AT_FAULTS)


def faults(between: float, number: int, seed: int = 1) -> list[float]:
    found = random.Random(seed)
    return [found.expovariate(1 / between) for _ in range(number)]


@pytest.mark.parametrize("between", [15.0, 30.0, 60.0, 120.0, 250.0])
def test_loss_is_near_that_of_the_best_constant_interval(between: float) -> None:
    rounds = faults(between, 200)
    constant = [Model(steps).after(rounds) for steps in (5, 7, 10, 14, 20, 28, 40, 56)]
    found = Model(adaptive()).after(rounds)
    assert found < 1.15 * min(constant)
    assert found < 1.05 * Model(Interval(None, None, OVERHEAD)).after(rounds)


@pytest.mark.parametrize(("between", "number"), [(4 * NEUTRAL, 60), (30 * NEUTRAL, 10)])
def test_rare_faults_change_little(between: float, number: int) -> None:
    rounds = faults(between, number)
    with_rate, without = Model(adaptive()), Model(Interval(None, None, OVERHEAD))
    assert with_rate.after(rounds) < 1.02 * without.after(rounds)
    assert with_rate.spent < 1.25 * without.spent


def test_loss_is_half_of_that_by_the_overhead_alone_at_frequent_faults() -> None:
    rounds = faults(20.0, 200)
    today = Model(Interval(None, None, OVERHEAD)).after(rounds)
    assert Model(adaptive()).after(rounds) < 0.7 * today


def test_interval_without_faults_is_that_of_the_overhead() -> None:
    with_rate, without = Model(adaptive()), Model(Interval(None, None, OVERHEAD))
    for _ in range(20):  # planned stops, which repeat no step
        with_rate.round(30.0, is_fault=False)
        without.round(30.0, is_fault=False)
        assert with_rate.known == without.known
    assert with_rate.spent == without.spent


def test_single_fault_after_a_long_time_changes_no_interval() -> None:
    model = Model(adaptive())
    model.round(LONG)
    model.round(NEUTRAL, is_fault=False)
    assert model.last == pytest.approx(steps_within(AIM * OVERHEAD, COST, STEP), abs=1)


def test_third_fault_after_a_long_time_shortens_the_interval() -> None:
    model = Model(adaptive())
    model.round(LONG)
    for _ in range(3):
        model.round(20.0)
    assert model.last < 0.9 * steps_within(AIM * OVERHEAD, COST, STEP)


def test_burst_of_faults_is_forgotten() -> None:
    """No faults follow. The overhead falls with the time, and its sum has a bound."""
    model = Model(adaptive())
    for _ in range(50):
        model.round(10.0)
    assert model.last < 12
    model.spent = 0.0
    model.round(4 * NEUTRAL, is_fault=False)
    assert model.last == pytest.approx(steps_within(AIM * OVERHEAD, COST, STEP), abs=1)
    assert model.spent < OVERHEAD * 4 * NEUTRAL + 200 * COST


def test_overhead_has_a_bound_at_any_rate() -> None:
    model = Model(adaptive())
    for _ in range(30):
        model.round(5.0)
    assert model.last == pytest.approx(steps_within(OVERHEAD_AT_FAULTS, COST, STEP), abs=1)
    model.spent = 0.0
    model.round(20.0)
    assert model.spent <= 1.2 * OVERHEAD_AT_FAULTS * 20.0


@pytest.mark.parametrize(
    "interval", [Interval(None, None, OVERHEAD), Interval(7, None, OVERHEAD, OVERHEAD_AT_FAULTS)]
)
def test_given_interval_or_overhead_is_not_shortened(interval: Interval) -> None:
    interval.start(0, 0.0, 100, Losses(4.0, 10.0, COST), STEP)
    expected = 7 if interval.first == 7 else 100
    assert interval.first == expected
    for number in range(COSTS - 1):
        now = (number + 1) * (100 * STEP + COST)
        cost = Cost(COST, COST) if number else None
        assert interval.proposed(100 * (number + 1), now, cost) == expected


def test_interval_of_held_steps_is_not_shortened() -> None:
    """A fault then repeats a step at most, with any interval."""
    interval = adaptive()
    interval.start(0, 0.0, 100, Losses(4.0, 10.0, COST), STEP, is_held=True)
    assert interval.first == 100
    cost = Cost(COST, COST)
    assert interval.proposed(100, 100 * STEP, cost, is_held=True) == 100
    assert interval.proposed(200, 200 * STEP, cost) < 20


def test_interval_is_shorter_from_the_first_step_after_a_fault() -> None:
    """The costs of the new processes are not measured yet: that of the last round counts."""
    interval = adaptive()
    interval.start(50, 0.0, 40, Losses(2.0, 60.0, COST), STEP)
    shorter = steps_at_faults(30.0, COST, STEP, OVERHEAD_AT_FAULTS)
    assert interval.first == shorter < 20
    assert interval.proposed(50 + shorter, shorter * STEP, None) == shorter
    # Right after a restart a snapshot may take longer.
    slow = Cost(10 * COST, 10 * COST)
    now = 2 * shorter * STEP + slow.stopped
    assert interval.proposed(50 + 2 * shorter, now, slow) == pytest.approx(shorter, abs=2)


@pytest.mark.parametrize(("slowed", "expected"), [(0.0, COST), (0.02, COST + 3 * 0.02)])
def test_copies_on_other_nodes_count_for_the_shorter_interval_by_their_effect(
    slowed: float, expected: float
) -> None:
    """Three steps after each snapshot are beside them. The interval without faults is as before."""
    found = {}
    for losses in (Losses(), Losses(4.0, 40.0, 1.0)):
        interval = adaptive()
        interval.start(0, 0.0, 10, losses)
        step, now = 0, 0.0
        for number in range(3 * COSTS):
            step, now = step + 10, now + 10 * STEP + COST
            steps = interval.proposed(step, now, Cost(COST, COST) if number else None)
            interval.stepped(1, STEP, copied=True)
            for at in range(9):
                seconds = STEP + (slowed if at < 3 else 0.0)
                interval.stepped(1, seconds, copied=False, is_replicating=at < 3)
        found[losses.faults] = steps
        assert interval.cost == pytest.approx(expected)
    longest = REPAYMENT * steps_within(AIM * OVERHEAD, COST, STEP)  # those so far came too often
    assert found[0.0] == pytest.approx(longest, abs=1)
    between = (40.0 + now) / 4.0
    shorter = steps_at_faults(between, expected, STEP, OVERHEAD_AT_FAULTS)
    assert found[4.0] == pytest.approx(shorter, abs=1)


def test_cost_of_the_last_rounds_counts_while_copies_are_beside_all_steps() -> None:
    interval = adaptive()
    interval.start(0, 0.0, 10, Losses(4.0, 40.0, 5 * COST))
    step, now = 0, 0.0
    for number in range(COSTS + 1):
        step, now = step + 10, now + 10 * STEP + COST
        interval.proposed(step, now, Cost(COST, COST) if number else None)
        interval.stepped(1, STEP, copied=True)
        for _ in range(9):
            interval.stepped(1, STEP, copied=False, is_replicating=True)
    assert interval.cost == 5 * COST


def test_interval_at_faults_follows_the_square_root_of_their_distance() -> None:
    assert steps_at_faults(100.0, 0.5, 0.1, 0.05) == 100
    assert steps_at_faults(400.0, 0.5, 0.1, 0.05) == 200
    assert steps_at_faults(4.0, 0.5, 0.1, 0.05) == 100  # at most that share of the time
    assert steps_at_faults(100.0, 0.0, 0.1, 0.05) == steps_at_faults(1.0, 0.1, 0.0, 0.05) == 1


@pytest.mark.parametrize(("settings", "expected"), [({}, 20), ({"max_overhead": OVERHEAD}, 48)])
def test_snapshots_of_new_workers_follow_the_faults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, float],
    expected: int,
) -> None:
    now = [1000.0]
    real = MemoryBuffers.commit

    def commit(self: MemoryBuffers, part: Part, body: Body) -> None:
        real(self, part, body)
        now[0] += COST

    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))
    monkeypatch.setattr(MemoryBuffers, "commit", commit)
    for clock in ("monotonic", "perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: now[0])
    monkeypatch.setattr(time, "monotonic_ns", lambda: round(now[0] * 1e9))

    def trained(steps: int) -> int:
        """Train up to a fault; return the steps from the last snapshot but one to the last."""
        snapshots = Snapshots(**settings)  # type: ignore[arg-type]
        found = snapshots.restore()
        begun = 0 if found is None else found.step
        taken = [begun]
        for step in range(begun + 1, begun + 1 + steps):
            now[0] += STEP
            if snapshots.save(step, {"x": step}):
                taken.append(step)
        assert step > taken[-1], "a fault repeats steps"
        return taken[-1] - taken[-2]

    assert trained(2001) == pytest.approx(48, abs=2)
    gaps = [trained(333) for _ in range(8)]
    assert gaps[0] == pytest.approx(46, abs=4)  # one fault has little effect
    assert gaps[-1] == pytest.approx(expected, abs=2 if settings else 8)


class MixedRanks(Gang):
    """Gang of this rank and another one with a `max_overhead` of its own."""

    def gather(self, exchange: Exchange, content: bytes) -> list[memoryview]:
        if exchange != Exchange.BEGIN:
            return super().gather(exchange, content)
        [mine] = unpack_begins([content])
        return [memoryview(each.packed()) for each in (mine, mine._replace(follows_faults=False))]


def test_ranks_begin_with_one_interval_if_one_has_a_given_overhead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))
    first = Snapshots(every_steps=30)
    first.restore()
    for step in range(1, 75):
        first.save(step, {"x": step})
    file = ReachedFile(tmp_path, 0)
    file.restored(Losses(4.0, 0.04, 1e-6))
    assert [each.losses.faults for each in ended_on(tmp_path)] == [4.0]

    def interval() -> int:
        snapshots = Snapshots()
        assert snapshots.restore() is not None
        return snapshots._interval

    assert interval() < 30
    monkeypatch.setattr("elasticjob.train.snapshots.api.Gang", MixedRanks)
    assert interval() == 30


def test_restart_before_the_first_step_counts_no_further_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(layout.SNAPSHOT_FOLDER, str(tmp_path))

    def faults_after(steps: int) -> float:
        """Restore, then train up to a fault; return the number of faults at the restore."""
        snapshots = Snapshots(every_steps=10)
        found = snapshots.restore()
        begun = 0 if found is None else found.step
        assert snapshots._reached is not None
        losses = snapshots._reached._losses
        for step in range(begun + 1, begun + 1 + steps):
            snapshots.save(step, {"x": step})
        return losses.faults

    assert faults_after(15) == 0.0
    assert faults_after(0) == pytest.approx(RECENT)
    assert faults_after(0) == pytest.approx(RECENT)
    assert faults_after(20) == pytest.approx(RECENT)  # at step 30, with a snapshot
    assert faults_after(5) == pytest.approx(RECENT)
    assert faults_after(1) == pytest.approx(RECENT * (RECENT + 1))


# --- records


def test_losses_are_those_of_the_newest_record() -> None:
    records = [(-1, Losses()), (80, Losses(2.0, 100.0, 0.1)), (79, Losses(3.0, 900.0, 0.3))]
    assert agreed_losses(records, 0.01, is_fault=False) == Losses(2.0, 100.0, 0.3)
    found = agreed_losses(records, 0.01, is_fault=True)
    assert found == pytest.approx((2.4, 80.0, 0.3))
    assert agreed_losses([(-1, Losses())], 0.01, is_fault=True).faults > 0


def test_losses_of_a_long_time_weigh_no_more_than_its_end() -> None:
    found = Losses(4.0, 0.0, COST).later(1e9, OVERHEAD)
    assert found.seconds == pytest.approx(COST / OVERHEAD**2)
    assert found.faults < 1e-3
    assert Losses(4.0, 0.0).later(1e9, OVERHEAD) == Losses(4.0, 1e9)


def test_losses_outlive_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5_000_000_000]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0])
    file = ReachedFile(tmp_path, 0)
    file.restored(Losses(2.0, 100.0, 0.1))
    assert ended_on(tmp_path) == []
    now[0] += 3_000_000_000
    file.cost = 0.2
    file.write(7)
    [found] = ended_on(tmp_path)
    assert (found.losses, found.is_counted) == (Losses(2.0, 103.0, 0.2), False)
    # The next worker counts the fault, and may end before its first step.
    following = ReachedFile(tmp_path, 0)
    following.restored(Losses(2.4, 82.4, 0.2))
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.losses) == (7, Losses(2.4, 82.4, 0.2))
    assert found.is_counted
    following.write(6)
    following.restored(Losses(1.0, 1.0, 1.0))  # in the same process
    [found] = ended_on(tmp_path)
    assert (found.losses, found.is_counted) == (Losses(1.0, 1.0, 1.0), True)


def test_record_without_losses_is_read(tmp_path: Path) -> None:
    """Earlier versions of the library write no losses, and overwrite the rest."""
    file = ReachedFile(tmp_path, 0)
    file.restored(Losses(2.0, 100.0, 0.1))
    file.due = 9
    file.write(7)
    path = tmp_path / "reached-0"
    content = path.read_bytes()
    path.write_bytes(content[:-25])
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.due, found.losses) == (7, 9, Losses())
    ReachedFile(tmp_path, 0).restored(Losses(3.0, 1.0, 1.0))
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.due, found.losses) == (7, 9, Losses(3.0, 1.0, 1.0))


@pytest.mark.parametrize("number", [math.nan, math.inf, -1.0, 1e300])
def test_torn_losses_are_left_out(tmp_path: Path, number: float) -> None:
    file = ReachedFile(tmp_path, 0)
    file.cost = number
    file.write(7)
    [found] = ended_on(tmp_path)
    assert (found.reached.step, found.losses) == (7, Losses())
