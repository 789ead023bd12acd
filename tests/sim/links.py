"""The connections between agents, and the probes of launchers.

Owns every link. A process that ends closes its links within milliseconds; a cut, a
stopped process or a machine without power only shows as silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticjob_rendezvous.core.events import (
    Link,
    LinkDown,
    LinkHeard,
    LinkUp,
    PeerDown,
    PeerHeard,
    PeerUp,
    Probe,
    Probed,
    Verdict,
)

if TYPE_CHECKING:
    from tests.sim.agent import Agent
    from tests.sim.world import World

HEARTBEAT_SECONDS = 1.0
SILENCE_SECONDS = 3.0
CONNECT_SECONDS = 2.0
REDIAL_SECONDS = (0.2, 0.4, 0.8, 1.6, 2.0)


@dataclass(slots=True, eq=False)
class Connection:
    """A link that stands: `client` holds it, `server` is (or was) the coordinator."""

    client: Agent
    server: Agent
    target: Link
    session: str
    heard: float
    open: bool = True


class Switchboard:
    """All links of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._wanted: dict[Agent, Link] = {}
        self._connections: dict[Agent, Connection] = {}
        self._failures: dict[Agent, int] = {}
        self._sessions: dict[Agent, str] = {}

    # -- what agents ask for --------------------------------------------------------

    def link(self, agent: Agent, target: Link) -> None:
        if self._wanted.get(agent) == target:
            return
        self.unlink(agent)
        self._wanted[agent] = target
        self._sessions[agent] = agent.session  # it goes by this one while the link is held
        self._failures.pop(agent, None)
        self.world.at(self.world.network.delay(), self._dial, agent, target)

    def unlink(self, agent: Agent) -> None:
        self._wanted.pop(agent, None)
        connection = self._connections.pop(agent, None)
        if connection is not None and connection.open:
            connection.open = False
            self._tell_server(connection)

    def serve(self, agent: Agent) -> None:
        """The server knows of another round: tell those linked to it."""
        for connection in self._served_by(agent):
            self.world.at(self.world.network.delay(), self._speak, connection)

    def probe(self, agent: Agent, effect: Probe) -> None:
        world = self.world
        verdict = self._verdict(agent, effect)
        wait = 2.0 * world.network.delay()
        if verdict is Verdict.UNKNOWN:
            wait += 1.0 + world.rng.random()
        world.at(wait, agent.deliver, Probed(effect.member, effect.session, verdict))

    def _verdict(self, agent: Agent, effect: Probe) -> Verdict:
        pod = self.world.pods_by_address.get(effect.address)
        if pod is None:
            return Verdict.GONE
        if not pod.powered or pod.frozen or not self.world.network.joined(agent.pod.id, pod.id):
            return Verdict.UNKNOWN
        if not pod.alive or pod.id != effect.member:
            return Verdict.GONE
        if pod.agent is not None:
            if pod.agent.paused and not effect.launcher_port:
                return Verdict.UNKNOWN
            if not pod.agent.silent:
                return Verdict.BOTH_ALIVE if pod.workers_alive else Verdict.AGENT_ALIVE
        if not pod.workers_alive:
            return Verdict.GONE
        if pod.round < effect.round:
            pod.end_orphans()
        return Verdict.WORKERS_ALIVE

    # -- dialling -------------------------------------------------------------------

    def _dial(self, agent: Agent, target: Link) -> None:
        if self._wanted.get(agent) != target or agent.exited or agent in self._connections:
            return
        if agent.paused:
            self.world.at(0.5, self._dial, agent, target)
            return
        world = self.world
        pod = world.pods_by_address.get(target.address)
        server = pod.agent if pod is not None else None
        silent = pod is not None and (
            not pod.powered
            or pod.frozen
            or (server is not None and server.paused)
            or not world.network.joined(agent.pod.id, pod.id)
        )
        if silent:
            world.at(CONNECT_SECONDS, self._failed, agent, target, False)
        elif server is None or pod is None or not pod.alive:
            world.at(world.network.delay(), self._failed, agent, target, True)
        else:
            self._connect(agent, server, target)

    def _connect(self, agent: Agent, server: Agent, target: Link) -> None:
        world = self.world
        session = self._sessions[agent]
        connection = Connection(agent, server, target, session, world.now)
        self._connections[agent] = connection
        self._failures.pop(agent, None)
        world.at(world.network.delay(), agent.deliver, LinkUp(target.member, target.session))
        up = PeerUp(agent.pod.id, connection.session)
        world.at(world.network.delay(), server.deliver, up)
        world.at(world.network.delay(), self._speak, connection)
        world.at(HEARTBEAT_SECONDS, self._beat, connection)

    def _failed(self, agent: Agent, target: Link, refused: bool) -> None:
        if self._wanted.get(agent) != target or agent in self._connections:
            return
        agent.deliver(LinkDown(target.member, target.session, refused))
        self._redial(agent, target)

    def _redial(self, agent: Agent, target: Link) -> None:
        times = self._failures.get(agent, 0)
        self._failures[agent] = times + 1
        wait = REDIAL_SECONDS[min(times, len(REDIAL_SECONDS) - 1)]
        self.world.at(wait, self._dial, agent, target)

    # -- a link that stands ---------------------------------------------------------

    def _speak(self, connection: Connection) -> None:
        if connection.open and self._hears(connection):
            target = connection.target
            heard = LinkHeard(target.member, target.session, connection.server.serves)
            connection.client.deliver(heard)

    def _hears(self, connection: Connection) -> bool:
        client, server = connection.client.pod, connection.server.pod
        if not (client.powered and server.powered) or client.frozen or server.frozen:
            return False
        if connection.client.paused or connection.server.paused:
            return False
        return self.world.network.joined(client.id, server.id)

    def _beat(self, connection: Connection) -> None:
        if not connection.open:
            return
        world = self.world
        if self._hears(connection):
            connection.heard = world.now
            self._speak(connection)
            connection.server.deliver(PeerHeard(connection.client.pod.id, connection.session))
        elif world.now - connection.heard >= SILENCE_SECONDS:
            self._close(connection)
            return
        world.at(HEARTBEAT_SECONDS, self._beat, connection)

    def _close(self, connection: Connection) -> None:
        """Both ends hear that the link is down; the client dials again."""
        connection.open = False
        client, target = connection.client, connection.target
        if self._connections.get(client) is connection:
            del self._connections[client]
        self._tell_server(connection)
        delay = self.world.network.delay()
        down = LinkDown(target.member, target.session, refused=False)
        self.world.at(delay, client.deliver, down)
        self._redial(client, target)

    def _tell_server(self, connection: Connection) -> None:
        down = PeerDown(connection.client.pod.id, connection.session)
        self.world.at(self.world.network.delay(), connection.server.deliver, down)

    def _served_by(self, agent: Agent) -> list[Connection]:
        return [c for c in self._connections.values() if c.server is agent and c.open]

    # -- ends -----------------------------------------------------------------------

    def ended(self, agent: Agent) -> None:
        """An agent process ended: its peers notice at once, unless they can't be reached."""
        self._wanted.pop(agent, None)
        own = self._connections.get(agent)
        ends = ([own] if own is not None else []) + self._served_by(agent)
        for connection in ends:
            other = connection.server if connection.client is agent else connection.client
            noticed = agent.pod.powered and self.world.network.joined(agent.pod.id, other.pod.id)
            wait = 0.0 if noticed else SILENCE_SECONDS
            self.world.at(wait, self._ended, connection)

    def _ended(self, connection: Connection) -> None:
        if connection.open:
            self._close(connection)
