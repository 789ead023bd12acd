"""What an agent should do whose rendezvous is a `RendezvousHandler`, which cannot direct.

A handler only answers: a place in a round, how many wait, whether it is closed. From the
answers and from what the agent tells of its node this makes the directives that the v3
engine would give: `core.follow` decides, and here is what it speaks of. The edge
(`elasticjob_agent.api.following`) asks the handler and does what is ordered.

Agents of ours leave each other notes in a round's store, since a handler cannot tell
them apart: that a worker failed (so the others' collectives cannot end), that the job
failed (so nobody is to wait for it), and that a node left, rather than was lost. torch's
agents neither write nor read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.core.directives import Directive, Idle
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.records import Outcome
from elasticjob_rendezvous.core.roster import Roster

NOT_BEGUN = Idle("the launcher is not there yet")
NOTHING = Local()


class Phase(StrEnum):
    OUT = "out"  # no place, and none sought yet
    JOINING = "joining"  # the handler is asked for a place
    SEATED = "seated"  # a place in a round
    STOPPING = "stopping"  # the round is to end here
    MEETING = "meeting"  # our workers are done, the others' not yet
    DEPARTING = "departing"  # the handler is told that we go
    OVER = "over"


class Trouble(StrEnum):
    """Why a handler gave no place."""

    CLOSED = "closed"
    TIMEOUT = "timeout"
    LEFT = "left"  # somebody called its `shutdown` or `leave`
    UNSUPPORTED = "unsupported"  # what keeps the rendezvous cannot serve us, now or later
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Terms:
    """What never changes: who we are, the job's budget, and the grace of a planned stop.

    `name` is what people call us.
    """

    member: str
    run_id: str
    max_restarts: int
    stop_grace_seconds: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Following:
    """Everything known of our part.

    Args:
        number: of the last round that we had a place in.
        restarts: failures charged to the job so far.
        uncharged: failures in a row that were not.
        noted: the round of which the failure was noted for the others.
        alone: we ended as done, and whether the others are is not known.
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
    """The truth of this node."""

    local: Local


@dataclass(frozen=True, slots=True)
class Joined:
    """A place in a round; `roster.restarts` is what all members agreed on."""

    roster: Roster


@dataclass(frozen=True, slots=True)
class NotJoined:
    """No place; `outcome` is how the job ended meanwhile, as far as its last rounds tell."""

    trouble: Trouble
    detail: str
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A look at the handler, and at the notes in the round's store.

    Args:
        waiting: nodes that wait for a next round, or a round that lost one.
        closed: the rendezvous is closed.
        failed: the note that a worker failed; empty without one.
        ended: the note that the job failed.
        met: all members have come to the exit barrier.
        lost: a node of our round is gone, and does not wait for another.
        left: the note by which a node left; its name.
        moved_on: a node of our round wants a newer one, or has it.
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
    """The exit barrier's time is over; `unknown` says why the others' end is not known."""

    unknown: str = ""


@dataclass(frozen=True, slots=True)
class Departed:
    """The handler was told that we go."""


Event = Told | Joined | NotJoined | Seen | Waited | Departed


# -- orders -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """Seek a place in the next round; `charge`: our last one ended by a failure to be charged."""

    charge: bool
    restarts: int


@dataclass(frozen=True, slots=True)
class NoteFailure:
    """Leave the others the note that a worker failed."""

    text: str


@dataclass(frozen=True, slots=True)
class Meet:
    """Come to the exit barrier; answered by `Seen(met=True)` or `Waited`."""


@dataclass(frozen=True, slots=True)
class CloseAll:
    """Leave the others the note that the job failed, and close the rendezvous."""

    text: str


@dataclass(frozen=True, slots=True)
class Depart:
    """Tell the handler that we go; answered by `Departed`."""


Order = Join | NoteFailure | Meet | CloseAll | Depart
