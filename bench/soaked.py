"""A job that the soak disturbs: what both kinds of it have in common, and how it is waited for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from bench.disturbances import MOST, UNNOTICED, Disturbance, Kind, Told

NAME = "soak"
SCRIPT = Path(__file__).with_name("soaked_train.py")
ENDLESS = 10**7
STEPS_TO_END = 50
"""Training steps that are left when the job is told where to end."""
LEAST_STEPS = 300
"""Fewer do not make a good model of the example."""
STEPS_AFTER = 10
"""Training steps by which it is seen that training goes on after a fault."""


def training(last: Path, *options: object) -> dict[str, list[str]]:
    """Command and arguments of a worker, which ends at the step that `last` will name."""
    steps = ["--steps", str(ENDLESS), "--report-seconds", "0"]
    return {
        "command": ["python3", SCRIPT.name],
        "args": [str(last), *steps, *map(str, options)],
    }


def spec_of(faults: int) -> dict[str, Any]:
    """The job's spec but for its template."""
    return {"nodes": MOST - 1, "minNodes": 1, "maxNodes": MOST, "maxRestarts": faults + 2}


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

    def do(self, what: Disturbance, before: Told) -> None:
        """Disturb it, which said this before."""
        self._before = before.number
        if what.kind is Kind.SCALE:
            self.wanted = what.nodes
        self.apply(what)

    @abstractmethod
    def apply(self, what: Disturbance) -> None: ...

    def back(self, what: Disturbance) -> bool:
        """Whether what was killed has been replaced, where that is not seen in the round."""
        return True

    # -- its end

    def finish(self) -> int:
        """Have it end soon, by a last failure after which workers know where; the step."""
        pod, last = self.standing().running[0], max(LEAST_STEPS, self.step() + STEPS_TO_END)
        self.let_end(last)
        self.apply(Disturbance(Kind.KILL_WORKER, pod))
        return last

    @abstractmethod
    def let_end(self, step: int) -> None:
        """Tell the scripts of all pods at which step to end."""

    @abstractmethod
    def ends(self) -> float:
        """Wait until it has succeeded; the accuracy that it came to."""

    @abstractmethod
    def left(self) -> list[str]:
        """Take it away; what is left of it after that."""

    # -- waiting

    def standing(self) -> Told:
        """Its status when it tells of all that run: not while its etcd has just been killed."""
        deadline = time.monotonic() + self.patience_seconds
        while len((now := self.told()).running) != self.wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.wanted} nodes are not told of: {now}; {self.log()}")
            time.sleep(self.poll_seconds)
        return now

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
        """Whether what was done has shown, and what was killed is back."""
        return (done.kind in UNNOTICED or now.number > self._before) and self.back(done)
