"""State, events and orders of an agent that polls a torch `RendezvousHandler`.

A handler gives no directives. It only answers: a seat in a round, the number of waiting nodes,
whether it is closed. `core.follow` derives from these answers and the agent's local state the
directives that the v3 engine would give. `elasticjob_agent.api.following` does the I/O: it polls
the handler and executes the orders.

A handler does not distinguish the reasons for a node's departure, so ElasticJob agents leave each
other notes in a round's store: a worker failed (the others' collectives cannot finish), the job
failed (no node should wait for it), or a node left and was not lost. torch's agents neither write
nor read these notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.core.directives import Directive, Idle
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.records import Outcome
from elasticjob_rendezvous.core.roster import Roster

NOT_BEGUN = Idle("the launcher is not connected yet")
NOTHING = Local()


class Phase(StrEnum):
    OUT = "out"  # no seat, none requested yet
    JOINING = "joining"  # a seat is requested from the handler
    SEATED = "seated"  # a seat in a round
    STOPPING = "stopping"  # this node's workers of the round are stopping
    MEETING = "meeting"  # own workers are done, waiting at the exit barrier
    DEPARTING = "departing"  # the leave is being reported to the handler
    OVER = "over"


class Trouble(StrEnum):
    """Reason for which a handler gave no seat."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    LEFT = "left"  # `shutdown` or `leave` of the handler was called
    UNSUPPORTED = "unsupported"  # the rendezvous backend can never serve this agent
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Terms:
    """Constants: identity of this agent, the job's restart budget, the grace of a planned stop.

    `name` is the display name.
    """

    member: str
    run_id: str
    max_restarts: int
    stop_grace_seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Following:
    """State of an agent that polls a handler.

    Args:
        number: last round in which this agent had a seat.
        restarts: failures charged to the job so far.
        uncharged: consecutive failures that were not charged.
        noted: round whose failure this agent has noted for the others.
        alone: True if this agent ended as done without knowing whether the others are.
    """

    terms: Terms
    phase: Phase = Phase.OUT
    directive: Directive = NOT_BEGUN
    local: Local = NOTHING
    number: int = 0
    seated_at: float = 0.0
    restarts: int = 0
    uncharged: int = 0
    noted: int = 0
    alone: bool = False


# -- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Told:
    """Local state of this node changed."""

    local: Local


@dataclass(frozen=True, slots=True)
class Joined:
    """Seat in a round; `roster.restarts` is the count that all members agreed on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class NotJoined:
    """No seat; `outcome` is the job's outcome as far as its last rounds show it."""

    trouble: Trouble
    detail: str
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of polling the handler and the notes in the round's store.

    Args:
        waiting: number of nodes that wait for the next round; also positive if the round lost one.
        closed: True if the rendezvous is closed.
        failed: note that a worker failed; empty without one.
        ended: note that the job failed; empty without one.
        met: True if all members have reached the exit barrier.
        lost: True if a node of this round is gone and does not wait for another round.
        left: name of a node that left, from its note; empty without one.
        moved_on: True if a node of this round requests a newer round or is in one.
    """

    waiting: int = 0
    closed: bool = False
    failed: str = ""
    ended: str = ""
    met: bool = False
    lost: bool = False
    left: str = ""
    moved_on: bool = False


@dataclass(frozen=True, slots=True)
class Waited:
    """Exit barrier timed out; `unknown` is the reason if the others' result is unknown."""

    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Departed:
    """Leave reported to the handler."""


Event = Told | Joined | NotJoined | Seen | Waited | Departed


# -- orders -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Order: request a seat in the next round; `charge` charges the failure of the last round."""

    charge: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Order: leave the others a note that a worker failed."""

    text: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Order: enter the exit barrier. The answer is `Seen(met=True)` or `Waited`."""


@dataclass(frozen=True, slots=True)
class CloseAll:
    """Order: leave the others a note that the job failed, and close the rendezvous."""

    text: str


@dataclass(frozen=True, slots=True)
class Depart:
    """Order: report the leave to the handler. The answer is `Departed`."""


Order = Join | NoteFailure | Meet | CloseAll | Depart
