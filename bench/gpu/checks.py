"""Cases of the GPU check and their results. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Fault(StrEnum):
    """Fault, or change of size, during a training."""

    KILL_WORKER = "kill-worker"
    KILL_NODE = "kill-node"
    DRAIN = "drain"
    JOIN = "join"
    OUT_OF_MEMORY = "out-of-memory"
    ABORT = "abort"


CAUSES: Mapping[Fault, frozenset[str]] = {
    Fault.KILL_WORKER: frozenset({"failure"}),
    Fault.KILL_NODE: frozenset({"loss", "failure"}),
    Fault.DRAIN: frozenset({"leave"}),
    Fault.JOIN: frozenset({"join"}),
    Fault.OUT_OF_MEMORY: frozenset({"failure"}),
    Fault.ABORT: frozenset({"failure"}),
}
"""Causes that the status may report for the first round after a fault.

A gang of one node cannot lose its node and continue: its next round begins with the new pod.
"""
ALONE = frozenset({"start", "join", "failure", "loss", "leave"})


MAX_STEPS_LOST = 2
"""Steps that a gang with a snapshot after each step may repeat."""


class System(StrEnum):
    """Launcher of the gang."""

    OURS = "elasticjob"
    TORCHRUN = "torchrun"


@dataclass(frozen=True, slots=True)
class Case:
    """One fault in a gang of `nodes` nodes with one worker each.

    Attributes:
        warm: workers are forked from a preloaded interpreter.
        compiled: the model is compiled by `torch.compile`.
        snapshots: the script takes a snapshot after each step and restores it.
    """

    fault: Fault
    backend: str
    nodes: int
    warm: bool = True
    compiled: bool = False
    snapshots: bool = False
    system: System = System.OURS

    @property
    def least(self) -> int:
        """Nodes before the fault."""
        return self.nodes - 1 if self.fault is Fault.JOIN else self.nodes

    @property
    def causes(self) -> frozenset[str]:
        return CAUSES[self.fault] if self.least > 1 else ALONE

    def __str__(self) -> str:
        ranks = f"{self.nodes} rank{'s' if self.nodes > 1 else ''}"
        words = [self.system, self.fault, self.backend, ranks, self.start, self.model]
        return " ".join(word for word in words if word)

    @property
    def start(self) -> str:
        return "warm" if self.warm else "cold"

    @property
    def model(self) -> str:
        """Variant of the training: compiled, with snapshots, or empty."""
        return "compiled" if self.compiled else "snapshots" if self.snapshots else ""


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a case.

    Attributes:
        seconds: from the fault to the first step of every rank in a later round of any size.
        full_seconds: the same for a round of the full size.
        cause: the status' cause of the first round after the fault.
        cold_reason: the status' reason, if it calls the start cold.
        message: the failure in the status.
        steps_lost: completed steps that the gang repeated, with snapshots.
        times: times of that round in the status, in milliseconds.
        error: the reason if the gang did not recover, the status is wrong, or steps were lost.
    """

    case: Case
    seconds: float | None = None
    full_seconds: float | None = None
    cause: str = ""
    cold_reason: str = ""
    message: str = ""
    steps_lost: int | None = None
    times: Mapping[str, int] = field(default_factory=dict)
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "system": self.case.system,
            "fault": self.case.fault,
            "backend": self.case.backend,
            "ranks": self.case.nodes,
            "warm": self.case.warm,
            "compiled": self.case.compiled,
            "snapshots": self.case.snapshots,
            "seconds": _rounded(self.seconds),
            "full_seconds": _rounded(self.full_seconds),
            "cause": self.cause,
            "cold_reason": self.cold_reason,
            "message": self.message,
            "steps_lost": self.steps_lost,
            **self.times,
            "error": self.error,
        }


def gangs(devices: int, backend: str = "") -> list[tuple[str, int]]:
    """Return backend and number of ranks of the gangs that this number of devices allows.

    NCCL refuses two ranks on one device. With a single device a second gang of two ranks shares it
    over gloo, which copies device tensors through the host.
    """
    if backend == "gloo" or devices == 0:
        return [("gloo", 2)]
    several = [("nccl", min(devices, 4))]
    return several if devices > 1 or backend else [*several, ("gloo", 2)]


