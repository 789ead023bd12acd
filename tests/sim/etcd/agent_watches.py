"""Watches of one agent: delivery of events from etcd to the agent, with stuck watches.

This module owns the open watches, by generation. Within a range events arrive in order; between
ranges, even of one watch, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.effects import Unwatch, Watch
from elasticjob_rendezvous.protocol.events import Changed, WatchBroken, WatchOpened
from elasticjob_rendezvous.protocol.kv import WatchBatch
from tests.sim.etcd.simulated_etcd import Compacted, Watcher

if TYPE_CHECKING:
    from tests.sim.processes.agent import Agent
    from tests.sim.world import World

SILENCE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class WatchLine:
    """Watch with its watchers in etcd, and the events held back by a cut."""

    generation: int
    watchers: list[Watcher] = field(default_factory=list)
    arrival: dict[int, float] = field(default_factory=dict)
    held: list[tuple[int, WatchBatch]] = field(default_factory=list)
    open: bool = True
    stuck: bool = False
    endpoint: int = 0


class WatchLines:
    """Watches of one agent process."""

    def __init__(self, world: World, agent: Agent) -> None:
        self.world = world
        self.agent = agent
        self._lines: dict[int, WatchLine] = {}

    def close(self) -> None:
        for line in list(self._lines.values()):
            self._end(line)

    def watch(self, effect: Watch) -> None:
        line = self._lines[effect.generation] = WatchLine(effect.generation)
        world = self.world
        line.endpoint = self.agent.wire.endpoint
        if line.endpoint in world.network.dead_endpoints:
            world.at(SILENCE_SECONDS, self._break, line, "no answer")
            return
        if not world.etcd_up or not world.network.reaches_etcd(self.agent.pod.id):
            refused = not world.etcd_up and world.etcd_refuses
            wait = 0.01 if refused else SILENCE_SECONDS
            world.at(wait, self._break, line, "unreachable")
        else:
            world.at(world.network.delay(), self._open, line, effect)

    def unwatch(self, effect: Unwatch) -> None:
        line = self._lines.get(effect.generation)
        if line is not None:
            self._end(line)

    def _open(self, line: WatchLine, effect: Watch) -> None:
        """Open the watch in etcd; it ends at once if etcd cannot serve it."""
        world = self.world
        if not line.open:
            return
        if not world.etcd_up:
            world.at(0.1, self._break, line, "etcd is down")
            return
        if effect.revision > world.etcd.revision + 1:
            world.at(world.network.delay(), self._break, line, "etcd is behind")
            return
        since = effect.revision - 1 if effect.revision else world.etcd.revision
        opened = WatchOpened(line.generation, since, world.etcd.cluster_id)
        arrives = world.now + world.network.delay()
        world.at(arrives - world.now, self._opened, line, opened)
        try:
            for stream, target in enumerate(effect.ranges):
                line.arrival[stream] = arrives

                def sink(batch: WatchBatch, stream: int = stream) -> None:
                    self._push(line, stream, batch)

                start = effect.revision or world.etcd.revision + 1
                line.watchers.append(world.etcd.watch(target, start, sink))
        except Compacted as error:
            world.at(world.network.delay(), self._break, line, str(error))

    def _opened(self, line: WatchLine, event: WatchOpened) -> None:
        if not self.world.network.hears_etcd(self.agent.pod.id):
            self.world.at(SILENCE_SECONDS, self._break, line, "no answer")
        elif line.open:
            self.agent.deliver(event)

    def _push(self, line: WatchLine, stream: int, batch: WatchBatch) -> None:
        """Send a batch from etcd."""
        world = self.world
        if not world.network.hears_etcd(self.agent.pod.id) or self._is_stuck(line):
            line.held.append((stream, batch))
            return
        arrival = max(line.arrival[stream], world.now + world.network.delay())
        line.arrival[stream] = arrival
        world.at(arrival - world.now, self._changed, line, batch)

    def _is_stuck(self, line: WatchLine) -> bool:
        """Return True if this watch is silent although etcd is reachable."""
        network = self.world.network
        mute = network.stale_endpoints | network.dead_endpoints
        return line.stuck or line.endpoint in mute

    def _changed(self, line: WatchLine, batch: WatchBatch) -> None:
        if line.open:
            self.agent.deliver(Changed(line.generation, batch.revision, batch.events))

    # -- ends -----------------------------------------------------------------------

    def _break(self, line: WatchLine, error: str) -> None:
        if line.open:
            self._end(line)
            if line.endpoint == self.agent.wire.endpoint:
                self.agent.wire.next_endpoint()
            self.agent.deliver(WatchBroken(line.generation, error))

    def _end(self, line: WatchLine) -> None:
        line.open = False
        self._lines.pop(line.generation, None)
        for watcher in line.watchers:
            self.world.etcd.cancel(watcher)

    def break_all(self, error: str) -> None:
        """Break the connections; the agent is notified."""
        for line in self._lines.values():
            self.world.at(self.world.network.delay(), self._break, line, error)

    def cut(self) -> None:
        for line in self._lines.values():
            self.world.at(SILENCE_SECONDS, self._silent, line)

    def _silent(self, line: WatchLine) -> None:
        if not self.world.network.reaches_etcd(self.agent.pod.id):
            self._break(line, "silent")

    def stick(self) -> None:
        """Silence the open watches; new ones work."""
        for line in self._lines.values():
            line.stuck = True

    def give_up_stuck(self) -> None:
        """Break stuck watches after an unanswered progress request."""
        for line in list(self._lines.values()):
            if self._is_stuck(line):
                self._break(line, "silent, and no answer to a progress request")

    def lose_endpoint(self, endpoint: int) -> None:
        """Lose the watches of an endpoint whose connections carry nothing any more."""
        for line in self._lines.values():
            if line.endpoint == endpoint:
                self.world.at(SILENCE_SECONDS, self._lost, line)

    def _lost(self, line: WatchLine) -> None:
        if line.endpoint in self.world.network.dead_endpoints:
            self._break(line, "silent")

    def healed(self) -> None:
        for line in self._lines.values():
            if self._is_stuck(line):
                continue
            held, line.held = line.held, []
            for stream, batch in held:
                self._push(line, stream, batch)
