"""An etcd that is filled beyond its quota, and what its documentation says to do then."""

from __future__ import annotations

import asyncio

from elasticjob_rendezvous.core.kv import Put
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from tests.integration.etcd_server import EtcdServer

NO_SPACE = "etcdserver: mvcc: database space exceeded"
SMALL = f"--quota-backend-bytes={4 * 1024 * 1024}"
_WASTE = "/waste/"
_PIECES = 64


def fill(etcd: EtcdServer) -> None:
    """Write until the quota of `SMALL` refuses."""
    assert NO_SPACE in asyncio.run(_refusal(etcd.url))


async def _refusal(url: str) -> str:
    async with Client([url]) as client:
        for number in range(_PIECES):
            try:
                await client.put(Put(f"{_WASTE}{number}", b"x" * 1024 * 256))
            except EtcdError as error:
                return str(error)
    return "never refused"


def empty(etcd: EtcdServer) -> None:
    """Delete, compact, defragment, disarm."""
    etcd.ctl("del", "--prefix", _WASTE)
    fields = etcd.ctl("get", "nothing", "-w", "fields")
    etcd.ctl("compact", fields.split('"Revision" : ')[1].split()[0])
    etcd.ctl("defrag")
    etcd.ctl("alarm", "disarm")
