"""Links and probes over real loopback connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

import pytest

from elasticjob_launcher.proof import (
    LINK,
    PROBE_LAUNCHER,
    BadPeer,
    Exchange,
    Peer,
    Refusal,
    answering,
    challenge,
    link_answer,
    link_question,
    probe_answer,
    reached_address,
    read_challenge,
    read_link_answer,
    read_question,
)
from elasticjob_rendezvous import listener as peer_listener
from elasticjob_rendezvous.links import dial, server, wire
from elasticjob_rendezvous.links.server import PeerServer
from elasticjob_rendezvous.links.wire import Channel
from elasticjob_rendezvous.protocol.effects import Link, Probe
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeaveNoticesReceived,
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
    Verdict,
)
from elasticjob_rendezvous.protocol.records.members import LeaveNotice

KEY = b"the job's key"
HOST = "127.0.0.1"
A = Peer("id-a", "s1")
B = Peer("id-b", "s2")
PATIENCE_SECONDS = 60.0
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


QUICK = wire.LinkTimes(heartbeat_seconds=0.1, first_redial_seconds=0.02, accept_again_seconds=0.2)
SHORT = replace(QUICK, silence_seconds=0.5, quiet_seconds=0.25, handshake_seconds=0.5)
"""Silence limits of a sixth."""


class Heard:
    """Events in the order in which they were posted."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self.all: list[Event] = []

    def post(self, event: Event) -> None:
        self.all.append(event)
        self._queue.put_nowait(event)

    async def until(self, wanted: Event) -> None:
        """Wait for this event; skip others."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while await self._queue.get() != wanted:
                pass


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


@contextlib.asynccontextmanager
async def coordinator(
    heard: Heard, job_key: bytes = KEY, workers: int = 0, times: wire.LinkTimes = QUICK
) -> AsyncIterator[tuple[PeerServer, int]]:
    server = PeerServer(
        "id-a", job_key, heard.post, HOST, lambda: workers, session=lambda: "s1", times=times
    )
    try:
        yield server, await server.start()
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def link_to(
    port: int,
    heard: Heard,
    leaving: Callable[[], wire.Leaving] = tuple,
    member: str = "id-a",
    job_key: bytes = KEY,
    times: wire.LinkTimes = QUICK,
) -> AsyncIterator[asyncio.Task[None]]:
    """Hold member b's link to the agent at this port."""
    link = Link(member, "s1", HOST, port)
    task = asyncio.create_task(
        dial.hold_link(link, "id-b", "s2", lambda: job_key, heard.post, leaving, 0.0, times)
    )
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@contextlib.asynccontextmanager
async def listening(handler: Handler) -> AsyncIterator[int]:
    """Run a server of a stranger; yield its port."""
    closed: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed.append(writer)
        await handler(reader, writer)

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in closed:
            writer.close()


