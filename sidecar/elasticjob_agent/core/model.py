"""The agent's state, what happens to it and what it orders. Only values; nothing decides here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

from elasticjob.layout import Request
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.hands import HandsEvent, Hello, WorkerExited
from elasticjob_rendezvous.core.directives import Directive, Finish, Left, Refused, Run
from elasticjob_rendezvous.core.failures import Failure
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.roster import Roster, Seat


class ExitCode(IntEnum):
    """How the agent's process ends."""

    OK = 0  # the job succeeded, or this node left as it was asked to
    FAILED = 1  # the job failed, or this node's launcher was lost
    USAGE = 2  # bad options, settings or files
    RENDEZVOUS = 3  # refused, closed before this agent came, or the join timed out
    STOPPED = 4  # the job was ended from outside
    INTERNAL = 70  # a fault of the agent itself


LEFTOVER_SECONDS = 0.2
"""How long what the workers left behind may take to go by itself."""

LEFT_CODE = 143
"""What the launcher exits with when its node left: ended on request, not succeeded."""


# -- state --------------------------------------------------------------------------


class StopCause(StrEnum):
    """Why this agent ends a round's workers."""

    FAILURE = "failure"  # one of them failed: the rest can't go on
    PEER_FAILURE = "peerFailure"  # the rendezvous wants them dead: another node's worker failed
    URGENT = "urgent"  # the rendezvous wants them dead for another reason: a node was lost, …
    PLANNED = "planned"  # the rendezvous wants them to end in good order
    HANG = "hang"  # they stand still: they are to say where
    LEAVE = "leave"  # this node leaves
    LEFTOVERS = "leftovers"  # all workers ended, processes of theirs did not
    END = "end"  # the job is over


@dataclass(frozen=True, slots=True)
class StopOrder:
    """The order that was given last for a crew; a shorter grace may follow, never a longer."""

    cause: StopCause
    grace_seconds: float

    @property
    def dump(self) -> bool:
        """Whether workers are to write down where they stand."""
        return self.cause is StopCause.HANG


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's end, and why workers were being ended when we heard of it, if they were."""

    exit: WorkerExited
    during: StopCause | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A checkpoint that a crew was asked for.

    Args:
        point: the place at which all ranks save; 0 while it is not agreed on.
        before: what the workers had said by then.
        passed: the last place that any of them passed; -1 before they were heard.
    """

    point: int
    before: Mapping[int, WorkerProgress]
    passed: int = -1


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one round on this node, from the order to start them on.

    Args:
        round: the round they belong to.
        slots: how many there are.
        base_rank: the rank of local rank 0; None when an earlier agent started
            them and left no note of it.
        began: when they were ordered, monotonic seconds.
        started: the hands said that they run.
        start_ms: how long that took.
        cold_reason: why they were started afresh; empty where they were forked.
        exits: of those that ended, in order of arrival.
        reports: the error files found, by local rank.
        order: how they are being ended, if they are.
        failure: the first failure among them.
        ended_at: when the last of them ended, monotonic seconds.
        empty: no process of theirs is left.
        progress: the latest word of each that said anything, by local rank.
        first_step_ms: from their start to the first step of the slowest; 0 while unknown.
        advanced_at: when one of them last told something new, monotonic seconds.
        busy_seconds: what a step takes each of its own, smoothed, where they tell it.
        asked: the checkpoint that they were asked for.
    """

    round: int
    slots: int
    base_rank: int | None
    began: float
    started: bool = False
    start_ms: int = 0
    cold_reason: str = ""
    exits: tuple[Ended, ...] = ()
    reports: Mapping[int, bytes] = field(default_factory=dict)
    order: StopOrder | None = None
    failure: Failure | None = None
    ended_at: float | None = None
    empty: bool = False
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)
    first_step_ms: int = 0
    advanced_at: float | None = None
    busy_seconds: Mapping[int, float] = field(default_factory=dict)
    asked: Asked | None = None

    @property
    def leftovers_at(self) -> float | None:
        """When processes that outlive all workers are ended, after a moment to go by themselves."""
        if self.ended_at is None or self.empty or self.order is not None:
            return None
        return self.ended_at + LEFTOVER_SECONDS

    @property
    def all_ended(self) -> bool:
        return len({ended.exit.local_rank for ended in self.exits}) >= self.slots

    @property
    def done(self) -> bool:
        """Every worker ended with success by itself, and nothing of theirs is left.

        A script may end with 0 because it was told to stop, or to save: that is no success.
        """
        return self._well and not self._told_to_save

    @property
    def obeyed(self) -> bool:
        """Every worker ended with 0, once it had been told to save."""
        return self._well and self._told_to_save

    @property
    def _well(self) -> bool:
        return (
            self.empty
            and self.all_ended
            and self.failure is None
            and all(ended.exit.exit_code == 0 and ended.during is None for ended in self.exits)
        )

    @property
    def _told_to_save(self) -> bool:
        """Whether a worker came to the place where all save; a text or file names no places."""
        asked = self.asked
        return asked is not None and any(
            said.saves and (said.points >= asked.point > 0 or said.points == 0)
            for said in self.progress.values()
        )


