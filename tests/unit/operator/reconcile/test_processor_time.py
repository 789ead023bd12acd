"""Bound on the processor time of a reconcile, on the process's own timer."""

from __future__ import annotations

import asyncio
import inspect
import time

import pytest

from elasticjob_operator.reconcile.fault_guard import RECONCILE_SECONDS
from elasticjob_operator.reconcile.processor_time import STEP_SECONDS, ProcessorTime, TooLong
from elasticjob_operator.replica.active import STUCK_SECONDS
from elasticjob_operator.replica.lease import LeaseSettings

LIMITS = ProcessorTime(step_seconds=0.05, total_seconds=0.2)


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def limited(steps: int, seconds: float) -> int:
    async def work() -> int:
        for _ in range(steps):
            await asyncio.sleep(0)
            burn(seconds)
        return steps

    return await LIMITS.limit(work())


def test_result_of_a_short_reconcile_is_returned() -> None:
    assert asyncio.run(limited(3, 0.001)) == 3


def test_endless_computation_is_ended() -> None:
    with pytest.raises(TooLong, match=r"one step of the reconcile needed more than 0\.05 s"):
        asyncio.run(limited(1, 3600))


def test_many_short_steps_are_ended_at_the_total() -> None:
    with pytest.raises(TooLong, match=r"the reconcile needed more than 0\.2 s"):
        asyncio.run(limited(1000, 0.03))


def test_waits_do_not_count() -> None:
    async def work() -> str:
        await asyncio.sleep(0.3)
        return "done"

    async def main() -> str:
        return await LIMITS.limit(work())

    assert asyncio.run(main()) == "done"


def test_computation_that_drops_the_first_exception_is_ended_again() -> None:
    dropped = 0

    async def work() -> None:
        nonlocal dropped
        try:
            burn(3600)
        except TooLong:
            dropped += 1
        burn(3600)

    async def main() -> None:
        await LIMITS.limit(work())

    with pytest.raises(TooLong):
        asyncio.run(main())
    assert dropped == 1


def test_errors_and_cancellation_reach_the_coroutine() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        finally:
            await asyncio.sleep(0)
            seen.append("cleaned up")

    async def main() -> None:
        async with asyncio.timeout(0.05):
            await LIMITS.limit(work())

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert seen == ["cancelled", "cleaned up"]


def test_other_tasks_are_not_limited() -> None:
    async def main() -> int:
        other = asyncio.create_task(asyncio.sleep(0.01, 1))
        found = await LIMITS.limit(asyncio.sleep(0.05, 2))
        burn(0.2)
        return found + await other

    assert asyncio.run(main()) == 3


def test_reconcile_within_its_bounds_costs_neither_the_lease_nor_the_process() -> None:
    duration_seconds = inspect.signature(LeaseSettings).parameters["duration_seconds"].default
    assert duration_seconds >= 4 * STEP_SECONDS
    assert RECONCILE_SECONDS < STUCK_SECONDS