def free_port() -> int:
    """Return a port without a listener."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        return int(bound.getsockname()[1])


# -- links ----------------------------------------------------------------------------


def test_both_sides_of_a_link_receive_heartbeats() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (server, port), link_to(port, there):
            await there.until(LinkUp("id-a", "s1"))
            await here.until(PeerUp("id-b", "s2"))
            server.serve(7)
            await there.until(LinkHeartbeat("id-a", "s1", 7))
            await here.until(PeerHeartbeat("id-b", "s2"))
            await here.until(PeerHeartbeat("id-b", "s2"))
            await there.until(LinkHeartbeat("id-a", "s1", 7))  # again, with the heartbeat

    run(scenario())


def test_link_reports_the_duration_of_the_coordinator_evidence() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        loop = asyncio.get_running_loop()
        until = loop.time() + 20.0
        server = PeerServer(
            "id-a", KEY, here.post, HOST, lambda: 1, evidence_until=lambda: until, times=QUICK
        )
        port = await server.start()
        async with link_to(port, there):
            await there.until(LinkHeartbeat("id-a", "s1", 0))
        await server.stop()
        [heard] = [event for event in there.all if isinstance(event, LinkHeartbeat)][:1]
        assert heard.vouched_seconds is not None
        assert 10.0 < heard.vouched_seconds <= 20.0

    run(scenario())


@pytest.mark.parametrize(("workers", "told"), [(1, True), (0, False)])
def test_probed_agent_reports_the_deadline_of_its_workers(workers: int, told: bool) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + 20.0
        server = PeerServer(
            "id-a", KEY, Heard().post, HOST, lambda: workers, live_until=lambda: until
        )
        port = await server.start()
        answer = await dial.run_probe(Probe("id-a", "s1", HOST, port, 0), B, KEY)
        await server.stop()
        assert (answer.live_seconds is not None) is told
        assert answer.live_seconds is None or 10.0 < answer.live_seconds <= 20.0

    run(scenario())


def test_new_link_reports_the_round_at_once() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (server, port):
            server.serve(3)
            async with link_to(port, there):
                await there.until(LinkHeartbeat("id-a", "s1", 3))
        assert there.all[:2] == [LinkUp("id-a", "s1"), LinkHeartbeat("id-a", "s1", 3)]

    run(scenario())


def test_leave_notice_is_delivered_once_to_each_side_of_a_link() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        leaves = (LeaveNotice("id-b", "n", "drained"),)
        goes = (LeaveNotice("id-a", "m", "its node goes"),)
        leaving: list[wire.Leaving] = [()]
        async with coordinator(here) as (server, port), link_to(port, there, lambda: leaving[0]):
            leaving[0] = leaves
            await here.until(LeaveNoticesReceived(leaves))
            server.announce(goes)
            await there.until(LeaveNoticesReceived(goes))
            leaving[0] = ()
            await here.until(LeaveNoticesReceived(()))
        assert len([event for event in here.all if isinstance(event, LeaveNoticesReceived)]) == 2

    run(scenario())


def test_each_side_knows_when_it_was_last_received() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        began = time.monotonic()
        async with coordinator(here) as (_, port), link_to(port, there):
            for _ in range(5):
                await here.until(PeerHeartbeat("id-b", "s2"))
                await there.until(LinkHeartbeat("id-a", "s1", 0))
        for heard in (here.all, there.all):
            sent = [
                event.sent for event in heard if isinstance(event, PeerHeartbeat | LinkHeartbeat)
            ]
            times = [at for at in sent if at is not None]
            assert len(times) == len(sent) >= 5
            assert began <= times[0] < times[-1] <= time.monotonic()
            assert times == sorted(times)

    run(scenario())


def test_messages_received_by_one_side_only_prove_nothing_more() -> None:
    """The other side still reports the last message that it received, which does not advance."""
    count = wire.Count(linked_at=10.0)
    assert count.line(11.0) == {"heard": 0}
    assert count.proven(0, 11.5) == 10.0
    assert count.line(12.0) == {"heard": 1}
    assert count.proven(1, 12.5) == 11.0
    assert [count.proven(1, now) for now in range(13, 19)] == [11.0] * 6
    assert count.line(20.0)["heard"] == 8
    assert count.proven(3, 20.5) == 20.0


def test_receipt_of_a_message_never_sent_is_refused() -> None:
    count = wire.Count(linked_at=10.0)
    count.line(11.0)
    assert count.proven(1, 11.5) == 11.0
    with pytest.raises(BadPeer) as refused:
        count.proven(2, 12.0)
    assert refused.value.reason is Refusal.MALFORMED


def test_coordinator_detects_a_dead_member_at_once() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (_, port):
            async with link_to(port, there):
                await here.until(PeerUp("id-b", "s2"))
            await here.until(PeerDown("id-b", "s2"))

    run(scenario())


def test_member_detects_a_dead_coordinator_and_dials_again() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with contextlib.AsyncExitStack() as stack:
            first = contextlib.AsyncExitStack()
            _, port = await first.enter_async_context(coordinator(here))
            await stack.enter_async_context(link_to(port, there))
            await there.until(LinkUp("id-a", "s1"))
            await first.aclose()
            await there.until(LinkDown("id-a", "s1", refused=False))
            await there.until(LinkDown("id-a", "s1", refused=True))
            again = socket.create_server((HOST, port))
            connection, _ = await asyncio.to_thread(again.accept)
            connection.close()
            again.close()
            await there.until(LinkDown("id-a", "s1", refused=False))

    run(scenario())


def test_silent_member_is_reported_as_gone() -> None:
    async def scenario() -> None:
        here = Heard()
        async with coordinator(here, times=SHORT) as (_, port):
            member = await introduced(port)
            await here.until(PeerUp("id-b", "s2"))
            member.beat()
            await here.until(PeerHeartbeat("id-b", "s2"))
            await here.until(PeerQuiet("id-b", "s2"))
            await here.until(PeerDown("id-b", "s2"))
            assert here.all.count(PeerQuiet("id-b", "s2")) == 1
            assert not member.reader.at_eof() or await member.reader.read() == b""
            member.writer.close()

    run(scenario())


def test_silent_coordinator_is_reported_as_gone() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = wire.nonce()
        writer.write(wire.line(challenge(nonce)))
        question = read_question(KEY, await wire.read(reader, PATIENCE_SECONDS), nonce, (LINK,))
        writer.write(wire.line(link_answer(KEY, answering(question, A, nonce), question.mac)))

    async def scenario() -> None:
        there = Heard()
        async with listening(silent) as port, link_to(port, there, times=SHORT):
            await there.until(LinkUp("id-a", "s1"))
            await there.until(LinkQuiet("id-a", "s1"))
            await there.until(LinkDown("id-a", "s1", refused=False))
            assert there.all.count(LinkQuiet("id-a", "s1")) == 1

    run(scenario())


def test_message_after_missed_heartbeats_is_received() -> None:
    """None of it is lost, and the next silence counts from there."""
    patient = replace(QUICK, quiet_seconds=0.1, silence_seconds=PATIENCE_SECONDS)

    async def scenario() -> None:
        here = Heard()
        async with coordinator(here, times=patient) as (_, port):
            member = await introduced(port)
            for _ in range(2):
                await here.until(PeerQuiet("id-b", "s2"))
                member.beat()
                await here.until(PeerHeartbeat("id-b", "s2"))
            assert PeerDown("id-b", "s2") not in here.all
            member.writer.close()

    run(scenario())


def test_newer_of_two_links_of_a_session_counts() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (_, port):
            stale = await introduced(port)
            await here.until(PeerUp("id-b", "s2"))
            async with link_to(port, there):
                await here.until(PeerUp("id-b", "s2"))
                stale.writer.close()
                for _ in range(3):
                    await here.until(PeerHeartbeat("id-b", "s2"))
                assert PeerDown("id-b", "s2") not in here.all
            await here.until(PeerDown("id-b", "s2"))

    run(scenario())


@dataclass
class Member:
    """Member b with a link opened by hand, on which it sends only heartbeats asked for."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    channel: Channel
    heard: int = 0

    def beat(self) -> None:
        self.writer.write(self.channel.seal({"heard": self.heard}))


