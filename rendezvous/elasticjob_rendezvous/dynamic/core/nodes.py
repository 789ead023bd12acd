"""Node names of the dynamic rendezvous, and the rank order of a round."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_DIGITS = re.compile(r"([0-9]+)")
OUR_LOCAL_IDS = 1 << 30
"""Minimum `local_id` of our nodes. torch numbers the handlers of a process from 0."""


@dataclass(frozen=True, slots=True)
class NodeDesc:
    """Name of one handler: address of its host, process id, and number within the process.

    The node publishes `addr` as MASTER_ADDR if it becomes rank 0.
    """

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


def rank_order(node: NodeDesc) -> tuple[object, ...]:
    """Return a node's sort key: `node-2` before `node-10`, unlike torch's plain string order.

    The node that completes a round assigns its ranks and all others read them, so nodes with
    either order can share a round.
    """
    parts = _DIGITS.split(node.addr)
    numbers = [digits.lstrip("0") for digits in parts[1::2]]
    # A number as (length, digits), which allows any length.
    natural = (parts[0], *zip(map(len, numbers), numbers, parts[2::2], strict=True))
    return (natural, node.addr, node.pid, node.local_id)


def is_torch_node(node: NodeDesc) -> bool:
    """Return True if the node is one of torch's own."""
    return node.local_id < OUR_LOCAL_IDS


def in_rank_order(participants: Iterable[NodeDesc], last_master: object) -> list[NodeDesc]:
    """Return the nodes in rank order.

    Args:
        last_master: `name_of` the last rank 0 that one of our nodes assigned; other values match
            no node.
    """
    ordered = sorted(participants, key=rank_order)
    ours = [node for node in ordered if not is_torch_node(node)]
    if len(ours) in (0, len(ordered)):
        return ordered
    master = next((node for node in ordered if name_of(node) == last_master), ours[0])
    return [master, *(node for node in ordered if node != master)]


def name_of(node: NodeDesc) -> tuple[str, int, int]:
    """Return a node's representation in the field `state.MASTER`."""
    return (node.addr, node.pid, node.local_id)
