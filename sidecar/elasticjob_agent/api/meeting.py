"""Agreement of agents to use a bootstrap store that the launcher of rank 0's node already serves.

A handler names an address and a port where rank 0's worker is to serve the store. There a worker
that connects too early has to wait, and the store ends with rank 0 if rank 0 finishes first. The
agents agree through the round's store to use the launcher's store instead. torch's agents do not
take part, so with one of them in the round the handler's address is used.
"""

from __future__ import annotations

from typing import Any

SERVED = "elasticjob/served"
OURS = "elasticjob/ours"


def offer(store: Any, group_rank: int, port: int) -> None:
    """Publish this node's store; call before ranks are assigned. `port` is 0 without a store."""
    if group_rank == 0 and port:
        store.set(SERVED, str(port).encode())
    store.add(OURS, 1)


def agreed(store: Any, nodes: int) -> int:
    """Return the store's port on rank 0's node, equal on all agents; 0 if they did not agree.

    Call after ranks are assigned.
    """
    if not store.check([SERVED]) or int(store.get(OURS)) < nodes:
        return 0
    return int(store.get(SERVED))
