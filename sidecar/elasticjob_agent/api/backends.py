"""Factory of rendezvous handlers for agents, by backend name. Imports each backend lazily."""

from __future__ import annotations

from elasticjob_agent.api.directed import create_handler as create_directed
from elasticjob_rendezvous.api import RendezvousHandler, RendezvousParameters
from elasticjob_rendezvous.core.typed import echoed

BACKENDS = ("elasticjob", "etcd", "etcd-v2", "c10d")


def create_handler(parameters: RendezvousParameters) -> RendezvousHandler:
    """Return ElasticJob's handler for `parameters.backend`: v3, or any of torch's backend names.

    Raises:
        ValueError: unknown backend, or a malformed setting.
        RendezvousConnectionError: the backend cannot be reached.
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
    raise ValueError(f"unknown rendezvous backend {echoed(parameters.backend)}: known are {known}")
