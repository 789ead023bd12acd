"""Stores and handlers of a c10d rendezvous: a TCPStore hosted by one process, or a shared file."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from elasticjob_rendezvous.c10d import native
from elasticjob_rendezvous.c10d.backend import C10dRendezvousBackend
from elasticjob_rendezvous.dynamic.create import create_handler as create_dynamic_handler
from elasticjob_rendezvous.dynamic.endpoint import (
    DEFAULT_C10D_PORT,
    is_this_machine,
    parse_endpoint,
)
from elasticjob_rendezvous.dynamic.handler import DynamicRendezvousHandler
from elasticjob_rendezvous.dynamic.master_address import Sharing
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 60
_FAILURES = (ValueError, RuntimeError, TimeoutError)


def torch_distributed() -> Any:
    """Import and return `torch.distributed`.

    Raises:
        RendezvousError: torch is not installed.
    """
    first = "torch.distributed" not in sys.modules
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise RendezvousError(
            "the rendezvous backend c10d needs torch: install elasticjob[torch]"
        ) from error
    if first:
        # The import leaves exceptions in reference cycles, which keep our callers' frames and
        # thus their stores and handlers alive.
        gc.collect()
    return distributed


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Create the backend from parameters, and the store for its rounds.

    On a TCPStore each has a separate connection, so that a wait on the store does not delay the
    heartbeats.

    Settings:
        store_type: `tcp` (default) or `file`; for `file` the endpoint is a path, or empty for a
            new temporary file.
        is_host: True if this process hosts the TCPStore. Without the setting, a process on the
            endpoint's machine tries to host it, and connects if another process already does.
        read_timeout: timeout of each operation of a TCPStore in seconds (60).

    Raises:
        ValueError: a setting or the endpoint is malformed.
        RendezvousConnectionError: the store is unreachable, or could not be hosted as requested.
        RendezvousError: no temporary file could be created, or torch is missing.
    """
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "file":
        store = _file_store(params.endpoint)
        return C10dRendezvousBackend(store, params.run_id), store
    if store_type != "tcp":
        raise ValueError(f"the setting 'store_type' must be tcp or file, not {echoed(store_type)}")
    host, port = parse_endpoint(params.endpoint, DEFAULT_C10D_PORT)
    read_timeout = params.get_as_int("read_timeout", READ_TIMEOUT_SECONDS)
    if read_timeout is None or read_timeout <= 0:
        raise ValueError(f"the setting 'read_timeout' must be at least 1, not {read_timeout}")
    store = _tcp_store(host, port, params.get_as_bool("is_host"), read_timeout)
    own = _connected(host, store.port, False, read_timeout)
    return C10dRendezvousBackend(own, params.run_id), store


def sharing(params: RendezvousParameters, store: Any) -> Sharing:
    """Return the access to torch's shared stores for a run; `store` is the backend's."""
    lasting = None
    if params.backend == "c10d" and hasattr(store, "port"):
        host, _ = parse_endpoint(params.endpoint, DEFAULT_C10D_PORT)
        lasting = RendezvousStoreInfo(host, store.port)
    return Sharing(partial(native.emptied, params.run_id), lasting)


def _tcp_store(host: str, port: int, is_host: bool | None, read_timeout: int) -> Any:
    if is_host is not None:
        return _connected(host, port, is_host, read_timeout)
    if is_this_machine(host):
        try:
            return _connected(host, port, True, read_timeout)
        except RendezvousConnectionError as error:
            log.info("another process seems to host the store: %s", error)
    return _connected(host, port, False, read_timeout)


def _connected(host: str, port: int, is_host: bool, read_timeout: int) -> Any:
    try:
        store = torch_distributed().TCPStore(
            host,
            port,
            is_master=is_host,
            wait_for_workers=False,
            multi_tenant=is_host,
            timeout=timedelta(seconds=read_timeout),
        )
    except _FAILURES as error:
        attempt = "host" if is_host else "connect to"
        raise RendezvousConnectionError(
            f"could not {attempt} the c10d store at {host}:{port}: {error}"
        ) from error
    if is_host:
        log.info("process %d hosts the c10d store at %s:%d", os.getpid(), host, store.port)
    return store


def _file_store(path: str) -> Any:
    if not path:
        try:
            handle, path = tempfile.mkstemp(prefix="elasticjob-rendezvous-")
        except OSError as error:
            raise RendezvousError(f"no temporary file for the c10d store: {error}") from error
        os.close(handle)
    elif not Path(path).parent.is_dir():  # torch would try for five minutes
        raise RendezvousConnectionError(f"no directory for the c10d store file {path}")
    try:
        return torch_distributed().FileStore(path)
    except _FAILURES as error:
        raise RendezvousConnectionError(
            f"could not open the c10d store in {path}: {error}"
        ) from error


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
