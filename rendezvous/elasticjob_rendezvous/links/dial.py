"""Outgoing connections of an agent: the link to its coordinator, and probes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from elasticjob_launcher.proof import (
    PROBE_AGENT,
    PROBE_LAUNCHER,
    Answer,
    BadPeer,
    Exchange,
    Peer,
    Refusal,
    link_question,
    permission,
    probe_question,
    reached_address,
    read_challenge,
    read_link_answer,
    read_probe_answer,
)
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.protocol.effects import Link, Probe
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeaveNoticesReceived,
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    Probed,
    Verdict,
)

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
LAST_REDIAL_SECONDS = 2.0
RETRY_TIMES = 4
RETRY_SECONDS = 0.1


@contextlib.asynccontextmanager
async def _connection(
    address: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(address, port, limit=wire.MAX_LINE_BYTES)
    except (ValueError, OverflowError) as error:
        # One member's invalid record must not end other members' agents.
        text = f"{address!r}, port {port}: {error}"
        raise BadPeer(Refusal.BAD_ADDRESS, text) from error
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
    job_key: Callable[[], bytes],
    post: Callable[[Event], None],
    leaving: Callable[[], wire.Leaving],
    delay_seconds: float,
    times: wire.LinkTimes = wire.LINK_TIMES,
) -> None:
    """Maintain a link to `link`'s agent until cancelled, and reconnect whenever it breaks.

    Each heartbeat carries the leave notices from `leaving`.

    The first connection is delayed by `delay_seconds`: a thousand members must not connect to
    their new coordinator while it forms a round.
    """
    await asyncio.sleep(delay_seconds)
    pause = times.first_redial_seconds
    logged: Refusal | None = None
    while True:
        refused = False
        try:
            async with _connection(link.address, link.port) as (reader, writer):
                linked_at = asyncio.get_running_loop().time()
                channel = await _greet(
                    link, Peer(member, session), job_key(), reader, writer, times
                )
                post(LinkUp(link.member, link.session))
                pause, logged = times.first_redial_seconds, None
                await _listen(link, channel, reader, writer, post, leaving, linked_at, times)
        except ConnectionRefusedError:
            refused = True
        except BadPeer as error:
            if error.reason is not logged:
                log.warning("closed the link to member %r: %s", link.member, error)
            logged = error.reason
        except (OSError, EOFError, TimeoutError):
            pass
        post(LinkDown(link.member, link.session, refused))
        await asyncio.sleep(pause)
        pause = min(pause * 2, LAST_REDIAL_SECONDS)


async def _greet(
    link: Link,
    me: Peer,
    job_key: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    times: wire.LinkTimes,
) -> wire.Channel:
    """Prove possession of the job's key and verify that the coordinator holds it, too."""
    exchange = await _exchange(me, Peer(link.member, link.session), reader, times)
    question = link_question(job_key, exchange)
    writer.write(wire.line(question))
    answer = await wire.read(reader, times.handshake_seconds)
    exchange, mac = read_link_answer(job_key, exchange, answer, question["mac"])
    if exchange.answerer.member != link.member:
        text = f"the agent at {link.address}:{link.port} is {exchange.answerer.member!r}"
        raise BadPeer(Refusal.OTHER_MEMBER, text)
    return wire.Channel(job_key, exchange, mac, coordinates=False)


async def _exchange(
    me: Peer, target: Peer, reader: asyncio.StreamReader, times: wire.LinkTimes
) -> Exchange:
    """Return an exchange with the challenge of the process at the other end."""
    challenge = read_challenge(await wire.read(reader, times.handshake_seconds))
    return Exchange(me, wire.nonce(), target, challenge)


