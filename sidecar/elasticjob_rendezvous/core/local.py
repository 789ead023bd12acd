"""What the agent says of its node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.core.failures import Failure


class Workers(StrEnum):
    NONE = "none"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Local:
    """The facts of this node, as the agent sees them now.

    Args:
        ready: workers could be started (the launcher said hello).
        workers: what runs; `round` is the round of those workers, and with
            `NONE` the highest round of which a worker ever ran here.
        failure: the first failure of `round`, if it failed.
        done: every worker of `round` ended with success.
        leaving: why this node is about to go; empty when it is not.
        master_port: a port held for the next round, fresh after each round.
        master_served: a store for the workers listens there already.
        start_ms: how long the workers of `round` took to start.
        first_step_ms: how long all of them then took to their first step; 0 while unknown.
        step: the last step that they told, told here now and then; -1 before the first.
        checkpoint_step: the last step that a checkpoint of theirs contains; -1 for none.
        busy_ms: see `records.Member`.
        live_until: the deadline that workers had which this agent found, by the machine's
            monotonic clock; None where there were none, or their launcher has no deadline.
        saves, passed, saved, completed, cold: see `records.Member`.
    """

    ready: bool = False
    workers: Workers = Workers.NONE
    round: int = 0
    failure: Failure | None = None
    done: bool = False
    leaving: str = ""
    master_port: int = 0
    start_ms: int = 0
    first_step_ms: int = 0
    step: int = -1
    checkpoint_step: int = -1
    master_served: bool = False
    busy_ms: int = 0
    saves: bool = False
    passed: int = -1
    saved: bool = False
    completed: bool = False
    cold: str | None = None
    live_until: float | None = None
