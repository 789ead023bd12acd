"""Server of the agent for probes and, while it is the coordinator, for its members' links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from elasticjob_launcher.admission import Caps
from elasticjob_launcher.proof import (
    LINK,
    PROBE_AGENT,
    BadPeer,
    Message,
    Peer,
    Question,
    Refusal,
    answering,
    challenge,
    link_answer,
    probe_answer,
    reached_address,
    read_question,
)
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.listener import Keep, Listener, listening_socket, refusals
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeaveNoticesReceived,
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
)

log = logging.getLogger(__name__)

BACKLOG = 1024
CAPS = Caps(unproven=1024, per_address=512, kept=20_480)
"""Every member of a job links to its coordinator: 16,384 at most, and some twice on reconnecting.
Gangs on one machine connect from one address."""


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """Established link of one member."""

    writer: asyncio.StreamWriter
    channel: wire.Channel
    count: wire.Count


class PeerServer:
    """Server on one port for the lifetime of an agent.

    `post` receives `PeerUp`, `PeerHeartbeat`, `PeerQuiet`, `PeerDown` and `LeaveNoticesReceived`.
    `serve` sets the round number sent on every link, `announce` the leave notices. `workers`
    returns the number of local workers, or 1 if they are not counted: members without a launcher
    are probed here. `live_until` returns the workers' self-fencing deadline, `evidence_until` the
    time up to which members may rely on the round number, both on the loop's clock. `session`
    returns the name of the agent's present session.
    """

    def __init__(
        self,
        member: str,
        job_key: bytes,
        post: Callable[[Event], None],
        bind_address: str,
        workers: Callable[[], int],
        live_until: Callable[[], float | None] = lambda: None,
        evidence_until: Callable[[], float | None] = lambda: None,
        session: Callable[[], str] = lambda: "",
        times: wire.LinkTimes = wire.LINK_TIMES,
    ) -> None:
        self._member = member
        self._job_key = job_key
        self._post = post
        self._bind_address = bind_address
        self._workers = workers
        self._live_until = live_until
        self._evidence_until = evidence_until
        self._session = session
        self._times = times
        self._listener: Listener | None = None
        self._links: dict[Peer, _Link] = {}
        self._round = 0
        self._leaving: Message = {}
        self._heartbeat_timer: asyncio.TimerHandle | None = None

    def use_key(self, job_key: bytes) -> None:
        """Use this key for the peers that connect from now on."""
        self._job_key = job_key

    async def start(self) -> int:
        """Bind and listen; return the port."""
        sock = listening_socket(self._bind_address, 0, BACKLOG)
        port: int = sock.getsockname()[1]
        self._listener = Listener(
            sock, CAPS, self._serve, wire.MAX_LINE_BYTES, self._times.accept_again_seconds
        )
        self._beat()
        return port

    async def stop(self) -> None:
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()

    def serve(self, round: int) -> None:
        """Send `round` as the newest known round to every linked member, now and per heartbeat."""
        self._round = round
        self._send_lines()

    def announce(self, leaving: wire.Leaving) -> None:
        """Send these leave notices to every linked member with each heartbeat."""
        self._leaving = wire.leaving_line(leaving)

    def _beat(self) -> None:
        self._send_lines()
        loop = asyncio.get_running_loop()
        self._heartbeat_timer = loop.call_later(self._times.heartbeat_seconds, self._beat)

    def _send_lines(self) -> None:
        now, evidence_until = asyncio.get_running_loop().time(), self._evidence_until()
        for link in self._links.values():
            self._send_line(link, now, evidence_until)

    def _send_line(self, link: _Link, now: float, evidence_until: float | None) -> None:
        line = {**link.count.line(now), "round": self._round, **self._leaving}
        if evidence_until is not None:
            line["vouched_seconds"] = wire.seconds(evidence_until - link.count.received_at)
        link.writer.write(link.channel.seal(line))

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        try:
            await self._handle_peer(reader, writer, keep)
        except (OSError, EOFError, TimeoutError):
            pass
        except BadPeer as error:
            refusals.refused(log, writer.get_extra_info("peername"), error)

    async def _handle_peer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        """Let the peer prove itself, then answer its probe or keep its link."""
        nonce, asked_at = wire.nonce(), asyncio.get_running_loop().time()
        writer.write(wire.line(challenge(nonce)))
        message = await wire.read(reader, self._times.handshake_seconds)
        question = read_question(self._job_key, message, nonce, (LINK, PROBE_AGENT))
        exchange = answering(question, Peer(self._member, self._session()), nonce)
        if question.ask != LINK:
            facts = self._facts(writer)
            writer.write(wire.line(probe_answer(self._job_key, exchange, facts, question.mac)))
            await writer.drain()
            return
        if question.target.member != self._member:
            text = f"a link to member {question.target.member!r}, not to {self._member!r}"
            raise BadPeer(Refusal.OTHER_MEMBER, text)
        if not keep():
            raise BadPeer(Refusal.TOO_MANY, f"there are {CAPS.kept} links already")
        answer = link_answer(self._job_key, exchange, question.mac)
        writer.write(wire.line(answer))
        channel = wire.Channel(self._job_key, exchange, answer["mac"], coordinates=True)
        await self._keep(question, reader, _Link(writer, channel, wire.Count(asked_at)))

    def _facts(self, writer: asyncio.StreamWriter) -> Message:
        """Return the fields of an answer to a probe."""
        facts: Message = {
            "at": reached_address(writer.get_extra_info("sockname")),
            "agent_attached": True,
            "workers": self._workers(),
        }
        live_until = self._live_until()
        if live_until is not None:
            now = asyncio.get_running_loop().time()
            facts["live_seconds"] = wire.seconds(live_until - now)
        return facts

    async def _keep(self, question: Question, reader: asyncio.StreamReader, link: _Link) -> None:
        member, session = question.asker
        received: wire.Leaving = ()
        count = link.count
        self._links[question.asker] = link
        self._send_line(link, asyncio.get_running_loop().time(), self._evidence_until())
        self._post(PeerUp(member, session, count.linked_at))
        try:
            while True:
                try:
                    line = await wire.read_line(reader, self._times.quiet_seconds)
                except TimeoutError:
                    self._post(PeerQuiet(member, session))
                    line = await self._read_late_line(reader)
                beat = wire.member_heartbeat(link.channel.open(line))
                now = asyncio.get_running_loop().time()
                self._post(PeerHeartbeat(member, session, count.proven(beat.acknowledged, now)))
                if beat.leaving != received:
                    received = beat.leaving
                    self._post(LeaveNoticesReceived(received))
        except BadPeer as error:
            refusals.warn(log, f"closed the link of member {member!r}", error)
        finally:
            if self._links.get(question.asker) is link:
                del self._links[question.asker]
                self._post(PeerDown(member, session))

    async def _read_late_line(self, reader: asyncio.StreamReader) -> bytes:
        """Wait for a member that missed heartbeats, up to the maximum silence of a link."""
        try:
            return await wire.read_line(
                reader, self._times.silence_seconds - self._times.quiet_seconds
            )
        except TimeoutError:
            return await wire.read_line(reader, wire.LAST_READ_SECONDS)
