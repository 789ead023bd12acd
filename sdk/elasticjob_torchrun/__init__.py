"""Plug-in by which torchrun in a pod with `launch: PerNode` joins the job's rendezvous.

torch loads this module through the entry-point group `torchrun.handlers` in every process that
imports its elastic modules, training scripts included, so it imports nothing else before a handler
is created. The launcher sets `ELASTICJOB_TORCHRUN` for the command of the pod: the address of its
socket. Where it is set, the plug-in also replaces torch's own backends, since a command line or a
framework may name one of them: `--standalone`, `--rdzv-backend=c10d`, `--master-addr`. In a worker
they refuse to start, as described in `nested`.
"""

from __future__ import annotations

import os
from typing import Any, Callable

ADDRESS = "ELASTICJOB_TORCHRUN"
"""Environment variable: `<token>@<path>` of the launcher's socket; absent in the workers."""
NESTED = "ELASTICJOB_NESTED_LAUNCH"
"""Environment variable of workers: `refuse` or `allow` a torchrun inside of a worker."""
BACKEND = "elasticjob-node"
REPLACED = ("static", "c10d", "etcd", "etcd-v2")

Creator = Callable[[Any], Any]


def plugin() -> Creator:
    """Return the function that creates a handler from `RendezvousParameters`; called by torch."""
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

    creators = getattr(rendezvous_handler_registry, "_registry", {})
    for backend in REPLACED:
        if backend in creators:
            creators[backend] = _instead_of(creators[backend])
    return create


def _instead_of(original: Creator) -> Creator:
    def create_where_set(parameters: Any) -> Any:
        if os.environ.get(ADDRESS):
            return create(parameters)
        if os.environ.get(NESTED) == "refuse" and not _is_first():
            from elasticjob_torchrun.nested import refuse

            refuse()
        return original(parameters)

    return create_where_set


def _is_first() -> bool:
    """Return True for rank 0, and for the first of several workers of a node: such a worker may
    start a job of its own, and if all do, another worker of the node is refused."""
    several = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
    first_of_node = several and os.environ.get("LOCAL_RANK") == "0"
    return os.environ.get("RANK", "0") == "0" or first_of_node


def create(parameters: Any) -> Any:
    """Create a handler for torch's agent. Raises ValueError outside a pod with launch: PerNode."""
    address = os.environ.get(ADDRESS)
    if not address:
        raise ValueError(
            f"--rdzv-backend={BACKEND} needs the variable {ADDRESS}, which is set for the command "
            "of an ElasticJob with launch: PerNode, and not for the workers that it starts"
        )
    from elasticjob_torchrun.handler import NodeHandler

    return NodeHandler(address, parameters.backend, parameters.run_id)
