"""Client requests against every supported etcd version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import InvalidRequest
from elasticjob_rendezvous.protocol.kv import (
    Compare,
    Delete,
    Is,
    KeyValue,
    Order,
    Put,
    Range,
    Target,
    Txn,
)
from tests.integration.etcd_server import EtcdServer


def run(server: EtcdServer, scenario: Callable[[Client], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Client([server.url]) as client:
            await scenario(client)

    asyncio.run(main())


def keys(found: tuple[KeyValue, ...], prefix: str) -> list[str]:
    return [kv.key.removeprefix(prefix) for kv in found]


def test_put_and_range_return_value_and_revisions(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        created = await client.put(Put(f"{prefix}k", b"\x00one\xff"))
        written = await client.put(Put(f"{prefix}k", b"two"))
        found = await client.range(Range(f"{prefix}k"))
        assert found.kvs == (KeyValue(f"{prefix}k", b"two", created, written),)
        assert created < written <= found.revision
        assert found.cluster_id == (await client.status()).cluster_id

    run(etcd, scenario)


def test_range_of_missing_key_is_empty(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        found = await client.range(Range(f"{prefix}none"))
        assert (found.kvs, found.count) == ((), 0)
        assert found.revision >= 1

    run(etcd, scenario)


def test_range_honours_prefix_order_and_limit(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        for name in ("c", "a", "b"):
            await client.put(Put(f"{prefix}{name}", b""))
        await client.put(Put(f"{prefix}c", b"again"))  # keeps its place by creation
        await client.put(Put(prefix[:-1] + "0", b"beside the prefix"))

        async def names(order: Order = Order.KEY, limit: int = 0) -> list[str]:
            found = await client.range(Range(prefix, True, order, limit))
            return keys(found.kvs, prefix)

        assert await names() == ["a", "b", "c"]
        assert await names(Order.CREATE) == ["c", "a", "b"]
        assert await names(Order.CREATE, limit=1) == ["c"]
        assert await names(limit=2) == ["a", "b"]
        assert (await client.range(Range(prefix, True, limit=1))).count == 3

    run(etcd, scenario)


@pytest.mark.parametrize(
    ("target", "operator", "offset", "holds"),
    [
        (Target.CREATE, Is.EQUAL, 0, True),
        (Target.CREATE, Is.EQUAL, 1, False),
        (Target.CREATE, Is.NOT_EQUAL, 1, True),
        (Target.CREATE, Is.GREATER, -1, True),
        (Target.CREATE, Is.GREATER, 0, False),
        (Target.CREATE, Is.LESS, 1, True),
        (Target.CREATE, Is.LESS, 0, False),
        (Target.MOD, Is.EQUAL, 0, True),
        (Target.MOD, Is.EQUAL, -1, False),
        (Target.MOD, Is.NOT_EQUAL, 0, False),
        (Target.MOD, Is.GREATER, -1, True),
        (Target.MOD, Is.LESS, 0, False),
    ],
)
def test_compare_operators_match_revisions(
    newest_etcd: EtcdServer, prefix: str, target: Target, operator: Is, offset: int, holds: bool
) -> None:
    async def scenario(client: Client) -> None:
        created = await client.put(Put(f"{prefix}k", b""))
        written = await client.put(Put(f"{prefix}k", b""))
        revision = (created if target is Target.CREATE else written) + offset
        condition = Compare(f"{prefix}k", target, revision, operator)
        assert (await client.txn(Txn((condition,), ()))).succeeded is holds

    run(newest_etcd, scenario)


def test_txn_applies_one_branch_atomically(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        absent = Compare(f"{prefix}k", Target.CREATE, 0)
        missing_mod = Compare(f"{prefix}k", Target.MOD, 0)
        everything = Range(prefix, prefix=True)
        txn = Txn(
            (absent, missing_mod),
            (Put(f"{prefix}k", b"1"), Put(f"{prefix}l", b"2"), everything),
            (Range(f"{prefix}l"), Delete(prefix, prefix=True), everything),
        )
        first = await client.txn(txn)
        assert first.succeeded
        assert [(op, keys(kvs, prefix)) for op, kvs in first.ranges] == [(everything, ["k", "l"])]
        assert {kv.mod_revision for kv in first.ranges[0][1]} == {first.revision}
        second = await client.txn(txn)
        assert not second.succeeded
        assert [keys(kvs, prefix) for _, kvs in second.ranges] == [["l"], []]
        assert second.revision == first.revision + 1
        assert second.cluster_id == first.cluster_id

    run(etcd, scenario)


def test_recreated_session_key_has_new_create_revision(etcd: EtcdServer, prefix: str) -> None:
    """A returning member deletes its old key and puts the new one in one transaction."""

    async def scenario(client: Client) -> None:
        old = await client.put(Put(f"{prefix}old", b""))
        unchanged = Compare(f"{prefix}old", Target.MOD, old)
        txn = Txn((unchanged,), (Delete(f"{prefix}old"), Put(f"{prefix}new", b"")))
        assert (await client.txn(txn)).succeeded
        (kv,) = (await client.range(Range(prefix, prefix=True))).kvs
        assert (kv.key, kv.create_revision > old) == (f"{prefix}new", True)
        assert not (await client.txn(txn)).succeeded

    run(etcd, scenario)


def test_txn_with_duplicate_key_is_refused(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        twice = Txn((), (Put(f"{prefix}k", b"1"), Put(f"{prefix}k", b"2")))
        with pytest.raises(InvalidRequest, match="duplicate key"):
            await client.txn(twice)
        assert (await client.range(Range(f"{prefix}k"))).kvs == ()

    run(etcd, scenario)


def test_oversized_value_is_refused_and_large_range_is_read(etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        for size in (2_000_000, 5_000_000):  # above etcd's limit, and above its gRPC server's
            with pytest.raises(InvalidRequest, match=r"too large|larger than max"):
                await client.put(Put(f"{prefix}k", bytes(size)))
        for index in range(6):
            await client.put(Put(f"{prefix}{index}", bytes(1_400_000)))
        found = await client.range(Range(prefix, prefix=True))
        assert sum(len(kv.value) for kv in found.kvs) == 6 * 1_400_000

    run(etcd, scenario)


def test_non_utf8_key_of_another_client_is_read(newest_etcd: EtcdServer, prefix: str) -> None:
    async def scenario(client: Client) -> None:
        key = prefix + b"\xff\xfe".decode("utf-8", "surrogateescape")
        await client.put(Put(key, b"v"))
        (kv,) = (await client.range(Range(prefix, prefix=True))).kvs
        assert kv.key == key
        assert (await client.range(Range(key))).kvs == (kv,)

    run(newest_etcd, scenario)