@dataclass(frozen=True, slots=True)
class Shown:
    """What the rendezvous was told of a round's training; `at` is monotonic seconds."""

    round: int
    step: int
    checkpoint_step: int
    at: float
    busy_ms: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """What never changes in an agent's life.

    Args:
        member, name, node: who this is, for failure records.
        slots: workers to run.
        stop_grace_seconds: what workers get when this node leaves by itself.
        run_id: the job, for messages.
        warm_start: workers are to be forked from a preloaded interpreter, where they can be.
        hang_seconds: after which workers that told of steps and are silent count as
            hanging; 0 is never.
    """

    member: str
    name: str
    node: str
    slots: int
    stop_grace_seconds: float
    run_id: str
    warm_start: bool = False
    hang_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ending:
    """The agent's end: its exit code, the launcher's, and what explains both."""

    code: ExitCode
    launcher_code: int
    message: str


@dataclass(frozen=True, slots=True)
class State:
    """Everything the agent knows.

    Args:
        directive: the rendezvous' latest word.
        hello: the hands are there.
        gone: why the hands are lost for good; empty while they are not.
        crew: the last round of workers that ran here, running or not.
        ran: the highest round before that of which a worker ran here.
        port: the port held for the next round, 0 before there is one.
        served: a store listens there already.
        prepare_by: until when this node waits for its preloaded interpreter before it takes
            part; None when it does not wait.
        leaving: why this node goes; empty when it stays.
        leaving_at: since when, monotonic seconds.
        hurried: somebody asked a second time: no more grace.
        leave_by, release_by: monotonic deadlines for going without an answer.
        ending: decided; the hands were released.
        told: the last `Local`.
        shown: what it says of training, and since when: see `core.showing`.
        over: nothing follows.
    """

    facts: Facts
    directive: Directive | None = None
    hello: Hello | None = None
    gone: str = ""
    crew: Crew | None = None
    ran: int = 0
    port: int = 0
    served: bool = False
    prepare_by: float | None = None
    leaving: str = ""
    leaving_at: float | None = None
    hurried: bool = False
    leave_by: float | None = None
    release_by: float | None = None
    ending: Ending | None = None
    told: Local | None = None
    shown: Shown | None = None
    over: bool = False

    @property
    def round(self) -> int:
        """The highest round of which a worker ever ran here, or is about to."""
        return self.ran if self.crew is None else max(self.ran, self.crew.round)

    @property
    def obeyed_until(self) -> float | None:
        """Until when workers that saved as they were told, and ended, count as running, while
        peers may still save: the end of their round is on its way. None where there are none.
        """
        crew, directive = self.crew, self.directive
        if crew is None or not crew.obeyed or crew.ended_at is None or self.gone or self.hurried:
            return None
        if not isinstance(directive, Run) or directive.save is None:
            return None
        same = directive.roster.number == crew.round
        return crew.ended_at + directive.save.seconds if same else None

    @property
    def busy(self) -> bool:
        """Processes of a round are there, or may be, or count as that."""
        return self.crew is not None and (not self.crew.empty or self.obeyed_until is not None)

    @property
    def may_leave(self) -> bool:
        """To be told to end is no leave once the end is there anyway."""
        over = isinstance(self.directive, Finish | Left | Refused)
        return not (over or self.gone or self.ending is not None)


# -- events -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Directed:
    """The rendezvous' directive changed."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class FromHands:
    """The hands said something.

    With a `Hello` or `WorkerExited` come the error files of that round's
    workers, by local rank, and the base rank noted when they were started; and
    their last words of progress, for the step at which one failed.
    """

    event: HandsEvent
    reports: Mapping[int, bytes] = field(default_factory=dict)
    base_rank: int | None = None
    progress: Mapping[int, WorkerProgress] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node is to go: SIGTERM, or the control socket. `hurry`: at once."""

    reason: str
    hurry: bool = False


@dataclass(frozen=True, slots=True)
class PortHeld:
    """A port is held for the next round."""

    port: int


@dataclass(frozen=True, slots=True)
class Timer:
    """`step.wake_at` was reached."""


@dataclass(frozen=True, slots=True)
class WorkersProgressed:
    """Workers of a round said something new; `progress` holds all of them, by local rank.

    `utc_ms` is when that was read; `asked`: after a request was put in its place.
    """

    round: int
    progress: Mapping[int, WorkerProgress]
    utc_ms: int
    asked: bool = False


Event = Directed | FromHands | LeaveAsked | PortHeld | Timer | WorkersProgressed


# -- commands -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartCrew:
    """Start this node's workers of a final round."""

    roster: Roster
    seat: Seat
    max_restarts: int


@dataclass(frozen=True, slots=True)
class PrepareCrew:
    """Have the hands load beforehand what workers will load."""


@dataclass(frozen=True, slots=True)
class StopCrew:
    """End a round's workers: at once with no grace, else SIGTERM, grace, SIGKILL.

    With `dump` they say where they stand first.
    """

    round: int
    grace_seconds: float
    dump: bool = False


@dataclass(frozen=True, slots=True)
class AskCrew:
    """Ask a round's workers to save; answered by `WorkersProgressed(asked=True)`."""

    round: int
    request: Request


@dataclass(frozen=True, slots=True)
class HoldPort:
    """Hold a fresh port for the next round; answered by `PortHeld`."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Tell the rendezvous the whole truth of this node."""

    local: Local


@dataclass(frozen=True, slots=True)
class Release:
    """Kill what is left and let the launcher exit with this code."""

    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Exit:
    """End this agent."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log."""

    text: str
    warning: bool = False


Command = StartCrew | AskCrew | PrepareCrew | StopCrew | HoldPort | Tell | Release | Exit | Note
