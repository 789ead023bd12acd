"""Polling of agents: real HTTP servers in this process, and a clock of the test's."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from elasticjob_operator.domain.manifests.names import HEALTH_PORT
from elasticjob_operator.domain.observed.etcd_records import Records, merge_reports
from elasticjob_operator.domain.observed.state import SeenTrouble
from elasticjob_operator.rendezvous import agent_poller
from elasticjob_operator.rendezvous.agent_poller import (
    JOB_UNPROVEN_REQUESTS,
    MOST_BACKOFF_SECONDS,
    AgentPoller,
    Polling,
    PollTarget,
)
from elasticjob_operator.rendezvous.report_client import POLL_ERRORS, Agent, fetch_report
from elasticjob_rendezvous.protocol.records.agent_reports import (
    AgentReport,
    agent_report,
    answer_headers,
    proven,
    read_headers,
    written,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble

PREFIX = job_prefix("team", "uid", 1)
KEYS = Keys(PREFIX)
SECONDS = 60.0


def answer(member: str, number: int, state: RoundState = RoundState.FINAL) -> bytes:
    records: dict[str, object] = {
        KEYS.session(member, "s"): Member(member, "s", member, "10.0.0.1", 0, round=number),
        KEYS.round: Round(number, state, Cause(CauseKind.START)),
    }
    return json.dumps(written(agent_report(PREFIX, "c10d", member, records, state.value))).encode()


@dataclass
class Server:
    """Server that answers each request with `reply`; `heard` holds the requests."""

    status: str = "200 OK"
    body: bytes = b""
    reply: bytes | None = None
    """Bytes to send instead of the proven answer."""
    member: str = "one"
    port: int = 0
    heard: list[bytes] = field(default_factory=list)
    held: asyncio.Event | None = None
    """Event that delays the reply until it is set."""

    def says(self, body: bytes, status: str = "200 OK") -> None:
        self.body, self.status = body, status

    def answers(self, head: bytes) -> bytes:
        """Return the answer to a request as the agent of `member` gives it."""
        if self.reply is not None:
            return self.reply
        given = read_headers(head)
        request = proven(b"key", given, self.member, time.time_ns() // 1_000_000)
        status = self.status if request is not None else "403 Forbidden"
        proof = {} if request is None else answer_headers(b"key", request, self.body)
        lines = "".join(f"{name}: {value}\r\n" for name, value in proof.items())
        return f"HTTP/1.1 {status}\r\n{lines}Connection: close\r\n\r\n".encode() + self.body


@asynccontextmanager
async def serving(
    body: bytes, address: str = "127.0.0.1", port: int = 0, member: str = "one"
) -> AsyncIterator[Server]:
    one = Server(body=body, member=member)

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            one.heard.append(head)
            if one.held is not None:
                await one.held.wait()
            writer.write(one.answers(head))
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):  # the poller has given up
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answered, address, port)
    async with server:
        one.port = server.sockets[0].getsockname()[1]
        yield one


def often(port: int = HEALTH_PORT) -> Polling:
    """Return polls of agents at this port, one immediately after the other."""
    return Polling(period_seconds=0.01, least_period_seconds=0.0, sample_seconds=0.01, port=port)


def steady(port: int) -> Polling:
    """Return frequent polls for a machine on which an answer may take longer than a request."""
    return replace(
        often(port),
        lifetime_seconds=SECONDS,
        most_backoff_seconds=0.05,
        most_silent_backoff_seconds=0.05,
    )


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(SECONDS):
            await scenario()

    asyncio.run(bounded())


def test_agent_report_request_carries_proof_of_the_job_key() -> None:
    async def scenario() -> None:
        async with serving(b"{}") as server:
            assert await fetch_report(Agent("one", "127.0.0.1"), server.port, b"key") == b"{}"
        [head] = server.heard
        assert head.startswith(b"GET /rendezvous HTTP/1.1\r\n")
        assert b"X-ElasticJob-Proof: " in head
        assert b"X-ElasticJob-Time: " in head
        assert b"X-ElasticJob-Nonce: " in head

    run(scenario)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 403 Forbidden\r\n\r\n{}",
        b"garbage\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 5000,
        b"x" * 200_000,
    ],
    ids=["refused", "no HTTP", "hung up", "too long", "no end of a head"],
)
def test_invalid_answer_is_ignored(reply: bytes) -> None:
    async def scenario() -> None:
        async with serving(b"") as server:
            server.reply = reply
            with pytest.raises(POLL_ERRORS):
                await fetch_report(Agent("one", "127.0.0.1"), server.port, b"key", most_bytes=4096)

    run(scenario)


def test_answer_without_proof_of_the_job_key_is_ignored() -> None:
    """From a process that has the address of the agent, and from another agent of the job."""

    async def scenario() -> None:
        async with serving(answer("one", 1)) as server:
            server.reply = b"HTTP/1.1 200 OK\r\n\r\n" + answer("one", 1)
            with pytest.raises(MalformedRecord, match="no proof of the job's key"):
                await fetch_report(Agent("one", "127.0.0.1"), server.port, b"key")
            server.reply = None
            with pytest.raises(MalformedRecord, match="403"):
                await fetch_report(Agent("two", "127.0.0.1"), server.port, b"key")

    run(scenario)


def test_changed_report_wakes_the_job_and_ended_job_is_forgotten() -> None:
    woken: list[tuple[str, str]] = []
    pods = {"one"}

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        late = 0.0
        async with serving(answer("one", 1)) as server:
            status = AgentPoller(
                lambda *job: woken.append(job), lambda: loop.time() + late, often(server.port)
            )
            asking = asyncio.create_task(status.run())
            target = PollTarget(PREFIX, b"key", (Agent("one", "127.0.0.1"),))
            assert status.records("uid", pods) is None
            status.follow("team", "uid", target)
            assert status.is_settling("uid")
            await until(lambda: len(woken) == 1)
            assert not status.is_settling("uid")
            assert rounds(status) == 1
            questions = len(server.heard)
            await until(lambda: len(server.heard) > questions + 3)
            assert len(woken) == 1, "nothing has changed since"
            server.says(answer("one", 2))
            await until(lambda: len(woken) == 2)
            assert rounds(status) == 2
            server.says(answer("other", 9))
            questions = len(server.heard)
            await until(lambda: len(server.heard) > questions + 3)
            assert rounds(status) == 2, "another pod has the address now: it says nothing of ours"
            late = agent_poller.REPORT_LIFETIME_SECONDS + 1
            status.follow("team", "uid", target)
            await until(lambda: len(woken) == 3)
            assert status.records("uid", pods) is None
            assert not status.is_settling("uid")
            server.says(answer("one", 3, RoundState.CLOSED))
            await until(lambda: len(woken) == 4)
        late += agent_poller.REPORT_LIFETIME_SECONDS + 1
        assert rounds(status) == 3, "the last word stays"
        status.follow("team", "uid", PollTarget(PREFIX, b"key", ()))
        assert status.records("uid", set()) is None, "as long as its pod"
        status.forget("uid")
        assert status.records("uid", pods) is None
        asking.cancel()

    def rounds(status: AgentPoller) -> int:
        found = status.records("uid", pods)
        assert found is not None
        assert found.round is not None
        return found.round.number

    run(scenario)


def failed(member: str) -> bytes:
    """Return the report of a member whose worker failed in round 2, which others do not know."""
    records: dict[str, object] = {
        KEYS.session(member, "s"): Member(member, "s", member, "10.0.0.1", 0, round=2),
        KEYS.round: Round(2, RoundState.FINAL, Cause(CauseKind.START)),
        KEYS.failure(2, member): Failure(2, member, member, 0, 0, FailureClass.USER_ERROR, 1),
    }
    return json.dumps(written(agent_report(PREFIX, "c10d", member, records, "final"))).encode()


def test_of_an_ended_agent_only_failures_count_until_its_pod_is_gone() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        late = 0.0
        async with (
            serving(answer("one", 1)) as running,
            serving(failed("two"), "127.0.0.2", running.port, "two"),
        ):
            status = AgentPoller(lambda *_: None, lambda: loop.time() + late, often(running.port))
            asking = asyncio.create_task(status.run())
            agents = (Agent("one", "127.0.0.1"), Agent("two", "127.0.0.2"))
            status.follow("team", "uid", PollTarget(PREFIX, b"key", agents))
            await until(lambda: len(members(status)) == 2)
            assert not status.has_seen_end("uid", "two")
            status.follow("team", "uid", PollTarget(PREFIX, b"key", agents[:1]))
            late = agent_poller.REPORT_LIFETIME_SECONDS + 1
            questions = len(running.heard)
            await until(lambda: len(running.heard) > questions + 1)
            found = status.records("uid", {"one", "two"}, {"two"})
            assert found is not None
            assert [one.id for one in found.members] == ["one"]
            assert found.round is not None
            assert found.round.number == 1
            assert [one.member for one in found.failures] == ["two"]
            assert status.records("uid", {"one", "two"}, {"one", "two"}) is None
            found = status.records("uid", {"one"})
            assert found is not None
            assert found.failures == ()
            running.says(answer("one", 1, RoundState.CLOSED))
            await until(lambda: status.has_seen_end("uid", "one"))
            found = status.records("uid", {"one"}, {"one"})
            assert found is not None
            assert found.round is not None
            assert found.round.state is RoundState.CLOSED
        asking.cancel()

    def members(status: AgentPoller) -> list[str]:
        found = status.records("uid", {"one", "two"})
        return [] if found is None else [one.id for one in found.members]

    run(scenario)


def test_reports_of_some_agents_are_not_complete() -> None:
    """A starting operator would consider the slow ones lost."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        async with (
            serving(answer("one", 1)) as quick,
            serving(answer("two", 1), "127.0.0.2", quick.port, "two") as slow,
        ):
            slow.held = asyncio.Event()
            status = AgentPoller(lambda *_: None, loop.time, Polling(port=quick.port))
            asking = asyncio.create_task(status.run())
            agents = (Agent("one", "127.0.0.1"), Agent("two", "127.0.0.2"))
            status.follow("team", "uid", PollTarget(PREFIX, b"key", agents))
            await until(lambda: status.records("uid", {"one", "two"}) is not None)
            assert status.is_settling("uid")
            slow.held.set()
            await until(lambda: not status.is_settling("uid"))
            found = status.records("uid", {"one", "two"})
            assert found is not None
            assert {member.id for member in found.members} == {"one", "two"}
        asking.cancel()

    run(scenario)


