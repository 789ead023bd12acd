"""What one engine is told once: its job, who it is, and its patience."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.bounds import Bounds


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this member is, for its whole life. See `records.Member` for the fields."""

    id: str
    name: str
    address: str
    agent_port: int
    launcher_port: int = 0
    slots: int = 1
    role: str = "default"
    node: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """What one engine is told once.

    Args:
        prefix: the job's key prefix, ending in a slash.
        identity: who this member is.
        bounds: what to write if there are none; None where an operator writes them.
        session_nonce: drawn by the edge; sessions are named from it.
        jitter: a number in [0, 1) drawn by the edge, fixed for this member.
        orphan_seconds: how long workers may live without their agent.
        keep_alive_seconds: the lease to ask for while no bounds are known.
        connect_seconds: how long to try for the first answer of etcd.
    """

    prefix: str
    identity: Identity
    session_nonce: str
    bounds: Bounds | None = None
    jitter: float = 0.0
    orphan_seconds: float = 30.0
    keep_alive_seconds: float = 5.0
    connect_seconds: float = 30.0
