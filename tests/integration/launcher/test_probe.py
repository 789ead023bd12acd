"""Launcher's answers to probes of other nodes about its workers."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.worker_runtime import Started, Stopped
from elasticjob_launcher.probe import MAX_PROBERS
from elasticjob_launcher.proof import (
    PROBE_LAUNCHER,
    Answer,
    Exchange,
    Message,
    Peer,
    link_question,
    probe_question,
    read_challenge,
    read_probe_answer,
)
from elasticjob_rendezvous.links import dial, wire
from elasticjob_rendezvous.links.server import PeerServer
from elasticjob_rendezvous.protocol.effects import Link, Probe
from elasticjob_rendezvous.protocol.events import Event, PeerUp, Verdict
from tests.integration.etcd_server import Ports
from tests.integration.launcher_rig import (
    JOB_KEY,
    PATIENCE_SECONDS,
    AgentProcess,
    SilentAgent,
    StartLauncher,
    alive,
    attached,
    few_descriptors,
    launcher_file,
    process_tag,
    soon,
    start_launcher,
    start_workers,
    until,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

PROBER = Peer("pod-1", "s7")
MEMBER = Peer("pod-0", "s1")
OBSERVED_SECONDS = 1.5
NO_CONNECTION = "cannot accept connections, new ones must wait: Too many open files"


async def raw_probe(port: int, line: bytes) -> list[Message]:
    """Send a line; return the lines after the challenge."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(line)
            challenge, *rest = (await reader.read()).splitlines()
            read_challenge(json.loads(challenge))
            return [json.loads(line) for line in rest]
    finally:
        writer.close()


