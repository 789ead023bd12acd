"""Cluster of three whose members die while it is used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous, Unavailable
from elasticjob_rendezvous.protocol.kv import Compare, Put, Range, Target, Txn
from tests.integration.etcd.watches import SECONDS, drained, events_of, opened
from tests.integration.etcd_server import EtcdCluster, EtcdServer

StartCluster = Callable[..., EtcdCluster]


async def leader_of(cluster: EtcdCluster) -> EtcdServer:
    for member in cluster.members:
        async with Client([member.url]) as client:
            status = await client.status()
            if status.member_id == status.leader_id:
                return member
    raise AssertionError("the cluster has no leader")


@dataclass
class Writes:
    """Results of a writer's writes below `prefix`."""

    prefix: str
    acknowledged: list[int] = field(default_factory=list)
    ambiguous: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def write_on(self, client: Client, stop: asyncio.Event) -> None:
        """Create one key after the other, none of them twice."""
        number = 0
        while not stop.is_set():
            number += 1
            key = f"{self.prefix}{number}"
            create = Txn((Compare(key, Target.CREATE, 0),), (Put(key, b""),))
            try:
                assert (await client.txn(create)).succeeded, f"{key} was written twice"
                self.acknowledged.append(number)
                self.progress.set()
            except Ambiguous:
                self.ambiguous.append(number)
            except Unavailable:
                self.refused.append(number)

    async def check(self, client: Client) -> None:
        found = await client.range(Range(self.prefix, True))
        stored = {int(kv.key.removeprefix(self.prefix)) for kv in found.kvs}
        assert set(self.acknowledged) <= stored, "an acknowledged write was lost"
        assert not set(self.refused) & stored, "a write said to be unsent was applied"
        assert stored <= set(self.acknowledged) | set(self.ambiguous)


async def reached(writes: Writes, more: int) -> None:
    """Wait until `more` further writes were acknowledged."""
    goal = len(writes.acknowledged) + more
    async with asyncio.timeout(SECONDS):
        while len(writes.acknowledged) < goal:
            writes.progress.clear()
            await writes.progress.wait()


@pytest.mark.parametrize("version", ["3.4", "3.7"])
def test_writes_continue_after_leader_is_killed(start_cluster: StartCluster, version: str) -> None:
    cluster = start_cluster(version)

    async def main() -> None:
        stop = asyncio.Event()
        writers = [Writes(f"/{member.name}/") for member in cluster.members]
        # Each begins with another member, so that one of them talks to the leader.
        clients = [
            Client(
                cluster.urls[index:] + cluster.urls[:index],
                random=lambda: 0.0,
                request_timeout_seconds=2,
            )
            for index in range(len(cluster.members))
        ]
        async with asyncio.TaskGroup() as tasks:
            for writes, client in zip(writers, clients, strict=True):
                tasks.create_task(writes.write_on(client, stop))
            for _ in range(2):
                for writes in writers:
                    await reached(writes, 20)
                leader = await leader_of(cluster)
                await asyncio.to_thread(leader.kill)
                for writes in writers:
                    await reached(writes, 20)
                await asyncio.to_thread(leader.start)
            stop.set()
        for writes, client in zip(writers, clients, strict=True):
            async with client:
                await writes.check(client)
            # For a sequential writer, only the writes in flight at a kill, or sent without a
            # leader, may be in doubt.
            assert len(writes.ambiguous) <= 4, writes.ambiguous

    asyncio.run(main())


def test_leases_and_watches_move_to_another_member(start_cluster: StartCluster) -> None:
    cluster = start_cluster()

    async def main() -> None:
        async with Client(cluster.urls, request_timeout_seconds=10) as client:
            lease = await client.grant(30)
            revision = await client.put(Put("/k", b"", lease.id))
            leader = await leader_of(cluster)
            urls = [leader.url] + [url for url in cluster.urls if url != leader.url]
            async with Client(urls, random=lambda: 0.0, request_timeout_seconds=10) as other:
                watch = other.watch([Range("/", True)], revision + 1)
                await opened(watch)
                ended = asyncio.create_task(drained(watch))
                assert await other.keep_alive(lease.id) == 30
                await asyncio.to_thread(leader.kill)
                with pytest.raises(Unavailable):
                    await ended
                assert await other.keep_alive(lease.id) == 30
                found = await other.range(Range("/", True))
                assert [kv.key for kv in found.kvs] == ["/k"]
                again = other.watch([Range("/", True)], found.revision + 1)
                await opened(again)
                await client.revoke(lease.id)
                assert (await events_of(again, 1))[0].key == "/k"

    asyncio.run(main())


def test_member_without_leader_ends_streams_and_is_unavailable(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster()
    alone, *others = cluster.members

    async def main() -> None:
        async with Client([alone.url], request_timeout_seconds=1) as client:
            lease = await client.grant(30)
            await client.keep_alive(lease.id)
            watch = client.watch([Range("/", True)], 0)
            await opened(watch)
            ended = asyncio.create_task(drained(watch))
            for member in others:
                member.kill()
            with pytest.raises(Unavailable, match="no leader"):
                await ended
            with pytest.raises(Unavailable):
                await client.range(Range("/"))
            # A server that was too slow with its refusal leaves a write in doubt.
            with pytest.raises((Unavailable, Ambiguous)):
                await client.put(Put("/k", b""))
            with pytest.raises(Unavailable):
                await client.keep_alive(lease.id)

    asyncio.run(main())
