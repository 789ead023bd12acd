"""The cluster's nodes as the watch tells of them: what the pods on them can count on."""

from __future__ import annotations

import logging

from elasticjob_operator.core.nodeview import Node, node_of
from elasticjob_operator.kube import NODES, Forbidden, Json, Kube

log = logging.getLogger(__name__)


class Nodes:
    """Every node by name. `known` is None where the operator may not read them."""

    def __init__(self) -> None:
        self.known: dict[str, Node] | None = None

    async def load(self, kube: Kube) -> None:
        """Read them all once, so that the first look at a job finds them."""
        try:
            found = await kube.list(NODES)
        except Forbidden as error:
            log.warning("nodes cannot be read, all of them are taken for ready: %s", error)
            return
        self.known = {raw["metadata"]["name"]: node_of(raw) for raw in found}

    def take(self, raw: Json, deleted: bool) -> bool:
        """Take in what the watch says of a node; true when that is news for the pods on it."""
        if self.known is None:
            return False
        name: str = raw["metadata"]["name"]
        if deleted:
            return self.known.pop(name, None) is not None
        now = node_of(raw)
        before, self.known[name] = self.known.get(name), now
        return before != now

    async def drop_ghosts(self, kube: Kube) -> list[str]:
        """Forget nodes whose deletion the watch missed; returns them."""
        if self.known is None:
            return []
        listed = await kube.list(NODES, metadata_only=True)
        names = {raw["metadata"]["name"] for raw in listed}
        gone = [name for name in self.known if name not in names]
        for name in gone:
            del self.known[name]
        return gone