async def _listen(
    link: Link,
    channel: wire.Channel,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    post: Callable[[Event], None],
    leaving: Callable[[], wire.Leaving],
    linked_at: float,
    times: wire.LinkTimes,
) -> None:
    """Post the coordinator's messages and send heartbeats, until either side disconnects."""
    loop = asyncio.get_running_loop()
    next_beat = beat_at = loop.time()
    count = wire.Count(linked_at)
    quiet = False
    received: wire.Leaving = ()
    while True:
        now = loop.time()
        if now >= next_beat:
            writer.write(channel.seal({**count.line(now), **wire.leaving_line(leaving())}))
            next_beat = now + times.heartbeat_seconds
        patience = times.silence_seconds if quiet else times.quiet_seconds
        wait = min(next_beat, beat_at + patience) - now + 0.01
        try:
            line = await wire.read_line(reader, max(wait, wire.LAST_READ_SECONDS))
        except TimeoutError:
            silence = loop.time() - beat_at
            if silence > times.silence_seconds + wire.LAST_READ_SECONDS and quiet:
                raise
            if silence > times.quiet_seconds and not quiet:
                quiet = True
                post(LinkQuiet(link.member, link.session))
            continue
        beat = wire.coordinator_heartbeat(channel.open(line))
        beat_at = loop.time()
        quiet = False
        proven = count.proven(beat.acknowledged, beat_at)
        post(LinkHeartbeat(link.member, link.session, beat.round, proven, beat.vouched_seconds))
        if beat.leaving != received:
            received = beat.leaving
            post(LeaveNoticesReceived(received))


async def run_probe(
    probe: Probe, asker: Peer, job_key: bytes, times: wire.LinkTimes = wire.LINK_TIMES
) -> Probed:
    """Probe a member's launcher, or its agent if the workers are the agent's children.

    A dying process may still accept a connection and then drop it; the probe is then repeated.
    """
    for _ in range(RETRY_TIMES):
        try:
            verdict, live_seconds = await _probe_once(probe, asker, job_key, times)
            return Probed(probe.member, probe.session, verdict, live_seconds)
        except (EOFError, ConnectionResetError, BrokenPipeError):
            await asyncio.sleep(RETRY_SECONDS)
    return Probed(probe.member, probe.session, Verdict.UNKNOWN)


async def _probe_once(
    probe: Probe, asker: Peer, job_key: bytes, times: wire.LinkTimes
) -> tuple[Verdict, float | None]:
    """Probe once; return the verdict and the remaining seconds of the workers' deadline."""
    port = probe.launcher_port or probe.agent_port
    try:
        async with _connection(probe.address, port) as (reader, writer):
            exchange = await _exchange(asker, Peer(probe.member, probe.session), reader, times)
            extends = probe.live_until > 0
            kind = PROBE_LAUNCHER if probe.launcher_port else PROBE_AGENT
            question = probe_question(job_key, exchange, kind, probe.round, extends)
            writer.write(wire.line(question))
            message = await wire.read(reader, times.handshake_seconds)
            exchange, answer = read_probe_answer(job_key, exchange, message, question["mac"])
            verdict = _judge(probe, answer, reached_address(writer.get_extra_info("peername")))
            known = verdict in (Verdict.WORKERS_ALIVE, Verdict.BOTH_ALIVE)
            if known and extends:
                await _permit(probe, job_key, exchange, answer, writer)
        return verdict, answer.live_seconds if known else None
    except ConnectionRefusedError:
        return Verdict.GONE, None
    except (ConnectionResetError, BrokenPipeError):
        raise
    except (OSError, TimeoutError, BadPeer):
        return Verdict.UNKNOWN, None


async def _permit(
    probe: Probe,
    job_key: bytes,
    exchange: Exchange,
    answer: Answer,
    writer: asyncio.StreamWriter,
) -> None:
    """Extend the workers' deadline to `probe.live_until`, if the round matches."""
    left = wire.seconds(probe.live_until - asyncio.get_running_loop().time())
    if not left or answer.round != probe.round:
        return
    writer.write(wire.line(permission(job_key, exchange, probe.round, left, answer.mac)))
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.drain()


def _judge(probe: Probe, answer: Answer, address: str) -> Verdict:
    """Return the verdict that a launcher's or an agent's answer implies for the member.

    The answer of another member at the probed address proves that the probed one is gone. An answer
    through another address, for example of a relay, proves nothing.
    """
    if answer.answerer.member != probe.member:
        return Verdict.GONE if answer.at == address else Verdict.UNKNOWN
    if answer.agent_attached:
        return Verdict.BOTH_ALIVE if answer.workers else Verdict.AGENT_ALIVE
    return Verdict.WORKERS_ALIVE if answer.workers else Verdict.GONE
