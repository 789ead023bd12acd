"""What the agent should do with its workers: a state, of which only the newest counts."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.records import Cause, Outcome, Save
from elasticjob_rendezvous.core.roster import Roster


@dataclass(frozen=True, slots=True)
class Idle:
    """Start nothing for now; what runs is left alone (only `Stop` and `Finish` end workers).

    `reason` is for people.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """Workers of this final round should run, seated by `roster`.

    `save` asks them for a checkpoint. `asks`: they are asked before a planned stop, so a node
    that leaves waits for that, or for `Stop`.
    """

    roster: Roster
    member: str
    max_restarts: int = 3
    save: Save | None = None
    asks: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Workers of `round` must end: at once with `kill`, else SIGTERM and the grace."""

    round: int
    kill: bool
    cause: Cause
    grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Left:
    """This member's key is gone because it left; the agent can exit."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is closed: end what still runs, then exit with the outcome."""

    outcome: Outcome
    failure: Failure | None = None
    grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Refused:
    """This member may not take part (differing bounds, …): a clear error for its user."""

    reason: str


Directive = Idle | Run | Stop | Left | Finish | Refused
