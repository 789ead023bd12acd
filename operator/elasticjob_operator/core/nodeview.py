"""What a Node object says of the machine: whether the pods on it can be counted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_operator.core.observed import NodeState

_CORDON = "node.kubernetes.io/unschedulable"
_REPELLING = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class Node:
    """A node, without the pods on it. `taints` are those that repel, a cordon's left out."""

    ready: bool = True
    cordoned: bool = False
    taints: tuple[Taint, ...] = ()


def node_of(raw: Mapping[str, Any]) -> Node:
    """What a Node object says; one that has not reported yet is taken for ready."""
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
            taint for taint in taints if taint.effect in _REPELLING and taint.key != _CORDON
        ),
    )


def state_under(node: Node, tolerations: Sequence[Mapping[str, Any]]) -> NodeState:
    """The node's state for a pod with these tolerations, the gravest that holds.

    A taint that the pod tolerates for good, such as that of a GPU pool, means nothing.
    """
    if not node.ready:
        return NodeState.NOT_READY
    if node.cordoned:
        return NodeState.CORDONED
    if not all(any(_tolerates(one, taint) for one in tolerations) for taint in node.taints):
        return NodeState.TAINTED
    return NodeState.READY


def _tolerates(toleration: Mapping[str, Any], taint: Taint) -> bool:
    """Whether the toleration holds against the taint, and for ever."""
    if toleration.get("tolerationSeconds") is not None and taint.effect == "NoExecute":
        return False
    if toleration.get("effect") not in (None, "", taint.effect):
        return False
    exists = toleration.get("operator") == "Exists"
    key = toleration.get("key") or ""
    if key != taint.key:
        return exists and not key
    return exists or (toleration.get("value") or "") == taint.value
