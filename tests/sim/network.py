"""Who can reach whom, and how long messages take. Owns the cuts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Delays:
    """One-way delays in seconds: `fast` to twice that, now and then up to `slow`."""

    fast: float = 0.0005
    slow: float = 0.05
    slow_share: float = 0.03

    def draw(self, rng: Random) -> float:
        if rng.random() < self.slow_share:
            return self.fast + self.slow * rng.random()
        return self.fast * (1.0 + rng.random())


@dataclass(slots=True)
class Network:
    """Pods in one island reach each other; pods in `no_etcd` don't reach etcd."""

    rng: Random
    delays: Delays = field(default_factory=Delays)
    island: dict[str, int] = field(default_factory=dict)
    no_etcd: set[str] = field(default_factory=set)

    def delay(self) -> float:
        return self.delays.draw(self.rng)

    def joined(self, one: str, other: str) -> bool:
        return one == other or self.island.get(one, 0) == self.island.get(other, 0)

    def reaches_etcd(self, pod: str) -> bool:
        return pod not in self.no_etcd

    def isolate(self, pods: list[str]) -> None:
        """Put these pods together on an island of their own."""
        number = max(self.island.values(), default=0) + 1
        for pod in pods:
            self.island[pod] = number

    def rejoin(self, pods: list[str]) -> None:
        for pod in pods:
            self.island.pop(pod, None)
