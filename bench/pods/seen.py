"""What the workers of a gang in pods said, read and judged. Pure. All times are UTC seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FIRST = re.compile(r"^(?:\[\d+\] )?first (\{.*\})$", re.MULTILINE)
PHASES = ("detect", "stop", "backoff", "join", "confirm", "start")
"""The parts of a recovery, in the order in which they come; the status' names, less `Ms`."""


@dataclass(frozen=True, slots=True)
class First:
    """A worker's first step.

    Args:
        launched: when its container began.
        began: when its script began.
        at: when the step was done.
        before: the last step of the worker before it in that container; None where it is the first.
    """

    pod: str
    round: int
    rank: int
    world: int
    pid: int
    launched: float
    began: float
    at: float
    before: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault, and what it cost, in seconds.

    Args:
        seconds: from the fault until all had done their first step.
        pause: what of it nobody trained.
        parts: where it went.
        cold: nodes whose workers were started cold.
        load: of the machine at that time, the average of a minute.
    """

    seconds: float
    pause: float | None
    parts: Mapping[str, float]
    cold: int = 0
    load: float = 0.0
    error: str = ""

    @staticmethod
    def failed(error: str) -> Outcome:
        return Outcome(0.0, None, {}, error=error)


@dataclass(frozen=True, slots=True)
class Life:
    """When a pod was first seen so, by somebody who watches; absent while it was not."""

    seen: dict[str, float] = field(default_factory=dict)


def firsts(pod: str, log: str) -> list[First]:
    """The first steps that the log of a pod's trainer tells of."""
    return [First(pod, **json.loads(line)) for line in _FIRST.findall(log)]


def together(told: Iterable[First], after: int, pods: Iterable[str]) -> list[First] | None:
    """The first steps of exactly these pods in the earliest round after that one, by rank."""
    wanted = sorted(pods)
    rounds: dict[int, list[First]] = {}
    for each in told:
        if each.round > after:
            rounds.setdefault(each.round, []).append(each)
    for _, found in sorted(rounds.items()):
        ordered = sorted(found, key=lambda each: each.rank)
        pods = sorted(each.pod for each in found)
        ranks = [(each.rank, each.world) for each in ordered]
        if pods == wanted and ranks == [(rank, len(wanted)) for rank in range(len(wanted))]:
            return ordered
    return None


def pause(found: Sequence[First]) -> float | None:
    """From the last step of the round before until all have done the first of this one."""
    known = [each.before for each in found if each.before is not None]
    return max(each.at for each in found) - max(known) if known else None


def recovery(found: Sequence[First], since: float, cost: Mapping[str, Any]) -> Outcome:
    """A fault at `since`: what the status says of it, and what is left.

    That is the time until its first symptom, and from the workers' start to their first step.
    """
    seconds = max(each.at for each in found) - since
    parts = {name: cost.get(f"{name}Ms", 0) / 1000 for name in PHASES}
    parts |= {"rest": seconds - sum(parts.values())}
    return Outcome(seconds, pause(found), parts, _cold(cost))


def join(
    found: Sequence[First], since: float, cost: Mapping[str, Any], newcomer: str, life: Life
) -> Outcome:
    """A newcomer that was asked for at `since`: the operator's part, that of Kubernetes, the
    newcomer's own preparation while the others train, and the pause."""
    (first,) = [each for each in found if each.pod == newcomer]
    at, pausing = max(each.at for each in found), pause(found) or 0.0
    parts = {
        "create": life.seen["created"] - since,
        "schedule": life.seen["scheduled"] - life.seen["created"],
        "containers": first.launched - life.seen["scheduled"],
        "prepare": at - pausing - first.launched,
        "pause": pausing,
        **{f"pause: {name}": cost.get(f"{name}Ms", 0) / 1000 for name in PHASES},
    }
    return Outcome(at - since, pausing, parts, _cold(cost))


def _cold(cost: Mapping[str, Any]) -> int:
    return int(cost.get("coldNodes", 0))
