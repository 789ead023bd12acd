"""Dynamic rendezvous whose rounds provide torch's own stores."""

from __future__ import annotations

from typing import Any

from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.c10d.stores import create_backend, sharing, torch_distributed
from elasticjob_rendezvous.dynamic.create import create_handler as create_dynamic_handler
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend


def create_handler(
    store: Any, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """Create a handler on any backend, with a `torch.distributed.Store` for its rounds.

    Settings and errors: see `dynamic.create.create_handler`.
    """
    prefixed = torch_distributed().PrefixStore
    return create_dynamic_handler(store, backend, params, prefixed, sharing(params, store))


def create_rdzv_handler(params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Create a c10d handler from torch's parameters."""
    backend, store = create_backend(params)
    return create_handler(store, backend, params)
