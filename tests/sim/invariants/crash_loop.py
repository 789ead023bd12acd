"""Checks of the crash-loop back-off: growing pauses, and an early end without progress.

This module owns the charges in their order, with the steps reported by failed workers, and the
losses in theirs. The rules are implemented a second time here, on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import CauseKind, Round, RoundState
from tests.sim.invariants.ground_truth import CONSEQUENCES

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker

SAME_STEP = 3
SOON_SECONDS = 60.0


class Crashing:
    """Crash-loop state, computed independently of the product.

    Attributes:
        row: consecutive charged failures before a first step.
        at_step: (step, number of consecutive failures at it).
        cuts: rounds that ended by the loss of a member that had been lost before.
    """

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.row = 0
        self.at_step: tuple[int, int] = (-1, 0)
        self._charged_at: dict[int, float] = {}
        self._certain = True
        self.cuts = 0
        self._lost: set[str] = set()
        self._cut_at = 0.0
        self._cuts_certain = True

    def changed(self, before: Round, after: Round) -> None:
        """Check one change of the round."""
        self._count_losses(before, after)
        self._check_cuts(before, after)
        for number in after.charged:
            if number not in self._charged_at:
                self._charged_at[number] = self.checker.world.now
                self._charge(number)
        if self._certain and self.no_progress_text:
            over = after.state is RoundState.CLOSED
            self.checker.need(over, "no progress", f"{self.at_step} and it goes on: {after}")
        freezes = before.state is RoundState.JOINABLE and after.state is RoundState.FROZEN
        if freezes and after.previous in self._charged_at:
            waited = self.checker.world.now - self._charged_at[after.previous]
            said = f"{waited:.2f} s after failure {self.row} in a row"
            self.checker.need(waited >= self._pause() - 0.01, "back-off", said)

    @property
    def no_progress_text(self) -> bool:
        return self.at_step[1] >= SAME_STEP

    def _pause(self) -> float:
        return 0.0 if self.row < 2 or not self._certain else float(2 ** (self.row - 2))

    # -- losses ---------------------------------------------------------------------

    def _count_losses(self, before: Round, after: Round) -> None:
        """Count one round that ended by a loss; an abort may turn out to be one later."""
        world = self.checker.world
        ended = max((n for n in self.checker.final_numbers if n < after.number), default=0)
        began = self.checker.sealed_at.get(ended)
        if began is not None and world.now - began >= SOON_SECONDS - 1.0:
            self._cuts_certain = False  # as long as the coordinator saw of it
        lost = after.counts.losses - before.counts.losses
        if world.truth.robbed or lost > 1 or after.number > before.number + 1:
            self._cuts_certain = False
        if not lost or not self._cuts_certain:
            return
        if after.number == before.number and after.number != ended + 1:
            self._cuts_certain = False  # a verdict on an earlier round
            return
        if after.cause.kind is not CauseKind.LOSS:
            self._cuts_certain = False  # a verdict on a round that a conclusive failure followed
            return
        roster = self.checker.sealed[ended]
        ids = {seat.id for seat in roster.seats if seat.name in after.cause.members}
        if ids & self._lost:
            self.cuts += 1
            self._cut_at = world.now
        self._lost |= ids

    def _check_cuts(self, before: Round, after: Round) -> None:
        """Check the count, and that members that were cut off again wait for their back-off."""
        if not self._cuts_certain:
            return
        streak = after.streak
        self.checker.need(streak.cuts == self.cuts, "cut offs", f"{self.cuts} in {after}")
        unknown = set(streak.lost) - self._lost
        self.checker.need(not unknown, "cut offs", f"{unknown} were not lost: {after}")
        freezes = before.state is RoundState.JOINABLE and after.state is RoundState.FROZEN
        if freezes and self.cuts >= 2 and set(after.ids) & self._lost:
            waited, pause = self.checker.world.now - self._cut_at, float(2 ** (self.cuts - 2))
            said = f"{waited:.2f} s after cut off {self.cuts} in a row"
            self.checker.need(waited >= min(pause, 60.0) - 0.01, "back-off", said)

    def _charge(self, number: int) -> None:
        """Add one charge. No simulated round lives for a minute, which would end a row too."""
        told = self.checker.world.etcd.range(
            Range(self.checker.world.keys.failures(number), prefix=True)
        ).kvs
        failures = [decode(Failure, kv.key, kv.value) for kv in told]
        steps = {failure.step for failure in failures if failure.kind not in CONSEQUENCES}
        if len(steps) > 1:
            self._certain = False  # clocks decide between several steps
        known = next(iter(steps), None)
        step = -1 if known is None else known
        self.row = 0 if step >= 0 else self.row + 1
        if step >= 0:
            self.at_step = (step, self.at_step[1] + 1 if step == self.at_step[0] else 1)
