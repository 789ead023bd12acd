"""The plug-in for torchrun: `torchrun --rdzv-backend=elasticjob --rdzv-endpoint=HOST:PORT …`.

torch loads it by the entry-point group `torchrun.handlers`, in every process that imports its
elastic modules, training scripts included. So this module imports nothing: torch and the etcd
client come when a handler is made, which only torchrun's own process does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plugin() -> Callable[[Any], Any]:
    """What torch calls at import: gives the creator of handlers from `RendezvousParameters`."""
    return create


def create(parameters: Any) -> Any:
    """A handler for torch's agent.

    Raises:
        ValueError: a setting is malformed; it names it.
        ImportError: the packages of the extra `sidecar` are not there.
    """
    try:
        from elasticjob_rendezvous.torchrun.handler import create_handler
    except ModuleNotFoundError as error:
        raise ImportError(
            f"--rdzv-backend=elasticjob needs the package {error.name!r}: "
            "install elasticjob[sidecar] in this image"
        ) from error
    return create_handler(parameters)