async def introduced(port: int, job_key: bytes = KEY) -> Member:
    """Open member b's link by hand; send nothing more."""
    reader, writer = await asyncio.open_connection(HOST, port)
    nonce = read_challenge(await wire.read(reader, PATIENCE_SECONDS))
    exchange = Exchange(B, wire.nonce(), A, nonce)
    question = link_question(job_key, exchange)
    writer.write(wire.line(question))
    try:
        answer = await wire.read(reader, PATIENCE_SECONDS)
    except EOFError:
        writer.close()
        raise
    exchange, mac = read_link_answer(job_key, exchange, answer, question["mac"])
    return Member(reader, writer, Channel(job_key, exchange, mac, coordinates=False))


# -- strangers ------------------------------------------------------------------------


def test_peer_without_the_job_key_is_not_linked(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        here = Heard()
        async with coordinator(here) as (_, port):
            with pytest.raises(EOFError):
                await introduced(port, job_key=b"another job's key")
        assert here.all == []

    run(scenario())
    assert "WrongProof: the peer does not hold this job's key" in caplog.text


def test_member_does_not_link_to_agent_of_another_job() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here, b"another job's key") as (_, port), link_to(port, there):
            await there.until(LinkDown("id-a", "s1", refused=False))
        assert LinkUp("id-a", "s1") not in there.all
        assert here.all == []

    run(scenario())


