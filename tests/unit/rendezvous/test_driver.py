"""When the engine of a crowd is stepped: changes are gathered, but not once all have spoken."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from elasticjob_rendezvous.core.effects import Effect
from elasticjob_rendezvous.core.events import Changed, Clock, Event, Started
from elasticjob_rendezvous.core.kv import KeyValue
from elasticjob_rendezvous.etcd.driver import CROWD, Driver

PATIENCE_SECONDS = 10.0


class Recorder:
    """Stands in for the engine of a coordinator that waits for `awaited` members."""

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
    """How many steps there were right after these changes, and all of them in the end."""
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


def test_a_crowds_changes_are_judged_together() -> None:
    at_once, steps = asyncio.run(_run(CROWD, awaited=0, changes=3))
    assert at_once == 1
    assert [type(step) for step in steps] == [Started, Changed]


def test_they_are_judged_at_once_when_all_may_have_spoken() -> None:
    at_once, steps = asyncio.run(_run(CROWD, awaited=3, changes=3))
    assert at_once == 2
    assert [type(step) for step in steps] == [Started, Changed]


def test_a_few_members_are_judged_one_by_one() -> None:
    at_once, steps = asyncio.run(_run(CROWD - 1, awaited=0, changes=3))
    assert (at_once, len(steps)) == (4, 4)
