"""Blockers: reasons for which wanted nodes are missing from a round, with their remedies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from elasticjob_operator.domain.explain.catalog import OBSTACLES, obstacle_remedy
from elasticjob_operator.domain.explain.phrases import gone_nodes_text, named, quoted, unschedulable
from elasticjob_operator.domain.observed.state import Obstacle, Pod, PodEnd
from elasticjob_operator.domain.plan.launch_failures import failed_since, launch_failure_text
from elasticjob_operator.domain.status.conditions import LAUNCH_FAILED, refusal_of
from elasticjob_operator.domain.status.failures import removal_cause
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import ConditionType, Launch


@dataclass(frozen=True, slots=True)
class Blocker:
    """One reason for missing nodes; `remedy` is empty if no user action is needed."""

    clause: str
    remedy: str = ""


def find_blockers(status: Status, pods: Iterable[Pod], present: frozenset[str]) -> list[Blocker]:
    """Return the reasons: first those that need a user's action, then those that resolve alone.

    `present` names the pods that are in the round or have joined.
    """
    pods, found = list(pods), list[Blocker]()
    if refusal := refusal_of(status):
        obstacle, message = refusal
        more = "more " if _has_pods(status) else ""
        found.append(
            Blocker(f"no {more}pods can be created: {quoted(message)}", OBSTACLES[obstacle].remedy)
        )
    absent = [pod for pod in pods if pod.name not in present]
    found += _obstacles([pod for pod in absent if pod.obstacle is not None and not pod.terminating])
    if not found:
        found += _failed_launches(status, pods)
    per_node = status.launch is not None and status.launch.mode is Launch.PER_NODE
    found += _transient([p for p in absent if p.obstacle is None or p.terminating], per_node)
    if not absent and not found and not _has_pods(status):
        found.append(Blocker("its pods are not created yet"))
    return found


def _has_pods(status: Status) -> bool:
    return status.pods is not None and status.pods.active > 0


def _obstacles(pods: list[Pod]) -> Iterator[Blocker]:
    """Yield one reason for each group of pods with the same obstacle and message."""
    groups: dict[tuple[Obstacle, str], list[str]] = {}
    for pod in pods:
        assert pod.obstacle is not None
        message = pod.obstacle_message
        if pod.obstacle is Obstacle.UNSCHEDULABLE:
            message = unschedulable(message)
        groups.setdefault((pod.obstacle, quoted(message)), []).append(pod.name)
    for (obstacle, message), names in groups.items():
        state = OBSTACLES[obstacle].meaning or "not startable"
        yield Blocker(
            f"{named(names)} {_are(names)} {state}" + (f": {message}" if message else ""),
            obstacle_remedy(obstacle, message),
        )


def _failed_launches(status: Status, pods: list[Pod]) -> Iterator[Blocker]:
    """Yield the last pod that failed at launch since the last round, until it is replaced.

    Only the operator knows the members among pods that were never Ready: condition PodsReady and
    `launchFailures` have its decision.
    """
    if status.pods is None or status.pods.active >= (status.wanted_nodes or 0):
        return
    if not any(
        condition.type is ConditionType.PODS_READY and condition.reason == LAUNCH_FAILED
        for condition in status.conditions
    ):
        return
    if known := status.launch_failures:
        yield Blocker(launch_failure_text(known.pod, known.count, quoted(known.message)))
        return
    # The previous release did not write them.
    finals = [found.final_time for found in status.rounds if found.final_time is not None]
    if failed := failed_since(pods, max(finals, default=None)):
        last = failed[-1]
        yield Blocker(launch_failure_text(last.name, len(failed), quoted(last.end_message)))


def _transient(pods: list[Pod], per_node: bool) -> Iterator[Blocker]:
    away = [pod for pod in pods if removal_cause(pod) is PodEnd.NODE_LOST and not pod.ended]
    gone = [pod for pod in away if pod.node_gone]
    if gone:
        yield Blocker(f"{named(pod.name for pod in gone)} cannot run: {gone_nodes_text(gone)}")
    silent = [pod.name for pod in away if not pod.node_gone]
    if silent:
        its = "their nodes do" if len(silent) > 1 else "its node does"
        yield Blocker(f"{named(silent)} cannot be reached: {its} not answer")
    lost = [pod.name for pod in away]
    stopping = [pod.name for pod in pods if pod.terminating and pod.name not in lost]
    if stopping:
        yield Blocker(f"{named(stopping)} {_are(stopping)} being stopped")
    rest = [p for p in pods if p.active and p.name not in lost]
    commands = [pod.name for pod in rest if per_node and pod.launcher_since]
    placed = [p.name for p in rest if (p.node or p.launcher_since) and p.name not in commands]
    if commands:
        yield Blocker(
            f"no torchrun in the command of {named(commands)} has asked for a round yet",
            "If the command starts none, set spec.launch to PerWorker",
        )
    if placed:
        yield Blocker(f"{named(placed)} {_are(placed)} starting")
    waiting = [pod.name for pod in rest if not (pod.node or pod.launcher_since)]
    if waiting:
        yield Blocker(f"{named(waiting)} {_wait(waiting)} for a machine")


def _are(names: list[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _wait(names: list[str]) -> str:
    return "wait" if len(names) > 1 else "waits"
