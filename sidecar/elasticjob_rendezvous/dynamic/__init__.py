"""The dynamic rendezvous of torch's `c10d` and `etcd-v2` backends, without torch.

Nodes share one state in a store that can compare and set, and torch's own
`DynamicRendezvousHandler` can be among them.
"""

from elasticjob_rendezvous.dynamic.backend import RendezvousBackend, Token
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout
from elasticjob_rendezvous.dynamic.create import create_handler
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]
