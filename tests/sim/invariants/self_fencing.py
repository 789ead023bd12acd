"""Self-fencing check: an isolated node ends its workers in time.

This module owns the start of each pod's isolation. There are no exceptions: a running agent must
fence its workers by itself, no matter which process started them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.liveness.failure_detector import TRUST_SECONDS
from elasticjob_rendezvous.protocol.liveness.self_fencing import REGISTER_AGAIN_SECONDS
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

LEAST_LEASE_SECONDS = 2.0
NOTICE_SECONDS = 1.0
TRAINS = (Workers.STARTING, Workers.RUNNING)


class Isolation:
    """Checker of isolated pods.

    Attributes:
        since: pod id -> time since which it reaches neither etcd nor another pod.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.since: dict[str, float] = {}

    @property
    def most_seconds(self) -> float:
        """Maximum isolation: a lease or the trust in links, then registering again; in seconds."""
        lease_seconds = max(LEAST_LEASE_SECONDS, self.world.plan.bounds.keep_alive_seconds)
        return max(lease_seconds, TRUST_SECONDS) + REGISTER_AGAIN_SECONDS + NOTICE_SECONDS

    def changed(self) -> None:
        """Update the isolation of every pod after a cut or its end."""
        for pod in self.world.alive():
            if self._is_alone(pod):
                if pod.id not in self.since:
                    self.since[pod.id] = self.world.now
                    self.world.at(self.most_seconds, self._check, pod, self.world.now)
            else:
                self.since.pop(pod.id, None)

    def _is_alone(self, pod: Pod) -> bool:
        """Return True if no packet reaches the pod; its own packets prove nothing to it."""
        network = self.world.network
        heard = any(
            network.carries(other.id, pod.id) for other in self.world.alive() if other is not pod
        )
        return not heard and not network.hears_etcd(pod.id)

    def _check(self, pod: Pod, since: float) -> None:
        """Check a pod after the maximum, counted from its agent's earliest chance to notice."""
        agent = pod.agent
        if self.since.get(pod.id) != since or not pod.alive or agent is None:
            return
        if agent.paused or pod.frozen:
            self.world.at(1.0, self._check, pod, since)
            return
        began = max(since, pod.agent_since, agent.resumed_at)
        due = began + self.most_seconds
        if self.world.now < due - 1e-6:
            self.world.at(due - self.world.now, self._check, pod, since)
            return
        seconds = self.world.now - since
        said = f"{pod.name} reached nobody for {seconds:.1f} s, and trains on in {pod.round}"
        self.world.checker.need(pod.phase not in TRAINS, "isolated workers end", said)
