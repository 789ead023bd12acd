"""The stores of a c10d rendezvous: a TCPStore that one process hosts, or a shared file."""

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
from elasticjob_rendezvous.c10d.backend import STATE_PREFIX, C10dRendezvousBackend, state_key
from elasticjob_rendezvous.core.typed import echoed
from elasticjob_rendezvous.dynamic.endpoint import (
    DEFAULT_C10D_PORT,
    is_this_machine,
    parse_endpoint,
)
from elasticjob_rendezvous.dynamic.masters import Sharing

log = logging.getLogger(__name__)

READ_TIMEOUT_SECONDS = 60
EMPTY_SECONDS = 10
_FAILURES = (ValueError, RuntimeError, TimeoutError)


def torch_distributed() -> Any:
    """torch's module of stores.

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
        # The import leaves exceptions in cycles, which hold our callers' frames and so their
        # stores and handlers.
        gc.collect()
    return distributed


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """The backend that parameters ask for, and the store for its rounds.

    On a TCPStore each has a connection of its own, so that a caller who waits on the store
    does not hold up the heartbeats.

    Settings:
        store_type: `tcp` (default) or `file`; then the endpoint is a path, or empty for a
            new temporary file.
        is_host: whether this process hosts the TCPStore. Where it is not said, a process
            on the endpoint's machine tries to, and connects if another one does already.
        read_timeout: seconds for each operation of a TCPStore (60).

    Raises:
        ValueError: a setting or the endpoint is malformed.
        RendezvousConnectionError: the store can't be reached, or not be hosted as was asked.
        RendezvousError: no temporary file could be made, or torch is missing.
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
    """What the rounds of a run can have of torch's stores; `store` is the backend's."""
    lasting = None
    if params.backend == "c10d" and hasattr(store, "port"):
        host, _ = parse_endpoint(params.endpoint, DEFAULT_C10D_PORT)
        lasting = RendezvousStoreInfo(host, store.port)
    return Sharing(partial(emptied, params.run_id), lasting)


def emptied(run_id: str, host: str, port: int) -> None:
    """Delete all keys of a TCPStore but those of this run's rendezvous.

    Raises:
        RendezvousConnectionError: it can't be reached, serves another run too, or torch is
            missing.
    """
    try:
        empty(_connected(host, port, False, EMPTY_SECONDS), run_id, f"{host}:{port}")
    except RendezvousConnectionError:
        raise
    except (RendezvousError, *_FAILURES) as error:
        raise RendezvousConnectionError(
            f"could not empty the c10d store at {host}:{port}: {error}"
        ) from error


def empty(store: Any, run_id: str, where: str) -> None:
    """Delete all of its keys but those of this run's rendezvous.

    Raises:
        RendezvousConnectionError: it serves another run too.
    """
    keys: list[str] = store.list_keys()
    _refuse_other_runs(keys, run_id, where)
    for key in keys:
        if not key.startswith(STATE_PREFIX):
            store.delete_key(key)


def _refuse_other_runs(keys: list[str], run_id: str, where: str) -> None:
    own = state_key(run_id)
    rendezvous = [key for key in keys if key.startswith(STATE_PREFIX)]
    others = [key for key in rendezvous if key != own and not key.startswith(f"{own}.")]
    if others:
        raise RendezvousConnectionError(
            f"the c10d store at {where} serves another run too: {min(others)}"
        )


def _tcp_store(host: str, port: int, is_host: bool | None, read_timeout: int) -> Any:
    if is_host is not None:
        return _connected(host, port, is_host, read_timeout)
    if is_this_machine(host):
        try:
            return _connected(host, port, True, read_timeout)
        except RendezvousConnectionError as error:
            log.info("another process hosts the store, as it seems: %s", error)
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
        raise RendezvousConnectionError(f"there is no folder for the c10d store in {path}")
    try:
        return torch_distributed().FileStore(path)
    except _FAILURES as error:
        raise RendezvousConnectionError(
            f"could not open the c10d store in {path}: {error}"
        ) from error
