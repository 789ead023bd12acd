"""Node settings of an agent that is started from Python."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_agent.settings import LogSettings, WarmStart

SHUTDOWN_SECONDS = 30
NO_LOGS = LogSettings()


@dataclass(frozen=True, slots=True)
class Node:
    """Implementation of `surroundings.NodeSettings`."""

    run_id: str
    member: str
    name: str
    address: str
    slots: int
    node: str = ""
    logs: LogSettings = NO_LOGS
    stop_grace_seconds: float = float(SHUTDOWN_SECONDS)
    announce: bool = False
    warm_start: WarmStart | None = None
    hang_seconds: float = 0.0