def test_member_does_not_link_to_another_member() -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (_, port), link_to(port, there, member="id-z"):
            await there.until(LinkDown("id-z", "s1", refused=False))
        assert here.all == []

    run(scenario())


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r\n",
        b'{"ask": "link"}\n',
        b'{"nonce": "00000000000000000000000000000000", "link": {}}\n',
        b'{"ask": "link", "nonce": "%s", "from": ["b", ""], "to": ["a", ""], "mac": ""}\n'
        % (b"\\ud800" * 16),
        b"\n",
        b"x" * 9000,
        b"",
    ],
    ids=["http", "no identity", "older release", "half characters", "empty", "long", "nothing"],
)
def test_unauthenticated_connection_is_closed_without_effect_on_others(line: bytes) -> None:
    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here, times=SHORT) as (_, port), link_to(port, there, times=SHORT):
            await here.until(PeerUp("id-b", "s2"))
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(line)
            async with asyncio.timeout(PATIENCE_SECONDS):
                with contextlib.suppress(ConnectionResetError):
                    assert set(json.loads(await reader.readline())) == {"nonce"}
                    assert await reader.read() == b""
            writer.close()
            await here.until(PeerHeartbeat("id-b", "s2"))
        assert LinkDown("id-a", "s1", refused=False) not in there.all

    run(scenario())


