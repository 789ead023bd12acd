"""The order of ranks in a round, and who gets rank 0 where torch's own nodes take part.

A plain torchrun has its workers share a store that the agent of rank 0 hosts, and its agents
remember the address of their first round for as long as they live. A round can be had with
them only where rank 0 gives that address again. A node of ours does, so it gets rank 0. Where
it can name only itself, and not a store that outlives it, rank 0 stays where it was.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc, is_torchs, rank_order


def in_rank_order(participants: Iterable[NodeDesc], last_master: object) -> list[NodeDesc]:
    """The nodes by rank.

    Args:
        last_master: `name_of` whom a node of ours gave rank 0 last; anything else is nobody.
    """
    ordered = sorted(participants, key=rank_order)
    ours = [node for node in ordered if not is_torchs(node)]
    if len(ours) in (0, len(ordered)):
        return ordered
    master = next((node for node in ordered if name_of(node) == last_master), ours[0])
    return [master, *(node for node in ordered if node != master)]


def name_of(node: NodeDesc) -> tuple[str, int, int]:
    """A node as it stands in a field of ours."""
    return (node.addr, node.pid, node.local_id)