def test_contradictory_reports_of_one_job_do_not_affect_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers of one job's agents must not affect the other jobs."""
    woken: list[str] = []

    def not_of_these(
        prefix: str, said: Collection[AgentReport], present: Collection[str]
    ) -> Records:
        if {"one", "two"} & set(present):
            raise ValueError("they contradict each other")
        return merge_reports(prefix, said, present)

    monkeypatch.setattr(agent_poller, "merge_reports", not_of_these)

    async def scenario() -> None:
        async with (
            serving(answer("one", 1)) as bad,
            serving(answer("two", 1), "127.0.0.2", bad.port, "two"),
            serving(answer("three", 1), "127.0.0.3", bad.port, "three"),
        ):
            clock = asyncio.get_running_loop().time
            status = AgentPoller(lambda _, uid: woken.append(uid), clock, often(bad.port))
            asking = asyncio.create_task(status.run())
            those = (Agent("one", "127.0.0.1"), Agent("two", "127.0.0.2"))
            status.follow("team", "bad", PollTarget(PREFIX, b"key", those))
            await until(lambda: len(bad.heard) > 3)
            status.follow(
                "team", "good", PollTarget(PREFIX, b"key", (Agent("three", "127.0.0.3"),))
            )
            await until(lambda: "good" in woken)
        asking.cancel()

    run(scenario)
    told = [(vars(one).get("job"), one.message) for one in caplog.records]
    assert told.count(("team/bad", "cannot read its agents' reports")) == 1