class Crammed:
    """Listener in a process that is out of file descriptors, until it is `relieved`."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.relieved = False
        self.refusals = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def accept(self) -> Any:
        if self.relieved:
            return self._real.accept()
        self.refusals += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_without_file_descriptors_the_server_pauses_accepting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listeners: list[Crammed] = []
    real = socket.create_server

    def create_server(*args: Any, **options: Any) -> Any:
        listeners.append(Crammed(real(*args, **options)))
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", create_server)

    async def scenario() -> None:
        here, there = Heard(), Heard()
        async with coordinator(here) as (_, port), link_to(port, there):
            (listener,) = listeners
            async with asyncio.timeout(PATIENCE_SECONDS):
                while listener.refusals < 3:
                    await asyncio.sleep(0)
            turns = 0
            while listener.refusals == 3:  # each of them a chance to try again
                turns += 1
                await asyncio.sleep(0)
            assert turns > 3
            listener.relieved = True
            await here.until(PeerUp("id-b", "s2"))

    run(scenario())


def test_link_is_dialled_again_with_the_key_that_was_read_meanwhile() -> None:
    """Agents of a run without a password read their key from etcd after they have started."""

    async def scenario() -> None:
        here, there, keys = Heard(), Heard(), [b"x" * 32]
        async with coordinator(here) as (_, port):
            link = Link("id-a", "s1", HOST, port)
            task = asyncio.create_task(
                dial.hold_link(link, "id-b", "s2", lambda: keys[-1], there.post, tuple, 0.0, QUICK)
            )
            await there.until(LinkDown("id-a", "s1", refused=False))
            keys.append(KEY)
            await there.until(LinkUp("id-a", "s1"))
            task.cancel()
            await asyncio.wait([task])

    run(scenario())


# Impossible addresses of agents, which a record may nevertheless contain.
NOWHERE = [("node..x", 1), ("n" * 64, 1), ("a\0b", 1), (HOST, 70_000), (HOST, -1)]


@pytest.mark.parametrize(("address", "port"), NOWHERE)
def test_link_to_unreachable_address_is_down_and_dialled_again(address: str, port: int) -> None:
    async def scenario() -> None:
        heard = Heard()
        link = Link("id-a", "s1", address, port)
        task = asyncio.create_task(
            dial.hold_link(link, "id-b", "s2", lambda: KEY, heard.post, lambda: (), 0.0, QUICK)
        )
        await heard.until(LinkDown("id-a", "s1", refused=False))
        await heard.until(LinkDown("id-a", "s1", refused=False))
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    run(scenario())


# -- probes ---------------------------------------------------------------------------


@pytest.mark.parametrize(("address", "port"), NOWHERE)
def test_probe_of_unreachable_address_proves_nothing(address: str, port: int) -> None:
    async def scenario() -> None:
        probed = await dial.run_probe(Probe("id-a", "s1", address, port, port), B, KEY)
        assert probed.verdict is Verdict.UNKNOWN

    run(scenario())


async def verdict(
    launcher_port: int,
    agent_port: int = 0,
    member: str = "id-a",
    times: wire.LinkTimes = QUICK,
) -> Verdict:
    probed = await dial.run_probe(
        Probe(member, "s1", HOST, agent_port, launcher_port), B, KEY, times
    )
    assert (probed.member, probed.session) == (member, "s1")
    return probed.verdict


def launcher(job_key: bytes = KEY, member: str = "id-a", **facts: Any) -> Handler:
    """Return a launcher that answers as the real one does."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = wire.nonce()
        writer.write(wire.line(challenge(nonce)))
        question = read_question(
            KEY, await wire.read(reader, PATIENCE_SECONDS), nonce, (PROBE_LAUNCHER,)
        )
        exchange = answering(question, Peer(member, "s1"), nonce)
        at = reached_address(writer.get_extra_info("sockname"))
        told = {"at": at, "round": 1, "workers": 0, "agent_attached": False, **facts}
        writer.write(wire.line(probe_answer(job_key, exchange, told, question.mac)))
        await writer.drain()
        writer.close()

    return serve


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"workers": 2, "agent_attached": False}, Verdict.WORKERS_ALIVE),
        ({"workers": 0, "agent_attached": False}, Verdict.GONE),
        ({"workers": 2, "agent_attached": True}, Verdict.BOTH_ALIVE),
        ({"workers": 0, "agent_attached": True}, Verdict.AGENT_ALIVE),
        ({"workers": "two", "agent_attached": True}, Verdict.UNKNOWN),
        ({"workers": 0, "unknown": 1}, Verdict.UNKNOWN),
        ({"workers": 2, "member": "id-z"}, Verdict.GONE),
        ({"workers": 2, "agent_attached": True, "member": "id-z"}, Verdict.GONE),
        ({"workers": 0, "member": "id-z", "at": "10.0.0.9 1"}, Verdict.UNKNOWN),
    ],
    ids=[
        "orphan",
        "no workers",
        "attached",
        "attached, no workers",
        "malformed field",
        "unknown field",
        "other member",
        "other member attached",
        "other member through a relay",
    ],
)
def test_probe_result_for_each_launcher_answer(body: dict[str, Any], expected: Verdict) -> None:
    async def scenario() -> None:
        async with listening(launcher(**body)) as port:
            assert await verdict(port) is expected

    run(scenario())


def test_refused_connection_is_proof() -> None:
    async def scenario() -> None:
        assert await verdict(free_port()) is Verdict.GONE

    run(scenario())


def test_answer_with_another_key_proves_nothing() -> None:
    async def scenario() -> None:
        async with listening(launcher(b"another job's key", workers=0)) as port:
            assert await verdict(port) is Verdict.UNKNOWN

    run(scenario())


