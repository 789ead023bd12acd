"""Deadline of workers whose agent dies or hangs, and permissions to extend it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator

import pytest

from elasticjob_agent.worker_runtime import Stopped
from elasticjob_launcher.proof import (
    PROBE_LAUNCHER,
    Exchange,
    Message,
    Peer,
    permission,
    probe_question,
    read_challenge,
    read_probe_answer,
)
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.links.dial import run_probe
from elasticjob_rendezvous.protocol.effects import Probe
from elasticjob_rendezvous.protocol.events import Probed, Verdict
from tests.integration.launcher_rig import (
    JOB_KEY,
    PATIENCE_SECONDS,
    AgentProcess,
    LauncherProcess,
    SilentAgent,
    StartLauncher,
    alive,
    attached,
    launcher_file,
    process_tag,
    soon,
    start_launcher,
    until,
    wait_for_end,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

LIVE_SECONDS = 4.0
BEAT_SECONDS = 0.5
EARLY_SECONDS = 3.0
"""Maximum age of the last heartbeat of an agent that is killed, on a busy machine."""
LATE_SECONDS = 20.0
"""Maximum delay of the end, on a busy machine; an orphan without a deadline would live for 30 s."""
SLEEPER = ("sleep", "100")
PROBER = Peer("pod-1", "s7")


def ended_in_time(
    pid: int, began: float, seconds: float, late_seconds: float = LATE_SECONDS
) -> None:
    """Check that the worker lives for part of its time, and no longer than all of it."""
    assert alive(pid), "it has its time"
    wait_for_end([pid])
    took = time.monotonic() - began
    assert seconds - EARLY_SECONDS <= took <= seconds + late_seconds, took


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_pod_workers_without_agent_end_at_deadline(
    start_launcher: StartLauncher, signum: signal.Signals
) -> None:
    agent = AgentProcess.of(start_launcher(), SLEEPER, live_seconds=LIVE_SECONDS)
    time.sleep(LIVE_SECONDS + 1.0)
    [pid] = agent.worker_pids
    assert alive(pid), "an agent that speaks puts it off"
    began = time.monotonic()
    agent.process.send_signal(signum)
    ended_in_time(pid, began, LIVE_SECONDS)
    agent.kill()


def test_workers_of_hung_bare_agent_end_at_deadline(process_tag: str) -> None:
    agent = AgentProcess(f"local_runtime(live_seconds={LIVE_SECONDS})", SLEEPER)
    began = time.monotonic()
    agent.process.send_signal(signal.SIGSTOP)
    ended_in_time(agent.worker_pids[0], began, LIVE_SECONDS)
    assert agent.process.poll() is None
    agent.kill()


async def permitted(port: int, seconds: float, number: int = 1, key: bytes = JOB_KEY) -> Probed:
    """Return the launcher's answer to a coordinator that extends the deadline by these seconds."""
    until = time.monotonic() + seconds
    return await run_probe(Probe("pod-0", "s0", "127.0.0.1", 0, port, number, until), PROBER, key)


async def port_of(launcher: LauncherProcess) -> int:
    runtime, _, hello = await attached(launcher)
    await runtime.aclose()
    return hello.probe_port


