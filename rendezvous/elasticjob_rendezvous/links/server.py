"""Server of the agent for probes and, while it is the coordinator, for its members' links."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass

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
from elasticjob_rendezvous.links.channel import Channel
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeavesTold,
    PeerDown,
    PeerHeard,
    PeerQuiet,
    PeerUp,
)

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPT_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Link:
    """Established link of one member."""

    writer: asyncio.StreamWriter
    channel: Channel
    count: wire.Count


class PeerServer:
    """Server on one port for the lifetime of an agent.

    `post` receives `PeerUp`, `PeerHeard`, `PeerQuiet`, `PeerDown` and `LeavesTold`. `serve` sets
    the round number sent on every link, `tell` the leave notices. `workers` returns the number of
    local workers, or 1 if they are not counted: members without a launcher are probed here.
    `live_until` returns the workers' self-fencing deadline, `vouched_until` the time up to which
    members may rely on the round number, both on the loop's clock. `session` returns the name of
    the agent's present session.
    """

    def __init__(
        self,
        member: str,
        job_key: bytes,
        post: Callable[[Event], None],
        bind_address: str,
        workers: Callable[[], int],
        live_until: Callable[[], float | None] = lambda: None,
        vouched_until: Callable[[], float | None] = lambda: None,
        session: Callable[[], str] = lambda: "",
    ) -> None:
        self._member = member
        self._job_key = job_key
        self._post = post
        self._bind_address = bind_address
        self._workers = workers
        self._live_until = live_until
        self._vouched_until = vouched_until
        self._session = session
        self._listener: socket.socket | None = None
        self._links: dict[Peer, _Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._round = 0
        self._leaving: Message = {}
        self._heart: asyncio.TimerHandle | None = None

    async def start(self) -> int:
        """Bind and listen; return the port."""
        family = socket.AF_INET6 if ":" in self._bind_address else socket.AF_INET
        listener = socket.create_server((self._bind_address, 0), family=family, backlog=BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        # Not asyncio.start_server: closing it while it accepts loses the new socket.
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._beat()
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def serve(self, round: int) -> None:
        """Send `round` as the newest known round to every linked member, now and per heartbeat."""
        self._round = round
        self._tell()

    def tell(self, leaving: wire.Leaving) -> None:
        """Send these leave notices to every linked member with each heartbeat."""
        self._leaving = wire.leaving_line(leaving)

    def _beat(self) -> None:
        self._tell()
        loop = asyncio.get_running_loop()
        self._heart = loop.call_later(wire.HEARTBEAT_SECONDS, self._beat)

    def _tell(self) -> None:
        now, vouched_until = asyncio.get_running_loop().time(), self._vouched_until()
        for link in self._links.values():
            self._say(link, now, vouched_until)

    def _say(self, link: _Link, now: float, vouched_until: float | None) -> None:
        line = {**link.count.line(now), "round": self._round, **self._leaving}
        if vouched_until is not None:
            line["vouched_seconds"] = wire.seconds(vouched_until - link.count.heard_at)
        link.writer.write(link.channel.seal(line))

    def _accept(self, listener: socket.socket) -> None:
        """Accept all pending connections."""
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # the peer has disconnected
            except OSError as error:  # for example too many open files
                log.warning("could not accept a peer's connection: %s", error)
                self._accept_later(listener)
                return
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(functools.partial(_close, connection))

    def _accept_later(self, listener: socket.socket) -> None:
        """Pause accepting: a pending connection would otherwise cause a busy loop."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)

        def again() -> None:
            if self._listener is listener:
                loop.add_reader(listener, self._accept, listener)

        loop.call_later(ACCEPT_AGAIN_SECONDS, again)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection, limit=wire.MAX_LINE_BYTES)
        try:
            await self._talk(reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass
        except BadPeer as error:
            log.warning(
                "refused a connection from %s: %s", writer.get_extra_info("peername"), error
            )
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Let the peer prove itself, then answer its probe or keep its link."""
        nonce, asked_at = wire.nonce(), asyncio.get_running_loop().time()
        writer.write(wire.line(challenge(nonce)))
        message = await wire.read(reader, wire.HANDSHAKE_SECONDS)
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
        answer = link_answer(self._job_key, exchange, question.mac)
        writer.write(wire.line(answer))
        channel = Channel(self._job_key, exchange, answer["mac"], coordinates=True)
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
        told: wire.Leaving = ()
        count = link.count
        self._links[question.asker] = link
        self._say(link, asyncio.get_running_loop().time(), self._vouched_until())
        self._post(PeerUp(member, session, count.linked_at))
        try:
            while True:
                try:
                    line = await wire.read_line(reader, wire.QUIET_SECONDS)
                except TimeoutError:
                    self._post(PeerQuiet(member, session))
                    line = await self._last_word(reader)
                beat = wire.member_heartbeat(link.channel.open(line))
                now = asyncio.get_running_loop().time()
                self._post(PeerHeard(member, session, count.proven(beat.heard, now)))
                if beat.leaving != told:
                    told = beat.leaving
                    self._post(LeavesTold(told))
        except BadPeer as error:
            log.warning("closed the link of member %r: %s", member, error)
        finally:
            if self._links.get(question.asker) is link:
                del self._links[question.asker]
                self._post(PeerDown(member, session))

    @staticmethod
    async def _last_word(reader: asyncio.StreamReader) -> bytes:
        """Wait for a member that missed heartbeats, up to the maximum silence of a link."""
        try:
            return await wire.read_line(reader, wire.SILENCE_SECONDS - wire.QUIET_SECONDS)
        except TimeoutError:
            return await wire.read_line(reader, wire.LAST_LOOK_SECONDS)


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    """Close a connection that its handler may not have taken over."""
    connection.close()
