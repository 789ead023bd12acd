"""Events that the agent's core takes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.worker_runtime import WorkerRuntimeEvent
from elasticjob_rendezvous.protocol.directives import Directive


@dataclass(frozen=True, slots=True)
class DirectiveChanged:
    """New directive from the rendezvous."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class RuntimeEvent:
    """Event from the worker runtime.

    A `Hello` or `WorkerExited` carries the error files of that round's workers by local rank,
    the base rank recorded at their start, and their last progress, which gives the step of a
    failure.
    """

    event: WorkerRuntimeEvent
    reports: Mapping[int, bytes] = field(default_factory=dict)
    base_rank: int | None = None
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Request to leave, from SIGTERM or the control socket. `hurry`: leave without grace."""

    reason: str
    hurry: bool = False


@dataclass(frozen=True, slots=True)
class PortReserved:
    """Port held for the next round."""

    port: int


@dataclass(frozen=True, slots=True)
class Timer:
    """Arrival of the time `step.wake_at`."""


@dataclass(frozen=True, slots=True)
class WorkersProgressed:
    """New progress of a round's workers; `progress` holds all workers, by local rank.

    `utc_ms` is the time of the read. `answers_request` is set if a save request was in place
    before it.
    """

    round: int
    progress: Mapping[int, WorkerProgress]
    utc_ms: int
    answers_request: bool = False


@dataclass(frozen=True, slots=True)
class WorkersCounted:
    """Number of workers of this node, from the worker runtime; precedes its first `Hello`."""

    workers: int


Event = (
    DirectiveChanged
    | RuntimeEvent
    | LeaveRequested
    | PortReserved
    | Timer
    | WorkersProgressed
    | WorkersCounted
)
