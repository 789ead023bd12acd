"""Exclusive, permanent claim of an etcd by one Kubernetes cluster.

The resync treats jobs unknown to its API server as deleted: two clusters on one etcd would delete
each other's records.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from elasticjob_operator.kube import NAMESPACES, Forbidden, Kube, NotFound
from elasticjob_rendezvous.core.keys import cluster_key
from elasticjob_rendezvous.core.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous

log = logging.getLogger(__name__)

OLDEST_NAMESPACE = "kube-system"
"""Namespace whose uid identifies the cluster: it lives as long as the cluster."""


class Claims:
    """Claims on etcds for the cluster that `kube` connects to."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._identity: str | None = None

    async def stranger(self, client: Client) -> str:
        """Claim this etcd; return the identity of another cluster that owns it, or "".

        Without permission to read this cluster's identity nothing is claimed.

        Raises:
            EtcdError, KubeError: the owner could not be determined.
        """
        identity = await self._own_identity()
        if not identity:
            return ""
        holder = await claimed(client, identity)
        return "" if holder == identity else holder

    async def _own_identity(self) -> str:
        if self._identity is None:
            try:
                raw = await self._kube.get(NAMESPACES, None, OLDEST_NAMESPACE)
            except (Forbidden, NotFound) as error:
                log.warning(
                    "cannot claim etcd, its use by another cluster would go unnoticed: %s", error
                )
                self._identity = ""
            else:
                self._identity = str(raw["metadata"]["uid"])
        return self._identity


async def claimed(client: Client, identity: str) -> str:
    """Claim an unclaimed etcd; return its owner afterwards. Raises `EtcdError`."""
    key = cluster_key()
    found = await client.range(Range(key))
    if not found.kvs:
        nobodys = Compare(key, Target.MOD, 0)
        with suppress(Ambiguous):  # the read below decides
            await client.txn(Txn((nobodys,), (Put(key, identity.encode()),)))
        found = await client.range(Range(key))
    return found.kvs[0].value.decode(errors="replace") if found.kvs else identity
