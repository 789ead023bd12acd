"""Plug-in for torchrun: `torchrun --rdzv-backend=elasticjob --rdzv-endpoint=HOST:PORT …`.

torch loads this module through the entry-point group `torchrun.handlers` in every process that
imports its elastic modules, training scripts included. It therefore imports torch and the etcd
client only when a handler is created, which happens in torchrun's own process alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def plugin() -> Callable[[Any], Any]:
    """Return the function that creates a handler from `RendezvousParameters`; called by torch."""
    return create


def create(parameters: Any) -> Any:
    """Create a handler for torch's agent.

    Raises:
        ValueError: a setting is malformed; the message names it.
        ImportError: the packages of the extra `sidecar` are not installed.
    """
    try:
        from elasticjob_rendezvous.torchrun.handler import create_handler
    except ModuleNotFoundError as error:
        raise ImportError(
            f"--rdzv-backend=elasticjob needs the package {error.name!r}: pip install elasticjob"
        ) from error
    return create_handler(parameters)
