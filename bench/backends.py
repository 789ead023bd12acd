"""Rendezvous backends under comparison: servers and handler factories for each."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from bench import etcd_proc
from bench.rendezvous_case import Handler, HandlerFactory
from bench.settings import OUR_ETCD_VERSION, PEERS_ETCD_VERSION, etcd_binary, fresh_id

JOIN_SECONDS = 600


class Backend(StrEnum):
    """Backends: ours, over etcd v3 and v2, and torch's three under torch's names."""

    ELASTICJOB = "elasticjob"
    ELASTICJOB_V2 = "elasticjob-v2"
    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    C10D = "c10d"


PEERS = (Backend.ELASTICJOB_V2, Backend.ETCD, Backend.ETCD_V2, Backend.C10D)


@dataclass(frozen=True, slots=True)
class Arena:
    """Environment of a case: the members' handler factory and, with etcd, its request count."""

    make: HandlerFactory
    requests: Callable[[], Counter[str]] | None


def preload() -> None:
    """Import the members' modules in the parent, so that no measurement includes an import."""
    import etcd  # noqa: F401
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
    import torch.distributed.elastic.rendezvous.etcd_rendezvous
    import torch.distributed.elastic.rendezvous.etcd_rendezvous_backend  # noqa: F401

    with contextlib.suppress(ModuleNotFoundError):  # its cases then fail with the error
        import elasticjob_rendezvous.etcd.handler
        import elasticjob_rendezvous.etcd_v2  # noqa: F401
    gc.freeze()  # else each member's first collection would copy the parent's memory


@contextlib.contextmanager
def arena(backend: Backend, members: int) -> Iterator[Arena]:
    """Yield a fresh server, if the backend needs one, and a unique run id."""
    run_id = fresh_id("rendezvous")
    match backend:
        case Backend.ELASTICJOB:
            with etcd_proc.etcd_server(etcd_binary(OUR_ETCD_VERSION), v2=False) as server:
                yield Arena(_ours(server.endpoint, run_id, members), server.requests)
        case Backend.ELASTICJOB_V2:
            with etcd_proc.etcd_server(etcd_binary(PEERS_ETCD_VERSION), v2=True) as server:
                yield Arena(_ours_v2(server.endpoint, run_id, members), server.requests)
        case Backend.ETCD | Backend.ETCD_V2:
            with etcd_proc.etcd_server(etcd_binary(PEERS_ETCD_VERSION), v2=True) as server:
                make = _torchs(backend, server.endpoint, run_id, members)
                yield Arena(make, server.requests)
        case Backend.C10D:
            endpoint = f"127.0.0.1:{etcd_proc.free_port()}"
            yield Arena(_torchs(backend, endpoint, run_id, members), None)
        case _:
            assert_never(backend)


def _ours(endpoint: str, run_id: str, members: int) -> HandlerFactory:
    def make(index: int) -> Handler:
        from elasticjob_rendezvous.api import RendezvousParameters
        from elasticjob_rendezvous.etcd.handler import create_handler

        parameters = RendezvousParameters(
            backend="etcd",
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=members,
            max_nodes=members,
            local_addr="127.0.0.1",
        )
        handler: Handler = create_handler(parameters)
        return handler

    return make


def _ours_v2(endpoint: str, run_id: str, members: int) -> HandlerFactory:
    def make(index: int) -> Handler:
        from elasticjob_rendezvous.api import RendezvousParameters
        from elasticjob_rendezvous.etcd_v2 import create_rdzv_handler

        parameters = RendezvousParameters(
            backend="etcd",
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=members,
            max_nodes=members,
            local_addr="127.0.0.1",
            timeout=JOIN_SECONDS,
        )
        return create_rdzv_handler(parameters)

    return make


def _torchs(backend: Backend, endpoint: str, run_id: str, members: int) -> HandlerFactory:
    def make(index: int) -> Handler:
        from torch.distributed.elastic.rendezvous import RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        # Explicit: by default torch guesses from the host name which member hosts the store.
        more = {"is_host": index == 0} if backend is Backend.C10D else {}
        parameters = RendezvousParameters(
            backend=str(backend),
            endpoint=endpoint,
            run_id=run_id,
            min_nodes=members,
            max_nodes=members,
            local_addr="127.0.0.1",
            timeout=JOIN_SECONDS,
            **more,
        )
        handler: Handler = get_rendezvous_handler(parameters)
        return handler

    return make
