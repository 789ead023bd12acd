"""Directives to the agent about its workers: a state, of which only the newest counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Cause, Outcome, Save
from elasticjob_rendezvous.protocol.records.roster import Roster


@dataclass(frozen=True, slots=True)
class Idle:
    """Order to start nothing for now; running workers stay (only `Stop` and `Finish` end them).

    `reason` is for people.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """Order to run workers of this final round, seated by `roster`.

    `save` asks them for a checkpoint. `asks`: a planned stop is preceded by such a request, so a
    leaving node waits for it, or for `Stop`.
    """

    roster: Roster
    member: str
    max_restarts: int = 3
    save: Save | None = None
    precedes_stop: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Order to end workers of `round`: at once with `kill`, else with SIGTERM and the grace."""

    round: int
    kill: bool
    cause: Cause
    grace_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Left:
    """Notice that this member left and its key is gone; the agent can exit."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Order to end what still runs, then exit with the outcome: the job is closed.

    While `reads_failure` is set, `failure` is being read, and the agent does not exit.
    """

    outcome: Outcome
    failure: Failure | None = None
    grace_seconds: float = 10.0
    reads_failure: bool = False


class RefusalKind(StrEnum):
    """Cause of a refusal, by which callers choose the error they raise."""

    STORE = "Store"  # etcd refuses this member, or does not answer
    BOUNDS = "Bounds"  # this member was started with other sizes than the job has


@dataclass(frozen=True, slots=True)
class Refused:
    """Notice that this member may not take part: an error for its user, with the text `reason`."""

    reason: str
    kind: RefusalKind = RefusalKind.STORE


Directive = Idle | Run | Stop | Left | Finish | Refused
