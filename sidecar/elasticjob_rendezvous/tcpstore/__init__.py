"""torch's TCPStore without torch: a client and a server of its wire protocol."""

from elasticjob_rendezvous.tcpstore.client import StoreGone, StoreTimeout, TCPStore
from elasticjob_rendezvous.tcpstore.server import TCPStoreServer

__all__ = ["StoreGone", "StoreTimeout", "TCPStore", "TCPStoreServer"]
