"""Interval between two snapshots in steps: given, from seconds, or from their measured cost and the
faults that repeat steps.

Also the policy by which a rank proposes to hold the state of each step between them. The cost of a
snapshot is the time for which it stops the training, and the time by which its copy in the
background slows down the step after it. The caller passes all times, in seconds. No I/O.
"""

from __future__ import annotations

import collections
import math
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob.train.snapshots.core.agreement import steps_at_faults, steps_between, steps_within

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_SECONDS = 86400
COSTS = 5
"""Number of measured costs, of which the median counts. The first ones include the allocation of
the buffers."""
PLAIN_STEPS = 20
"""Number of measured steps without a copy, of which the median counts. After this number of
snapshots in consecutive steps, a step without a copy is measured again."""
EARLY_GROWTH = 4
"""Largest factor from one interval to the next until `COSTS` costs are measured: snapshots of a
large state in each of the first steps would take the time of several steps. If the state of each
step is held for a stop copy, no step between two snapshots is lost. The factor then is the interval
after the first snapshot, and the measured costs alone determine the others."""
GROWTH = 100
"""Largest factor from one interval to the next: one short step does not predict the others."""

AIM = 0.85
"""Share of the largest overhead at which the interval aims. A snapshot delays the gang by the cost
of its slowest rank, often another one than before: more than the median of each rank."""
REPAYMENT = 1.5
"""Largest factor by which an interval is longer while the snapshots so far took more than their
share, such as the first ones, which allocate memory."""

OVERHEAD_AT_FAULTS = 0.05
"""Largest share of the training time that snapshots take while faults repeat steps."""
RECENT = 0.8
"""Factor by which each fault reduces the weight of those before: about five faults count."""

HELD_SHARE = 0.75
"""Largest share of the overhead for holding the state of each step. A stop copy suffices after each
single fault; the regular snapshots get the rest of the overhead."""


HELD_COSTS = 20
"""Number of measured costs of held states, of which the lower quartile counts: on a machine that is
busy for a moment, single ones are many times higher."""
FIRST_COSTS = 5
"""Number of costs after which the ranks first decide if they continue to hold states."""
RETRY = 16
"""Largest number of regular snapshots after which a rank that stopped holding states retries."""


class Cost(NamedTuple):
    """Cost of one snapshot in seconds.

    Args:
        stopped: time for which the training waited, in `save` and in the optimizers' next step.
        in_save: the part of it in `save`.
        background: processor time of the copy in the background.
    """

    stopped: float
    in_save: float
    background: float = 0.0

    def with_effect(self, slowed: float) -> float:
        """Return the cost if the steps beside the copy took `slowed` seconds longer.

        It is at least the time that the training waited, and at most that and the processor time
        of the copy.
        """
        return min(max(self.stopped, self.in_save + slowed), self.stopped + self.background)


class Account(NamedTuple):
    """Snapshots since a time, which are to take their share of it. All times are in seconds.

    Args:
        began: that time.
        snapshots: number of snapshots whose cost is known.
        cost: sum of their costs.
        steps: number of steps between the snapshots and the next calls of `save`.
        slowed: time that these steps took.
    """

    began: float = 0.0
    snapshots: int = 0
    cost: Cost = Cost(0.0, 0.0)
    steps: int = 0
    slowed: float = 0.0

    def with_snapshot(self, cost: Cost) -> Account:
        """Return the account with one more snapshot."""
        total = Cost(*map(sum, zip(self.cost, cost)))
        return self._replace(snapshots=self.snapshots + 1, cost=total)

    def with_steps(self, steps: int, seconds: float) -> Account:
        """Return the account with the steps beside one more copy."""
        return self._replace(steps=self.steps + steps, slowed=self.slowed + seconds)

    def total(self, plain: float) -> float:
        """Return the cost of all snapshots, for the time of a step without a copy."""
        return self.cost.with_effect(self.slowed - self.steps * plain)


