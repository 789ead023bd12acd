"""Job that the client submitted: state, changes and result, by blocking and awaitable calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.notebook import LiveDisplay, as_html, error_html
from elasticjob_cli.client.places import Place, Reading
from elasticjob_cli.commands.describe import failure_lines
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.log_lines import Line, LogOptions
from elasticjob_operator import model
from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.model import Phase, Status
from elasticjob_rendezvous.protocol.text import echoed


class JobFailed(CommandError):
    """Error of `result` for a job that ended without success; it has the job's result."""

    def __init__(self, message: str, result: JobResult) -> None:
        super().__init__(message)
        self.result = result


@dataclass(frozen=True, slots=True)
class JobResult:
    """Ended job: status, every known round as in `rounds.json`, and the workers' return values."""

    name: str
    status: Status
    rounds: Sequence[dict[str, Any]] = ()
    return_values: Mapping[int, Any] = field(default_factory=dict)
    """Return values of a function job on this machine, by rank."""


class Watch:
    """Statuses of a job from now to its end: iterate with `for` or `async for`.

    A status without a phase, which a job has in its first moment, is left out.
    """

    def __init__(self, read: Callable[[], Reading], poll_seconds: float) -> None:
        self._read = read
        self._poll_seconds = poll_seconds

    def __iter__(self) -> Iterator[Status]:
        last: Status | None = None
        while True:
            seen = self._read()
            if _is_news(seen, last):
                yield (last := seen.job.status)
            if seen.ended:
                return
            time.sleep(self._poll_seconds)

    async def __aiter__(self) -> AsyncIterator[Status]:
        last: Status | None = None
        while True:
            seen = await asyncio.to_thread(self._read)
            if _is_news(seen, last):
                yield (last := seen.job.status)
            if seen.ended:
                return
            await asyncio.sleep(self._poll_seconds)


def _is_news(seen: Reading, last: Status | None) -> bool:
    status = seen.job.status
    return status != last and (status.phase is not None or seen.ended)


