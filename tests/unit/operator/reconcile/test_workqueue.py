"""Work queue of jobs: nothing lost, no concurrent repetition, growing delays after errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.reconcile.job_memory import JobKey
from elasticjob_operator.reconcile.workqueue import (
    BURST,
    MOST_BACKOFF_SECONDS,
    RENEWAL_SECONDS,
    DelayingQueue,
    Retry,
    WorkQueue,
)

A, B, C = (JobKey("ns", name) for name in "abc")


def test_earliest_due_job_is_taken_first() -> None:
    queue = DelayingQueue()
    queue.schedule(A, 3.0)
    queue.schedule(B, 1.0)
    assert queue.take(0.5) is None
    assert queue.next_at() == 1.0
    assert [queue.take(5.0), queue.take(5.0), queue.take(5.0)] == [B, A, None]


def test_many_wakeups_of_one_job_are_merged() -> None:
    queue = DelayingQueue()
    for at in (2.0, 1.0, 3.0):
        queue.schedule(A, at)
    assert queue.waiting(9.0) == 1
    assert queue.take(1.0) == A
    queue.succeed(A)
    assert queue.take(9.0) is None


def test_earliest_time_wins() -> None:
    queue = DelayingQueue()
    for at in (5.0, 6.0, 1.0, 2.0):
        queue.schedule(A, at)
    assert queue.next_at() == 1.0
    assert queue.take(1.0) == A


def test_job_woken_during_its_reconcile_is_reconciled_again() -> None:
    queue = DelayingQueue()
    queue.schedule(A, 0.0)
    assert queue.take(0.0) == A
    queue.schedule(A, 1.0)
    assert queue.take(2.0) is None, "one worker at a time"
    assert queue.next_at() is None
    queue.succeed(A)
    assert queue.next_at() == 1.0
    assert queue.take(2.0) == A


def test_errors_back_off_and_success_resets_the_back_off() -> None:
    queue, now, delays = DelayingQueue(), 0.0, []
    for _ in range(9):
        queue.schedule(A, now)
        assert queue.take(now) == A
        delays.append(queue.fail(A, now))
        now += delays[-1]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert queue.take(now) == A
    queue.succeed(A)
    queue.schedule(A, now)
    queue.take(now)
    assert queue.fail(A, now) == 1


def test_event_does_not_wait_for_the_back_off() -> None:
    queue = DelayingQueue()
    queue.schedule(A, 0.0)
    queue.take(0.0)
    queue.fail(A, 0.0)
    queue.schedule(A, 0.1)
    assert queue.take(0.1) == A


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.sampled_from(["wake", "take", "succeed", "fail"])),
        max_size=60,
    )
)
def test_wakeup_is_never_lost(steps: list[tuple[JobKey, str]]) -> None:
    """A job woken after the start of its last reconcile is reconciled again, in any order."""
    queue, now = DelayingQueue(), 0.0
    owed: set[JobKey] = set()
    busy: set[JobKey] = set()
    for key, step in steps:
        now += 1.0
        if step == "wake":
            queue.schedule(key, now)
            owed.add(key)
        elif step == "take":
            taken = queue.take(now)
            if taken is not None:
                assert taken not in busy
                owed.discard(taken)
                busy.add(taken)
        elif key in busy:
            busy.remove(key)
            if step == "succeed":
                queue.succeed(key)
            else:
                queue.fail(key, now)
                owed.add(key)
    for key in busy:
        queue.succeed(key)
    now += 2 * MOST_BACKOFF_SECONDS
    found: set[JobKey] = set()
    while (taken := queue.take(now)) is not None:
        found.add(taken)
    assert found == owed


class Clock:
    """Clock controlled by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_with(
    work: Callable[[JobKey], Awaitable[float | None]],
    scenario: Callable[[WorkQueue, Clock], Awaitable[None]],
    workers: int = 2,
    failed: Callable[[Exception], None] = lambda error: None,
) -> None:
    async def main() -> None:
        clock = Clock()
        work_queue = WorkQueue(clock, workers, failed)
        runner = asyncio.create_task(work_queue.run(work))
        try:
            async with asyncio.timeout(60):
                await scenario(work_queue, clock)
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)

    asyncio.run(main())


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_concurrency_is_bounded_with_one_reconcile_per_job() -> None:
    running: list[JobKey] = []
    most: list[int] = []
    gate = asyncio.Event()

    async def work(key: JobKey) -> None:
        assert key not in running
        running.append(key)
        most.append(len(running))
        await gate.wait()
        running.remove(key)

    async def scenario(work_queue: WorkQueue, _: Clock) -> None:
        for key in (A, B, C, A, B):
            work_queue.wake(key)
        await turns()
        assert sorted(running) == [A, B]
        work_queue.wake(A)
        gate.set()
        await turns()
        assert most.count(3) == 0
        assert len(most) == 4, "A, B, C, and A once more"

    run_with(work, scenario)


