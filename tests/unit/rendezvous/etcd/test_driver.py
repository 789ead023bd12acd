"""Order of events: many changes are batched, and each request has one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elasticjob_rendezvous.etcd.driver import LARGE_GANG, Driver
from elasticjob_rendezvous.etcd.errors import InvalidRequest, PermissionDenied
from elasticjob_rendezvous.protocol.effects import Effect, Grant, Watch, Write
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Clock,
    Event,
    Granted,
    Started,
    WatchBroken,
)
from elasticjob_rendezvous.protocol.kv import KeyValue, LeaseGrant, Range, Txn, TxnResult

PATIENCE_SECONDS = 60.0


class Recorder:
    """Fake engine of a coordinator that waits for `awaited` members."""

    def __init__(self, members: int, awaited: int) -> None:
        self.coordinator = SimpleNamespace(active=True, awaited=awaited)
        self.view = SimpleNamespace(sessions=dict.fromkeys(range(members)))
        self.wake_at = None
        self.steps: list[Event] = []

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        self.steps.append(event)
        return []


def change(revision: int) -> Changed:
    return Changed(1, revision, (KeyValue(f"/k/{revision}", b"", revision, revision),))


async def stepped(engine: Recorder, changes: int) -> tuple[int, list[Event]]:
    """Return the number of steps right after these changes, and all events in the end."""
    nothing = cast(Any, None)
    driver = Driver(cast(Any, engine), nothing, (), nothing, b"", lambda: None)
    running = asyncio.create_task(driver.run())
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not engine.steps:
            await asyncio.sleep(0)
        for revision in range(changes):
            driver.post(change(revision + 1))
        at_once = len(engine.steps)
        while sum(len(e.events) for e in engine.steps if isinstance(e, Changed)) < changes:
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait([running])
    return at_once, engine.steps


async def _run(members: int, awaited: int, changes: int) -> tuple[int, list[Event]]:
    return await stepped(Recorder(members, awaited), changes)


def test_changes_of_a_large_gang_are_processed_together() -> None:
    at_once, steps = asyncio.run(_run(LARGE_GANG, awaited=0, changes=3))
    assert at_once == 1
    assert [type(step) for step in steps] == [Started, Changed]


def test_changes_are_processed_at_once_when_all_awaited_members_reported() -> None:
    at_once, steps = asyncio.run(_run(LARGE_GANG, awaited=3, changes=3))
    assert at_once == 2
    assert [type(step) for step in steps] == [Started, Changed]


def test_changes_of_a_small_gang_are_processed_one_by_one() -> None:
    at_once, steps = asyncio.run(_run(LARGE_GANG - 1, awaited=0, changes=3))
    assert (at_once, len(steps)) == (4, 4)


class RefusedWatch:
    """Fake client whose watch etcd refuses while another request is under way."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def grant(self, ttl_seconds: int) -> LeaseGrant:
        await self.may_answer.wait()
        return LeaseGrant(7, ttl_seconds)

    async def watch(self, *targets: object, **options: object) -> AsyncGenerator[None, None]:
        raise PermissionDenied("watch", "http://etcd", "not yours")
        yield


class Requesting(Recorder):
    """Fake engine that begins with a watch and a request."""

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        super().step(event, clock)
        return [Watch(1, (Range("/k"),), 0), Grant(5)] if isinstance(event, Started) else []


def test_refused_watch_does_not_answer_the_pending_request() -> None:
    """The refusal once counted as the answer: the real answer then ended the member."""

    async def main() -> list[Event]:
        engine, client = Requesting(1, 0), RefusedWatch()
        nothing = cast(Any, None)
        driver = Driver(cast(Any, engine), cast(Any, client), (), nothing, b"", lambda: None)
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not any(isinstance(event, WatchBroken) for event in engine.steps):
                await asyncio.sleep(0)
            client.may_answer.set()
            while not isinstance(engine.steps[-1], Granted):
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return engine.steps

    started, broken, granted = asyncio.run(main())
    assert isinstance(started, Started)
    assert isinstance(broken, WatchBroken)
    assert broken.terminal
    assert isinstance(granted, Granted)


class RefusedWrites:
    """Fake client of an etcd that refuses writes for their content."""

    async def txn(self, txn: Txn) -> TxnResult:
        raise InvalidRequest("txn", "http://etcd", f"too many operations: {len(txn.success)}")


class Writing(Recorder):
    """Fake engine that repeats its first write twice, then writes another."""

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        super().step(event, clock)
        return [Write(Txn((), (Range("/k"),) * (1 + (len(self.steps) > 3))))]


def test_write_that_etcd_always_refuses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The member repeats it: without a line in the log its job waits for no visible reason."""

    async def main() -> None:
        engine, nothing = Writing(1, 0), cast(Any, None)
        client = cast(Any, RefusedWrites())
        driver = Driver(cast(Any, engine), client, (), nothing, b"", lambda: None)
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(engine.steps) < 8:
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(main())
    texts = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert [text.partition("failed: ")[2][:22] for text in texts] == [
        "too many operations: 1",
        "too many operations: 2",
    ]