def test_silent_pods_of_one_job_cost_no_other_job_an_interval() -> None:
    """600 pods that never answer, beside ten honest jobs of the namespace, which are polled on."""
    silent = tuple(Agent(f"silent-{n}", "127.0.0.2") for n in range(600))
    held: list[str] = []

    async def ask(agent: Agent, port: int, job_key: bytes, most_bytes: int) -> bytes:
        if agent in silent:
            held.append(agent.member)
            await asyncio.Event().wait()
        return await fetch_report(agent, port, job_key, most_bytes)

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(serving(answer("m0", 1), "127.0.0.10", 0, "m0"))
            honest = [first]
            for n in range(1, 10):
                one = serving(answer(f"m{n}", 1), f"127.0.0.{10 + n}", first.port, f"m{n}")
                honest.append(await stack.enter_async_context(one))
            poller = AgentPoller(lambda *_: None, polling=steady(first.port), request=ask)
            poller.follow("team", "bad", PollTarget(PREFIX, b"key", silent))
            for n in range(10):
                target = PollTarget(PREFIX, b"key", (Agent(f"m{n}", f"127.0.0.{10 + n}"),))
                poller.follow("team", f"uid-{n}", target)
            polling = asyncio.create_task(poller.run())
            await until(lambda: all(len(one.heard) > 8 for one in honest))
            assert all(poller.records(f"uid-{n}", {f"m{n}"}) is not None for n in range(10))
            assert len(held) == len(set(held)) == JOB_UNPROVEN_REQUESTS, "none has ended"
            polling.cancel()
            await asyncio.wait([polling])

    run(scenario)


