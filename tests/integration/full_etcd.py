"""Etcd filled beyond its quota, and the recovery described in etcd's documentation."""

from __future__ import annotations

import asyncio
import itertools
import time

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.kv import Put
from tests.integration.etcd_server import EtcdServer

NO_SPACE = "etcdserver: mvcc: database space exceeded"
SMALL = f"--quota-backend-bytes={4 * 1024 * 1024}"
_WASTE = "/waste/"
_PIECES = 32
_SECONDS = 60.0


def fill(etcd: EtcdServer, user: str = "", password: str = "") -> None:
    """Write until the quota of `SMALL` refuses a write.

    etcd compares the quota with the size at its last commit, up to 100 ms or a slow disk ago. So
    the same keys are written again until then.
    """

    async def refusal() -> str:
        found = "never refused"
        deadline = time.monotonic() + _SECONDS
        async with Client([etcd.url], user=user or None, password=password) as client:
            for number in itertools.cycle(range(_PIECES)):
                try:
                    await client.put(Put(f"{_WASTE}{number}", b"x" * 1024 * 256))
                except EtcdError as error:
                    found = str(error)
                if NO_SPACE in found or time.monotonic() > deadline:
                    return found
                await asyncio.sleep(0.01)
        return found

    found = asyncio.run(refusal())
    assert NO_SPACE in found, found


def empty(etcd: EtcdServer, user: str | None = None) -> None:
    """Delete, compact, defragment, disarm."""
    etcd.ctl("del", "--prefix", _WASTE, user=user)
    fields = etcd.ctl("get", "nothing", "-w", "fields", user=user)
    etcd.ctl("compact", fields.split('"Revision" : ')[1].split()[0], user=user)
    etcd.ctl("defrag", user=user)
    etcd.ctl("alarm", "disarm", user=user)
