"""Ground truth of a run, unknown to the agents, on which the invariants are judged.

This module owns the record of deaths, leaves, failures, ends and faults of one run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.failures import ECHOES, FailureClass

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

CONSEQUENCES = ECHOES | {FailureClass.MASTER_PORT}


@dataclass(slots=True)
class Truth:
    """Actual events of one run.

    Attributes:
        departures: pod id -> times at which it was lost, told to leave, or lost its session.
        preempted: ids of pods that the operator reported as preempted by the cluster.
        genuine: rounds in which a worker failed by itself.
        aborts: round -> time of the first aborted collective.
        blips: rounds whose collectives a cut between pods broke.
        ended: (round, pod id) whose workers all ended with success.
        troubled_at: last time etcd, the network or a whole process misbehaved.
        agents_gone: pod id -> time of its agent's last death.
        closed_by_hand: set when the end was requested through an agent.
    """

    world: World
    departures: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    preempted: set[str] = field(default_factory=set)
    genuine: set[int] = field(default_factory=set)
    aborts: dict[int, float] = field(default_factory=dict)
    blips: set[int] = field(default_factory=set)
    ended: set[tuple[int, str]] = field(default_factory=set)
    troubled_at: float = -1000.0
    agents_gone: dict[str, float] = field(default_factory=dict)
    closed_by_hand: bool = False
    robbed: bool = False

    def gone(self, pod: Pod) -> None:
        self.departures[pod.id].append(self.world.now)

    def leaves(self, pod: Pod) -> None:
        self.departures[pod.id].append(self.world.now)

    def failed(self, pod: Pod, kind: FailureClass) -> None:
        if kind in CONSEQUENCES:
            self.aborts.setdefault(pod.round, self.world.now)
        else:
            self.genuine.add(pod.round)

    def done(self, pod: Pod) -> None:
        self.ended.add((pod.round, pod.id))

    def blip(self, number: int) -> None:
        self.blips.add(number)

    def trouble(self) -> None:
        self.troubled_at = self.world.now