def test_agent_that_does_not_answer_is_asked_again_after_growing_delays() -> None:
    """Its neighbour is asked all the time meanwhile."""
    late, asked = 0.0, {"good": 0, "bad": 0}

    async def reply(agent: Agent, port: int, job_key: bytes, most_bytes: int) -> bytes:
        asked[agent.member] += 1
        if agent.member == "bad":
            raise OSError("refused")
        return answer(agent.member, 1)

    async def scenario() -> None:
        nonlocal late
        poller = AgentPoller(lambda *_: None, lambda: late, often(), reply)
        agents = (Agent("bad", "10.0.0.1"), Agent("good", "10.0.0.2"))
        polling = asyncio.create_task(poller.run())
        gaps, last = [], 0.0
        while late < 10.0:
            late += 0.1
            before, failed = asked["good"], asked["bad"]
            poller.follow("team", "uid", PollTarget(PREFIX, b"key", agents))
            await until(lambda: asked["good"] > before)  # noqa: B023
            if asked["bad"] > failed:
                gaps.append(round(late - last, 1))
                last = late
        polling.cancel()
        assert gaps[1:4] == sorted(gaps[1:4])
        assert max(gaps) >= MOST_BACKOFF_SECONDS - 0.1
        assert asked["bad"] < 12
        assert not poller.is_settling("uid"), "all were asked, and one answers"

    run(scenario)


def test_new_agents_of_a_large_job_are_all_asked_soon() -> None:
    async def scenario() -> None:
        asked = set()

        async def reply(agent: Agent, port: int, job_key: bytes, most_bytes: int) -> bytes:
            asked.add(agent.member)
            await asyncio.sleep(0.005)
            return answer(agent.member, 1)

        poller = AgentPoller(lambda *_: None, request=reply)
        agents = tuple(Agent(f"m{n}", "10.0.0.1") for n in range(1024))
        polling = asyncio.create_task(poller.run())
        poller.follow("team", "uid", PollTarget(PREFIX, b"key", agents))
        async with asyncio.timeout(60):
            await until(lambda: len(asked) == 1024)
        polling.cancel()

    run(scenario)


async def until(so: Callable[[], bool]) -> None:
    """Poll until the condition holds; the scenario has the deadline."""
    while not so():
        await asyncio.sleep(0.005)


def test_etcd_agents_are_sampled_and_those_in_trouble_polled_again() -> None:
    trouble = StoreTrouble("etcd", StoreState.REFUSING, "etcd:2379", "etcdserver: no", 1)
    woken: list[tuple[str, str]] = []
    calls: list[str] = []
    in_trouble = {"pod-9"}

    async def answer(agent: Agent, port: int, job_key: bytes, most_bytes: int) -> bytes:
        address = agent.address
        calls.append(address)
        store = trouble if address in in_trouble else None
        return json.dumps(written(AgentReport("etcd", address, {}, store=store))).encode()

    async def scenario() -> None:
        status = AgentPoller(lambda *job: woken.append(job), polling=often(), request=answer)
        agents = tuple(Agent(f"pod-{n}", f"pod-{n}") for n in range(20))
        status.follow("team", "uid", PollTarget(PREFIX, b"key", agents, sampled=True))
        asking = asyncio.create_task(status.run())
        await until(lambda: status.trouble("uid") is not None)
        assert status.trouble("uid") == SeenTrouble(trouble, ("pod-9",))
        assert woken[-1] == ("team", "uid")
        before = len(calls)
        await until(lambda: len(calls) > before + 10 * agent_poller.SAMPLE)
        some = calls[before:]
        assert some.count("pod-9") > 2 * some.count("pod-3"), "it is asked each time"
        in_trouble.clear()
        await until(lambda: status.trouble("uid") is None)
        asking.cancel()

    run(scenario)