def test_reconcile_may_request_its_next_time() -> None:
    looks: list[float] = []

    async def scenario(work_queue: WorkQueue, clock: Clock) -> None:
        work_queue.wake(A)
        await turns()
        assert len(looks) == 1
        clock.now = 6.0
        work_queue.wake(B)  # the runner checks its clock when an event occurs
        await turns()
        assert len(looks) == 3

    async def work(key: JobKey) -> float | None:
        looks.append(0.0)
        return 5.0 if key is A and len(looks) == 1 else None

    run_with(work, scenario)


@pytest.mark.parametrize(
    ("due", "times"), [(0.5, [0.0, 0.5, 2.5]), (5.0, [0.0, 1.0, 3.0]), (None, [0.0, 1.0, 3.0])]
)
def test_failed_reconcile_is_repeated_at_the_time_at_which_another_is_due(
    due: float | None, times: list[float]
) -> None:
    looks: list[float] = []
    clocks: list[Clock] = []

    async def scenario(work_queue: WorkQueue, clock: Clock) -> None:
        clocks.append(clock)
        work_queue.wake(A)
        while clock.now < 3.0:
            await turns()
            clock.now += 0.5
            work_queue.wake(B)  # the runner checks its clock when an event occurs
        await turns()

    async def work(key: JobKey) -> None:
        if key is A:
            looks.append(clocks[0].now)
            raise Retry("refused", due_seconds=due if len(looks) == 1 else None)

    run_with(work, scenario)
    assert looks == times


def test_errors_are_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[Exception] = []

    async def work(key: JobKey) -> None:
        if key is A:
            raise Retry("etcd is away")
        raise ZeroDivisionError("a bug")

    async def scenario(work_queue: WorkQueue, clock: Clock) -> None:
        for now in (0.0, 10.0, 20.0):
            clock.now = now
            work_queue.wake(A)
            work_queue.wake(B)
            await turns()

    with caplog.at_level(logging.WARNING):
        run_with(work, scenario, failed=counted.append)
    assert len(counted) == 6
    known = [record for record in caplog.records if "etcd is away" in record.message]
    assert [record.message for record in known] == ["retry in 1 s: etcd is away"]
    assert vars(known[0])["job"] == "ns/a"
    assert known[0].exc_info is None
    bugs = [record for record in caplog.records if "a bug" in record.message]
    assert len(bugs) == 1
    assert bugs[0].exc_info, "a traceback shows where the bug is"


def test_stop_finishes_running_reconcile_and_starts_no_other() -> None:
    async def main() -> None:
        work_queue, let_go = WorkQueue(asyncio.get_running_loop().time), asyncio.Event()
        ended: list[JobKey] = []

        async def look(key: JobKey) -> float | None:
            begun.set()
            await let_go.wait()
            ended.append(key)
            return 0.0

        begun = asyncio.Event()
        running = asyncio.create_task(work_queue.run(look))
        work_queue.wake(A)
        await begun.wait()
        finishing = asyncio.create_task(work_queue.finish())
        await asyncio.sleep(0)
        work_queue.wake(B)
        assert not finishing.done()
        let_go.set()
        async with asyncio.timeout(60):
            await finishing
        assert ended == [A]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(main())


def taken(queue: DelayingQueue, key: JobKey, seconds: float, step: float = 0.01) -> int:
    """Wake a job all the time; return the number of its reconciles."""
    found = 0
    for at in range(round(seconds / step)):
        queue.schedule(key, at * step)
        while (got := queue.take(at * step)) is not None:
            found += 1
            queue.succeed(got)
    return found


def test_job_that_changes_all_the_time_is_reconciled_at_a_limited_rate() -> None:
    queue = DelayingQueue()
    assert taken(queue, A, 1.0) <= BURST + 1 / RENEWAL_SECONDS
    assert taken(DelayingQueue(), A, 60.0) <= BURST + 60 / RENEWAL_SECONDS
    queue.schedule(B, 0.0)
    assert queue.take(1.0) == B, "another job does not wait"


def test_postponed_job_is_reconciled_once_its_rate_allows_it() -> None:
    queue = DelayingQueue()
    for _ in range(BURST):
        queue.schedule(A, 0.0)
        assert queue.take(0.0) == A
        queue.succeed(A)
    queue.schedule(A, 0.0)
    assert queue.take(0.0) is None
    assert queue.next_at() == RENEWAL_SECONDS
    assert queue.take(RENEWAL_SECONDS) == A


def test_quiet_job_has_its_whole_burst_again() -> None:
    queue = DelayingQueue()
    assert taken(queue, A, 1.0) >= BURST
    later = 1.0 + BURST * RENEWAL_SECONDS
    for _ in range(BURST):
        queue.schedule(A, later)
        assert queue.take(later) == A
        queue.succeed(A)
