"""Poller of the agents' status, for jobs whose rendezvous the operator cannot read itself.

Polls about once a second, and at once when a job is reconciled, but only while it has pods that can
answer. A report expires when its agent stops answering.

A request to an agent that does not answer lasts until its timeout. Tenants create pods, so each job
has a budget of concurrent requests, and within it a smaller one for agents that did not answer
their last request or were never asked; these are asked again after growing delays. Each namespace
has a budget too, so that the jobs of one tenant do not use up those of others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

from elasticjob_operator.domain.manifests.names import HEALTH_PORT
from elasticjob_operator.domain.observed.etcd_records import Records, merge_reports, rendezvous_view
from elasticjob_operator.domain.observed.state import SeenTrouble
from elasticjob_operator.logs import of_job
from elasticjob_operator.rendezvous.report_client import (
    MAX_REPORT_BYTES,
    POLL_ERRORS,
    Agent,
    fetch_report,
)
from elasticjob_rendezvous.protocol.records.agent_reports import (
    AgentReport,
    read,
    store_trouble,
)
from elasticjob_rendezvous.protocol.records.members import RoundState

log = logging.getLogger(__name__)

PODS_A_SECOND = 100
"""Maximum request rate per job; a large job is polled less often."""
REPORT_LIFETIME_SECONDS = 5.0
"""Lifetime of an agent's report in seconds."""
SAMPLE = 4
"""Number of agents polled together for a job whose records are in etcd."""
JOB_REQUESTS = 24
"""Maximum concurrent requests of a job to agents that answered their last one."""
JOB_UNPROVEN_REQUESTS = 8
"""Maximum concurrent requests of a job to other agents."""
NAMESPACE_REQUESTS = 64
MAX_CONCURRENT_REQUESTS = 512
POLL_SECONDS = 1.0
"""Time after which a poll of a job begins no further request; the next poll continues."""
LEAST_BACKOFF_SECONDS = 0.1
MOST_BACKOFF_SECONDS = 2.0
SLOW_SECONDS = 0.5
MOST_SILENT_BACKOFF_SECONDS = 16.0
REPORT_BYTES = 256 * 1024
"""Maximum size of an answer without the assignments of its rosters."""
REPORT_BYTES_PER_NODE = 512
"""Bytes of one node in the rosters of an answer."""
FAILURES = "failures/"
"""Beginning of the keys of failures in a report."""
Changed = Callable[[str, str], None]
"""Callback with namespace and uid of a job whose agents report something new."""


@dataclass(frozen=True, slots=True)
class PollTarget:
    """Agents to poll for one incarnation of a job, and the job's key, which signs the requests.

    `sampled` is set when the records are in etcd: a few agents at a time are polled for the health
    of their own connection to it.
    """

    prefix: str
    job_key: bytes
    agents: tuple[Agent, ...]
    sampled: bool = False


FetchReport = Callable[[Agent, int, bytes, int], Awaitable[bytes]]
"""Function that polls an agent at a port, with the job's key and the maximum size of the answer:
`fetch_report`."""


@dataclass(frozen=True, slots=True)
class Polling:
    """Intervals of the polls and other durations in seconds, and the port of the agents.

    Args:
        period_seconds: time between two polls of a job that is read through its agents.
        least_period_seconds: minimum time between two polls of a job, however often it is
            reconciled.
        sample_seconds: time between two polls of a sample.
        lifetime_seconds: lifetime of an agent's report.
        most_backoff_seconds: maximum delay after a request that failed at once, as while a
            container starts.
        most_silent_backoff_seconds: maximum delay after a request that took longer than
            `SLOW_SECONDS`.
    """

    period_seconds: float = 1.0
    least_period_seconds: float = 0.2
    sample_seconds: float = 2.0
    lifetime_seconds: float = REPORT_LIFETIME_SECONDS
    most_backoff_seconds: float = MOST_BACKOFF_SECONDS
    most_silent_backoff_seconds: float = MOST_SILENT_BACKOFF_SECONDS
    port: int = HEALTH_PORT


@dataclass(slots=True)
class _AgentMemory:
    """Requests to one agent.

    Attributes:
        failures: number of failed requests in a row.
        requested_at: time of the last request.
        due: time before which it is not asked again.
    """

    failures: int = 0
    requested_at: float = float("-inf")
    due: float = float("-inf")

    @property
    def proven(self) -> bool:
        """True if it answered its last request."""
        return self.requested_at > float("-inf") and not self.failures

    def succeed(self, now: float) -> None:
        self.failures, self.requested_at = 0, now

    def fail(self, began: float, now: float, polling: Polling) -> None:
        slow = now - began > SLOW_SECONDS
        most = polling.most_silent_backoff_seconds if slow else polling.most_backoff_seconds
        base = max(now - began, LEAST_BACKOFF_SECONDS)
        self.due = now + min(base * 2.0 ** min(self.failures, 16), most)
        self.failures, self.requested_at = self.failures + 1, now


