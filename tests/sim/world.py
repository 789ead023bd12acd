"""Simulated run: virtual time, the event heap, and all simulated components.

This module owns time and randomness. All randomness of a run comes from one `Random(seed)`, drawn
in the order of events, so a seed replays exactly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.records.keys import Keys
from tests.sim.etcd.simulated_etcd import EXPIRY_CHECK_SECONDS, SimEtcd
from tests.sim.faults import Faults
from tests.sim.invariants.checker import Checker, Violation
from tests.sim.invariants.ground_truth import Truth
from tests.sim.invariants.running_workers import Running
from tests.sim.invariants.self_fencing import Isolation
from tests.sim.network.adversary import Adversary
from tests.sim.network.links import Switchboard
from tests.sim.network.reachability import Delays, Network
from tests.sim.plan import Plan
from tests.sim.processes.agent import Agent
from tests.sim.processes.operator import Controller
from tests.sim.processes.pod import Pod
from tests.sim.processes.training import Gangs

MOST_EVENTS = 100_000
PREFIX = "/elasticjob/sim/job/0/"
Line = tuple[float, str, str, object]
EngineFactory = Callable[[Config], Engine]


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a run. `violation` is None when every invariant held."""

    seed: int
    plan: Plan
    violation: Violation | None
    trace: list[Line]
    world: World


class World:
    """Simulated world of one job."""

    def __init__(self, seed: int, plan: Plan, new_engine: EngineFactory = Engine) -> None:
        self.rng = Random(seed)
        self.plan = plan
        self.new_engine = new_engine
        self.now = 0.0
        self.calm = False
        self.trace: list[Line] = []
        self.keys = Keys(PREFIX)
        self.network = Network(self.rng, Delays(slow=plan.slow_seconds))
        self.checker = Checker(self)
        self.running = Running(self, self.checker)
        self.truth = Truth(self)
        self.isolation = Isolation(self)
        self.etcd = SimEtcd(self.checker.committed)
        self.etcd_up = True
        self.etcd_refuses = True
        self.etcd_full = False
        self.etcd_spends = False
        self.links = Switchboard(self)
        self.adversary = Adversary(self, seed)
        self.gangs = Gangs(self)
        self.controller = Controller(self)
        self.faults = Faults(self)
        self.pods: list[Pod] = []
        self.agents: dict[str, Agent] = {}
        self.pods_by_address: dict[str, Pod] = {}
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._sequence = 0
        self._ports = 20_000
        self._expiry_at: float | None = None
        self._expiry_phase = self.rng.random() * EXPIRY_CHECK_SECONDS

    # -- time -----------------------------------------------------------------------

    def at(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Call after `delay` virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, call, args))

    def run(self, until: float) -> None:
        heap = self._heap
        limit = self._sequence + MOST_EVENTS
        while heap and heap[0][0] <= until:
            self.now, _, call, args = heapq.heappop(heap)
            call(*args)
            if self._sequence > limit:
                self.checker.fail("no spinning", f"more than {MOST_EVENTS} events")
        self.now = until

    def note(self, who: str, what: str, detail: object) -> None:
        self.trace.append((self.now, who, what, detail))

    def roll(self, rate: str) -> bool:
        """Return True if a fault of this kind hits this message."""
        chance = self.plan.rates.get(rate, 0.0)
        return chance > 0.0 and not self.calm and self.rng.random() < chance

    # -- construction ---------------------------------------------------------------

    def next_port(self) -> int:
        self._ports += 1
        return self._ports

    def add_pod(self, name: str = "") -> Pod:
        """Add a new pod: its id is new, its name may have been used before."""
        number = len(self.pods)
        slots = self.plan.slots[number % len(self.plan.slots)]
        identity = Identity(
            id=f"uid-{number}",
            name=name or f"pod-{number}",
            address=f"10.0.0.{number}",
            agent_port=7000,
            launcher_port=7001 if self.plan.launcher else 0,
            slots=slots,
            node=f"node-{number % 3}",
        )
        pod = Pod(self, identity)
        self.pods.append(pod)
        self.pods_by_address[identity.address] = pod
        self.note(pod.name, "pod starts", identity.id)
        pod.boot()
        self.controller.pods_changed()
        return pod

    def new_agent(self, pod: Pod) -> Agent:
        config = Config(
            prefix=PREFIX,
            identity=pod.identity,
            session_nonce=f"s{pod.agents}",
            bounds=None if self.plan.operator else self.plan.bounds,
            jitter=self.rng.random(),
            orphan_seconds=self.plan.orphan_seconds,
            keep_alive_seconds=self.plan.bounds.keep_alive_seconds,
        )
        agent = Agent(self, pod, config, f"{pod.id}#{pod.agents}")
        self.agents[agent.origin] = agent
        return agent

    def alive(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.alive]

    # -- leases ---------------------------------------------------------------------

    def lease_moved(self) -> None:
        """Schedule the lease check after the next expiry."""
        expiry = self.etcd.next_expiry()
        if expiry is None or self._expiry_at is not None or not self.etcd_up:
            return
        due = max(expiry, self.now)
        checks = int((due - self._expiry_phase) / EXPIRY_CHECK_SECONDS) + 1
        self._expiry_at = self._expiry_phase + checks * EXPIRY_CHECK_SECONDS
        self.at(max(0.0, self._expiry_at - self.now), self._expire)

    def _expire(self) -> None:
        self._expiry_at = None
        if self.etcd_up:
            for lease in self.etcd.expire(self.now):
                self.note("etcd", "lease ran out", lease)
        self.lease_moved()
