"""Helpers that read watches in tests, always with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from elasticjob_rendezvous.protocol.kv import WatchBatch, WatchEvent

Watch = AsyncGenerator[WatchBatch, None]

SECONDS = 60.0


async def opened(watch: Watch) -> int:
    """Wait until the watch is in place; return the revision it starts after."""
    async with asyncio.timeout(SECONDS):
        batch = await anext(watch)
    assert batch.events == ()
    return batch.revision


async def next_events(watch: Watch, count: int) -> list[WatchEvent]:
    """Return the next `count` events and leave the watch open."""
    events: list[WatchEvent] = []
    async with asyncio.timeout(SECONDS):
        while len(events) < count:
            events += (await anext(watch)).events
    assert len(events) == count, events
    return events


async def events_of(watch: Watch, count: int) -> list[WatchEvent]:
    """Return the first `count` events and close the watch."""
    async with aclosing(watch):
        return await next_events(watch, count)


async def drained(watch: Watch) -> None:
    """Read until the watch ends with its error."""
    async with asyncio.timeout(SECONDS), aclosing(watch):
        async for _ in watch:
            pass
    raise AssertionError("a watch must not end without an error")
