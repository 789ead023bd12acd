"""Server of the agent for probes and, while it is the coordinator, for its members' links."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.listener import Caps, Keep, Listener, listening_socket, refusals
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
CAPS = Caps(unproven=1024, per_address=512, kept=20_480)
"""Every member of a job links to its coordinator: 16,384 at most, and some twice on reconnecting.
Gangs on one machine connect from one address."""


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
        self._listener: Listener | None = None
        self._links: dict[tuple[str, str], tuple[asyncio.StreamWriter, wire.Count]] = {}
        self._round = 0
        self._leaving: wire.Message = {}
        self._heart: asyncio.TimerHandle | None = None
        self.session = ""

    async def start(self) -> int:
        """Bind and listen; return the port."""
        sock = listening_socket(self._bind_address, 0, BACKLOG)
        port: int = sock.getsockname()[1]
        self._listener = Listener(sock, CAPS, self._serve, wire.MAX_LINE_BYTES)
        self._beat()
        return port

    async def stop(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
        if self._listener is not None:
            listener, self._listener = self._listener, None
            await listener.close()

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

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
        try:
            await self._talk(reader, writer, keep)
        except (OSError, EOFError, TimeoutError):
            pass
        except wire.BadPeer as error:
            refusals.refused(log, writer.get_extra_info("peername"), error)

    async def _talk(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keep: Keep
    ) -> None:
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
        if not keep():
            raise wire.BadPeer(f"there are {CAPS.kept} links already")
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
