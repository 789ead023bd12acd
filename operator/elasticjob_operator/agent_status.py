"""Poller of the agents' status, for jobs whose rendezvous the operator cannot read itself.

Polls about once a second, and at once when a job is reconciled, but only while it has pods that can
answer. A report expires when its agent stops answering.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from elasticjob_operator.core.mirrored import Records, records_of_agents, rendezvous_view
from elasticjob_operator.core.observed import SeenTrouble
from elasticjob_operator.core.sidecar import HEALTH_PORT
from elasticjob_operator.logs import of_job
from elasticjob_rendezvous.core.codec import MalformedRecord
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.served import PATH, Served, headers, read, store_trouble

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
LEAST_PERIOD_SECONDS = 0.2
"""Minimum time between two polls of a job, however often it is reconciled."""
PODS_A_SECOND = 100
"""Maximum request rate per job; a large job is polled less often."""
ASK_SECONDS = 2.0
SILENCE_SECONDS = 5.0
"""Lifetime of an agent's report in seconds."""
SAMPLE = 4
"""Number of agents polled together for a job whose records are in etcd."""
SAMPLE_SECONDS = 2.0
MOST_AT_ONCE = 64
MOST_BYTES = 4 * 1024 * 1024
NO_ANSWER = (
    OSError,
    TimeoutError,
    ValueError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)
"""Errors of `ask` and of parsing its answer."""

Changed = Callable[[str, str], None]
"""Callback with namespace and uid of a job whose agents report something new."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent to poll: its pod's uid and address."""

    member: str
    address: str


@dataclass(frozen=True, slots=True)
class Asked:
    """Agents to poll for one incarnation of a job, and the job's key, which signs the requests.

    `sampled` is set when the records are in etcd: a few agents at a time are polled for the health
    of their own connection to it.
    """

    prefix: str
    job_key: bytes
    agents: tuple[Agent, ...]
    sampled: bool = False


@dataclass(slots=True)
class _Followed:
    namespace: str
    uid: str
    asked: Asked
    since: float
    due: float
    began: float = float("-inf")
    busy: bool = False
    asked_all: bool = False
    reports: dict[str, tuple[float, Served]] = field(default_factory=dict)
    told: object = None
    complaint: str = ""
    next_sample: int = 0


class AgentStatus:
    """Latest reports of the agents of all followed jobs. `clock` is monotonic."""

    def __init__(self, changed: Changed, clock: Callable[[], float] = time.monotonic) -> None:
        self._changed = changed
        self._clock = clock
        self._jobs: dict[str, _Followed] = {}
        self._news = asyncio.Event()
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    def follow(self, namespace: str, uid: str, asked: Asked) -> None:
        """Poll these agents from now on, starting soon; an empty set of agents pauses polling."""
        now = self._clock()
        job = self._jobs.get(uid)
        if job is None or job.asked.prefix != asked.prefix:
            job = self._jobs[uid] = _Followed(namespace, uid, asked, since=now, due=now)
        job.asked = asked
        job.due = min(job.due, max(now, job.began + LEAST_PERIOD_SECONDS))
        self._news.set()

    def forget(self, uid: str) -> None:
        """Drop a deleted job."""
        self._jobs.pop(uid, None)

    def records(self, uid: str, pods: Collection[str]) -> Records | None:
        """Return the reported records of members whose pods (uids) exist; None without a report."""
        job = self._jobs.get(uid)
        if job is None:
            return None
        job.reports = {member: said for member, said in job.reports.items() if member in pods}
        return self._merged(job, pods)

    def trouble(self, uid: str) -> SeenTrouble | None:
        """Return the store trouble that the job's agents report; None if they report none."""
        job = self._jobs.get(uid)
        there = set() if job is None else {agent.member for agent in job.asked.agents}
        said = [] if job is None else [one for one in self._believed(job) if one.member in there]
        trouble = store_trouble(said)
        if trouble is None:
            return None
        return SeenTrouble(trouble, tuple(sorted(one.member for one in said if one.store)))

    def is_settling(self, uid: str) -> bool:
        """Return True while the first poll of the job's agents is incomplete and still recent.

        Partial answers are not conclusive: a member that has not answered yet is not lost.
        """
        job = self._jobs.get(uid)
        if job is None or not job.asked.agents or (job.asked_all and self._believed(job)):
            return False
        return self._clock() - job.since < SILENCE_SECONDS

    async def run(self) -> None:
        """Poll until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                now = self._clock()
                for job in self._jobs.values():
                    if job.asked.agents and job.due <= now and not job.busy:
                        job.busy, job.began, job.due = True, now, now + self._period_seconds(job)
                        tasks.create_task(self._ask_all(job))
                await self._pause()

    async def _pause(self) -> None:
        """Wait until a job is due or `follow` is called."""
        waiting = [job.due for job in self._jobs.values() if job.asked.agents and not job.busy]
        seconds = max(min(waiting) - self._clock(), 0.0) if waiting else None
        try:
            async with asyncio.timeout(seconds):
                await self._news.wait()
        except TimeoutError:
            return

    async def _ask_all(self, job: _Followed) -> None:
        asked = job.asked
        try:
            some = _sample(job)
            await asyncio.gather(*(self._ask(job, agent, asked.job_key) for agent in some))
            job.asked_all = True
            if self._jobs.get(job.uid) is job:
                self._tell(job)
        except Exception as error:  # a job's top-level task: its failure must not end the others
            self._complain(job, error)
        finally:
            job.busy = False
            self._news.set()

    async def _ask(self, job: _Followed, agent: Agent, job_key: bytes) -> None:
        async with self._slots:
            try:
                body = await ask(agent.address, HEALTH_PORT, job_key)
                said = read(body)
            except NO_ANSWER as error:
                log.debug("agent %s of job %s does not answer: %s", agent.member, job.uid, error)
                return
        if said.member == agent.member:  # else another pod has the address by now
            job.reports[agent.member] = self._clock(), said

    def _complain(self, job: _Followed, error: Exception) -> None:
        complaint = f"{type(error).__name__}: {error}"
        if complaint != job.complaint:
            job.complaint = complaint
            about = of_job(f"{job.namespace}/{job.uid}")
            log.error("cannot read its agents' reports", exc_info=error, extra=about)

    def _tell(self, job: _Followed) -> None:
        """Wake the job's reconcile if it would see a difference."""
        present = {agent.member for agent in job.asked.agents}
        found = None if job.asked.sampled else self._merged(job, present)
        view = None if found is None else rendezvous_view(found)
        seen = self.trouble(job.uid)
        told = view, None if seen is None else (seen.trouble.state, seen.trouble.text)
        if told != (job.told or (None, None)):
            job.told = told
            self._changed(job.namespace, job.uid)

    def _merged(self, job: _Followed, pods: Collection[str]) -> Records | None:
        present = [said for said in self._believed(job) if said.member in pods]
        return records_of_agents(job.asked.prefix, present, pods) if present else None

    def _believed(self, job: _Followed) -> list[Served]:
        """Return the unexpired reports; the last report of a closed rendezvous never expires."""
        now, believed = self._clock(), SILENCE_SECONDS
        if job.asked.sampled:
            believed += self._period_seconds(job)
        return [
            said
            for at, said in job.reports.values()
            if said.state == RoundState.CLOSED or now - at < believed
        ]

    def _period_seconds(self, job: _Followed) -> float:
        if job.asked.sampled:
            sampled = sum(other.asked.sampled for other in self._jobs.values())
            return max(SAMPLE_SECONDS, sampled * SAMPLE / PODS_A_SECOND)
        return max(PERIOD_SECONDS, len(job.asked.agents) / PODS_A_SECOND)


