"""State of a Node object as it affects the pods on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_operator.domain.observed.state import NodeState

_CORDON = "node.kubernetes.io/unschedulable"
_EFFECTS = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """Node without its pods. `taints` are those with effect NoSchedule or NoExecute, except the
    taint of a cordon."""

    ready: bool = True
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()


def parse_node(raw: Mapping[str, Any]) -> Node:
    """Parse a Node object; assume a node without a Ready condition to be ready."""
    spec = raw.get("spec") or {}
    conditions = (raw.get("status") or {}).get("conditions") or ()
    ready = next((found["status"] for found in conditions if found["type"] == "Ready"), "True")
    taints = (
        Taint(taint["key"], taint.get("value") or "", taint["effect"])
        for taint in spec.get("taints") or ()
    )
    return Node(
        ready=ready == "True",
        cordoned=bool(spec.get("unschedulable")),
        taints=tuple(
            taint for taint in taints if taint.effect in _EFFECTS and taint.key != _CORDON
        ),
    )


def state_for_pod(node: Node, tolerations: Sequence[Mapping[str, Any]]) -> NodeState:
    """Return the most severe state of the node for a pod with these tolerations.

    A taint that the pod tolerates without a time limit, such as a GPU pool's, is ignored.
    """
    if not node.ready:
        return NodeState.NOT_READY
    if node.cordoned:
        return NodeState.CORDONED
    if not all(
        any(_tolerates(toleration, taint) for toleration in tolerations) for taint in node.taints
    ):
        return NodeState.TAINTED
    return NodeState.READY


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Return True if the toleration matches the taint without a time limit."""
    if toleration.get("tolerationSeconds") is not None and taint.effect == "NoExecute":
        return False
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    exists = toleration.get("operator") == "Exists"
    key = toleration.get("key") or ""
    if key != taint.key:
        return exists and not key
    return exists or (toleration.get("value") or "") == taint.value
