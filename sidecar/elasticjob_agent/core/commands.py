"""Commands that the agent's core returns."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob.layout import Request
from elasticjob_agent.core.state import Ending
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.worker_group import Local


@dataclass(frozen=True, slots=True)
class StartGroup:
    """Command: start this node's workers of a final round."""

    roster: Roster
    assignment: RankAssignment
    max_restarts: int


@dataclass(frozen=True, slots=True)
class PrepareGroup:
    """Command: have the worker runtime preload the modules that workers import."""


@dataclass(frozen=True, slots=True)
class StopGroup:
    """Command: stop a round's workers with SIGTERM, grace, SIGKILL; without grace, kill at once.

    With `dump` the workers first write their stacks, with `copies` a snapshot of their training
    state. With `ends_step` they first finish their step.
    """

    round: int
    grace_seconds: float
    dump: bool = False
    copies: bool = True
    ends_step: bool = False


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """Command: ask a round's workers to save.

    The answer is `WorkersProgressed(answers_request=True)`.
    """

    round: int
    request: Request


@dataclass(frozen=True, slots=True)
class ReservePort:
    """Command: hold a fresh port for the next round. The answer is `PortReserved`."""


@dataclass(frozen=True, slots=True)
class ReportLocal:
    """Command: report this node's complete local state to the rendezvous."""

    local: Local


@dataclass(frozen=True, slots=True)
class Release:
    """Command: kill remaining processes and let the launcher exit with this code."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Exit:
    """Command: end this agent."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class LogLine:
    """Command: write one log line."""

    text: str
    warning: bool = False


Command = (
    StartGroup
    | RequestCheckpoint
    | PrepareGroup
    | StopGroup
    | ReservePort
    | ReportLocal
    | Release
    | Exit
    | LogLine
)
