"""Level-triggered work queue of job keys, with per-key back-off and a rate limit.

A wake-up carries no data, so several for one job merge. One worker at a time reconciles a job; a
wake-up meanwhile schedules another reconcile. After an error the job is retried with exponential
back-off; a new wake-up does not wait for it. The rate of each job's reconciles is limited: a job
whose records or pods change all the time does not delay the others.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Awaitable, Callable
from itertools import count

from elasticjob_operator.logs import of_job
from elasticjob_operator.reconcile.job_memory import JobKey
from elasticjob_rendezvous.token_bucket import TokenBuckets

log = logging.getLogger(__name__)

WORKERS = 16
FIRST_BACKOFF_SECONDS = 1.0
MOST_BACKOFF_SECONDS = 60.0

BURST = 20
"""Number of reconciles of one job that may follow each other without a pause."""
RENEWAL_SECONDS = 0.5
"""Interval in seconds between the reconciles of a job that has used up its burst."""

Work = Callable[[JobKey], Awaitable[float | None]]
"""Reconcile of one job; returns the seconds until the next one, None for no further one."""


class Retry(Exception):
    """Incomplete reconcile with a known reason; the work queue retries it.

    Args:
        kind: the reason as a metric label; if empty, the type of its cause is used.
        due_seconds: seconds until a reconcile is due for another reason, such as a deadline; it
            does not wait for the back-off.
    """

    def __init__(self, message: str, kind: str = "", due_seconds: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.due_seconds = due_seconds


class DelayingQueue:
    """Schedule of due keys and keys in progress. No I/O; times are the caller's clock."""

    def __init__(self) -> None:
        self._buckets = TokenBuckets[JobKey](BURST, RENEWAL_SECONDS)
        self._due: dict[JobKey, float] = {}
        self._heap: list[tuple[float, int, JobKey]] = []
        self._order = count()
        self._began: dict[JobKey, float] = {}
        self._failures: dict[JobKey, int] = {}

    def schedule(self, key: JobKey, at: float) -> None:
        """Schedule `key` for `at`; keep an earlier schedule."""
        if self._due.get(key, at + 1) <= at:
            return
        self._due[key] = at
        if key not in self._began:
            heapq.heappush(self._heap, (at, next(self._order), key))

    def take(self, now: float) -> JobKey | None:
        """Return the key that has been due longest and is not in progress, and mark it begun."""
        while self._heap and self._heap[0][0] <= now:
            at, _, key = heapq.heappop(self._heap)
            if key in self._began or self._due.get(key) != at:
                continue
            bucket = self._buckets.get(key, now)
            if not bucket.take(now):
                self._due[key] = bucket.available_at
                heapq.heappush(self._heap, (bucket.available_at, next(self._order), key))
                continue
            del self._due[key]
            self._began[key] = now
            return key
        return None

    def succeed(self, key: JobKey) -> None:
        self._failures.pop(key, None)
        self._end(key)

    def fail(self, key: JobKey, now: float) -> float:
        """End the work and schedule the next attempt; return the seconds until then."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(failures - 1, 16), MOST_BACKOFF_SECONDS)
        self.schedule(key, now + delay)
        self._end(key)
        return delay

    def next_at(self) -> float | None:
        """Return the next due time; None if nothing is scheduled."""
        while self._heap:
            at, _, key = self._heap[0]
            if key not in self._began and self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    def waiting(self, now: float) -> int:
        """Return the number of keys that are due and not yet taken."""
        return sum(at <= now for at in self._due.values())

    @property
    def running(self) -> int:
        """Number of keys in progress."""
        return len(self._began)

    def oldest_began(self) -> float | None:
        """Return the start of the longest-running work; None if there is none."""
        return min(self._began.values(), default=None)

    def _end(self, key: JobKey) -> None:
        del self._began[key]
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], next(self._order), key))


class WorkQueue:
    """Work queue that runs `work` for each woken key, at most `workers` at a time."""

    def __init__(
        self,
        clock: Callable[[], float],
        workers: int = WORKERS,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._clock = clock
        self._slots = asyncio.Semaphore(workers)
        self._queue = DelayingQueue()
        self._changed = asyncio.Event()
        self._failed = failed
        self._logged: dict[JobKey, str] = {}
        self._ending = False

    def wake(self, key: JobKey, delay_seconds: float = 0.0) -> None:
        """Schedule a reconcile after the delay, or earlier if another wake-up demands it."""
        self._queue.schedule(key, self._clock() + delay_seconds)
        self._changed.set()

    @property
    def depth(self) -> int:
        """Number of jobs that are due and wait for a worker."""
        return self._queue.waiting(self._clock())

    @property
    def running(self) -> int:
        """Number of reconciles in progress."""
        return self._queue.running

    @property
    def longest_seconds(self) -> float:
        """Duration of the longest-running reconcile in seconds."""
        began = self._queue.oldest_began()
        return 0.0 if began is None else self._clock() - began

    async def run(self, work: Work) -> None:
        """Process the queue until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._slots.acquire()
                key = await self._next()
                tasks.create_task(self._reconcile(key, work))

    async def finish(self) -> None:
        """Stop starting reconciles and wait for the running ones."""
        self._ending = True
        while self._queue.oldest_began() is not None:
            self._changed.clear()
            await self._changed.wait()

    async def _next(self) -> JobKey:
        while True:
            self._changed.clear()
            key = None if self._ending else self._queue.take(self._clock())
            if key is not None:
                return key
            at = None if self._ending else self._queue.next_at()
            seconds = None if at is None else max(at - self._clock(), 0.0)
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _reconcile(self, key: JobKey, work: Work) -> None:
        try:
            seconds = await work(key)
        except Exception as error:  # a job's top-level task: every error is retried
            self._retry(key, error)
        else:
            self._logged.pop(key, None)
            if seconds is not None:
                self._queue.schedule(key, self._clock() + seconds)
            self._queue.succeed(key)
        finally:
            self._slots.release()
            self._changed.set()

    def _retry(self, key: JobKey, error: Exception) -> None:
        now = self._clock()
        delay = self._queue.fail(key, now)
        due = error.due_seconds if isinstance(error, Retry) else None
        if due is not None and due < delay:
            self._queue.schedule(key, now + due)
            delay = due
        self._failed(error)
        text = f"{type(error).__name__}: {error}"
        if text == self._logged.get(key):
            return  # already logged
        self._logged[key] = text
        trace = None if isinstance(error, Retry) else error
        log.warning("retry in %.0f s: %s", delay, error, exc_info=trace, extra=of_job(key))