@dataclass(slots=True)
class _PolledJob:
    namespace: str
    uid: str
    target: PollTarget
    since: float
    due: float
    began: float = float("-inf")
    busy: bool = False
    polled_all: bool = False
    agents: dict[Agent, _AgentMemory] = field(default_factory=dict)
    reports: dict[str, tuple[float, AgentReport]] = field(default_factory=dict)
    reported: object = None
    logged: str = ""
    next_sample: int = 0


class AgentPoller:
    """Latest reports of the agents of all followed jobs. `clock` is monotonic."""

    def __init__(
        self,
        changed: Changed,
        clock: Callable[[], float] = time.monotonic,
        polling: Polling | None = None,
        request: FetchReport | None = None,
    ) -> None:
        self._changed = changed
        self._clock = clock
        self._polling = polling or Polling()
        self._fetch_report = request or fetch_report
        self._jobs: dict[str, _PolledJob] = {}
        self._news = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)
        self._namespaces: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def follow(self, namespace: str, uid: str, target: PollTarget) -> None:
        """Poll these agents from now on, starting soon; an empty set of agents pauses polling."""
        now = self._clock()
        job = self._jobs.get(uid)
        if job is None or job.target.prefix != target.prefix:
            job = self._jobs[uid] = _PolledJob(namespace, uid, target, since=now, due=now)
        job.target = target
        job.due = min(job.due, max(now, job.began + self._polling.least_period_seconds))
        self._news.set()

    def forget(self, uid: str) -> None:
        """Drop a deleted job."""
        self._jobs.pop(uid, None)

    def records(
        self, uid: str, pods: Collection[str], ended: Set[str] = frozenset()
    ) -> Records | None:
        """Return the reported records of members whose pods (uids) exist; None without a report.

        The pods in `ended` have no agent any more. Of their last reports only the failures count,
        unless they saw the end of the job: the other members may not know their round.
        """
        job = self._jobs.get(uid)
        if job is None:
            return None
        job.reports = {member: report for member, report in job.reports.items() if member in pods}
        return self._merged(job, pods, ended)

    def has_seen_end(self, uid: str, member: str) -> bool:
        """Return True if this member reported the end of the job."""
        job = self._jobs.get(uid)
        _, report = (None, None) if job is None else job.reports.get(member, (None, None))
        return report is not None and report.state == RoundState.CLOSED

    def trouble(self, uid: str) -> SeenTrouble | None:
        """Return the store trouble that the job's agents report; None if they report none."""
        job = self._jobs.get(uid)
        there = set() if job is None else {agent.member for agent in job.target.agents}
        reports = (
            []
            if job is None
            else [report for report in self._valid_reports(job) if report.member in there]
        )
        trouble = store_trouble(reports)
        if trouble is None:
            return None
        return SeenTrouble(
            trouble, tuple(sorted(report.member for report in reports if report.store))
        )

    def is_settling(self, uid: str) -> bool:
        """Return True while the first poll of the job's agents is incomplete and still recent.

        Partial answers are not conclusive: a member that has not answered yet is not lost.
        """
        job = self._jobs.get(uid)
        if job is None or not job.target.agents or (job.polled_all and self._valid_reports(job)):
            return False
        return self._clock() - job.since < REPORT_LIFETIME_SECONDS

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                now = self._clock()
                for job in self._jobs.values():
                    if job.target.agents and job.due <= now and not job.busy:
                        job.busy, job.began, job.due = True, now, now + self._period_seconds(job)
                        tasks.create_task(self._poll_all(job))
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a job is due or `follow` is called."""
        waiting = [job.due for job in self._jobs.values() if job.target.agents and not job.busy]
        seconds = max(min(waiting) - self._clock(), 0.0) if waiting else None
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    async def _poll_all(self, job: _PolledJob) -> None:
        target = job.target
        try:
            job.agents = {agent: job.agents.get(agent) or _AgentMemory() for agent in target.agents}
            if target.sampled:  # its reports do not contain members whose pods are gone
                present = {agent.member for agent in target.agents}
                job.reports = {
                    name: report for name, report in job.reports.items() if name in present
                }
            now = self._clock()
            due = [agent for agent in _sample(job) if job.agents[agent].due <= now]
            due.sort(key=lambda one: (job.agents[one].failures, job.agents[one].requested_at))
            await self._poll_some(job, due, target.job_key)
            job.polled_all = target.sampled or all(
                known.requested_at > float("-inf") for known in job.agents.values()
            )
            if not job.polled_all:  # agents that were never asked
                job.due = min(job.due, job.began + POLL_SECONDS)
            if self._jobs.get(job.uid) is job:
                self._notify(job)
        except Exception as error:  # a job's top-level task: its failure must not end the others
            self._log_failure(job, error)
        finally:
            job.busy = False
            self._news.set()

    async def _poll_some(self, job: _PolledJob, due: Iterable[Agent], job_key: bytes) -> None:
        """Poll these agents, in this order, as far as the budget of the job lasts."""
        due = list(due)
        proven = iter([one for one in due if job.agents[one].proven])
        others = iter([one for one in due if not job.agents[one].proven])
        until = time.monotonic() + POLL_SECONDS
        namespace = self._namespaces.setdefault(
            job.namespace, asyncio.Semaphore(NAMESPACE_REQUESTS)
        )

        async def work(queue: Iterator[Agent]) -> None:
            for agent in queue:
                async with namespace, self._slots:
                    await self._poll(job, agent, job_key)
                if time.monotonic() >= until:
                    return

        workers = [work(proven) for _ in range(min(JOB_REQUESTS, len(due)))]
        workers += [work(others) for _ in range(min(JOB_UNPROVEN_REQUESTS, len(due)))]
        await asyncio.gather(*workers)

    async def _poll(self, job: _PolledJob, agent: Agent, job_key: bytes) -> None:
        known, began = job.agents[agent], self._clock()
        try:
            body = await self._fetch_report(agent, self._polling.port, job_key, _most_bytes(job))
            report = read(body)
        except POLL_ERRORS as error:
            log.debug("agent %s of job %s does not answer: %s", agent.member, job.uid, error)
            known.fail(began, self._clock(), self._polling)
            return
        known.succeed(self._clock())
        if report.member == agent.member:  # else another pod has the address by now
            job.reports[agent.member] = self._clock(), report

    def _log_failure(self, job: _PolledJob, error: Exception) -> None:
        logged = f"{type(error).__name__}: {error}"
        if logged != job.logged:
            job.logged = logged
            about = of_job(f"{job.namespace}/{job.uid}")
            log.error("cannot read its agents' reports", exc_info=error, extra=about)

    def _notify(self, job: _PolledJob) -> None:
        """Wake the job's reconcile if it would see a difference."""
        present = {agent.member for agent in job.target.agents}
        found = None if job.target.sampled else self._merged(job, present)
        view = None if found is None else rendezvous_view(found)
        seen = self.trouble(job.uid)
        reported = view, None if seen is None else (seen.trouble.state, seen.trouble.text)
        if reported != (job.reported or (None, None)):
            job.reported = reported
            self._changed(job.namespace, job.uid)

    def _merged(
        self, job: _PolledJob, pods: Collection[str], ended: Set[str] = frozenset()
    ) -> Records | None:
        whole = [
            report
            for report in self._valid_reports(job)
            if report.member in pods
            and (report.member not in ended or report.state == RoundState.CLOSED)
        ]
        if not whole:
            return None
        last = [
            _failures_of(report)
            for _, report in job.reports.values()
            if report.member in ended and report.state != RoundState.CLOSED
        ]
        present = [uid for uid in pods if uid not in ended]
        return merge_reports(job.target.prefix, [*whole, *last], present)

    def _valid_reports(self, job: _PolledJob) -> list[AgentReport]:
        """Return the unexpired reports; the last report of a closed rendezvous never expires."""
        now = self._clock()
        lifetime = self._polling.lifetime_seconds + self._period_seconds(job)
        if not job.target.sampled:
            lifetime -= self._polling.period_seconds
        return [
            report
            for at, report in job.reports.values()
            if report.state == RoundState.CLOSED or now - at < lifetime
        ]

    def _period_seconds(self, job: _PolledJob) -> float:
        if job.target.sampled:
            sampled = sum(other.target.sampled for other in self._jobs.values())
            return max(self._polling.sample_seconds, sampled * SAMPLE / PODS_A_SECOND)
        return max(self._polling.period_seconds, len(job.target.agents) / PODS_A_SECOND)


def _failures_of(report: AgentReport) -> AgentReport:
    """Return the report with the failures alone."""
    failures = {key: one for key, one in report.records.items() if key.startswith(FAILURES)}
    return replace(report, records=failures)


def _most_bytes(job: _PolledJob) -> int:
    """Return the maximum size of an agent's answer: the operator keeps one of each agent."""
    size = REPORT_BYTES + REPORT_BYTES_PER_NODE * len(job.target.agents)
    return min(size, MAX_REPORT_BYTES)


def _sample(job: _PolledJob) -> tuple[Agent, ...]:
    """Return the agents to poll now: all, or the next few and those that reported trouble."""
    agents = job.target.agents
    if not job.target.sampled or len(agents) <= SAMPLE:
        return agents
    first = job.next_sample % len(agents)
    job.next_sample = first + SAMPLE
    some = (agents + agents)[first : first + SAMPLE]
    reported = {member for member, (_, report) in job.reports.items() if report.store is not None}
    again = [agent for agent in agents if agent.member in reported and agent not in some]
    return (*some, *again[:SAMPLE])
