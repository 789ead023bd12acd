"""Checks of the crash-loop back-off: growing pauses, and an early end without progress.

This module owns the charges in their order, with the steps reported by failed workers. The rule is
implemented a second time here, on purpose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Round, RoundState
from tests.sim.invariants.ground_truth import CONSEQUENCES

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker

SAME_STEP = 3


class Crashing:
    """Crash-loop state, computed independently of the product.

    Attributes:
        row: consecutive charged failures before a first step.
        at_step: (step, number of consecutive failures at it).
    """

    def __init__(self, checker: Checker) -> None:
        self.checker = checker
        self.row = 0
        self.at_step: tuple[int, int] = (-1, 0)
        self._charged_at: dict[int, float] = {}
        self._certain = True

    def changed(self, before: Round, after: Round) -> None:
        """Check one change of the round."""
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
