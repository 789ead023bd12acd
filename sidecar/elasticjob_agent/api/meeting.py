"""Where the workers of a round of our agents meet: at a store that rank 0's node serves already.

A handler names an address and a port where the worker of rank 0 is to serve it. Who comes there a
moment too early waits, and rank 0 takes it along when it is done first. Agents agree through the
round's store to use that of a launcher instead; others than ours never do, so one of them
leaves everything as it was.
"""

from __future__ import annotations

from typing import Any

SERVED = "elasticjob/served"
OURS = "elasticjob/ours"


def offer(store: Any, group_rank: int, port: int) -> None:
    """Before ranks are assigned; `port` is of a store on this node, 0 where there is none."""
    if group_rank == 0 and port:
        store.set(SERVED, str(port).encode())
    store.add(OURS, 1)


def agreed(store: Any, nodes: int) -> int:
    """After it: the port of the store of rank 0's node, the same for all; 0 for none."""
    if not store.check([SERVED]) or int(store.get(OURS)) < nodes:
        return 0
    return int(store.get(SERVED))
