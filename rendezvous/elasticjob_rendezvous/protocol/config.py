"""Constant inputs of one engine: its job, its identity and its timeouts."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.records.params import RendezvousParams


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of this member for its whole life. See `members.Member` for the fields."""

    id: str
    name: str
    address: str
    agent_port: int
    launcher_port: int = 0
    slots: int = 1
    role: str = "default"
    node: str = ""
    launch: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """Constant inputs of one engine.

    Args:
        prefix: key prefix of the job, ending in a slash.
        identity: identity of this member.
        bounds: parameters to write if there are none; None where an operator writes them.
        session_nonce: random prefix of session names, drawn by the caller.
        jitter: a number in [0, 1) drawn by the caller, fixed for this member.
        orphan_seconds: maximum life of workers without their agent.
        keep_alive_seconds: lease to request while no bounds are known.
        connect_seconds: timeout for the first answer of etcd.
    """

    prefix: str
    identity: Identity
    session_nonce: str
    bounds: RendezvousParams | None = None
    jitter: float = 0.0
    orphan_seconds: float = 30.0
    keep_alive_seconds: float = 5.0
    connect_seconds: float = 30.0