class SubmittedJob:
    """Job of a client's place. Its methods raise `CommandError`, such as for a deleted job."""

    def __init__(
        self, place: Place, name: str, job: ElasticJob | None = None, python: str | None = None
    ) -> None:
        self._place = place
        self._job = job
        self._python = python
        self.name = name

    def __repr__(self) -> str:
        return f"<SubmittedJob {self.name}>"

    # -- state

    def read(self) -> model.ElasticJob:
        """Return the object with its current status."""
        return self._reading().job

    @property
    def status(self) -> Status:
        return self.read().status

    @property
    def phase(self) -> Phase | None:
        """Phase of the job; None before its first status."""
        return self.status.phase

    def rounds(self) -> Sequence[dict[str, Any]]:
        """Return the rounds of the job, oldest first; a cluster keeps the latest ones."""
        return self._place.rounds(self.name)

    def explain(self) -> tuple[str, ...]:
        """Return the sentences of `elasticjob explain`."""
        return self._place.explanation(self.name)

    def logs(
        self,
        *,
        rank: int | None = None,
        round_number: int | None = None,
        pod: str | None = None,
        tail: int | None = None,
        since: timedelta | None = None,
        follow: bool = False,
    ) -> Iterator[Line]:
        """Yield the lines of all pods, merged by time, as `elasticjob logs` selects them.

        Args:
            rank: only the worker with this rank.
            round_number: only this round.
            pod: only this pod.
            tail: only this number of last lines.
            since: only lines of this last time.
            follow: continue until the job ends.
        """
        _check_numbers(rank=rank, round_number=round_number, tail=tail)
        if since is not None and not isinstance(since, timedelta):
            raise BadInput(f"since must be a datetime.timedelta, not {echoed(since)}")
        options = LogOptions(pod, rank, round_number, tail, since, False, follow)
        return self._place.lines(self.name, options)

    # -- until its end

    def watch(self) -> Watch:
        """Return the current status and each change of it, up to the end of the job."""
        return Watch(self._reading, self._place.poll_seconds)

    def wait(self, timeout: float | None = None) -> Status:
        """Wait for the end of the job, successful or not.

        A suspended job of this machine has ended; one on a cluster may be resumed and has not.

        Raises:
            TimeoutError: the job has not ended within `timeout` seconds; it continues.
        """
        _check_seconds(timeout)
        due = None if timeout is None else time.monotonic() + timeout
        while not (seen := self._reading()).ended:
            left = self._place.poll_seconds if due is None else due - time.monotonic()
            if left <= 0:
                raise self._late(timeout)
            time.sleep(min(left, self._place.poll_seconds))
        return seen.job.status

    async def wait_async(self, timeout: float | None = None) -> Status:
        """Wait as `wait` does, without blocking the event loop."""
        _check_seconds(timeout)
        status = Status()
        try:
            async with asyncio.timeout(timeout):
                async for seen in self.watch():
                    status = seen
        except TimeoutError:
            raise self._late(timeout) from None
        return status

    def result(self, timeout: float | None = None) -> JobResult:
        """Wait for the end of the job and return its result.

        Raises:
            JobFailed: the job failed, or was stopped.
            TimeoutError: the job has not ended within `timeout` seconds; it continues.
        """
        self.wait(timeout)
        return self._result()

    async def result_async(self, timeout: float | None = None) -> JobResult:
        """Return the result as `result` does, without blocking the event loop."""
        await self.wait_async(timeout)
        return await asyncio.to_thread(self._result)

    # -- in a notebook

    def display(self) -> Status:
        """Show the job in the notebook's cell until it ends; return the last status.

        An interrupt of the kernel ends the display, and the job continues. Raises `BadInput`
        without IPython.
        """
        screen, status = LiveDisplay(), Status()
        for seen in self.watch():
            status = seen
            screen.show(self._repr_html_())
        return status

    async def display_async(self) -> Status:
        """Show the job as `display` does, without blocking the event loop: other cells can run."""
        screen, status = LiveDisplay(), Status()
        async for seen in self.watch():
            status = seen
            screen.show(await asyncio.to_thread(self._repr_html_))
        return status

    def _repr_html_(self) -> str:
        """Return the current state for a notebook; a deleted job's is its error."""
        try:
            reading = self._reading()
            return as_html(reading.job, reading.job.status.explanation)
        except CommandError as error:
            return error_html(str(error))

    # -- changes

    def scale(self, nodes: int) -> int:
        """Change the desired number of nodes; return the legal size that the job gets.

        Raises `BadInput` for a negative number.
        """
        _check_numbers(nodes=nodes)
        return self._place.scale(self.name, nodes)

    def suspend(self) -> None:
        """Stop the job after a checkpoint; its object and logs remain."""
        self._place.suspend(self.name)

    def resume(self) -> None:
        """Continue a suspended job from its last checkpoint.

        A local job can be resumed only with the object that `submit` returned.
        """
        self._place.resume(self.name, self._job, self._python)

    def delete(self) -> None:
        """Stop the job if it runs, and delete its status and logs."""
        self._place.delete(self.name)

    def _reading(self) -> Reading:
        return self._place.read(self.name)

    def _late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(f'job "{self.name}" has not ended within {timeout:g} s; it continues')

    def _result(self) -> JobResult:
        found = self.read()
        rounds = self.rounds()
        if found.status.phase is Phase.SUCCEEDED:
            values = self._place.return_values(found, rounds)
            return JobResult(self.name, found.status, rounds, values)
        result = JobResult(self.name, found.status, rounds)
        raise JobFailed(failure_text(found), result)


def failure_text(job: model.ElasticJob) -> str:
    """Return the reason for a job's failure: its condition, and the latest failure."""
    status = job.status
    name, phase = job.metadata.name, status.phase or "without a status"
    reasons = [
        f": {condition.reason}: {condition.message}"
        for condition in status.conditions
        if condition.type in ("Failed", "Suspended") and condition.status == "True"
    ]
    lines = [f'job "{name}" did not succeed: {phase}{reasons[0] if reasons else ""}']
    failure = latest_failure(status)
    return "\n".join(lines + ([] if failure is None else failure_lines(failure)))


def _check_numbers(**values: object) -> None:
    """Raise `BadInput` for a value that is neither None nor a number from 0 on."""
    for name, value in values.items():
        if value is not None and (type(value) is not int or value < 0):
            raise BadInput(f"{name} must be a number from 0 on, not {echoed(value)}")


def _check_seconds(timeout: object) -> None:
    """Raise `BadInput` for a timeout that is neither None nor a number of seconds."""
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and (not is_number or timeout != timeout):
        raise BadInput(f"timeout must be a number of seconds or None, not {echoed(timeout)}")
