"""Plan of a run, drawn from its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum


class Mode(StrEnum):
    """Kind of a node."""

    POD = "pod"  # a launcher and a sidecar agent, as in a pod
    BARE = "bare"  # `elasticjob agent`, whose launcher is its child


class Scope(StrEnum):
    """Peers or store from which a node is cut off."""

    ALL = "all"
    ETCD = "etcd"
    PEERS = "peers"


class Way(StrEnum):
    """Direction in which packets of the cut node are lost."""

    BOTH = "both"
    SENT = "sent"
    RECEIVED = "received"


class Fault(StrEnum):
    """Fault of the agent on a cut node."""

    NONE = "none"
    KILL = "kill"  # SIGKILL
    STOP = "stop"  # SIGSTOP for good
    STOP_RESUME = "stop-resume"  # SIGSTOP, later SIGCONT
    STOP_KILL = "stop-kill"  # SIGSTOP, later SIGKILL


class Role(StrEnum):
    """Node to cut off, by its part in the first round."""

    COORDINATOR = "coordinator"
    SUCCESSOR = "successor"
    RANK_0 = "rank0"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of one run. Times are seconds after the cut; the cut's is seconds after round 1 begins.

    Args:
        seed: the seed that it was drawn from; also its name.
        role: the first node that is cut off; `Fault` applies to its agent.
        victims: number of nodes cut off together, each from the nodes that stay connected.
        fate_at: time at which a stopped agent resumes or is killed.
        restart_after: seconds until a killed agent is restarted; None: never.
        heal_at: None: never.
        stubborn: workers ignore SIGTERM.
        warm: workers are forked from a preloaded interpreter.
    """

    seed: int
    mode: Mode = Mode.POD
    lease_seconds: float = 3.0
    nodes: int = 3
    victims: int = 1
    role: Role = Role.OTHER
    scope: Scope = Scope.ALL
    way: Way = Way.BOTH
    cut_after: float = 1.0
    fault: Fault = Fault.NONE
    fault_at: float = 1.0
    fate_at: float | None = None
    restart_after: float | None = None
    heal_at: float | None = None
    stubborn: bool = False
    warm: bool = False
    etcd: str = "3.7"

    def __str__(self) -> str:
        parts = [
            f"{self.mode} lease {self.lease_seconds:g}",
            f"{self.victims}/{self.nodes} nodes ({self.role})",
            f"cut from {self.scope}, packets lost: {self.way}, {self.cut_after:.2f} s into round 1",
            f"agent: {self.fault}",
        ]
        if self.fault is not Fault.NONE:
            parts[-1] += f" at {self.fault_at:+.2f}"
        if self.fate_at is not None:
            parts[-1] += f", then at {self.fate_at:+.2f}"
        if self.restart_after is not None:
            parts.append(f"restarted after {self.restart_after:.2f}")
        healed = "not healed" if self.heal_at is None else f"healed at {self.heal_at:+.2f}"
        extra = [name for name in ("stubborn", "warm") if getattr(self, name)]
        return "; ".join((*parts, healed, *extra, f"etcd {self.etcd}"))


KINDS = [
    (scope, way, fault, healed)
    for scope in Scope
    for way in Way
    for fault in Fault
    for healed in (True, False)
]
"""Every kind of run. Seeds take them in turn, so that any 90 consecutive seeds cover each one."""

_SHUFFLED = random.Random(0).sample(KINDS, len(KINDS))


def draw(seed: int) -> Plan:
    """Return the plan of a seed."""
    scope, way, fault, healed = _SHUFFLED[seed % len(KINDS)]
    rng = random.Random(seed)
    lease = rng.choice((2.0, 3.0, 5.0))
    nodes = rng.choice((2, 3, 3, 3, 4))
    # Most faults occur while the lease is valid, before any member can have noticed the cut.
    fault_at = rng.uniform(
        *rng.choice(((-1.0, 0.0), (0.0, lease), (0.0, lease), (lease, lease + 4)))
    )
    fate_at = None
    if fault in (Fault.STOP_RESUME, Fault.STOP_KILL):
        fate_at = fault_at + rng.uniform(0.3, lease + 6.0)
    killed = fault in (Fault.KILL, Fault.STOP_KILL)
    return Plan(
        seed=seed,
        mode=rng.choice(tuple(Mode)),
        lease_seconds=lease,
        nodes=nodes,
        victims=rng.choice((1, 1, 1, 1, nodes - 1, nodes)),
        role=rng.choice(tuple(Role)),
        scope=scope,
        way=way,
        # Links connect in the first 0.3 s of a round; later moments are all alike.
        cut_after=rng.choice((rng.uniform(0.0, 0.4), rng.uniform(0.4, 3.0))),
        fault=fault,
        fault_at=fault_at,
        fate_at=fate_at,
        restart_after=rng.uniform(0.1, 5.0) if killed and rng.random() < 0.6 else None,
        heal_at=rng.uniform(0.5, lease + 8.0) if healed else None,
        stubborn=rng.random() < 0.25,
        warm=rng.random() < 0.3,
        etcd=rng.choice(("3.4", "3.5", "3.6", "3.7", "3.7")),
    )
