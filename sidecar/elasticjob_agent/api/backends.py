"""A handler by the name of its backend, for agents. Each imports only what it needs."""

from __future__ import annotations

from elasticjob_agent.api.directed import create_handler as create_directed
from elasticjob_rendezvous.api import RendezvousHandler, RendezvousParameters
from elasticjob_rendezvous.core.typed import echoed

BACKENDS = ("elasticjob", "etcd", "etcd-v2", "c10d")


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """The handler that an agent should have: ours, for each of torch's names and for v3.

    Raises:
        ValueError: there is no such backend, or a setting of it is malformed.
        RendezvousConnectionError: it cannot be reached.
        ImportError: its extra (`etcd-v2`, `torch`) is not installed.
    """
    match parameters.backend:
        case "elasticjob":
            return create_directed(parameters)
        case "etcd":
            from elasticjob_rendezvous import etcd_v2

            return etcd_v2.create_rdzv_handler(parameters)
        case "etcd-v2":
            from elasticjob_rendezvous.dynamic import etcd_backend

            return etcd_backend.create_rdzv_handler(parameters)
        case "c10d":
            from elasticjob_rendezvous import c10d

            return c10d.create_rdzv_handler(parameters)
    known = ", ".join(BACKENDS)
    raise ValueError(f"no rendezvous backend {echoed(parameters.backend)}; there are {known}")
