"""Job under the soak test: base class of the local and the cluster variant."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from bench.soak.disturbances import MOST, UNNOTICED, Disturbance, JobState, Kind

NAME = "soak"
SCRIPT = Path(__file__).with_name("stoppable_train.py")
ENDLESS = 10**7
STEPS_TO_END = 50
"""Training steps left when the job gets its last step."""
LEAST_STEPS = 300
"""Minimum number of training steps for an accurate model of the example."""
STEPS_AFTER = 10
"""Number of training steps that prove progress after a fault."""


def training(last: Path, *options: object) -> dict[str, list[str]]:
    """Return command and arguments of a worker that ends at the step in the file `last`."""
    steps = ["--steps", str(ENDLESS), "--report-seconds", "0"]
    return {
        "command": ["python3", SCRIPT.name],
        "args": [str(last), *steps, *map(str, options)],
    }


def spec_of(faults: int) -> dict[str, Any]:
    """Return the job's spec without its template."""
    return {"nodes": MOST - 1, "minNodes": 1, "maxNodes": MOST, "maxRestarts": faults + 2}


class Soaked(ABC):
    """Running job and context manager that cleans up completely; `wanted` is its desired size."""

    weights: ClassVar[Mapping[Kind, int]]
    evicts: ClassVar[bool]
    """True if a drain is an eviction."""
    patience_seconds: ClassVar[float]
    poll_seconds: ClassVar[float]

    def __init__(self) -> None:
        self.wanted = MOST - 1
        self._before = 0

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...

    # -- state

    @abstractmethod
    def job_state(self) -> JobState:
        """Return its current status."""

    @abstractmethod
    def step(self) -> int:
        """Return the newest step that any of its workers reported."""

    @abstractmethod
    def ended(self) -> bool:
        """Return True if it has succeeded or failed."""

    @abstractmethod
    def log(self) -> str:
        """Return the end of its runner's log, or the operator's explanation."""

    @abstractmethod
    def keep(self, folder: Path) -> None:
        """Save evidence of an error."""

    # -- faults

    def may(self, fault: Disturbance) -> bool:
        """Return True if this fault is meaningful now."""
        return True

    def do(self, fault: Disturbance, before: JobState) -> None:
        """Inject a fault; `before` is the status before it."""
        self._before = before.number
        if fault.kind is Kind.SCALE:
            self.wanted = fault.nodes
        self.apply(fault)

    @abstractmethod
    def apply(self, fault: Disturbance) -> None: ...

    def back(self, fault: Disturbance) -> bool:
        """Return True if the killed part is replaced, for faults that cause no round."""
        return True

    # -- end of the job

    def finish(self) -> int:
        """Set the last step, with a final failure so that workers read it; return the step."""
        pod, last = self.standing().running[0], max(LEAST_STEPS, self.step() + STEPS_TO_END)
        self.let_end(last)
        self.apply(Disturbance(Kind.KILL_WORKER, pod))
        return last

    @abstractmethod
    def let_end(self, step: int) -> None:
        """Give the scripts of all pods the last step."""

    @abstractmethod
    def ends(self) -> float:
        """Wait until it has succeeded; return its accuracy."""

    @abstractmethod
    def left(self) -> list[str]:
        """Delete it; return its leftovers."""

    # -- waiting

    def standing(self) -> JobState:
        """Wait for a status that lists all running nodes; just after a kill of etcd it may not."""
        deadline = time.monotonic() + self.patience_seconds
        while len((now := self.job_state()).running) != self.wanted:
            if time.monotonic() > deadline:
                raise AssertionError(f"not {self.wanted} nodes in the status: {now}; {self.log()}")
            time.sleep(self.poll_seconds)
        return now

    def trains(self, after: Disturbance | None = None) -> JobState:
        """Wait until the desired number of nodes runs and makes progress; return the status."""
        deadline = time.monotonic() + self.patience_seconds
        aim: tuple[int, int] | None = None  # the round, and the step to be reached in it
        while True:
            now, step = self.job_state(), self.step()
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

    def _over(self, done: Disturbance, now: JobState) -> bool:
        """Return True if the fault has had its effect and the killed part is replaced."""
        return (done.kind in UNNOTICED or now.number > self._before) and self.back(done)
