"""Server of the agent for probes and, while it is the coordinator, for its members' links."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable

from elasticjob_rendezvous.links import wire
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


class PeerServer:
    """Server on one port for the lifetime of an agent.

    `post` receives `PeerUp`, `PeerHeard`, `PeerQuiet`, `PeerDown` and `LeavesTold`. `serve` sets
    the round number sent on every link, `tell` the leave notices. `workers` returns the number of
    local workers, or 1 if they are not counted: members without a launcher are probed here.
    `live_until` returns the workers' self-fencing deadline, `vouched_until` the time up to which
    members may rely on the round number, both on the loop's clock.
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
    ) -> None:
        self._member = member
        self._job_key = job_key
        self._post = post
        self._bind_address = bind_address
        self._workers = workers
        self._live_until = live_until
        self._vouched_until = vouched_until
        self._listener: socket.socket | None = None
        self._links: dict[tuple[str, str], tuple[asyncio.StreamWriter, wire.Count]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._round = 0
        self._leaving: wire.Message = {}
        self._heart: asyncio.TimerHandle | None = None
        self.session = ""

    def use_key(self, job_key: bytes) -> None:
        """Use this key for the peers that connect from now on."""
        self._job_key = job_key

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
        for writer, count in self._links.values():
            self._say(writer, count, now, vouched_until)

    def _say(
        self,
        writer: asyncio.StreamWriter,
        count: wire.Count,
        now: float,
        vouched_until: float | None,
    ) -> None:
        line = {**count.line(now), "round": self._round, **self._leaving}
        if vouched_until is not None:
            line["vouched_seconds"] = wire.seconds(vouched_until - count.heard_at)
        writer.write(wire.line(line))

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
        except wire.BadPeer as error:
            log.warning(
                "refused a connection from %s: %s", writer.get_extra_info("peername"), error
            )
        finally:
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await wire.read(reader, wire.HANDSHAKE_SECONDS)
        question = hello.get("nonce")
        if not isinstance(question, str) or not 16 <= len(question) <= 128:
            raise wire.BadPeer("nonce must be 16 to 128 characters")
        if not question.isascii():
            raise wire.BadPeer("nonce must be ASCII")
        mine = wire.nonce()
        asked_at = asyncio.get_running_loop().time()
        body: wire.Message = {
            "member": self._member,
            "session": self.session,
            "agent_attached": True,
            "workers": self._workers(),
            "nonce": mine,
        }
        live_until = self._live_until()
        if live_until is not None:
            body["live_seconds"] = wire.seconds(live_until - asked_at)
        body["hmac"] = wire.sign(self._job_key, question, body)
        writer.write(wire.line(body))
        link = hello.get("link")
        if link is None:
            await writer.drain()
            return
        proof = await wire.read(reader, wire.HANDSHAKE_SECONDS)
        if not isinstance(link, dict) or not wire.verified(
            self._job_key, mine, {**link, "hmac": proof.get("hmac")}
        ):
            raise wire.BadPeer("the peer does not hold this job's key")
        count = wire.Count(asked_at)
        await self._keep(str(link.get("member")), str(link.get("session")), reader, writer, count)

    async def _keep(
        self,
        member: str,
        session: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: wire.Count,
    ) -> None:
        key = (member, session)
        told: wire.Leaving = ()
        link = self._links[key] = (writer, count)
        now = asyncio.get_running_loop().time()
        self._say(writer, count, now, self._vouched_until())
        self._post(PeerUp(member, session, count.linked_at))
        try:
            while True:
                try:
                    message = await wire.read(reader, wire.QUIET_SECONDS)
                except TimeoutError:
                    self._post(PeerQuiet(member, session))
                    message = await self._last_word(reader)
                now = asyncio.get_running_loop().time()
                self._post(PeerHeard(member, session, count.proven(message, now)))
                leaving = wire.leaving_told(message)
                if leaving != told:
                    told = leaving
                    self._post(LeavesTold(leaving))
        finally:
            if self._links.get(key) is link:
                del self._links[key]
                self._post(PeerDown(member, session))

    @staticmethod
    async def _last_word(reader: asyncio.StreamReader) -> wire.Message:
        """Wait for a member that missed heartbeats, up to the maximum silence of a link."""
        try:
            return await wire.read(reader, wire.SILENCE_SECONDS - wire.QUIET_SECONDS)
        except TimeoutError:
            return await wire.read(reader, wire.LAST_LOOK_SECONDS)


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    """Close a connection that its handler may not have taken over."""
    connection.close()