def test_coordinator_permission_keeps_workers_until_next_agent_attaches(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        port = await port_of(launcher)
        agent = AgentProcess.of(launcher, SLEEPER, live_seconds=LIVE_SECONDS)
        agent.kill()
        killed = time.monotonic()
        while time.monotonic() < killed + 2 * LIVE_SECONDS:
            answer = await permitted(port, LIVE_SECONDS)
            assert answer.verdict is Verdict.WORKERS_ALIVE
            assert answer.live_seconds is not None
            assert answer.live_seconds <= LIVE_SECONDS + 0.01
            await asyncio.sleep(BEAT_SECONDS)
        runtime, events, hello = await attached(launcher)
        assert hello.pids == {0: agent.worker_pids[0]}
        assert hello.live_until is not None
        assert 0 < hello.live_until - time.monotonic() <= LIVE_SECONDS
        await runtime.stop(1, 0)
        await until(events, Stopped)
        await runtime.aclose()

    asyncio.run(scenario())


def test_permission_expires_after_orphan_time(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        port = await port_of(launcher)
        agent = AgentProcess.of(launcher, SLEEPER, orphan_seconds=12.0, live_seconds=LIVE_SECONDS)
        agent.kill()
        killed = time.monotonic()
        assert (await permitted(port, 60.0)).verdict is Verdict.WORKERS_ALIVE
        answer = await permitted(port, 60.0)
        assert answer.live_seconds is not None
        assert LIVE_SECONDS < answer.live_seconds <= 12.0
        await soon(lambda: not alive(agent.worker_pids[0]))
        assert time.monotonic() - killed <= 12.0 + LATE_SECONDS

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def asked(port: int) -> AsyncIterator[tuple[Exchange, str, asyncio.StreamWriter]]:
    """Open a probe that extends the deadline: yield what its permission covers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        nonce = read_challenge(await wire.read(reader, PATIENCE_SECONDS))
        exchange = Exchange(PROBER, wire.nonce(), Peer("pod-0", "s0"), nonce)
        question = probe_question(JOB_KEY, exchange, PROBE_LAUNCHER, 1, True)
        writer.write(wire.line(question))
        said = await wire.read(reader, PATIENCE_SECONDS)
        exchange, answer = read_probe_answer(JOB_KEY, exchange, said, question["mac"])
        yield exchange, answer.mac, writer
        await reader.read()
    finally:
        writer.close()


def test_permission_without_valid_proof_is_ignored(start_launcher: StartLauncher) -> None:
    """With another key or number, over another answer, replayed, or with an unknown field."""

    async def scenario() -> None:
        launcher = start_launcher()
        port = await port_of(launcher)
        agent = AgentProcess.of(launcher, SLEEPER, live_seconds=LIVE_SECONDS)
        async with asked(port) as (exchange, mac, writer):
            replayed = permission(JOB_KEY, exchange, 1, 60.0, mac)
            writer.write(wire.line(replayed))
        agent.kill()
        killed = time.monotonic()
        for number in range(8):
            async with asked(port) as (exchange, mac, writer):
                good = permission(JOB_KEY, exchange, 1, 60.0, mac)
                said: list[Message] = [
                    permission(b"another", exchange, 1, 60.0, mac),
                    permission(JOB_KEY, exchange, 2, 60.0, mac),
                    permission(JOB_KEY, exchange, 1, 60.0, "0" * 64),
                    replayed,
                    {**good, "live_seconds": 90.0},
                    {**good, "live_seconds": True},
                    {**good, "until": 1},
                    {"round": 1, "live_seconds": 60.0},
                ]
                writer.write(wire.line(said[number]))
        ended_in_time(agent.worker_pids[0], killed, LIVE_SECONDS)

    asyncio.run(scenario())


def test_heartbeat_delayed_by_stopped_launcher_counts_from_send_time(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        agent = await SilentAgent.attached(launcher, "s0")
        await agent.hears("hello")
        agent.say(type="attach", member="pod-0", session="s0", job_key=JOB_KEY.hex(),
                  orphan_seconds=30, deadlines=True)  # fmt: skip
        live, stopped = 8.0, 5.0
        agent.say(type="beat", at=time.monotonic(), live_seconds=live)
        agent.start(1, *SLEEPER)
        started = await agent.hears("started")
        launcher.process.send_signal(signal.SIGSTOP)
        said = time.monotonic()
        agent.say(type="beat", at=said, live_seconds=live)
        await asyncio.sleep(stopped)
        launcher.process.send_signal(signal.SIGCONT)
        ended_in_time(started["pids"]["0"], said, live, late_seconds=stopped - 0.5)
        agent.close()

    asyncio.run(scenario())


def test_agent_without_deadline_leaves_orphan_time_in_force(
    start_launcher: StartLauncher,
) -> None:
    """An older agent; the launcher may have received a deadline before."""

    async def scenario() -> None:
        launcher = start_launcher()
        AgentProcess.of(launcher, SLEEPER, live_seconds=LIVE_SECONDS).kill()
        older = await SilentAgent.attached(launcher, "s1")
        hello = await older.hears("hello")
        older.close()
        await asyncio.sleep(LIVE_SECONDS + 1.0)
        runtime, events, again = await attached(launcher)
        assert again.pids == {int(rank): pid for rank, pid in hello["pids"].items()}
        await runtime.stop(1, 0)
        await until(events, Stopped)
        await runtime.aclose()

    asyncio.run(scenario())