@dataclass(frozen=True, slots=True)
class Agents:
    """Rendezvous of one job as reported by its agents; the counterpart of `Etcd` for backends that
    the operator cannot read. The job's Secret holds its author's credentials and the agents' key.
    """

    status: AgentStatus
    namespace: str
    uid: str
    users: None = None
    ca: None = None
    own: bool = False

    def is_settling(self, now: float) -> bool:
        return self.status.is_settling(self.uid)

    def trouble_of(self, uid: str) -> SeenTrouble | None:
        return self.status.trouble(uid)

    def follow(self, asked: Asked) -> None:
        self.status.follow(self.namespace, self.uid, asked)

    def records(self, pods: Collection[str]) -> Records | None:
        return self.status.records(self.uid, pods)


async def ask(address: str, port: int, job_key: bytes) -> bytes:
    """Return one agent's answer. Raises one of `NO_ANSWER` without a usable one."""
    async with asyncio.timeout(ASK_SECONDS):
        reader, writer = await asyncio.open_connection(address, port)
        try:
            writer.write(_question(address, port, job_key))
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.partition(b"\r\n")[0].split(b" ", 2)
            if line[1:2] != [b"200"]:
                raise MalformedRecord(PATH, f"it answers {b' '.join(line[1:]).decode('latin-1')}")
            return await _body(reader)
        finally:
            writer.close()


def _question(address: str, port: int, job_key: bytes) -> bytes:
    host = f"[{address}]" if ":" in address else address
    lines = {
        "Host": f"{host}:{port}",
        **headers(job_key, time.time_ns() // 1_000_000),
        "Connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"GET {PATH} HTTP/1.1\r\n{head}\r\n".encode("latin-1")


async def _body(reader: asyncio.StreamReader) -> bytes:
    """Read until the agent closes the connection."""
    parts, room = [], MOST_BYTES
    while part := await reader.read(65536):
        room -= len(part)
        if room < 0:
            raise MalformedRecord(PATH, f"its answer is longer than {MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _sample(job: _Followed) -> tuple[Agent, ...]:
    """Return the agents to poll now: all, or the next few and those that reported trouble."""
    agents = job.asked.agents
    if not job.asked.sampled or len(agents) <= SAMPLE:
        return agents
    first = job.next_sample % len(agents)
    job.next_sample = first + SAMPLE
    some = (agents + agents)[first : first + SAMPLE]
    told = {member for member, (_, said) in job.reports.items() if said.store is not None}
    again = [agent for agent in agents if agent.member in told and agent not in some]
    return (*some, *again[:SAMPLE])
