"""Rendezvous parameters of a job: sizes, timeouts and drain requests.

Written by the operator; outside Kubernetes by the first member.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.records.codec import prepare
from elasticjob_rendezvous.protocol.records.members import Member, Outcome


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """Drain request of the operator for a member; `preempted`: the cluster wants its pod gone."""

    member: str
    reason: str
    preempted: bool = False


@dataclass(frozen=True, slots=True)
class ClosingRequest:
    """Request of the operator to save, then to close the job; a coordinator of an earlier release
    ignores it.

    Args:
        outcome: outcome to close with.
        since_ms: UTC time of this request; the operator closes the job itself if no coordinator
            has done so in time.
    """

    outcome: Outcome
    since_ms: int = 0


LONGEST_SECONDS = 1e9
LEAST_KEEP_ALIVE_SECONDS = 2
"""Minimum lease: etcd grants no shorter one, and nodes of torch's c10d send a heartbeat once a
second."""
LEAST_CONFIRM_SECONDS = 1
"""Minimum confirmation timeout: a member that does not confirm is left out of the round, and on a
busy machine a confirmation takes a while."""
LEAST_JOIN_SECONDS = 1

_TIMEOUTS = (
    "join_timeout_seconds",
    "last_call_seconds",
    "keep_alive_seconds",
    "confirm_seconds",
    "settle_seconds",
    "stop_grace_seconds",
    "scale_up_wait_seconds",
)


@dataclass(frozen=True, slots=True)
class RendezvousParams:
    """Rendezvous parameters of a job. Durations are seconds.

    `expected` is the number of members that can join at present (the wanted size less those that
    cannot run); None means unknown, which counts as `max_nodes`.
    `scale_up_wait_seconds` is the maximum time that newcomers wait for a checkpoint before they
    interrupt a round; 0 lets them interrupt it at once.
    `ceiling_nodes` is the maximum size that the job may ever have, independent of the wanted one; 0
    means `max_nodes`.
    `leave_seconds` is the time that a node has from the request to leave until it is gone.
    `closing` asks the coordinator to end the job after a checkpoint.
    """

    min_nodes: int
    max_nodes: int
    increment: int = 1
    expected: int | None = None
    max_restarts: int = 3
    join_timeout_seconds: float = 600.0
    last_call_seconds: float = 30.0
    keep_alive_seconds: float = 5.0
    confirm_seconds: float = 5.0
    settle_seconds: float = 3.0
    stop_grace_seconds: float = 10.0
    scale_up_wait_seconds: float = 0.0
    leave_seconds: float = 30.0
    ceiling_nodes: int = 0
    marks: tuple[DrainRequest, ...] = ()
    closing: ClosingRequest | None = None

    def __post_init__(self) -> None:
        """Refuse sizes and durations that break arithmetic; the reader then names the record."""
        least = {"min_nodes": 1, "max_nodes": 1, "increment": 1, "max_restarts": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in _TIMEOUTS:
            seconds = getattr(self, name)
            if not 0.0 <= seconds <= LONGEST_SECONDS:  # nor NaN
                raise ValueError(f"{name} must be from 0 to {LONGEST_SECONDS:g}, got {seconds}")

    @property
    def wanted(self) -> int:
        """Number of members worth waiting for."""
        expected = self.max_nodes if self.expected is None else self.expected
        return min(self.max_nodes, expected)

    @property
    def sizes(self) -> str:
        """Sizes in the form that members declare, which reveals a member of another job."""
        return f"{self.min_nodes}:{self.max_nodes}:{self.increment}"

    def agrees(self, member: Member) -> bool:
        """Return True if `member` was started with these sizes, or leaves them to the operator."""
        return not member.sizes or member.sizes == self.sizes

    def marked(self, member: str) -> DrainRequest | None:
        return next(
            (drain_request for drain_request in self.marks if drain_request.member == member), None
        )


prepare(RendezvousParams)
