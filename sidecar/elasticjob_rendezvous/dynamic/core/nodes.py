"""The name of a node in the dynamic rendezvous, and the order in which ranks are given."""

from __future__ import annotations

import re
from dataclasses import dataclass

_DIGITS = re.compile(r"([0-9]+)")
OUR_LOCAL_IDS = 1 << 30
"""The least `local_id` of ours. torch counts the handlers of a process, from 0."""


@dataclass(frozen=True, slots=True)
class NodeDesc:
    """One handler: the address of its host, its process, and which handler of that process.

    `addr` is also what the node publishes as MASTER_ADDR when it becomes rank 0.
    """

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


def rank_order(node: NodeDesc) -> tuple[object, ...]:
    """Sort key of a node: `node-2` before `node-10`, unlike the reference's plain string order.

    Whoever completes a round assigns its ranks and all others read them, so the two orders
    can live in one gang.
    """
    parts = _DIGITS.split(node.addr)
    numbers = [digits.lstrip("0") for digits in parts[1::2]]
    # A number as (length, digits): no limit on how long it is.
    natural = (parts[0], *zip(map(len, numbers), numbers, parts[2::2], strict=True))
    return (natural, node.addr, node.pid, node.local_id)


def is_torchs(node: NodeDesc) -> bool:
    """Whether the node is one of torch's own."""
    return node.local_id < OUR_LOCAL_IDS
