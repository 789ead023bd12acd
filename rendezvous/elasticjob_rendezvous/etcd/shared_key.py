"""Key of the agents of a run without a password: random, kept in etcd, created by the first agent.

Only clients of this etcd know it. An etcd that has lost its data gets a key again: that of a
running member, or of a newcomer, which the other members then use.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Callable

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.keys import Keys

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
CHECK_SECONDS = 10.0
"""Interval at which a member reads the key again: etcd may have lost its data."""
KEY_BYTES = 32


async def shared_key(client: Client, prefix: str, proposal: bytes = b"") -> tuple[bytes, bytes]:
    """Return the stored secret and the key derived from it; store `proposal` if there is none.

    Raises `EtcdError`.
    """
    key = Keys(prefix).job_key
    stored = proposal or secrets.token_hex(KEY_BYTES).encode()
    txn = Txn((Compare(key, Target.CREATE, 0),), (Put(key, stored),), (Range(key),))
    result = await client.txn(txn)
    if not result.succeeded:
        stored = result.ranges[0][1][0].value
    return stored, hashlib.sha256(prefix.encode() + b"\n" + stored).digest()


async def follow_shared_key(client: Client, prefix: str, use: Callable[[bytes], None]) -> None:
    """Pass the current key to `use`, at the start and after each change, until cancelled."""
    stored, used = b"", b""
    while True:
        seconds = CHECK_SECONDS
        try:
            stored, key = await shared_key(client, prefix, stored)
        except EtcdError as error:
            log.debug("cannot read the key of this run: %s", error)
            seconds = RETRY_SECONDS
        else:
            if key != used:
                used = key
                use(key)
        await asyncio.sleep(seconds)
