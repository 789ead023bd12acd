"""Connections between agents, and the probes of launchers.

This module owns every link. A process that ends closes its links within milliseconds; a cut, a
stopped process or a machine without power only shows as silence, to each side separately: their
heartbeats are not synchronised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticjob_launcher.proof import BadPeer, Peer
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.links.wire import Channel
from elasticjob_rendezvous.protocol.effects import Link, Probe
from elasticjob_rendezvous.protocol.events import (
    Event,
    LeaveNoticesReceived,
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.protocol.records.members import LeaveNotice

if TYPE_CHECKING:
    from tests.sim.processes.agent import Agent
    from tests.sim.world import World

HEARTBEAT_SECONDS = 0.5
QUIET_SECONDS = 1.5
SILENCE_SECONDS = 3.0
CONNECT_SECONDS = 2.0
REDIAL_SECONDS = (0.2, 0.4, 0.8, 1.6, 2.0)


@dataclass(slots=True, eq=False)
class End:
    """Side of a link: its belief that the link is open, last receipt and sent leave notices.

    `got`: send time of the last message received, by the sender's clock; `got_at`: time of its
    receipt. `channel`: the authenticated lines, in runs with an adversary.
    """

    agent: Agent
    heard: float
    got: float = 0.0
    got_at: float = 0.0
    told: tuple[LeaveNotice, ...] = ()
    channel: Channel | None = None
    open: bool = True
    quiet: bool = False


@dataclass(slots=True, eq=False)
class Connection:
    """Established link: `client` holds it, `server` is (or was) the coordinator."""

    client: End
    server: End
    target: Link
    session: str

    @property
    def ends(self) -> tuple[tuple[End, End], tuple[End, End]]:
        return (self.client, self.server), (self.server, self.client)


class Switchboard:
    """Links of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._wanted: dict[Agent, Link] = {}
        self._connections: dict[Agent, Connection] = {}
        self._served: dict[Agent, list[Connection]] = {}
        self._failures: dict[Agent, int] = {}
        self._sessions: dict[Agent, str] = {}

    # -- requests of agents ---------------------------------------------------------

    def link(self, agent: Agent, target: Link) -> None:
        if self._wanted.get(agent) == target:
            return
        self.unlink(agent)
        self._wanted[agent] = target
        self._sessions[agent] = agent.session  # identifies the client while the link is held
        self._failures.pop(agent, None)
        self.world.at(self.world.network.delay(), self._dial, agent, target)

    def unlink(self, agent: Agent) -> None:
        self._wanted.pop(agent, None)
        connection = self._connections.pop(agent, None)
        if connection is not None:
            self._hang_up(connection, connection.client)

    def serve(self, agent: Agent) -> None:
        """Announce the server's new round number on its links."""
        for connection in self._served_by(agent):
            self.world.at(self.world.network.delay(), self._speak, connection.server, connection)

    def probe(self, agent: Agent, effect: Probe) -> None:
        world = self.world
        verdict = self._verdict(agent, effect)
        wait = 2.0 * world.network.delay()
        if verdict is Verdict.UNKNOWN:
            wait += 1.0 + world.rng.random()
        answer = Probed(effect.member, effect.session, verdict, self._live_seconds(effect, verdict))
        world.at(wait, agent.deliver, answer)
        if effect.live_until and verdict in (Verdict.WORKERS_ALIVE, Verdict.BOTH_ALIVE):
            world.at(2.0 * world.network.delay(), self._permit, agent, effect, world.now)

    def _live_seconds(self, effect: Probe, verdict: Verdict) -> float | None:
        """Return the workers' deadline in the answer."""
        pod = self.world.pods_by_address.get(effect.address)
        if pod is None or verdict not in (Verdict.WORKERS_ALIVE, Verdict.BOTH_ALIVE):
            return None
        if not effect.launcher_port and pod.agent is not None:  # the agent answers for the workers
            return max(0.0, pod.agent.engine.live_until - pod.agent.clock())
        return None if pod.live_until is None else max(0.0, pod.live_until - self.world.now)

    def _permit(self, agent: Agent, effect: Probe, asked_at: float) -> None:
        """Deliver the second line of a probe, whose seconds count from the answer to the first."""
        pod = self.world.pods_by_address[effect.address]
        if agent.exited or agent.paused or not self.world.network.joined(agent.pod.id, pod.id):
            return
        left = effect.live_until - agent.clock()
        if left > 0.0:
            self.world.at(self.world.network.delay(), pod.permit, effect.round, asked_at + left)

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
        pod.told_absent(effect.round)
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
        if silent and world.adversary.active and not agent.paused:
            world.adversary.answers(agent, self._sessions[agent], target)
        if silent:
            world.at(CONNECT_SECONDS, self._failed, agent, target, False)
        elif server is None or pod is None or not pod.alive:
            world.at(world.network.delay(), self._failed, agent, target, True)
        else:
            self._connect(agent, server, target)

    def _connect(self, agent: Agent, server: Agent, target: Link) -> None:
        world = self.world
        connection = Connection(
            End(agent, world.now, got=server.clock(), got_at=world.now),
            End(server, world.now, got=agent.clock(), got_at=world.now),
            target,
            self._sessions[agent],
        )
        if world.adversary.present:
            dialler = Peer(agent.pod.id, connection.session)
            channels = world.adversary.channels(dialler, Peer(server.pod.id, server.session))
            connection.client.channel, connection.server.channel = channels
        self._connections[agent] = connection
        self._served.setdefault(server, []).append(connection)
        self._failures.pop(agent, None)
        world.at(world.network.delay(), agent.deliver, LinkUp(target.member, target.session))
        up = PeerUp(agent.pod.id, connection.session, server.clock())
        world.at(world.network.delay(), server.deliver, up)
        world.at(world.network.delay(), self._speak, connection.server, connection)
        for here, _ in connection.ends:
            first = HEARTBEAT_SECONDS * (0.02 + 0.98 * world.rng.random())
            world.at(first, self._beat, here, connection)

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

    # -- established links ----------------------------------------------------------

    def _speak(self, here: End, connection: Connection) -> None:
        """Send a message from one side, if the packet passes."""
        there = connection.server if here is connection.client else connection.client
        if not (here.open and there.open and self._passes(here.agent, there.agent)):
            return
        self.world.adversary.sends(here, there, connection)
        there.heard = self.world.now
        if not there.agent.paused:  # a paused agent would read it only after its next message
            there.got, there.got_at = here.agent.clock(), self.world.now
        there.quiet = False
        there.agent.deliver(self._word(here, connection))
        if here.agent.tells != here.told:
            here.told = here.agent.tells
            there.agent.deliver(LeaveNoticesReceived(here.told))

    def open_ends(self) -> list[tuple[End, Connection]]:
        """Return the sides of all links whose process would read a line now."""
        connections = [each for served in self._served.values() for each in served]
        return [
            (here, connection)
            for connection in connections
            for here, there in connection.ends
            if here.open and there.open and not (here.agent.paused or here.agent.exited)
            if here.agent.pod.powered and not here.agent.pod.frozen
        ]

    def written(self, here: End, connection: Connection, line: bytes) -> None:
        """Let one side of a link read a line that the other did not send."""
        assert here.channel is not None
        serves = here is connection.server
        read = wire.member_heartbeat if serves else wire.coordinator_heartbeat
        try:
            beat = read(here.channel.open(line))
        except BadPeer:
            self.world.adversary.closed += 1
            self._fell_silent(here, connection)
            return
        self.world.adversary.accepted += 1
        here.heard, now, target = self.world.now, here.agent.clock(), connection.target
        if serves:
            here.agent.deliver(
                PeerHeartbeat(connection.client.agent.pod.id, connection.session, now)
            )
        else:
            heard = LinkHeartbeat(
                target.member, target.session, beat.round, now, beat.vouched_seconds
            )
            here.agent.deliver(heard)

    def wants(self, agent: Agent) -> Link | None:
        """Return the link that an agent wants to hold."""
        return self._wanted.get(agent)

    def _word(self, here: End, connection: Connection) -> Event:
        target = connection.target
        if here is connection.server:
            heard_at = here.got_at + here.agent.pod.clock_offset
            vouched = max(0.0, here.agent.engine.evidence_until - heard_at)
            return LinkHeartbeat(
                target.member, target.session, here.agent.serves, here.got, vouched
            )
        return PeerHeartbeat(here.agent.pod.id, connection.session, here.got)

    def _passes(self, one: Agent, other: Agent) -> bool:
        if not (one.pod.powered and other.pod.powered) or one.pod.frozen or other.pod.frozen:
            return False
        if one.exited or one.paused:  # messages to a paused process wait in its queue
            return False
        return self.world.network.carries(one.pod.id, other.pod.id)

    def _beat(self, here: End, connection: Connection) -> None:
        """Send one side's heartbeat and check the time since its last receipt."""
        if not here.open:
            return
        self._speak(here, connection)
        silence = self.world.now - here.heard
        if silence >= SILENCE_SECONDS:
            self._fell_silent(here, connection)
            return
        if silence >= QUIET_SECONDS and not here.quiet:
            here.quiet = True
            here.agent.deliver(self._quiet(here, connection))
        self.world.at(HEARTBEAT_SECONDS, self._beat, here, connection)

    def _quiet(self, here: End, connection: Connection) -> Event:
        if here is connection.server:
            return PeerQuiet(connection.client.agent.pod.id, connection.session)
        return LinkQuiet(connection.target.member, connection.target.session)

    def _fell_silent(self, here: End, connection: Connection) -> None:
        """Give the link up on this side; the other side learns of it if reachable."""
        self._lose(here, connection)
        self._hang_up(connection, here)

    def _hang_up(self, connection: Connection, here: End) -> None:
        """Close the side `here`: the other sees that at once, or detects silence later."""
        here.open = False
        there = connection.server if here is connection.client else connection.client
        one, other = here.agent.pod, there.agent.pod
        if one.powered and self.world.network.carries(one.id, other.id):
            self.world.at(self.world.network.delay(), self._lose, there, connection)

    def _lose(self, here: End, connection: Connection) -> None:
        """Report the lost link to one side; the client dials again."""
        if not here.open:
            return
        here.open = False
        if here is connection.server:
            self._served[here.agent].remove(connection)
            here.agent.deliver(PeerDown(connection.client.agent.pod.id, connection.session))
            return
        agent, target = here.agent, connection.target
        if self._connections.get(agent) is connection:
            del self._connections[agent]
            agent.deliver(LinkDown(target.member, target.session, refused=False))
            self._redial(agent, target)

    def _served_by(self, agent: Agent) -> list[Connection]:
        return [c for c in self._served.get(agent, ()) if c.server.open]

    # -- ends -----------------------------------------------------------------------

    def ended(self, agent: Agent) -> None:
        """End an agent's links: its peers notice at once, unless they are unreachable."""
        self._wanted.pop(agent, None)
        own = self._connections.pop(agent, None)
        if own is not None:
            self._hang_up(own, own.client)
        for connection in self._served_by(agent):
            self._hang_up(connection, connection.server)
        self._served.pop(agent, None)