class Losses(NamedTuple):
    """Rate of the faults after which steps were repeated. Each round passes it to the next.

    Args:
        faults: number of faults, with lower weights for earlier ones.
        seconds: training time in which they occurred, with the same weights.
        cost: cost of a snapshot in seconds; 0 as long as it is unknown.
    """

    faults: float = 0.0
    seconds: float = 0.0
    cost: float = 0.0

    def later(self, seconds: float, max_overhead: float) -> Losses:
        """Return the losses after a further time without a fault.

        Older faults lose weight: the time has a maximum, `cost / max_overhead**2`, with which one
        fault changes no interval. Beyond it the number of faults is reduced instead.
        """
        total = self.seconds + max(0.0, seconds)
        most = self.cost / max_overhead**2 if self.cost > 0 else math.inf
        if total <= most:
            return self._replace(seconds=total)
        return self._replace(faults=self.faults * most / total, seconds=most)

    def after_fault(self) -> Losses:
        """Return the losses after one more fault."""
        return self._replace(faults=RECENT * (self.faults + 1), seconds=RECENT * self.seconds)


def agreed_losses(
    records: Iterable[tuple[int, Losses]], max_overhead: float, *, is_fault: bool
) -> Losses:
    """Return the losses with which a round begins, the same on all ranks.

    Args:
        records: the last step of an earlier round that each rank knows, with the losses by then.
        is_fault: True if a fault has ended that round, after which steps are repeated.
    """
    found = list(records)
    _, newest = max(found, key=lambda each: (each[0], each[1].seconds))
    cost = max(each.cost for _, each in found)  # the ranks take the longest interval
    losses = newest._replace(cost=cost).later(0.0, max_overhead)
    return losses.after_fault() if is_fault else losses


