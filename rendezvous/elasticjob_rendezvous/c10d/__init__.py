"""torch's `c10d` rendezvous: the dynamic rendezvous on a TCPStore or a FileStore.

Requires torch (the extra `torch`), which is imported only when a store is created.
"""

from elasticjob_rendezvous.c10d.backend import C10dRendezvousBackend
from elasticjob_rendezvous.c10d.stores import create_backend, create_handler, create_rdzv_handler

__all__ = [
    "C10dRendezvousBackend",
    "create_backend",
    "create_handler",
    "create_rdzv_handler",
]
