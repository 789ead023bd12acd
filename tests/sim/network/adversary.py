"""Adversary of the links: a process without the job's key.

It reaches every agent, whatever is cut between them, sees every line, answers at the addresses of
members that are cut off, and writes into every link. Its handshakes and lines are judged by the
code of the product. It draws from randomness of its own: a run whose links it cannot enter is the
run without it.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import TYPE_CHECKING

from elasticjob_launcher.proof import (
    LINK,
    PROBE_LAUNCHER,
    BadPeer,
    Exchange,
    Message,
    Peer,
    link_answer,
    link_question,
    probe_answer,
    probe_question,
    read_link_answer,
    read_question,
)
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.links.wire import Channel
from elasticjob_rendezvous.protocol.effects import Link
from elasticjob_rendezvous.protocol.events import (
    LeaveNoticesReceived,
    LinkHeartbeat,
    LinkUp,
    PeerHeartbeat,
    PeerUp,
)
from elasticjob_rendezvous.protocol.records.members import LeaveNotice

if TYPE_CHECKING:
    from tests.sim.network.links import Connection, End
    from tests.sim.processes.agent import Agent
    from tests.sim.world import World

ATTACK = "attack"
"""Name of the fault during which the adversary acts."""
EVERY_SECONDS = 0.25
REMEMBERED = 60
KEY = b"the job's key"
ANOTHER_KEY = b"another job's key"


class Adversary:
    """Forged dials, forged answers, and lines written into links.

    `present` is True if the plan lets it act: only then do links carry real lines. `accepted`
    counts the forgeries that an agent believed.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.present = any(action.name == ATTACK for action in world.plan.actions)
        self.accepted = 0
        self.closed = 0
        self._rng = Random(f"adversary {seed}")
        self._until = 0.0
        self._writes = False
        self._nonces = 0
        self._lines: deque[bytes] = deque(maxlen=REMEMBERED)
        self._macs: deque[str] = deque(["0" * 64], maxlen=REMEMBERED)

    @property
    def active(self) -> bool:
        return self.world.now < self._until and not self.world.calm

    def attack(self, seconds: float, writes: bool) -> None:
        """Act for this time; with `writes`, also write into the links of others."""
        idle = not self.active
        self._until, self._writes = self.world.now + seconds, writes
        if idle:
            self.world.at(EVERY_SECONDS, self._act)

    # -- honest links ---------------------------------------------------------------

    def channels(self, client: Peer, server: Peer) -> tuple[Channel, Channel]:
        """Return both sides' channels after an honest handshake, and remember its messages."""
        exchange = Exchange(client, self._nonce(), server, self._nonce())
        question = link_question(KEY, exchange)
        answer = link_answer(KEY, exchange, question["mac"])
        facts: Message = {"at": "", "agent_attached": True, "workers": 0}
        probed = probe_question(KEY, exchange, PROBE_LAUNCHER, 0, False)
        told = probe_answer(KEY, exchange, facts, probed["mac"])
        self._macs.extend(said["mac"] for said in (question, answer, probed, told))
        mac = answer["mac"]
        return Channel(KEY, exchange, mac, False), Channel(KEY, exchange, mac, True)

    def sends(self, here: End, there: End, connection: Connection) -> None:
        """Carry one line of an honest link, and remember it."""
        if here.channel is None or there.channel is None:
            return
        message: Message = {"heard": 0}
        if here is connection.server:
            message["round"] = here.agent.serves
        line = here.channel.seal(message)
        there.channel.open(line)
        self._lines.append(line)

    # -- forgeries ------------------------------------------------------------------

    def _act(self) -> None:
        if not self.active:
            return
        for agent in [pod.agent for pod in self.world.alive() if pod.agent is not None]:
            for other in self.world.alive():
                if other.agent is not None and other.agent is not agent and not agent.paused:
                    self._dial(agent, Peer(other.id, other.agent.session))
        if self._writes:
            ends = self.world.links.open_ends()
            if ends:
                self.world.links.written(*self._rng.choice(ends), self._line())
        self.world.at(EVERY_SECONDS, self._act)

    def _dial(self, server: Agent, claimed: Peer) -> None:
        """Dial an agent as another member, whose name and session are no secret."""
        nonce, target = self._nonce(), Peer(server.pod.id, server.session)
        exchange = Exchange(claimed, self._nonce(), target, nonce)
        question = {**link_question(ANOTHER_KEY, exchange), "mac": self._rng.choice(self._macs)}
        try:
            found = read_question(KEY, question, nonce, (LINK,))
        except BadPeer:
            return
        self.accepted += 1
        now = server.clock()
        server.deliver(PeerUp(*found.asker, now))
        server.deliver(PeerHeartbeat(*found.asker, now))
        server.deliver(
            LeaveNoticesReceived((LeaveNotice(claimed.member, "", "evicted by the intruder"),))
        )

    def answers(self, agent: Agent, session: str, target: Link) -> None:
        """Answer a member that dials a coordinator that it cannot reach."""
        peer = Peer(target.member, target.session)
        exchange = Exchange(Peer(agent.pod.id, session), self._nonce(), peer, self._nonce())
        question = link_question(KEY, exchange)
        said = {**link_answer(ANOTHER_KEY, exchange, ""), "mac": self._rng.choice(self._macs)}
        self._macs.append(question["mac"])
        try:
            read_link_answer(KEY, exchange, said, question["mac"])
        except BadPeer:
            return
        self.accepted += 1
        agent.deliver(LinkUp(*peer))
        self._vouch(agent, target)

    def _vouch(self, agent: Agent, target: Link) -> None:
        """Keep a believed link alive: no newer round is running."""
        if self.active and not agent.exited and self.world.links.wants(agent) == target:
            number = agent.engine.local.round
            agent.deliver(
                LinkHeartbeat(*Peer(target.member, target.session), number, agent.clock())
            )
            self.world.at(EVERY_SECONDS, self._vouch, agent, target)

    def _line(self) -> bytes:
        """Return an invented, a repeated or a changed line."""
        forged = wire.line({"heard": 0, "round": 1, "vouched_seconds": 3.0})[:-1] + b" " + b"0" * 64
        known = [line.rstrip(b"\n") for line in self._lines] or [forged]
        kind = self._rng.randrange(3)
        if kind == 0:
            return forged + b"\n"
        line = self._rng.choice(known)
        return (line if kind == 1 else line.replace(b'"heard":0', b'"heard":1')) + b"\n"

    def _nonce(self) -> str:
        self._nonces += 1
        return f"{self._nonces:032x}"
