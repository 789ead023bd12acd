"""Outgoing connections of an agent: the link to its coordinator, and probes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.protocol.effects import Link, Probe
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeavesTold,
    LinkDown,
    LinkHeard,
    LinkQuiet,
    LinkUp,
    Probed,
    Verdict,
)

CONNECT_SECONDS = 2.0
FIRST_REDIAL_SECONDS = 0.2
LAST_REDIAL_SECONDS = 2.0
ASK_AGAIN_TIMES = 4
ASK_AGAIN_SECONDS = 0.1


@contextlib.asynccontextmanager
async def _connection(
    address: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address, port, limit=wire.MAX_LINE_BYTES)
    except (ValueError, OverflowError) as error:
        # One member's invalid record must not end other members' agents.
        raise wire.BadPeer(f"invalid agent address {address!r}, port {port}: {error}") from error
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def hold_link(
    link: Link,
    member: str,
    session: str,
    job_key: bytes,
    post: Callable[[Event], None],
    leaving: Callable[[], wire.Leaving],
    delay_seconds: float,
) -> None:
    """Maintain a link to `link`'s agent until cancelled, and reconnect whenever it breaks.

    Each heartbeat carries the leave notices from `leaving`.

    The first connection is delayed by `delay_seconds`: a thousand members must not connect to
    their new coordinator while it forms a round.
    """
    await asyncio.sleep(delay_seconds)
    pause = FIRST_REDIAL_SECONDS
    while True:
        refused = False
        try:
            async with _connection(link.address, link.port) as (reader, writer):
                linked_at = await _greet(link, member, session, job_key, reader, writer)
                post(LinkUp(link.member, link.session))
                pause = FIRST_REDIAL_SECONDS
                await _listen(link, reader, writer, post, leaving, linked_at)
        except ConnectionRefusedError:
            refused = True
        except (OSError, EOFError, TimeoutError, wire.BadPeer):
            pass
        post(LinkDown(link.member, link.session, refused))
        await asyncio.sleep(pause)
        pause = min(pause * 2, LAST_REDIAL_SECONDS)


async def _greet(
    link: Link,
    member: str,
    session: str,
    job_key: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> float:
    """Authenticate the link; return the time at which the request was sent."""
    asked_at = asyncio.get_running_loop().time()
    question = wire.nonce()
    me = {"member": member, "session": session}
    writer.write(wire.line({"nonce": question, "link": me}))
    answer = await wire.read(reader, wire.HANDSHAKE_SECONDS)
    if not wire.verified(job_key, question, answer) or answer.get("member") != link.member:
        raise wire.BadPeer(f"the agent at {link.address}:{link.port} is not {link.member}")
    writer.write(wire.line({"hmac": wire.sign(job_key, str(answer.get("nonce")), {**me})}))
    return asked_at


async def _listen(
    link: Link,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    post: Callable[[Event], None],
    leaving: Callable[[], wire.Leaving],
    linked_at: float,
) -> None:
    """Post the coordinator's messages and send heartbeats, until either side disconnects."""
    loop = asyncio.get_running_loop()
    next_beat = heard = loop.time()
    count = wire.Count(linked_at)
    quiet = False
    told: wire.Leaving = ()
    while True:
        now = loop.time()
        if now >= next_beat:
            writer.write(wire.line({**count.line(now), **wire.leaving_line(leaving())}))
            next_beat = now + wire.HEARTBEAT_SECONDS
        patience = wire.SILENCE_SECONDS if quiet else wire.QUIET_SECONDS
        wait = min(next_beat, heard + patience) - now + 0.01
        try:
            message = await wire.read(reader, max(wait, wire.LAST_LOOK_SECONDS))
        except TimeoutError:
            silence = loop.time() - heard
            if silence > wire.SILENCE_SECONDS + wire.LAST_LOOK_SECONDS and quiet:
                raise
            if silence > wire.QUIET_SECONDS and not quiet:
                quiet = True
                post(LinkQuiet(link.member, link.session))
            continue
        heard = loop.time()
        quiet = False
        number, proven = message.get("round"), count.proven(message, heard)
        if isinstance(number, int):
            vouched = wire.told_seconds(message, "vouched_seconds")
            post(LinkHeard(link.member, link.session, number, proven, vouched))
        others = wire.leaving_told(message)
        if others != told:
            told = others
            post(LeavesTold(others))


async def ask(probe: Probe, job_key: bytes) -> Probed:
    """Probe a member's launcher, or its agent if the workers are the agent's children.

    A dying process may still accept a connection and then drop it; the probe is then repeated.
    """
    for _ in range(ASK_AGAIN_TIMES):
        try:
            verdict, live_seconds = await _ask_once(probe, job_key)
            return Probed(probe.member, probe.session, verdict, live_seconds)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            await asyncio.sleep(ASK_AGAIN_SECONDS)
    return Probed(probe.member, probe.session, Verdict.UNKNOWN)


async def _ask_once(probe: Probe, job_key: bytes) -> tuple[Verdict, float | None]:
    """Probe once; return the verdict and the remaining seconds of the workers' deadline."""
    port = probe.launcher_port or probe.agent_port
    try:
        async with _connection(probe.address, port) as (reader, writer):
            question = wire.nonce()
            body: wire.Message = {"round": probe.round}
            asked = {"nonce": question, "hmac": wire.sign(job_key, question, body), **body}
            if probe.live_until:
                asked["extends"] = True
            writer.write(wire.line(asked))
            answer = await wire.read(reader, wire.HANDSHAKE_SECONDS)
            verdict = _judge(probe, job_key, question, answer)
            if verdict in (Verdict.WORKERS_ALIVE, Verdict.BOTH_ALIVE):
                await _permit(probe, job_key, answer, writer)
        known = verdict in (Verdict.WORKERS_ALIVE, Verdict.BOTH_ALIVE)
        return verdict, wire.told_seconds(answer, "live_seconds") if known else None
    except ConnectionRefusedError:
        return Verdict.GONE, None
    except (ConnectionResetError, BrokenPipeError):
        raise
    except (OSError, TimeoutError, wire.BadPeer):
        return Verdict.UNKNOWN, None


async def _permit(
    probe: Probe, job_key: bytes, answer: wire.Message, writer: asyncio.StreamWriter
) -> None:
    """Extend the workers' deadline to `probe.live_until`, if that is set and the round matches."""
    question = answer.get("nonce")
    left = wire.seconds(probe.live_until - asyncio.get_running_loop().time())
    if not isinstance(question, str) or not left or answer.get("round") != probe.round:
        return
    body: wire.Message = {"round": probe.round, "live_seconds": left}
    writer.write(wire.line({**body, "hmac": wire.sign(job_key, question, body)}))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.drain()


def _judge(probe: Probe, job_key: bytes, question: str, answer: wire.Message) -> Verdict:
    """Return the verdict that a launcher's or an agent's answer implies for the member."""
    if not wire.verified(job_key, question, answer):
        return Verdict.UNKNOWN
    if answer.get("member") != probe.member:
        return Verdict.GONE
    workers = answer.get("workers")
    some_run = isinstance(workers, int) and workers > 0
    if answer.get("agent_attached"):
        return Verdict.BOTH_ALIVE if some_run else Verdict.AGENT_ALIVE
    return Verdict.WORKERS_ALIVE if some_run else Verdict.GONE