async def said(
    port: int,
    target: Peer = MEMBER,
    newest: int = 0,
    key: bytes = JOB_KEY,
    source: str = "127.0.0.1",
    **changes: Any,
) -> tuple[Exchange, Message, Message]:
    """Send a probe by hand; return the exchange, the question and the launcher's line."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        nonce = read_challenge(await wire.read(reader, PATIENCE_SECONDS))
        exchange = Exchange(PROBER, wire.nonce(), target, nonce)
        question = {**probe_question(key, exchange, PROBE_LAUNCHER, newest, False), **changes}
        writer.write(wire.line(question))
        return exchange, question, await wire.read(reader, PATIENCE_SECONDS)
    finally:
        writer.close()


async def probe(
    port: int, newest: int = 0, target: Peer = MEMBER, source: str = "127.0.0.1"
) -> Answer:
    """Probe with the number of the newest round."""
    exchange, question, answer = await said(port, target, newest, source=source)
    return read_probe_answer(JOB_KEY, exchange, answer, question["mac"])[1]


def test_answer_describes_worker_state(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, hello = await attached(launcher)
        await runtime.start(start_workers(4, ("sleep", "100"), ("sleep", "100"), ("/no/such",)))
        await until(events, Started)

        answer = await probe(hello.probe_port)
        assert answer == Answer(
            MEMBER, f"127.0.0.1 {hello.probe_port}", True, 2, 4, None, answer.mac
        )
        assert (await probe(hello.probe_port)).mac != answer.mac

        await runtime.aclose()
        orphaned = await probe(hello.probe_port)
        assert (orphaned.workers, orphaned.agent_attached) == (2, False)
        runtime, events, _ = await attached(launcher, session="s2")
        await runtime.stop(4, 0)
        await until(events, Stopped)
        stopped = await probe(hello.probe_port)
        assert (stopped.answerer.session, stopped.round, stopped.workers) == ("s2", None, 0)
        await runtime.aclose()

    asyncio.run(scenario())


def is_open(sock: socket.socket) -> bool:
    """Return True unless the other side has closed the connection."""
    sock.setblocking(False)
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_probe_is_answered_beside_silent_connections_of_a_stranger(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _events, hello = await attached(launcher)
        for _ in range(10):  # their timeout may end first on a busy machine
            flood = [
                socket.create_connection(("127.0.0.1", hello.probe_port), None, (source, 0))
                for source in ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6")
                for _ in range(MAX_PROBERS)
            ]
            assert (await probe(hello.probe_port)).answerer.member == "pod-0"
            are_held = any(is_open(sock) for sock in flood)
            for sock in flood:
                sock.close()
            if are_held:
                break
        else:
            raise AssertionError("the answer came after the timeout of the silent connections")
        await runtime.aclose()

    asyncio.run(scenario())


def test_burst_of_probes_from_many_addresses_is_answered_whole(
    start_launcher: StartLauncher,
) -> None:
    """All members of a large job probe their lost coordinator at once."""

    async def run_probe(port: int, number: int) -> str:
        source = f"127.1.{number // 250}.{number % 250 + 1}"
        return (await probe(port, source=source)).answerer.member

    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _events, hello = await attached(launcher)
        async with asyncio.timeout(PATIENCE_SECONDS):
            asked = (run_probe(hello.probe_port, number) for number in range(3 * MAX_PROBERS))
            assert set(await asyncio.gather(*asked)) == {"pod-0"}
        await runtime.aclose()

    asyncio.run(scenario())


def cpu_ticks(pid: int) -> int:
    """Return the processor time used, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_connections_wait_without_descriptors_and_launcher_stays_idle(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _events, hello = await attached(launcher)
        pid = launcher.process.pid
        more = few_descriptors(pid)
        before = cpu_ticks(pid)
        probing = asyncio.create_task(probe(hello.probe_port))
        coming = asyncio.create_task(attached(launcher, session="s2"))
        await soon(lambda: launcher.stderr.read_text().count(NO_CONNECTION) == 2)
        await asyncio.sleep(OBSERVED_SECONDS)
        assert cpu_ticks(pid) - before < 100 * OBSERVED_SECONDS / 4, "it turned all the time"
        assert not probing.done()
        assert not coming.done()
        more()
        assert (await probing).answerer.member == "pod-0"
        newer, _, _ = await coming
        assert launcher.stderr.read_text().count(NO_CONNECTION) == 2, "each listener says it once"
        await newer.aclose()
        await runtime.aclose()

    asyncio.run(scenario())


async def answered(port: int, attached: bool) -> Answer:
    """Return the first answer with this attachment state."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await probe(port)).agent_attached is not attached:
            await asyncio.sleep(0.1)
    return answer


def test_hung_agent_counts_as_absent_and_workers_stopped_for_newer_round_as_not_failed(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _, hello = await attached(launcher)
        port = hello.probe_port
        await runtime.aclose()
        agent = AgentProcess.of(launcher, ("sleep", "100"))
        assert (await probe(port, 2)).agent_attached, "a living agent ends its own workers"
        agent.process.send_signal(signal.SIGSTOP)
        silent = await answered(port, False)
        assert (silent.round, silent.workers) == (1, 1)
        assert (await probe(port, 1)).workers == 1, "its round is not over"
        agent.process.send_signal(signal.SIGCONT)
        await answered(port, True)
        agent.process.send_signal(signal.SIGSTOP)
        await answered(port, False)
        await probe(port, 2)
        await soon(lambda: not alive(agent.worker_pids[0]))
        agent.kill()
        runtime, _, hello = await attached(launcher, session="s1")
        [ended] = hello.exits
        assert (ended.signal, ended.unasked) == (signal.SIGKILL, True)
        await runtime.aclose()

    asyncio.run(scenario())


def test_pending_start_of_hung_agent_is_refused_after_newer_round(
    start_launcher: StartLauncher,
) -> None:
    """The other members learned that nothing runs here, and have begun a new round."""

    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _, hello = await attached(launcher)
        await runtime.aclose()
        agent = await SilentAgent.attached(launcher, "s1")
        await agent.hears("hello")
        await answered(hello.probe_port, False)
        assert (await probe(hello.probe_port, 4)).workers == 0
        agent.say(type="beat")
        agent.start(4, "true")
        assert await agent.hears("started", "stopped") == {"type": "stopped", "round": 4}
        agent.start(5, "true")
        assert (await agent.hears("started", "stopped"))["type"] == "started"
        await agent.hears("stopped")
        agent.close()
        # A newly attached agent knows the state.
        agent = await SilentAgent.attached(launcher, "s2")
        agent.start(4, "true")
        assert (await agent.hears("started", "stopped"))["type"] == "started"
        await agent.hears("stopped")
        agent.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"nonce": "ab" * 8}, "Malformed: nonce must be"),
        ({"nonce": None}, "Malformed: nonce must be"),
        ({"ask": "link"}, "Malformed: ask must be"),
        ({"ask": "probe agent"}, "Malformed: ask must be"),
        ({"link": {}}, "UnknownField: unknown field 'link'"),
        ({"round": 9}, "WrongProof: "),
        ({"to": ["pod-9", "s1"]}, "WrongProof: "),
        ({"mac": "0" * 64}, "WrongProof: "),
        ({"mac": None}, "Malformed: mac must be"),
    ],
    ids=str,
)
def test_wrong_question_gets_no_answer(
    start_launcher: StartLauncher, changes: Message, reason: str
) -> None:
    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        _, _, answer = await said(hello.probe_port, **changes)
        assert answer.pop("error").startswith(reason)
        assert answer == {}
        await runtime.aclose()

    asyncio.run(scenario())


def test_prober_without_the_job_key_learns_nothing_and_stops_nothing(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, hello = await attached(launcher)
        await runtime.start(start_workers(4, ("sleep", "100")))
        await until(events, Started)
        await runtime.aclose()
        for key in (b"another job's key", bytes(32)):
            _, _, answer = await said(hello.probe_port, newest=9, key=key)
            assert set(answer) == {"error"}
        older = {"nonce": "00ff" * 8}  # the question of an earlier release
        [answer] = await raw_probe(hello.probe_port, wire.line(older))
        assert answer == {"error": "Malformed: ask must be one of: probe launcher"}
        orphaned = await probe(hello.probe_port)
        assert (orphaned.workers, orphaned.agent_attached) == (1, False)

    asyncio.run(scenario())


def test_question_replayed_to_the_launcher_gets_no_answer(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        _, question, _ = await said(hello.probe_port)
        [answer] = await raw_probe(hello.probe_port, wire.line(question))
        assert answer["error"].startswith("WrongProof: ")
        await runtime.aclose()

    asyncio.run(scenario())


def test_question_for_another_member_stops_no_workers(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, hello = await attached(launcher)
        await runtime.start(start_workers(4, ("sleep", "100")))
        await until(events, Started)
        await runtime.aclose()
        answer = await probe(hello.probe_port, 9, Peer("pod-9", "s1"))
        assert (answer.answerer, answer.workers) == (MEMBER, 1)
        assert (await probe(hello.probe_port)).workers == 1

    asyncio.run(scenario())


def test_launcher_without_agent_has_no_key_to_answer_with(start_launcher: StartLauncher) -> None:
    ports = Ports(1)
    (port,) = ports.numbers

    async def scenario() -> None:
        launcher = start_launcher(ELASTICJOB_PROBE_PORT=str(port))
        await soon(lambda: Path(launcher.socket).exists())
        _, _, answer = await said(port)
        assert answer == {"error": "NoKey: no agent has attached to this launcher yet"}

    try:
        asyncio.run(scenario())
    finally:
        ports.close()


# -- a stranger between a launcher and an agent ---------------------------------------


@asynccontextmanager
async def agent_server(member: str = "pod-2") -> AsyncIterator[tuple[int, list[Event]]]:
    """Run the peer server of another agent of the job; yield its port and its events."""
    events: list[Event] = []
    server = PeerServer(member, JOB_KEY, events.append, "127.0.0.1", lambda: 0)
    try:
        yield await server.start(), events
    finally:
        await server.stop()


@asynccontextmanager
async def relay(target: int) -> AsyncIterator[int]:
    """Pass every byte between the connections to a port of its own and the target."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", target)
        writers.extend((writer, to_there))
        await asyncio.gather(pump(reader, to_there), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.sleep(0.05)


def test_launcher_signs_no_link(start_launcher: StartLauncher) -> None:
    """The oracle of earlier releases: the launcher's answer over an agent's nonce as a proof."""

    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        async with agent_server() as (port, events):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            nonce = read_challenge(await wire.read(reader, PATIENCE_SECONDS))
            question = {
                "ask": "link", "nonce": nonce, "from": list(MEMBER), "to": ["pod-2", ""],
            }  # fmt: skip
            [answer] = await raw_probe(
                hello.probe_port, wire.line({"nonce": nonce, **question, "mac": "0" * 64})
            )
            assert set(answer) == {"error"}, "it computes no code for a stranger"
            _, _, answer = await said(hello.probe_port)
            writer.write(wire.line({**question, "mac": answer["mac"]}))
            assert await reader.read() == b""
            writer.close()
            assert events == []
        await runtime.aclose()

    asyncio.run(scenario())


def test_link_question_relayed_to_a_launcher_gets_no_answer(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        there: list[Event] = []
        async with relay(hello.probe_port) as port:
            link = Link("pod-0", "s1", "127.0.0.1", port)
            task = asyncio.create_task(
                dial.hold_link(link, *PROBER, lambda: JOB_KEY, there.append, tuple, 0.0)
            )
            await soon(lambda: len(there) >= 2)
            task.cancel()
            await asyncio.wait([task])
        assert {type(event).__name__ for event in there} == {"LinkDown"}
        reader, writer = await asyncio.open_connection("127.0.0.1", hello.probe_port)
        nonce = read_challenge(await wire.read(reader, PATIENCE_SECONDS))
        exchange = Exchange(PROBER, wire.nonce(), MEMBER, nonce)
        writer.write(wire.line(link_question(JOB_KEY, exchange)))
        assert set(await wire.read(reader, PATIENCE_SECONDS)) == {"error"}
        writer.close()
        await runtime.aclose()

    asyncio.run(scenario())


def test_probe_relayed_to_another_member_proves_nothing(start_launcher: StartLauncher) -> None:
    """Another member's answer proves a death only from the probed address itself."""

    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        async with relay(hello.probe_port) as port:
            through = await dial.run_probe(
                Probe("pod-9", "s1", "127.0.0.1", 0, port), PROBER, JOB_KEY
            )
            same = await dial.run_probe(Probe("pod-0", "s1", "127.0.0.1", 0, port), PROBER, JOB_KEY)
        there = Probe("pod-9", "s1", "127.0.0.1", 0, hello.probe_port)
        direct = await dial.run_probe(there, PROBER, JOB_KEY)
        async with agent_server() as (port, events), relay(port) as relayed:
            agent = Probe("pod-9", "s1", "127.0.0.1", relayed, 0)
            another = await dial.run_probe(agent, PROBER, JOB_KEY)
            launcher = Probe("pod-2", "s1", "127.0.0.1", 0, port)
            agent_for_launcher = await dial.run_probe(launcher, PROBER, JOB_KEY)
            assert events == []
        assert agent_for_launcher.verdict is Verdict.UNKNOWN
        assert through.verdict is Verdict.UNKNOWN
        assert another.verdict is Verdict.UNKNOWN
        assert direct.verdict is Verdict.GONE
        assert same.verdict is Verdict.AGENT_ALIVE
        await runtime.aclose()

    asyncio.run(scenario())


def test_relayed_link_cannot_be_written_to() -> None:
    """A relay may pass the lines on. A line of its own closes the link."""

    async def scenario() -> None:
        async with agent_server() as (port, events):
            upstream: list[asyncio.StreamWriter] = []

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                there, to_there = await asyncio.open_connection("127.0.0.1", port)
                upstream.extend((to_there, writer))
                writer.write(await there.readline())
                to_there.write(await reader.readline())
                writer.write(await there.readline())
                writer.write(first := await there.readline())
                writer.write(first)

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            there: list[Event] = []
            link = Link("pod-2", "", "127.0.0.1", server.sockets[0].getsockname()[1])
            task = asyncio.create_task(
                dial.hold_link(link, *PROBER, lambda: JOB_KEY, there.append, tuple, 0.0)
            )
            await soon(lambda: len(there) >= 3)
            task.cancel()
            await asyncio.wait([task])
            server.close()
            for writer in upstream:
                writer.close()
            await asyncio.sleep(0.05)
        names = [type(event).__name__ for event in there]
        assert names[:3] == ["LinkUp", "LinkHeartbeat", "LinkDown"]
        assert isinstance(events[0], PeerUp)

    asyncio.run(scenario())


def test_unauthenticated_connections_disturb_nothing(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        runtime, events, hello = await attached(start_launcher())
        idle = await asyncio.open_connection("127.0.0.1", hello.probe_port)
        [answer] = await raw_probe(hello.probe_port, b"GET / HTTP/1.1\r\n\r\n")
        assert "not a JSON line" in answer["message"]
        [answer] = await raw_probe(hello.probe_port, b"x" * 4000)
        assert "longer than" in answer["message"]
        assert (await probe(hello.probe_port)).answerer == MEMBER
        await runtime.start(start_workers(1, ("true",)))
        await until(events, Stopped)
        async with asyncio.timeout(PATIENCE_SECONDS):
            read_challenge(json.loads(await idle[0].readline()))
            assert await idle[0].read() == b""  # a silent client is disconnected
        idle[1].close()
        await runtime.aclose()

    asyncio.run(scenario())
