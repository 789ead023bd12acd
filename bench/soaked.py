"""A job that the soak disturbs: what both kinds of it have in common, and how it is waited for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from bench.disturbances import MOST, TAKES_THE_NODE, Disturbance, Kind, Told

NAME = "soak"
STEPS_OF_FAULT = 60
"""Training steps for each fault in the job: more than pass from one to the next."""
STEPS_AFTER = 10
"""Training steps by which it is seen that training goes on after a fault."""


def training(faults: int, *options: str) -> list[str]:
    """The arguments of the example's script, with as many steps as these faults need."""
    return ["--steps", str(STEPS_OF_FAULT * (faults + 1)), "--report-seconds", "0", *options]


def spec_of(faults: int) -> dict[str, Any]:
    """The job's spec but for its template."""
    return {"nodes": MOST - 1, "minNodes": 1, "maxNodes": MOST, "maxRestarts": faults + 1}


class Soaked(ABC):
    """The running job; `wanted` is its size. A context manager, whose end leaves nothing."""

    weights: ClassVar[Mapping[Kind, int]]
    evicts: ClassVar[bool]
    """Whether a drain is an eviction."""
    patience_seconds: ClassVar[float]
    poll_seconds: ClassVar[float]

    def __init__(self) -> None:
        self.wanted = MOST - 1
        self._before = 0

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    # -- what it says

    @abstractmethod
    def told(self) -> Told:
        """Its status now."""

    @abstractmethod
    def step(self) -> int:
        """The newest step that any of its workers told of."""

    @abstractmethod
    def ended(self) -> bool:
        """Whether it has come to an end, good or bad."""

    @abstractmethod
    def log(self) -> str:
        """The end of what its runner or its operator says."""

    @abstractmethod
    def keep(self, folder: Path) -> None:
        """Save what may explain what went wrong."""

    # -- what is done to it

    def may(self, what: Disturbance) -> bool:
        """Whether this fault would show what it is to show, now."""
        return True

    def do(self, what: Disturbance) -> None:
        self._before = self.told().number
        if what.kind is Kind.SCALE:
            self.wanted = what.nodes
        self.apply(what)

    @abstractmethod
    def apply(self, what: Disturbance) -> None: ...

    def back(self, what: Disturbance) -> bool:
        """Whether what was killed has been replaced, where that is not seen in the round."""
        return True

    # -- its end

    @abstractmethod
    def ends(self) -> float:
        """Wait until it has succeeded; the accuracy that it came to."""

    @abstractmethod
    def left(self) -> list[str]:
        """Take it away; what is left of it after that."""

    # -- waiting

    def trains(self, after: Disturbance | None = None) -> Told:
        """Wait until as many nodes run as are wanted, and train on from where they are; the status
        then."""
        deadline = time.monotonic() + self.patience_seconds
        aim: tuple[int, int] | None = None  # the round, and the step to be reached in it
        while True:
            now, step = self.told(), self.step()
            whole = len(now.running) == self.wanted and (after is None or self._over(after, now))
            if not whole or aim is None or aim[0] != now.number:
                aim = (now.number, step + STEPS_AFTER) if whole else None
            elif step >= aim[1]:
                return now
            if self.ended():
                raise AssertionError(f"the job ended: {self.log()}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"{after or 'the start'}: {self.wanted} nodes do not train: {now}, "
                    f"step {step}; {self.log()}"
                )
            time.sleep(self.poll_seconds)

    def _over(self, done: Disturbance, now: Told) -> bool:
        """Whether what was hit is gone from the round, or is back in it."""
        if done.kind in TAKES_THE_NODE:
            return done.pod not in now.running or now.number > self._before
        return self.back(done)
