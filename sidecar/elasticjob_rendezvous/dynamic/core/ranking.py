"""Rank order of a round, and the choice of rank 0 in rounds with torch's own nodes.

With a plain torchrun, the workers share a store hosted by the agent of rank 0, and all agents
remember the address of their first round for their whole life. A round with such agents works only
if rank 0 publishes that address again. Our nodes do, so one of them gets rank 0. If it can publish
only its own address, rather than that of a store that outlives it, the same node keeps rank 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc, is_torchs, rank_order


def in_rank_order(participants: Iterable[NodeDesc], last_master: object) -> list[NodeDesc]:
    """Return the nodes in rank order.

    Args:
        last_master: `name_of` the last rank 0 that one of our nodes assigned; other values match
            no node.
    """
    ordered = sorted(participants, key=rank_order)
    ours = [node for node in ordered if not is_torchs(node)]
    if len(ours) in (0, len(ordered)):
        return ordered
    master = next((node for node in ordered if name_of(node) == last_master), ours[0])
    return [master, *(node for node in ordered if node != master)]


def name_of(node: NodeDesc) -> tuple[str, int, int]:
    """Return a node's representation in the field `state.MASTER`."""
    return (node.addr, node.pid, node.local_id)
