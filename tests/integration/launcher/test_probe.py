"""Launcher's answers to probes of other nodes about its workers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.worker_runtime import Started, Stopped
from elasticjob_launcher.probe import MAX_PROBERS, QUESTION_SECONDS
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

NONCE = "00ff" * 8
OBSERVED_SECONDS = 1.5
NO_CONNECTION = "cannot accept connections, new ones must wait: Too many open files"


async def raw_probe(port: int, line: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            writer.write(line)
            return await reader.read()
    finally:
        writer.close()


async def probe(port: int, nonce: Any = NONCE) -> dict[str, Any]:
    return json.loads(await raw_probe(port, json.dumps({"nonce": nonce}).encode() + b"\n"))


def test_answer_is_signed_and_describes_worker_state(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, hello = await attached(launcher)
        await runtime.start(start_workers(4, ("sleep", "100"), ("sleep", "100"), ("/no/such",)))
        await until(events, Started)

        answer = await probe(hello.probe_port)
        mac = answer.pop("hmac")
        body = json.dumps(answer, sort_keys=True, separators=(",", ":")).encode()
        assert mac == hmac.new(JOB_KEY, NONCE.encode() + body, hashlib.sha256).hexdigest()
        assert answer == {
            "member": "pod-0", "session": "s1", "round": 4, "workers": 2, "agent_attached": True,
        }  # fmt: skip
        assert (await probe(hello.probe_port, "ab" * 8))["hmac"] != mac

        await runtime.aclose()
        orphaned = await probe(hello.probe_port)
        assert (orphaned["workers"], orphaned["agent_attached"]) == (2, False)
        runtime, events, _ = await attached(launcher, session="s2")
        await runtime.stop(4, 0)
        await until(events, Stopped)
        stopped = await probe(hello.probe_port)
        assert (stopped["session"], stopped["round"], stopped["workers"]) == ("s2", None, 0)
        await runtime.aclose()

    asyncio.run(scenario())


def test_probe_is_answered_beside_silent_connections_of_a_stranger(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _events, hello = await attached(launcher)
        flood = [
            socket.create_connection(("127.0.0.1", hello.probe_port), source_address=(source, 0))
            for source in ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6")
            for _ in range(MAX_PROBERS)
        ]
        began = time.monotonic()
        assert (await probe(hello.probe_port))["member"] == "pod-0"
        assert time.monotonic() - began < QUESTION_SECONDS, "without waiting for their timeout"
        for sock in flood:
            sock.close()
        await runtime.aclose()

    asyncio.run(scenario())


def test_burst_of_probes_from_many_addresses_is_answered_whole(
    start_launcher: StartLauncher,
) -> None:
    """All members of a large job probe their lost coordinator at once."""

    async def ask(port: int, number: int) -> bytes:
        source = (f"127.1.{number // 250}.{number % 250 + 1}", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=source)
        writer.write(json.dumps({"nonce": NONCE}).encode() + b"\n")
        answer = await reader.read()
        writer.close()
        return answer

    async def scenario() -> None:
        launcher = start_launcher()
        runtime, _events, hello = await attached(launcher)
        async with asyncio.timeout(PATIENCE_SECONDS):
            asked = (ask(hello.probe_port, number) for number in range(3 * MAX_PROBERS))
            assert all(b"pod-0" in answer for answer in await asyncio.gather(*asked))
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
        assert (await probing)["member"] == "pod-0"
        newer, _, _ = await coming
        assert launcher.stderr.read_text().count(NO_CONNECTION) == 2, "each listener says it once"
        await newer.aclose()
        await runtime.aclose()

    asyncio.run(scenario())


async def told(port: int, newest: int) -> dict[str, Any]:
    """Send a probe with a newer round; return the answer."""
    body = json.dumps({"round": newest}, separators=(",", ":")).encode()
    mac = hmac.new(JOB_KEY, NONCE.encode() + body, hashlib.sha256).hexdigest()
    question = {"nonce": NONCE, "round": newest, "hmac": mac}
    return json.loads(await raw_probe(port, json.dumps(question).encode() + b"\n"))


async def answered(port: int, attached: bool) -> dict[str, Any]:
    """Return the first answer with this attachment state."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (answer := await probe(port))["agent_attached"] is not attached:
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
        assert (await told(port, 2))["agent_attached"], "a living agent ends its own workers"
        agent.process.send_signal(signal.SIGSTOP)
        silent = await answered(port, False)
        assert (silent["round"], silent["workers"]) == (1, 1)
        assert (await told(port, 1))["workers"] == 1, "its round is not over"
        agent.process.send_signal(signal.SIGCONT)
        await answered(port, True)
        agent.process.send_signal(signal.SIGSTOP)
        await answered(port, False)
        await told(port, 2)
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
        assert (await told(hello.probe_port, 4))["workers"] == 0
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
    "nonce",
    ["", "ab", "g" * 16, "AB" * 8, "abc" * 5, "ab" * 65, 12, None, ["ab" * 8], "ab" * 8 + "\n"],
)
def test_wrong_nonce_is_refused(start_launcher: StartLauncher, nonce: Any) -> None:
    async def scenario() -> None:
        runtime, _, hello = await attached(start_launcher())
        answer = await probe(hello.probe_port, nonce)
        assert "nonce must be" in answer.pop("error")
        assert answer == {}
        await runtime.aclose()

    asyncio.run(scenario())


def test_unauthenticated_connections_get_no_answer_and_disturb_nothing(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        runtime, events, hello = await attached(start_launcher())
        idle = await asyncio.open_connection("127.0.0.1", hello.probe_port)
        assert b"not a JSON line" in await raw_probe(hello.probe_port, b"GET / HTTP/1.1\r\n\r\n")
        assert b"longer than" in await raw_probe(hello.probe_port, b"x" * 2000)
        assert (await probe(hello.probe_port))["member"] == "pod-0"
        await runtime.start(start_workers(1, ("true",)))
        await until(events, Stopped)
        asked = time.monotonic()
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await idle[0].read() == b""  # a silent client is disconnected
        assert time.monotonic() - asked < 5
        idle[1].close()
        await runtime.aclose()

    asyncio.run(scenario())