def cases(found: Iterable[tuple[str, int]], faults: Sequence[Fault] = tuple(Fault)) -> list[Case]:
    """Return all cases of these gangs. A join needs two ranks."""
    chosen = []
    for backend, nodes in found:
        possible = [fault for fault in faults if nodes > 1 or fault is not Fault.JOIN]
        for warm in (True, False):
            chosen += [Case(fault, backend, nodes, warm) for fault in possible]
        for fault in possible:
            # The only node takes its snapshots with it.
            if fault is Fault.KILL_WORKER or (fault is Fault.KILL_NODE and nodes > 1):
                chosen.append(Case(fault, backend, nodes, snapshots=True))
        if Fault.KILL_WORKER in possible:
            chosen.append(Case(Fault.KILL_WORKER, backend, nodes, compiled=True))
            peer = Case(Fault.KILL_WORKER, backend, nodes, warm=False, system=System.TORCHRUN)
            chosen.append(peer)
    return chosen


def recovered_at(
    steps: Mapping[int, Sequence[Mapping[str, Any]]], since: float, before: int, ranks: int = 0
) -> float | None:
    """Return the time at which every rank had completed a step of one round after `before`.

    Args:
        steps: the lines of each rank, in their order.
        since: Unix time of the fault.
        ranks: the size of that round; 0 stands for any size.

    Returns:
        The time of the earliest such round, None if there is none.
    """
    firsts: dict[int, dict[int, float]] = {}
    worlds: dict[int, int] = {}
    for rank, lines in steps.items():
        for line in lines:
            number = line["round"]
            if line["time"] > since and number > before and ranks in (0, line["world"]):
                firsts.setdefault(number, {}).setdefault(rank, line["time"])
                worlds[number] = line["world"]
    complete = [max(times.values()) for n, times in firsts.items() if len(times) == worlds[n]]
    return min(complete, default=None)


def lost(steps: Mapping[int, Sequence[Mapping[str, Any]]], before: int) -> int:
    """Return the number of steps up to round `before` that a later round repeated."""
    lines = [line for each in steps.values() for line in each]
    last: int = max(line["step"] for line in lines if line["round"] <= before)
    first: int = min(line["step"] for line in lines if line["round"] > before)
    return max(0, last + 1 - first)


def judged(
    case: Case,
    seconds: float,
    full_seconds: float,
    round_: Mapping[str, Any],
    failure: str,
    steps_lost: int | None,
) -> Result:
    """Return the result of a recovery, with an error if the status does not report the fault.

    Args:
        round_: the first round after the fault in the status.
        failure: the message of the failure that ended the round before it.
        steps_lost: steps that were repeated; None without snapshots.
    """
    cause = str(round_.get("cause") or "")
    cold_reason = str(round_.get("coldReason") or "")
    error = ""
    if cause not in case.causes:
        expected = " or ".join(sorted(case.causes))
        error = f"the status reports cause {cause or 'none'}; expected: {expected}"
    elif case.fault is Fault.OUT_OF_MEMORY and "memory" not in failure.lower():
        error = f"the failure in the status does not name the memory: {failure or 'none'}"
    elif steps_lost is not None and steps_lost > MAX_STEPS_LOST:
        error = f"{steps_lost} steps were repeated; expected: at most {MAX_STEPS_LOST}"
    times = {name: each for name, each in round_.items() if name.endswith("Ms") and each}
    measured = (seconds, full_seconds, cause, cold_reason, failure, steps_lost)
    return Result(case, *measured, times, error)


def report(results: Sequence[Result], facts: Mapping[str, object]) -> str:
    """Return the report as Markdown."""
    lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "Seconds from the fault to the first step of every rank in a later round, and in a round",
        "of the full size.",
        "",
        "| system | fault | backend | ranks | start | model | seconds | full size | steps lost"
        " | cause | result |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case = result.case
        cold = case.warm and result.cold_reason
        cells = [
            *(case.system, case.fault, case.backend, case.nodes),
            f"cold: {result.cold_reason}" if cold else case.start,
            *(case.model, result.seconds, result.full_seconds, result.steps_lost, result.cause),
            result.error or "passed",
        ]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return " ".join(text.replace("|", "\\|").split())[:300]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
