"""Informer cache of the cluster's Node objects: the state of the machines under pods."""

from __future__ import annotations

import logging

from elasticjob_operator.core.nodeview import Node, node_of
from elasticjob_operator.kube import NODES, Forbidden, Json, Kube

log = logging.getLogger(__name__)


class Nodes:
    """Informer cache of Nodes by name. `known` is None if the operator may not read them."""

    def __init__(self) -> None:
        self.known: dict[str, Node] | None = None

    async def load(self, kube: Kube) -> None:
        """List all Nodes once, before the first reconcile of a job."""
        try:
            found = await kube.list(NODES)
        except Forbidden as error:
            log.warning("cannot list nodes, assuming all are Ready: %s", error)
            return
        self.known = {raw["metadata"]["name"]: node_of(raw) for raw in found}

    def take(self, raw: Json, deleted: bool) -> bool:
        """Apply a watch event of a Node; return True if it changes anything for its pods."""
        if self.known is None:
            return False
        name: str = raw["metadata"]["name"]
        if deleted:
            return self.known.pop(name, None) is not None
        now = node_of(raw)
        before, self.known[name] = self.known.get(name), now
        return before != now

    async def drop_ghosts(self, kube: Kube) -> list[str]:
        """Drop Nodes whose deletion the watch missed; return their names."""
        if self.known is None:
            return []
        listed = await kube.list(NODES, metadata_only=True)
        names = {raw["metadata"]["name"] for raw in listed}
        gone = [name for name in self.known if name not in names]
        for name in gone:
            del self.known[name]
        return gone
