"""Faults in order, and the results of their runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, assert_never

from bench.numbers import median_or_none
from bench.pods.gang import Gang, NotRecovered
from bench.pods.hands import Hands
from bench.pods.seen import Outcome
from tests.e2e.api import Refused


class Fault(StrEnum):
    """Faults; each leaves the gang at its former size."""

    PLAIN_POD = "plain-pod"
    WORKER_KILLED = "worker-killed"
    POD_DELETED = "pod-deleted"
    NODE_KILLED = "node-killed"
    SCALE_UP = "scale-up"


REPLACEMENT = "replacement"
"""Join of the replacement for a deleted or lost pod, measured from its creation."""


@dataclass(slots=True)
class Runs:
    """Outcomes of each fault on a gang of that size."""

    size: int
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def run(self, gang: Gang, hands: Hands, fault: Fault, turn: int) -> None:
        """Inject a fault and record its outcomes; the victims' ranks rotate."""
        try:
            for name, outcome in _done(gang, hands, fault, self.size, turn):
                self._note(name, turn, outcome)
        except (NotRecovered, Refused) as error:
            self._note(str(fault), turn, Outcome.failed(str(error)))

    def _note(self, name: str, turn: int, outcome: Outcome) -> None:
        known = replace(outcome, load=round(os.getloadavg()[0], 1))
        self.outcomes.setdefault(name, []).append(known)
        print(f"[{turn + 1}] {name}: {_shown(known)}", flush=True)

    def errors(self) -> list[str]:
        return [one.error for found in self.outcomes.values() for one in found if one.error]

    def to_json(self) -> list[dict[str, Any]]:
        """Return a row for each fault: medians, and every run."""
        return [self._row(name, found) for name, found in self.outcomes.items()]

    def _row(self, name: str, found: list[Outcome]) -> dict[str, Any]:
        good = [outcome for outcome in found if not outcome.error]
        phases = dict.fromkeys(phase for outcome in good for phase in outcome.parts)
        return {
            "fault": name,
            "seconds": median_or_none([outcome.seconds for outcome in good]),
            "pause": median_or_none([outcome.pause for outcome in good]),
            "parts": {
                phase: median_or_none([outcome.parts.get(phase, 0.0) for outcome in good])
                for phase in phases
            },
            "load": median_or_none([outcome.load for outcome in good]),
            "errors": [outcome.error for outcome in found if outcome.error],
            "runs": [
                {"seconds": o.seconds, "pause": o.pause, "load": o.load, "cold": o.cold, **o.parts}
                for o in good
            ],
        }

    def table(self) -> str:
        """Return a Markdown table of medians, with minimum and maximum of the total."""
        lines = [
            "| fault | runs | seconds | pause | parts | load |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.to_json():
            seconds = [run["seconds"] for run in row["runs"]] or [float("nan")]
            whole = f"{row['seconds'] or 0:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
            pause = "" if row["pause"] is None else f"{row['pause']:.2f}"
            count = f"{len(row['runs'])}" + f", {len(row['errors'])} failed" * bool(row["errors"])
            columns = (
                f"{count} | {whole} | {pause} | {_parts(row['parts'])} | {row['load'] or 0:.0f}"
            )
            lines.append(f"| {row['fault']} | {columns} |")
        return "\n".join(lines)


def _shown(outcome: Outcome) -> str:
    if outcome.error:
        return f"never: {outcome.error}"
    paused = "" if outcome.pause is None else f", paused {outcome.pause:.2f} s"
    cold = f", {outcome.cold} cold" if outcome.cold else ""
    columns = f"({_parts(outcome.parts)}){cold}, load {outcome.load}"
    return f"{outcome.seconds:.2f} s{paused} {columns}"


def _parts(parts: Any) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds)


def _done(
    gang: Gang, hands: Hands, fault: Fault, size: int, turn: int
) -> Iterator[tuple[str, Outcome]]:
    workers = gang.undisturbed(size)
    pods = sorted(workers, key=lambda pod: workers[pod].rank)
    victim, after = pods[turn % size], workers[pods[0]].round
    rest, known = [pod for pod in pods if pod != victim], gang.uids()
    match fault:
        case Fault.PLAIN_POD:
            yield fault, Outcome(gang.plain_pod(), None, {})
        case Fault.WORKER_KILLED:
            yield fault, gang.recovered(hands.kill_worker(workers[victim]), after, pods)
        case Fault.POD_DELETED | Fault.NODE_KILLED:
            act = hands.delete_pod if fault is Fault.POD_DELETED else hands.kill_node
            yield fault, gang.recovered(act(victim), after, rest)
            yield REPLACEMENT, gang.joined(None, after, rest, known)
        case Fault.SCALE_UP:
            hands.scale(size - 1)
            fewer = gang.undisturbed(size - 1)
            after, known = next(iter(fewer.values())).round, gang.uids()
            yield fault, gang.joined(hands.scale(size), after, list(fewer), known)
        case _:
            assert_never(fault)
