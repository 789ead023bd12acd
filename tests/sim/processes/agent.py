"""Simulated agent process: the real engine in a model of the real driver.

This module owns the engine's clock, its wake-up and the order of its events. The agent can be
stopped (events queue up) and killed (queued events are lost).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_launcher.watchdog import SILENT_SECONDS
from elasticjob_rendezvous.protocol.config import Config
from elasticjob_rendezvous.protocol.effects import (
    Effect,
    Grant,
    KeepAlive,
    Link,
    Note,
    Probe,
    Read,
    SendLeaveNotices,
    Serve,
    Unlink,
    Unwatch,
    Watch,
    Write,
)
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import (
    Clock,
    Event,
    Granted,
    KeptAlive,
    LocalChanged,
    Started,
    Tick,
)
from elasticjob_rendezvous.protocol.records.members import LeaveNotice
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.sim.etcd.agent_requests import Wire

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

SPIN_LIMIT = 200

UTC_START_MS = 1_700_000_000_000


class Agent:
    """Process that runs one `Engine`.

    Attributes:
        origin: identifies this process in its commits.
        serves: the round number it sends on its links, 0 before it serves any.
        tells: leave notices that its links carry with each heartbeat.
        paused: stopped; it neither reads nor acts.
        exited: gone for good.
    """

    def __init__(self, world: World, pod: Pod, config: Config, origin: str) -> None:
        self.world = world
        self.pod = pod
        self.origin = origin
        self.engine: Engine = world.new_engine(config)
        self.wire = Wire(world, self)
        self.serves = 0
        self.tells: tuple[LeaveNotice, ...] = ()
        self.paused = False
        self.paused_at = 0.0
        self.resumes_at = 0.0
        self.resumed_at = 0.0
        self.exited = False
        self.steps = 0
        self._inbox: list[Event] = []
        self._wake: float | None = None
        self._told: Local | None = None
        self._spin = (0.0, 0)

    # -- time -----------------------------------------------------------------------

    def signature(self) -> str:
        """Return the author of a commit: this process, its member and its current session."""
        return f"{self.origin}|{self.pod.id}|{self.session}"

    def clock(self) -> float:
        """Return this machine's monotonic time; the clocks of different machines are unrelated."""
        return self.world.now + self.pod.clock_offset

    @property
    def session(self) -> str:
        return self.engine.session

    # -- events ---------------------------------------------------------------------

    def start(self) -> None:
        self.deliver(Started())
        self.report()

    def report(self) -> None:
        """Send the state of the local workers to the engine, if it changed."""
        local = self.pod.local()
        if local != self._told:
            self._told = local
            self.deliver(LocalChanged(local))

    def deliver(self, event: Event) -> None:
        if self.exited:
            return
        if self.paused:
            self._inbox.append(event)
            return
        self._step(event)

    def _step(self, event: Event) -> None:
        world = self.world
        self.steps += 1
        world.note(self.pod.name, "<-", event)
        now = self.clock()
        utc_ms = UTC_START_MS + int(world.now * 1000) + self.pod.utc_skew_ms
        effects = self.engine.step(event, Clock(now, utc_ms))
        if isinstance(event, Granted | KeptAlive):
            world.running.promised(self)
        for effect in effects:
            world.note(self.pod.name, "->", effect)
            self._carry_out(effect)
        self._count_spins(now)
        self._schedule_wake()
        if not self.engine.self_fencing.backed(now) and self.pod.agent is self:
            self.pod.hear(self)
        directive = self.engine.hand_over()
        world.running.told(self, directive)
        self.pod.follow(directive)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Grant() | Read() | Write():
                self.wire.request(effect)
            case KeepAlive():
                self.wire.keep_alive(effect)
            case Watch():
                self.wire.requests += 1
                self.wire.watches.watch(effect)
            case Unwatch():
                self.wire.watches.unwatch(effect)
            case Link():
                self.world.links.link(self, effect)
            case Unlink():
                self.world.links.unlink(self)
            case Serve(round):
                self.serves = round
                self.world.links.serve(self)
            case SendLeaveNotices(leaving):
                self.tells = leaving
            case Probe():
                self.world.links.probe(self, effect)
            case Note():
                pass

    def _count_spins(self, now: float) -> None:
        at, times = self._spin
        self._spin = (now, times + 1 if at == now else 0)
        if self._spin[1] > SPIN_LIMIT:
            name, wake = self.pod.name, self.engine.wake_at
            self.world.checker.fail("no spinning", f"{name} never rests: wake_at {wake}")

    def _schedule_wake(self) -> None:
        wake = self.engine.wake_at
        if wake is None or wake == self._wake:
            self._wake = wake
            return
        self._wake = wake
        self.world.at(max(0.0, wake - self.clock()), self._tick, wake)

    def _tick(self, wake: float) -> None:
        if wake != self._wake or self.exited:
            return
        if self.paused:
            return  # `resume` checks the clock
        self._wake = None
        self.deliver(Tick())

    # -- faults ---------------------------------------------------------------------

    def pause(self) -> None:
        """Suspend the agent; pausing it again does not restart its silence."""
        if not self.paused:
            self.paused_at = self.world.now
        self.paused = True

    @property
    def silent(self) -> bool:
        """True if its launcher has not heard from it for `SILENT_SECONDS`."""
        return self.paused and self.world.now - self.paused_at >= SILENT_SECONDS

    def resume(self) -> None:
        """Continue with the queued events; expired timers may come first."""
        if not self.paused or self.exited:
            return
        self.paused = False
        self.resumed_at = self.world.now
        inbox, self._inbox = self._inbox, []
        due = self._wake is not None and self._wake <= self.clock()
        if due and self.world.rng.random() < 0.5:
            self._wake = None
            inbox.insert(0, Tick())
        elif due:
            self.world.at(0.0, self._tick, self._wake)
        for event in inbox:
            self.deliver(event)

    def kill(self) -> None:
        """End the process for good."""
        if self.exited:
            return
        self.exited = True
        self._inbox.clear()
        self.wire.close()
        self.world.links.ended(self)
