"""Key of a run without password, kept in etcd: shared by its agents, unknown to all others."""

from __future__ import annotations

import asyncio

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.shared_key import follow_shared_key, shared_key
from elasticjob_rendezvous.links.wire import run_key
from elasticjob_rendezvous.protocol.kv import Delete, Range, Txn
from elasticjob_rendezvous.protocol.records.keys import Keys
from tests.integration.etcd_server import EtcdServer


def test_agents_that_start_together_share_one_random_key(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        async with Client([etcd.url]) as one, Client([etcd.url]) as other:
            agreed = await asyncio.gather(*(shared_key(client, prefix) for client in (one, other)))
            assert agreed[0] == agreed[1]
            assert agreed[0][1] != run_key(prefix, None, "")
            another = await shared_key(one, f"{prefix}next/")
            assert another[1] != agreed[0][1]

    asyncio.run(main())


def test_key_is_restored_after_a_loss_of_data(etcd: EtcdServer, prefix: str) -> None:
    async def main() -> None:
        used: list[bytes] = []
        async with Client([etcd.url]) as client:
            following = asyncio.create_task(follow_shared_key(client, prefix, used.append))
            async with asyncio.timeout(60):
                while not used:
                    await asyncio.sleep(0.01)
                await client.txn(Txn((), (Delete(Keys(prefix).job_key),)))
                while not (await client.range(Range(Keys(prefix).job_key))).kvs:
                    await asyncio.sleep(0.1)
            following.cancel()
            assert (await shared_key(client, prefix))[1] == used[-1]
            assert len(used) == 1

    asyncio.run(main())
