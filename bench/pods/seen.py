"""Parsing and evaluation of the reports of a gang's workers. No I/O; times are UTC seconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_FIRST = re.compile(r"^(?:\[\d+\] )?first (\{.*\})$", re.MULTILINE)
PHASES = ("detect", "stop", "backoff", "join", "confirm", "start")
"""Parts of a recovery in chronological order; the status' names without `Ms`."""


@dataclass(frozen=True, slots=True)
class First:
    """First step of a worker.

    Args:
        launched: start time of its container.
        began: start time of its script.
        at: completion time of the step.
        before: time of the previous worker's last step in that container; None for the first.
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
    """Cost of one fault in seconds.

    Args:
        seconds: time from the fault until all completed their first step.
        pause: part of it without training.
        parts: its parts by name.
        cold: number of nodes whose workers were started cold.
        load: the machine's one-minute load average at that time.
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
    """Times at which a watcher first saw a pod in each state; absent if not seen yet."""

    seen: dict[str, float] = field(default_factory=dict)


def firsts(pod: str, log: str) -> list[First]:
    """Parse the first steps in the log of a pod's trainer."""
    return [First(pod, **json.loads(line)) for line in _FIRST.findall(log)]


def together(first_steps: Iterable[First], after: int, pods: Iterable[str]) -> list[First] | None:
    """Return the first steps, by rank, of the earliest round after `after` with these pods only."""
    wanted = sorted(pods)
    rounds: dict[int, list[First]] = {}
    for each in first_steps:
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
    """Return the seconds from the previous round's last step to this round's last first step."""
    known = [each.before for each in found if each.before is not None]
    return max(each.at for each in found) - max(known) if known else None


def recovery(found: Sequence[First], since: float, cost: Mapping[str, Any]) -> Outcome:
    """Return the cost of a fault at `since`: the parts in the status, and the rest.

    The rest is the time until the first symptom and from the workers' start to their first step.
    """
    seconds = max(each.at for each in found) - since
    parts = {name: cost.get(f"{name}Ms", 0) / 1000 for name in PHASES}
    parts |= {"rest": seconds - sum(parts.values())}
    return Outcome(seconds, pause(found), parts, _cold(cost))


def join(
    found: Sequence[First], since: float, cost: Mapping[str, Any], newcomer: str, life: Life
) -> Outcome:
    """Return the cost of a newcomer requested at `since`.

    Its parts are the operator's and Kubernetes' time, the newcomer's preparation while the others
    train, and the pause.
    """
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
