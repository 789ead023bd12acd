"""Which Kubernetes cluster an etcd belongs to: one alone, and it stays so.

The sweep takes jobs that its own API server does not know for gone. Two clusters on one etcd would
clear each other's.
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
"""It is there as long as its cluster, so its uid is the cluster's identity."""


class Claims:
    """Claims etcds for the cluster that `kube` reaches."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._identity: str | None = None

    async def stranger(self, client: Client) -> str:
        """The cluster that this etcd belongs to if that is another one; else it is ours now.

        Where our own identity may not be read nothing is claimed.

        Raises:
            EtcdError, KubeError: it is not known.
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
                    "etcd is not claimed: another cluster could use it unnoticed: %s", error
                )
                self._identity = ""
            else:
                self._identity = str(raw["metadata"]["uid"])
        return self._identity


async def claimed(client: Client, identity: str) -> str:
    """Claim an etcd that nobody has; who has it then. Raises `EtcdError`."""
    key = cluster_key()
    found = await client.range(Range(key))
    if not found.kvs:
        nobodys = Compare(key, Target.MOD, 0)
        with suppress(Ambiguous):  # the next look decides
            await client.txn(Txn((nobodys,), (Put(key, identity.encode()),)))
        found = await client.range(Range(key))
    return found.kvs[0].value.decode(errors="replace") if found.kvs else identity
