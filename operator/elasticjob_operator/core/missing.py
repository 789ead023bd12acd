"""Reasons why wanted nodes are missing from a round: blocked pods and their obstacles."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticjob_operator.core.conditions import refusal_of
from elasticjob_operator.core.evidence import end_of
from elasticjob_operator.core.observed import Obstacle, Pod, PodEnd
from elasticjob_operator.core.vocabulary import OBSTACLES
from elasticjob_operator.core.words import named, quoted, unschedulable
from elasticjob_operator.model.status import Status


@dataclass(frozen=True, slots=True)
class Missing:
    """One reason for missing nodes; `remedy` is empty if no user action is needed."""

    clause: str
    remedy: str = ""


def missing(status: Status, pods: Iterable[Pod], present: frozenset[str]) -> list[Missing]:
    """Return the reasons: first those that need a user's action, then those that resolve alone.

    `present` names the pods that are in the round or have joined.
    """
    found: list[Missing] = []
    if refusal := refusal_of(status):
        obstacle, said = refusal
        more = "more " if status.pods else ""
        found.append(
            Missing(f"no {more}pods can be created: {quoted(said)}", OBSTACLES[obstacle].remedy)
        )
    absent = [pod for pod in pods if pod.name not in present]
    found += _held_up([pod for pod in absent if pod.obstacle is not None and not pod.terminating])
    found += _going([pod for pod in absent if pod.obstacle is None or pod.terminating])
    if not absent and not found and status.pods == 0:
        found.append(Missing("its pods are not created yet"))
    return found


def _held_up(pods: list[Pod]) -> Iterator[Missing]:
    """Yield one reason for each group of pods with the same obstacle and message."""
    groups: dict[tuple[Obstacle, str], list[str]] = {}
    for pod in pods:
        assert pod.obstacle is not None
        said = pod.obstacle_message
        if pod.obstacle is Obstacle.UNSCHEDULABLE:
            said = unschedulable(said)
        groups.setdefault((pod.obstacle, quoted(said)), []).append(pod.name)
    for (obstacle, said), names in groups.items():
        words = OBSTACLES[obstacle]
        state = words.meaning or "not startable"
        yield Missing(
            f"{named(names)} {_are(names)} {state}" + (f": {said}" if said else ""), words.remedy
        )


def _going(pods: list[Pod]) -> Iterator[Missing]:
    lost = [pod.name for pod in pods if end_of(pod) is PodEnd.NODE_LOST and not pod.ended]
    if lost:
        its = "their nodes do" if len(lost) > 1 else "its node does"
        yield Missing(f"{named(lost)} cannot be reached: {its} not answer")
    stopping = [pod.name for pod in pods if pod.terminating and pod.name not in lost]
    if stopping:
        yield Missing(f"{named(stopping)} {_are(stopping)} being stopped")
    rest = [p for p in pods if p.active and p.name not in lost]
    placed = [pod.name for pod in rest if pod.node or pod.launcher_since]
    if placed:
        yield Missing(f"{named(placed)} {_are(placed)} starting")
    waiting = [pod.name for pod in rest if not (pod.node or pod.launcher_since)]
    if waiting:
        yield Missing(f"{named(waiting)} {_wait(waiting)} for a machine")


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _wait(names: list[str]) -> str:
    return "wait" if len(names) > 1 else "waits"
