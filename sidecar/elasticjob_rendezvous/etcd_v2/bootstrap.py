"""Where rank 0 of a version listens for torch's process group, by way of the version's store."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from elasticjob_rendezvous.api import RendezvousStoreInfo
from elasticjob_rendezvous.etcd_v2.store import EtcdStore

_KEYS = (RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY)


def bootstrap_store_info(
    rank: int, store: EtcdStore, local_addr: str | None
) -> RendezvousStoreInfo:
    """Rank 0 tells its address and a port that is free there; the others wait for them.

    Raises LookupError where rank 0 does not within the store's timeout.
    """
    if rank != 0:
        address, port = store.multi_get(_KEYS)
        return RendezvousStoreInfo(address.decode(), int(port))
    own = local_addr or socket.getfqdn()
    with _free_port() as number:
        store.multi_set(_KEYS, (own, str(number)))
    return RendezvousStoreInfo(own, number)


@contextlib.contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else gets inside the block."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield int(held.getsockname()[1])
