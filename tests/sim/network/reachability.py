"""Reachability between simulated hosts, and message delays. This module owns the cuts."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random


@dataclass(slots=True)
class Delays:
    """Delays of one-way messages in seconds: `fast` to twice that, now and then up to `slow`."""

    fast: float = 0.0005
    slow: float = 0.05
    slow_share: float = 0.03

    def draw(self, rng: Random) -> float:
        if rng.random() < self.slow_share:
            return self.fast + self.slow * rng.random()
        return self.fast * (1.0 + rng.random())


@dataclass(slots=True)
class Network:
    """Cuts of the simulated network.

    Attributes:
        island: pods of one island reach each other.
        no_etcd: neither requests nor answers pass between these pods and etcd.
        mute: requests of these pods do not reach etcd; its answers reach them.
        deaf: requests of these pods reach etcd; its answers do not reach them.
        lost: (sender, receiver) pairs whose packets are lost in that direction.
        dead_endpoints: endpoints of etcd that accept requests and answer none.
        stale_endpoints: endpoints of etcd that answer, but whose watches are silent.
    """

    rng: Random
    delays: Delays = field(default_factory=Delays)
    island: dict[str, int] = field(default_factory=dict)
    no_etcd: set[str] = field(default_factory=set)
    mute: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    lost: set[tuple[str, str]] = field(default_factory=set)
    dead_endpoints: set[int] = field(default_factory=set)
    stale_endpoints: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """True if nothing is cut."""
        cuts = (self.island, self.no_etcd, self.mute, self.deaf, self.lost)
        return not any((*cuts, self.dead_endpoints, self.stale_endpoints))

    def delay(self) -> float:
        return self.delays.draw(self.rng)

    def carries(self, sender: str, receiver: str) -> bool:
        """Return True if packets of `sender` reach `receiver`."""
        if sender == receiver:
            return True
        together = self.island.get(sender, 0) == self.island.get(receiver, 0)
        return together and (sender, receiver) not in self.lost

    def joined(self, one: str, other: str) -> bool:
        """Return True if both reach each other, which a new connection needs."""
        return self.carries(one, other) and self.carries(other, one)

    def asks_etcd(self, pod: str) -> bool:
        """Return True if requests of this pod reach etcd."""
        return pod not in self.no_etcd and pod not in self.mute

    def hears_etcd(self, pod: str) -> bool:
        """Return True if answers of etcd reach this pod."""
        return pod not in self.no_etcd and pod not in self.deaf

    def reaches_etcd(self, pod: str) -> bool:
        """Return True if requests and answers pass."""
        return self.asks_etcd(pod) and self.hears_etcd(pod)

    def isolate(self, pods: list[str]) -> None:
        """Put these pods together on an island of their own."""
        number = max(self.island.values(), default=0) + 1
        for pod in pods:
            self.island[pod] = number

    def rejoin(self, pods: list[str]) -> None:
        for pod in pods:
            self.island.pop(pod, None)
