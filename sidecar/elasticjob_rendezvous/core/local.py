"""Report of the agent about its node."""

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
    """State of this node as the agent sees it now.

    Args:
        ready: workers could be started (the launcher said hello).
        workers: state of the workers; `round` is their round, and with `NONE` the highest round of
            which a worker ever ran here.
        failure: the first failure of `round`, if it failed.
        done: every worker of `round` ended with success.
        leaving: reason why this node is about to leave; empty when it stays.
        master_port: a port held for the next round, fresh after each round.
        master_served: a store for the workers listens there already.
        start_ms: duration of the start of the workers of `round`.
        first_step_ms: duration from there until all of them reached their first step; 0 while
            unknown.
        step: the last step that they reported, updated now and then; -1 before the first.
        checkpoint_step: the last step that a checkpoint of theirs contains; -1 for none.
        busy_ms: see `records.Member`.
        live_until: deadline of the workers that this agent found, on the machine's monotonic
            clock; None if there were none, or their launcher has no deadline.
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
