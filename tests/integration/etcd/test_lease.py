"""Leases: expiry, keep-alive of several over one stream, revocation."""

from __future__ import annotations

import asyncio
import time

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import LeaseLost
from elasticjob_rendezvous.protocol.kv import Deleted, Put, Range
from tests.integration.etcd.watches import SECONDS, events_of
from tests.integration.etcd_server import EtcdServer


def test_expired_lease_deletes_its_keys_and_watch_reports_it(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            lease = await client.grant(1)
            revision = await client.put(Put(f"{prefix}k", b"", lease.id))
            (kv,) = (await client.range(Range(f"{prefix}k"))).kvs
            assert kv.lease == lease.id
            (event,) = await events_of(client.watch([Range(prefix, True)], revision + 1), 1)
            assert isinstance(event, Deleted)
            assert (event.key, event.mod_revision > revision) == (f"{prefix}k", True)
            with pytest.raises(LeaseLost):
                await client.keep_alive(lease.id)
            with pytest.raises(LeaseLost):
                await client.put(Put(f"{prefix}k", b"", lease.id))

    asyncio.run(main())


def test_several_leases_are_kept_alive_concurrently(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            leases = [await client.grant(ttl) for ttl in (3, 4, 6)]
            for lease in leases:
                await client.put(Put(f"{prefix}{lease.ttl_seconds}", b"", lease.id))
            lost = await client.grant(5)
            await client.revoke(lost.id)
            end = time.monotonic() + 3.5  # beyond the shortest lease
            while time.monotonic() < end:
                answers = await asyncio.gather(
                    *(client.keep_alive(lease.id) for lease in [*leases, lost]),
                    return_exceptions=True,
                )
                assert answers[:3] == [3, 4, 6]
                assert isinstance(answers[3], LeaseLost)
                await asyncio.sleep(0.3)
            assert (await client.range(Range(prefix, True))).count == 3

    asyncio.run(main())


def test_revoke_deletes_keys_and_is_idempotent(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as client:
            lease = await client.grant(30)
            await client.put(Put(f"{prefix}k", b"", lease.id))
            await client.revoke(lease.id)
            await client.revoke(lease.id)
            assert (await client.range(Range(prefix, True))).kvs == ()

    asyncio.run(main())


def test_put_without_lease_detaches_key(newest_etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([newest_etcd.url]) as client:
            lease = await client.grant(30)
            await client.put(Put(f"{prefix}k", b"", lease.id))
            await client.put(Put(f"{prefix}k", b""))
            await client.revoke(lease.id)
            (kv,) = (await client.range(Range(prefix, True))).kvs
            assert kv.lease == 0

    asyncio.run(main())


def test_cancelled_keep_alive_does_not_affect_other_leases(
    newest_etcd: EtcdServer, prefix: str
) -> None:
    """The cancelled request's answer must not count as that of the next lease."""

    async def main() -> None:
        async with Client([newest_etcd.url]) as client:
            short, long = await client.grant(5), await client.grant(60)
            for turns in range(20):
                impatient = asyncio.create_task(client.keep_alive(short.id))
                for _ in range(turns):
                    await asyncio.sleep(0)
                in_time = impatient.cancel()
                assert await client.keep_alive(long.id) == 60
                await asyncio.wait((impatient,), timeout=SECONDS)
                assert impatient.cancelled() is in_time

    asyncio.run(main())
