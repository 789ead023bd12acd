"""Probe of etcd v3: a transaction that writes nothing, but that etcd checks like a write.

Its comparison always holds, so the put in the other branch is never executed: no revision, no
event, no key. Yet it passes through consensus, the quota, the alarms and the user's permissions
like any write. In large rounds its rate is limited; in between, the probe requests etcd's status,
and sends the transaction at once if the status contains an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet
from pyetcd.etcdrpc import rpc_pb2

from elasticjob_rendezvous.etcd import wire
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError, PermissionDenied, Unauthenticated
from elasticjob_rendezvous.etcd.transport import Transport
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.store_health import LONGEST_PROBE_SECONDS, PROBE_SECONDS, Failed
from elasticjob_rendezvous.protocol.store_trouble import (
    ETCD,
    StoreFailure,
    StoreState,
    failure_in,
)

STORE = ETCD
KEY = "probe"
"""Key of the probe, below the prober's prefix. It never exists."""
PROBES_A_SECOND = 32
"""Target rate of all members of a round together; exceeded at LONGEST_PROBE_SECONDS."""
WRITES_A_SECOND = 50
"""Maximum rate of probe transactions of all members of a round together."""
_STATUS_ERRORS = 8
"""Field number of StatusResponse.errors (alarms, no leader); the generated messages lack it."""
_OWN_WORDS = "etcdserver: "


class EtcdProbe:
    """Probe through the caller's client; see `store_monitor.Probe`.

    Args:
        prefix: key prefix under which the caller may write.
        members: number of members that probe at the same time.
    """

    def __init__(self, client: Client, prefix: str, members: Callable[[], int]) -> None:
        self._transport: Transport = client.transport
        self._txn = wire.txn_request(dry_write(prefix + KEY))
        self._members = members
        self._refusal: Failed | None = None
        self._wrote_at = float("-inf")

    @property
    def pause_seconds(self) -> float:
        """Pause between two probes in seconds; longer in a large round."""
        seconds = self._members() / PROBES_A_SECOND
        return min(max(PROBE_SECONDS, seconds), LONGEST_PROBE_SECONDS)

    async def __call__(self, seconds: float) -> Failed | None:
        """Probe etcd once; see `store_monitor.Probe`."""
        now = time.monotonic()
        if now < self._wrote_at + self._members() / WRITES_A_SECOND:
            if self._refusal is not None:
                return self._refusal  # as of the last write
            try:
                if not await self._alarmed(seconds):
                    return None
            except EtcdError as error:
                return failure_of(error)
        failure = await self._written(seconds)
        if failure is None or failure.state is StoreState.REFUSING:
            self._wrote_at, self._refusal = now, failure
        return failure

    async def _written(self, seconds: float) -> Failed | None:
        try:
            await self._write(seconds)
        except EtcdError as error:
            return failure_of(error)
        return None

    async def _write(self, seconds: float) -> None:
        await self._transport.call(
            "write check",
            lambda link, metadata, timeout: link.kv.Txn(
                self._txn, metadata=metadata, timeout=timeout
            ),
            timeout_seconds=seconds,
            once=True,
        )

    async def _alarmed(self, seconds: float) -> bool:
        """Return True if etcd's status contains an error. Raises `EtcdError` without a status."""
        reply: Any = await self._transport.call(
            "status",
            lambda link, metadata, timeout: link.maintenance.Status(
                rpc_pb2.StatusRequest(), metadata=metadata, timeout=timeout
            ),
            timeout_seconds=seconds,
            once=True,
        )
        return any(found.field_number == _STATUS_ERRORS for found in UnknownFieldSet(reply))


def dry_write(key: str) -> Txn:
    """Return a transaction that reads `key`, or writes it if it exists, which it never does."""
    absent = Compare(key, Target.MOD, 0)
    return Txn((absent,), (Range(key, limit=1),), (Put(key, b""),))


def failure_of(error: EtcdError) -> Failed:
    """Convert an error: REFUSING with reason and etcd's text if etcd answered, else UNREACHABLE."""
    at = error.detail.find(_OWN_WORDS)
    text = error.detail if at < 0 else error.detail[at:]
    refused = isinstance(error, PermissionDenied | Unauthenticated)
    if text.startswith("DEADLINE_EXCEEDED"):
        text = "no answer in time"
    if at < 0 and not refused:
        return Failed(StoreState.UNREACHABLE, text)
    return Failed(
        StoreState.REFUSING, text, _reason(error, text), costly=isinstance(error, Unauthenticated)
    )


def _reason(error: EtcdError, text: str) -> StoreFailure:
    """Return the reason for a refusal: the text is more precise than the class of the error."""
    found = failure_in(text)
    if found is not StoreFailure.OTHER:
        return found
    if isinstance(error, PermissionDenied):
        return StoreFailure.PERMISSION_DENIED
    return StoreFailure.UNAUTHENTICATED if isinstance(error, Unauthenticated) else found