def at_least_one(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a whole number of at least 1."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def is_within(value: Any, most: float) -> bool:
    """Return True if the value is a number above 0, and at most `most`."""
    try:
        return bool(0 < value <= most)
    except (TypeError, ValueError, RuntimeError):  # such as a text, an array or a tensor
        return False


def seconds_within_a_day(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a duration above 0 and of at most a day."""
    if not is_within(value, MAX_SECONDS):
        raise ValueError(f"{name} must be above 0 and at most {MAX_SECONDS}, got {value!r}")


class Interval:
    """Interval that one rank proposes; the ranks take the longest proposal.

    Args:
        every_steps: constant number of steps.
        every_seconds: alternatively the approximate time.
        max_overhead: without either, the largest share of the training time.
        at_faults: the same while faults repeat steps, where that needs a shorter interval; at least
            `max_overhead`, which is the default.

    Raises:
        ValueError: an argument is out of range, or both intervals are given.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_seconds: float | None,
        max_overhead: float,
        at_faults: float | None = None,
    ) -> None:
        if every_steps is not None and every_seconds is not None:
            raise ValueError("give every_steps or every_seconds, not both")
        if every_steps is not None:
            at_least_one("every_steps", every_steps)
        if every_seconds is not None:
            seconds_within_a_day("every_seconds", every_seconds)
        if not is_within(max_overhead, 1):
            raise ValueError(f"max_overhead must be above 0 and at most 1, got {max_overhead!r}")
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._max_overhead = max_overhead
        self._at_faults = max(max_overhead, at_faults or 0.0)
        self._losses, self._started = Losses(), 0.0
        self._costs: collections.deque[Cost] = collections.deque(maxlen=COSTS)
        self._account = Account()
        self._plain: collections.deque[float] = collections.deque(maxlen=PLAIN_STEPS)
        self._slowed: collections.deque[tuple[int, float]] = collections.deque(maxlen=COSTS)
        self._since_plain = 0
        # Steps without a copy: those beside copies on other nodes, and all others.
        self._beside: collections.deque[float] = collections.deque(maxlen=PLAIN_STEPS)
        self._free: collections.deque[float] = collections.deque(maxlen=PLAIN_STEPS)
        self._counts: collections.deque[int] = collections.deque(maxlen=COSTS)
        self._count = 0
        self._known = 1
        self._step = 0
        self._began = 0.0

    @property
    def is_measured(self) -> bool:
        """True if the ranks may propose different numbers."""
        return self._every_steps is None

    @property
    def follows_faults(self) -> bool:
        """True if the interval is shorter while faults repeat steps."""
        is_given = self._every_steps is not None or self._every_seconds is not None
        return not is_given and self._at_faults > self._max_overhead

    @property
    def first(self) -> int:
        """Steps until the first snapshot of a round."""
        return self._every_steps or self._known

    @property
    def cost(self) -> float:
        """Cost of a snapshot with its copies on other nodes in seconds, for later rounds; 0 as long
        as it is unknown.

        The first costs of a process are too large. In rounds that end before `COSTS` of them, the
        smallest median counts. The cost of copies beside all steps is that of the last rounds.
        """
        known = self._losses.cost
        if not self._costs:
            return known
        cost = self._median_cost() + self._replication_cost()
        if self._beside and len(self._free) < COSTS:  # the cost of these copies is not measured
            return max(cost, known)
        if len(self._costs) >= COSTS:
            return cost
        return min(cost, known) if known > 0 else cost

    def start(
        self,
        step: int,
        now: float,
        known: int = 1,
        losses: Losses | None = None,
        step_seconds: float = 0.0,
        *,
        is_held: bool = False,
    ) -> None:
        """Begin to measure, after a restore.

        Args:
            known: interval of the restored snapshot, the shortest until new costs are measured.
            losses: faults before, by which the interval may be shorter at once; none, or other
                ranks would begin with a longer one, unless all of them follow the faults.
            step_seconds: duration of a step of the round before; 0 if it is unknown.
            is_held: as for `proposed`.
        """
        self._step, self._began = step, now
        self._losses, self._started = losses or Losses(), now
        self._known = max(1, known) if self._every_seconds is None else 1
        if not is_held and self._losses.cost > 0 and step_seconds > 0:  # the same on all ranks
            self._known = self._shortened(self._known, self._losses.cost, step_seconds, now)
        self._costs.clear()
        self._account = Account(now)
        self._plain.clear()
        self._slowed.clear()
        self._beside.clear()
        self._free.clear()
        self._counts.clear()
        self._since_plain = self._count = 0

    def stepped(
        self, steps: int, seconds: float, *, copied: bool, is_replicating: bool = False
    ) -> None:
        """Add the time between two calls of `save`.

        Args:
            steps: number of steps between the calls.
            copied: True if the first of the calls took a snapshot.
            is_replicating: True if copies on other nodes were in progress.
        """
        if steps < 1:
            return
        if copied:
            self._slowed.append((steps, seconds))
            self._account = self._account.with_steps(steps, seconds)
            self._since_plain += 1
        else:
            self._plain.append(seconds / steps)
            self._since_plain = 0
            (self._beside if is_replicating else self._free).append(seconds / steps)
            self._count += steps if is_replicating else 0

    def proposed(
        self,
        step: int,
        now: float,
        cost: Cost | None,
        spent: float = 0.0,
        *,
        is_held: bool = False,
    ) -> int:
        """Return the steps until the snapshot after this one.

        Args:
            cost: cost of the last snapshot; None before the first.
            spent: share of the training time that is spent in each step, up to `HELD_SHARE` of the
                largest.
            is_held: True if each step is held for a copy at a stop.
        """
        steps, seconds = step - self._step, now - self._began
        self._step, self._began = step, now
        if self._every_steps is not None:
            return self._every_steps
        if self._every_seconds is not None:
            # The steps before the first snapshot may be those of another training, done elsewhere.
            return 1 if cost is None else steps_between(self._every_seconds, steps, seconds)
        if cost is not None:
            self._costs.append(cost)
            self._account = self._account.with_snapshot(cost)
            self._counts.append(self._count)
        self._count = 0
        if cost is None or steps < 1:
            return max(self._known, EARLY_GROWTH) if is_held else self._known
        median = self._median_cost()
        step_seconds = max(0.0, seconds - median) / steps
        left = AIM * (self._max_overhead - min(spent, self._max_overhead * HELD_SHARE))
        is_early = len(self._costs) < COSTS
        growth = EARLY_GROWTH if is_early and not is_held else GROWTH
        found = min(steps_within(left, median, step_seconds), growth * steps)
        if is_early:
            found = max(found, self._known)
        elif step_seconds > 0:
            owed = max(0.0, self._total_cost() / left - (now - self._account.began))
            found += int(min(owed / step_seconds, (REPAYMENT - 1) * found))
        if not is_held:
            usual, found = found, self._shortened(found, self.cost, step_seconds, now)
            if found < usual:  # more snapshots than that share allows are intended
                self._account = Account(now)
        if is_early:
            return found
        # One more step than since the last snapshot: a call of `save` without one comes between.
        return max(found, steps + 1) if self._since_plain > PLAIN_STEPS else found

    def _shortened(self, steps: int, cost: float, step_seconds: float, now: float) -> int:
        """Return an interval in steps, or the shorter one that the rate of the faults needs."""
        losses = self._losses.later(now - self._started, self._max_overhead)
        if losses.faults <= 0 or not self.follows_faults:
            return steps
        between = losses.seconds / losses.faults
        return min(steps, steps_at_faults(between, cost, step_seconds, self._at_faults))

    def _replication_cost(self) -> float:
        """Return the time by which the copies of a snapshot on other nodes slow down the steps.

        It counts for the shorter interval alone. A measured step without these copies is needed.
        """
        if not self._beside or len(self._free) < COSTS or not self._counts:
            return 0.0
        slowed = statistics.median(self._beside) - statistics.median(self._free)
        return max(0.0, slowed) * statistics.median(self._counts)

    def _total_cost(self) -> float:
        """Return the cost of the snapshots in the account."""
        if len(self._plain) < COSTS:
            return self._account.snapshots * self._median_cost()
        return self._account.total(statistics.median(self._plain))

    def _median_cost(self) -> float:
        """Return the cost of a snapshot: what it stops, and what its copy slows down.

        The latter is at most the processor time of the copy, which counts in full as long as no
        step without a copy is measured.
        """
        median = Cost(*map(statistics.median, zip(*self._costs)))
        if len(self._plain) < COSTS or len(self._slowed) < COSTS:
            return median.stopped + median.background
        plain = statistics.median(self._plain)
        return median.with_effect(
            statistics.median(time - steps * plain for steps, time in self._slowed)
        )


class HoldPolicy:
    """Policy of one rank for holding the state of each step, based on the measured cost.

    The ranks hold states while all of them propose it. A rank that stops proposes it again after
    the next regular snapshot, then after two, four and so on, up to `RETRY` of them.

    Args:
        max_overhead: largest share of the training time that snapshots take.
    """

    def __init__(self, max_overhead: float) -> None:
        self.most = max_overhead * HELD_SHARE
        self._costs: collections.deque[float] = collections.deque(maxlen=HELD_COSTS)
        self.is_refused = False
        """True if a state could not be held."""
        self._rounds_off, self._pause = 0, 0

    def start(self) -> None:
        """Begin to measure, after a restore."""
        self._costs.clear()
        self.is_refused = False
        self._rounds_off, self._pause = 0, 0

    def took(self, seconds: float) -> None:
        """Record the time that holding the state of one step took."""
        self._costs.append(seconds)

    def share(self, step_seconds: float) -> float:
        """Return the cost as a share of the step time; 0 before the first measurement."""
        if not self._costs:
            return 0.0
        cost = sorted(self._costs)[len(self._costs) // 4]
        return cost / step_seconds if step_seconds > 0 else 1.0

    def proposed(self, step_seconds: float | None, *, is_on: bool) -> bool:
        """Return True if this rank proposes to hold states until the next regular snapshot.

        Must be called once for each exchange of the ranks.

        Args:
            step_seconds: usual duration of a step; None if it is unknown.
            is_on: True if the ranks hold now.
        """
        if not is_on:
            self._rounds_off += 1
            if self._rounds_off >= self._pause:
                self.is_refused = False
                self._costs.clear()
        is_measured = step_seconds is not None and len(self._costs) >= FIRST_COSTS
        is_cheap = not is_measured or self.share(step_seconds or 0.0) <= self.most
        wants = is_cheap and not self.is_refused
        if is_on and not wants:
            self._rounds_off, self._pause = 0, max(1, min(2 * self._pause, RETRY))
        elif is_on and len(self._costs) == HELD_COSTS:
            self._pause = 0
        return wants
