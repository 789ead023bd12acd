"""Client and server of the wire protocol of torch's TCPStore, without torch."""

from elasticjob_rendezvous.tcpstore.client import StoreGone, StoreTimeout, TCPStore
from elasticjob_rendezvous.tcpstore.server import TCPStoreServer

__all__ = ["StoreGone", "StoreTimeout", "TCPStore", "TCPStoreServer"]
