"""etcd v2 rendezvous behind `RendezvousHandler`, like torch's `EtcdRendezvousHandler`."""

from __future__ import annotations

import contextlib
import logging
import time
from datetime import timedelta
from urllib.parse import parse_qsl, unquote, urlsplit

import etcd

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from elasticjob_rendezvous.etcd_v2.client import create_client
from elasticjob_rendezvous.etcd_v2.core.delays import Retries
from elasticjob_rendezvous.etcd_v2.core.records import (
    DEFAULT_LAST_CALL_SECONDS,
    DEFAULT_PREFIX,
    DEFAULT_TIMEOUT_SECONDS,
)
from elasticjob_rendezvous.etcd_v2.rendezvous import NOTICE_SECONDS, EtcdRendezvous
from elasticjob_rendezvous.etcd_v2.store import EtcdStore
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger(__name__)

BACKEND = "etcd"
LOOK_AGAIN = timedelta(seconds=1)
"""Interval of checks that the version still exists, during the wait for rank 0's address."""


class EtcdRendezvousHandler(RendezvousHandler):
    """Implementation of `api.RendezvousHandler` over one etcd v2 member.

    Args:
        rdzv_impl: the member.
        local_addr: this node's address; detected if None.
        close_on_shutdown: True if `shutdown` closes the run for all, as in torch. Pass False or
            call `leave` if an agent must end without closing the run.
    """

    def __init__(
        self,
        rdzv_impl: EtcdRendezvous,
        local_addr: str | None = None,
        close_on_shutdown: bool = True,
    ) -> None:
        self._rdzv_impl = rdzv_impl
        self._local_addr = local_addr
        self._close_on_shutdown = close_on_shutdown
        self._waiting = 0
        self._closed = False
        self._left = False

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._rdzv_impl.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        while True:
            version, rank, world_size = self._rdzv_impl.rendezvous_barrier()
            store = self._rdzv_impl.setup_kv_store(version)
            info = self._meeting_place(rank, version, store)
            if info is not None:
                self._waiting = 0
                return RendezvousInfo(store, rank, world_size, info, int(version))
            log.info("%s: version %s ended before it started", self.get_run_id(), version)

    def _meeting_place(
        self, rank: int, version: str, store: EtcdStore
    ) -> RendezvousStoreInfo | None:
        """Return rank 0's bootstrap store address; None if the version ended before it was set.

        torch's handler waits for the store's timeout even if rank 0 has died or left.
        """
        limit = store.timeout
        deadline = time.monotonic() + limit.total_seconds()
        while True:
            try:
                if rank != 0:
                    store.set_timeout(LOOK_AGAIN)
                return RendezvousStoreInfo.build(rank, store, self._local_addr)
            except (LookupError, ValueError) as error:
                if time.monotonic() >= deadline or isinstance(error, ValueError):
                    raise RendezvousStateError(
                        f"rank 0 of version {version} published no valid address and port: {error}"
                    ) from error
            finally:
                store.set_timeout(limit)
            if self._left:
                raise RendezvousGracefulExitError("this member left the rendezvous")
            if self.is_closed():
                raise RendezvousClosedError(f"the run {echoed(self.get_run_id())} is closed")
            self.num_nodes_waiting()  # checks for lost members
            if self.lost() or self.moved_on():
                return None

    def is_closed(self) -> bool:
        """Return True if the run is closed; the last known value if etcd does not answer."""
        with contextlib.suppress(etcd.EtcdException):
            self._closed = self._rdzv_impl.is_closed()
        return self._closed

    def set_closed(self) -> None:
        self._rdzv_impl.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes; the last known one if etcd does not answer."""
        try:
            self._waiting = self._rdzv_impl.num_nodes_waiting()
        except etcd.EtcdException as error:
            log.info("%s: cannot read the waiting nodes: %r", self.get_run_id(), error)
        return self._waiting

    def lost(self) -> bool:
        """Return True if a member of our version is gone, by the last `num_nodes_waiting`."""
        with contextlib.suppress(etcd.EtcdException):
            return self._rdzv_impl.lost()
        return False

    def moved_on(self) -> bool:
        """Return True if other members ended our version; see `EtcdRendezvous.moved_on`."""
        with contextlib.suppress(etcd.EtcdException):
            return self._rdzv_impl.moved_on()
        return False

    def gone(self) -> frozenset[int]:
        """Return the ranks of lost members of our version; see `EtcdRendezvous.gone`."""
        with contextlib.suppress(etcd.EtcdException):
            return self._rdzv_impl.gone()
        return frozenset()

    def last_stores(self) -> list[EtcdStore]:
        """Return the stores of the last versions; see `EtcdRendezvous.last_versions`."""
        rendezvous = self._rdzv_impl
        return [rendezvous.setup_kv_store(version) for version in rendezvous.last_versions()]

    def stay(self) -> None:
        """Make our key permanent, since we have finished; see `EtcdRendezvous.stay`."""
        try:
            self._rdzv_impl.stay()
        except etcd.EtcdException as error:
            log.info("%s: could not yet make our key permanent: %r", self.get_run_id(), error)

    def setting_up(self) -> bool:
        """Return True if a member is known to be creating a version. No I/O."""
        with contextlib.suppress(RendezvousError):
            return self._rdzv_impl.setting_up()
        return False

    def leave(self) -> None:
        """Leave the rendezvous without closing it; a later `shutdown` does not close it either.

        See `EtcdRendezvous.leave`.
        """
        self._left = True
        self._rdzv_impl.leave()

    def shutdown(self) -> bool:
        try:
            if self._close_on_shutdown and not self._left:
                self.set_closed()
            self.leave()
        except (RendezvousError, etcd.EtcdException) as error:
            log.warning("%s: could not shut down: %r", self.get_run_id(), error)
            self._rdzv_impl.close()
            return False
        return True


def create_rdzv_handler(
    params: RendezvousParameters, retries: Retries | None = None
) -> EtcdRendezvousHandler:
    """Create a handler from torch's parameters, with other delays of retries if given.

    Settings: `timeout` (600) and `last_call_timeout` (30) in seconds, `etcd_prefix`
    (/torchelastic/p2p), `close_on_shutdown` (true), `notice_seconds` (1),
    `recovery_call_timeout` (default: `last_call_timeout`), `expected_nodes` (number of nodes that
    ends the first version's last call), and those of `create_client`.

    Raises:
        ValueError: a setting is malformed; the message names it.
        RendezvousConnectionError: no etcd with the v2 API answers.
    """
    timeout = params.get_as_float("timeout", DEFAULT_TIMEOUT_SECONDS)
    last_call = params.get_as_float("last_call_timeout", DEFAULT_LAST_CALL_SECONDS)
    notice = params.get_as_float("notice_seconds", NOTICE_SECONDS)
    recovery = params.get_as_float("recovery_call_timeout")
    closes = params.get_as_bool("close_on_shutdown", True)
    assert timeout is not None
    assert last_call is not None
    assert notice is not None
    for name, seconds in (("timeout", timeout), ("last_call_timeout", last_call)):
        if seconds < 0:
            raise ValueError(
                f"the rendezvous setting {echoed(name)} must not be negative: {seconds:g}"
            )
    member = EtcdRendezvous(
        client=create_client(params),
        prefix=str(params.get("etcd_prefix", DEFAULT_PREFIX)),
        run_id=params.run_id,
        num_min_workers=params.min_nodes,
        num_max_workers=params.max_nodes,
        timeout=timeout,
        last_call_timeout=last_call,
        notice_seconds=notice,
        recovery_call_timeout=recovery,
        expected_workers=params.get_as_int("expected_nodes"),
        retries=retries,
    )
    return EtcdRendezvousHandler(member, params.local_addr, bool(closes))


def parameters_from_url(url: str) -> RendezvousParameters:
    """Parse `etcd://host:port/run_id?min_workers=1&max_workers=3&…`.

    `max_workers` defaults to `min_workers`; all other parameters are settings of
    `create_rdzv_handler`, or `local_addr`.

    Raises:
        ValueError: the URL is malformed; the message names the fault.
    """
    parts = urlsplit(url)
    if parts.scheme != BACKEND:
        raise ValueError(f"the rendezvous URL must start with {BACKEND}://, not {echoed(url)}")
    run_id = unquote(parts.path.strip("/"))
    if not run_id:
        raise ValueError(f"the rendezvous URL must name the run after the endpoint: {echoed(url)}")
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    smallest = _whole_number(settings.pop("min_workers", None), "min_workers", url)
    greatest = settings.pop("max_workers", None)
    return RendezvousParameters(
        BACKEND,
        parts.netloc,
        run_id,
        smallest,
        smallest if greatest is None else _whole_number(greatest, "max_workers", url),
        settings.pop("local_addr", None),
        **settings,
    )


def _whole_number(text: str | None, name: str, url: str) -> int:
    if text is None or not text.strip().isdecimal():
        raise ValueError(f"the rendezvous URL must have {name} as a whole number: {echoed(url)}")
    return int(text)
