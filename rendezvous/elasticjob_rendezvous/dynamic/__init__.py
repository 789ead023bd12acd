"""Dynamic rendezvous of torch's `c10d` and `etcd-v2` backends, without torch.

Nodes share one state in a store with compare-and-set, and can share it with torch's own
`DynamicRendezvousHandler`.
"""

from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout
from elasticjob_rendezvous.dynamic.create import create_handler
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend, Token

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