@pytest.mark.parametrize("said", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"[]\n"])
def test_silent_or_malformed_answer_proves_nothing(said: bytes | None) -> None:
    async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if said is not None:
            writer.write(said)
        await reader.read()

    async def scenario() -> None:
        async with listening(stranger) as port:
            assert await verdict(port, times=SHORT) is Verdict.UNKNOWN

    run(scenario())


def test_exiting_process_is_probed_until_it_is_gone() -> None:
    """A dying process may accept a connection and drop it; the next one is refused."""

    async def scenario() -> None:
        dropped = asyncio.Event()

        async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()
            dropped.set()

        server = await asyncio.start_server(drop, HOST, 0)
        asked = asyncio.create_task(verdict(server.sockets[0].getsockname()[1]))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await dropped.wait()
            server.close()
            assert await asked is Verdict.GONE

    run(scenario())


def test_agent_itself_is_probed_without_a_launcher() -> None:
    async def scenario() -> None:
        async with coordinator(Heard()) as (_, port):
            assert await verdict(0, agent_port=port) is Verdict.AGENT_ALIVE
            assert await verdict(0, agent_port=port, member="id-z") is Verdict.GONE
        assert await verdict(0, agent_port=port) is Verdict.GONE
        async with coordinator(Heard(), workers=1) as (_, port):
            assert await verdict(0, agent_port=port) is Verdict.BOTH_ALIVE

    run(scenario())


# -- wrong lines on an established link ------------------------------------------------


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the refusals of earlier tests: all listeners of a process share one rate limit."""
    monkeypatch.setattr(server, "refusals", peer_listener.RefusalLog())


@pytest.mark.usefixtures("fresh_log")
@pytest.mark.parametrize(
    ("line", "reason", "accepted"),
    [
        (lambda member: b'{"heard":0}\n', "WrongLine", 0),
        (lambda member: member.channel.seal({"heard": 0}) * 2, "WrongLine", 1),
        (lambda member: member.channel.seal({"heard": 0}).replace(b"0", b"1", 1), "WrongLine", 0),
        (lambda member: member.channel.seal({"heard": 0, "round": 9}), "UnknownField", 0),
        (lambda member: member.channel.seal({"heard": 99}), "Malformed", 0),
        (lambda member: member.channel.seal({"heard": 0, "leaving": {"b": 1}}), "Malformed", 0),
    ],
    ids=["injected", "repeated", "changed", "unknown field", "impossible", "malformed"],
)
def test_wrong_line_closes_the_link_with_one_log_line(
    line: Callable[[Member], bytes], reason: str, accepted: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        here = Heard()
        async with coordinator(here) as (_, port):
            member = await introduced(port)
            await here.until(PeerUp("id-b", "s2"))
            member.writer.write(line(member) + member.channel.seal({"heard": 0}))
            await here.until(PeerDown("id-b", "s2"))
            with contextlib.suppress(ConnectionResetError):
                await member.reader.read()
            member.writer.close()
        heard = [event for event in here.all if isinstance(event, PeerHeartbeat)]
        assert len(heard) == accepted

    run(scenario())
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith(f"closed the link of member 'id-b': {reason}")


def test_reflected_line_closes_the_link_of_the_member(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger with the coordinator's address returns the member's own heartbeat."""

    async def reflect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonce = wire.nonce()
        writer.write(wire.line(challenge(nonce)))
        question = read_question(KEY, await wire.read(reader, 5), nonce, (LINK,))
        writer.write(wire.line(link_answer(KEY, answering(question, A, nonce), question.mac)))
        writer.write(await reader.readline())

    async def scenario() -> None:
        there = Heard()
        async with listening(reflect) as port, link_to(port, there):
            await there.until(LinkUp("id-a", "s1"))
            await there.until(LinkDown("id-a", "s1", refused=False))
        assert not any(isinstance(event, LinkHeartbeat) for event in there.all)

    run(scenario())
    assert caplog.records[0].getMessage().startswith("closed the link to member 'id-a': WrongLine")
