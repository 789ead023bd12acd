"""State of one member in the failure detector, with its transition tables. No I/O.

A state has independent parts, each with a table of its own: three parts for each session (link,
workers, key) and two for the member (contact, inquiry). A row of a table gives the next state for
each state in order of definition: the events of a link, the answers of probes and the passage of
time move a member through these tables and in no other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from elasticjob_rendezvous.protocol.liveness.probes import RepeatedProbe
from elasticjob_rendezvous.protocol.records.members import Member


class SessionEvent(StrEnum):
    """Input of the tables of one session."""

    LINK_OPENED = "link opened"
    OTHER_LINK_OPENED = "link of another session of the member opened"
    HEARTBEAT = "heartbeat on a link"
    LINK_CLOSED = "link closed"
    GONE = "probe proved that nothing runs there"
    WORKERS_ONLY = "probe found workers without an agent"
    AGENT_ANSWERED = "probe found the agent"
    NO_ANSWER = "probe got no answer"
    PROBE_REPEATED = "probe of an agent without a link was repeated"
    KEY_LOST = "member has no key"
    REPLACED = "member has a key of another session"
    ORPHAN_EXPIRED = "agent of the orphaned workers did not come back in time"
    TOOK_OVER = "this member became the coordinator"


class MemberEvent(StrEnum):
    """Input of the tables of one member."""

    LINK_OPENED = "link opened"
    HEARTBEAT = "heartbeat on a link"
    LED = "heartbeat of the member as coordinator, on our link to it"
    LINK_LOST = "last link closed without notice"
    NO_ANSWER = "probe of an unlinked session got no answer"
    SUSPECTED = "heartbeats are missing, or a link closed"
    SESSION_SUSPECTED = "the same, for another session than that of the inquiry"
    ABSENT = "member of the round has no key"
    INQUIRY_OVER = "nothing depends on the inquiry any more"
    TOOK_OVER = "this member became the coordinator"
    RESIGNED = "this member resigned as coordinator"


class LinkState(StrEnum):
    """Link of one session; `ANSWERING`: its agent answers probes though it has no link.

    The agent may have been about to die, so it is probed again.
    """

    UNLINKED = "unlinked"
    LINKED = "linked"
    ANSWERING = "answering"


class WorkersState(StrEnum):
    """Workers of one session; `ORPHANED`: they run without their agent."""

    WITH_AGENT = "attended"
    ORPHANED = "orphaned"


class KeyState(StrEnum):
    """Validity of a session's key; the coordinator deletes the key of any but a valid session.

    `ABANDONED`: the agent did not come back in time. Its launcher ends the workers, so the member
    is lost, though nothing proves yet that the workers have stopped. `GONE`: proven.
    """

    VALID = "valid"
    ABANDONED = "abandoned"
    GONE = "gone"


class ContactState(StrEnum):
    """Signs of trouble with a member: a lost link, probes without an answer, or both."""

    NORMAL = "normal"
    LINK_LOST = "link lost"
    SILENT = "silent"
    LINK_LOST_SILENT = "link lost, silent"


class InquiryState(StrEnum):
    """Repeated probes of a member, and their reason.

    `SUSPICION`: it fell silent while it had a key, so a message of its agent ends the inquiry.
    `ABSENCE`: it has no key while its workers may still run.
    """

    NONE = "none"
    SUSPICION = "suspicion"
    ABSENCE = "absence"


S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class ImpossibleTransition(Exception):
    """Event that cannot occur in a state."""


class Table(Generic[S, E]):
    """Transition table: (state, event) -> state.

    Args:
        states: the enumeration of the states.
        rows: event -> the next state for each state in order of definition; None: the event cannot
            occur in that state.
        ignored: events that leave every state as it is.
    """

    def __init__(
        self,
        states: type[S],
        rows: Mapping[E, tuple[S | None, ...]],
        ignored: frozenset[E] = frozenset(),
    ) -> None:
        self.rows = rows
        self.ignored = ignored
        self._next: dict[tuple[S, E], S | None] = {
            (state, event): after
            for event, row in rows.items()
            for state, after in zip(states, row, strict=True)
        }
        self._next |= {(state, event): state for event in ignored for state in states}

    def after(self, state: S, event: E) -> S:
        """Return the state that follows `state` on `event`."""
        after = self._next[state, event]
        if after is None:
            raise ImpossibleTransition(f"{event} cannot occur in the state {state}")
        return after


_SE, _ME = SessionEvent, MemberEvent

_UNLINKED, _LINKED, _STRAY = LinkState
LINK: Table[LinkState, SessionEvent] = Table(
    LinkState,
    {
        _SE.LINK_OPENED: (_LINKED, _LINKED, _LINKED),
        _SE.HEARTBEAT: (_LINKED, _LINKED, _LINKED),
        _SE.LINK_CLOSED: (_UNLINKED, _UNLINKED, _STRAY),
        _SE.AGENT_ANSWERED: (_STRAY, _LINKED, _STRAY),
        _SE.PROBE_REPEATED: (None, None, _UNLINKED),
        _SE.KEY_LOST: (_UNLINKED, _LINKED, _UNLINKED),
        _SE.REPLACED: (_UNLINKED, _LINKED, _UNLINKED),
        _SE.TOOK_OVER: (_UNLINKED, _LINKED, _UNLINKED),
    },
    ignored=frozenset(
        {_SE.OTHER_LINK_OPENED, _SE.GONE, _SE.WORKERS_ONLY, _SE.NO_ANSWER, _SE.ORPHAN_EXPIRED}
    ),
)

_WITH_AGENT, _ORPHANED = WorkersState
WORKERS: Table[WorkersState, SessionEvent] = Table(
    WorkersState,
    {
        _SE.LINK_OPENED: (_WITH_AGENT, _WITH_AGENT),
        _SE.OTHER_LINK_OPENED: (_WITH_AGENT, _WITH_AGENT),
        _SE.GONE: (_WITH_AGENT, _WITH_AGENT),
        _SE.WORKERS_ONLY: (_ORPHANED, _ORPHANED),
        _SE.NO_ANSWER: (_WITH_AGENT, _WITH_AGENT),
        _SE.REPLACED: (_WITH_AGENT, _WITH_AGENT),
        _SE.ORPHAN_EXPIRED: (None, _WITH_AGENT),
    },
    ignored=frozenset(
        {
            _SE.HEARTBEAT,
            _SE.LINK_CLOSED,
            _SE.AGENT_ANSWERED,
            _SE.PROBE_REPEATED,
            _SE.KEY_LOST,
            _SE.TOOK_OVER,
        }
    ),
)

_VALID, _ABANDONED, _GONE = KeyState
KEY: Table[KeyState, SessionEvent] = Table(
    KeyState,
    {
        _SE.GONE: (_GONE, _GONE, _GONE),
        _SE.ORPHAN_EXPIRED: (_ABANDONED, _ABANDONED, _GONE),
        _SE.TOOK_OVER: (_VALID, _VALID, _VALID),
    },
    ignored=frozenset(
        {
            _SE.LINK_OPENED,
            _SE.OTHER_LINK_OPENED,
            _SE.HEARTBEAT,
            _SE.LINK_CLOSED,
            _SE.WORKERS_ONLY,
            _SE.AGENT_ANSWERED,
            _SE.NO_ANSWER,
            _SE.PROBE_REPEATED,
            _SE.KEY_LOST,
            _SE.REPLACED,
        }
    ),
)

_NORMAL, _LOST, _SILENT, _LOST_SILENT = ContactState
CONTACT: Table[ContactState, MemberEvent] = Table(
    ContactState,
    {
        _ME.LINK_OPENED: (_NORMAL, _NORMAL, _NORMAL, _NORMAL),
        _ME.HEARTBEAT: (_NORMAL, _LOST, _NORMAL, _LOST),
        _ME.LINK_LOST: (_LOST, _LOST, _LOST_SILENT, _LOST_SILENT),
        _ME.NO_ANSWER: (_SILENT, _LOST_SILENT, _SILENT, _LOST_SILENT),
        _ME.TOOK_OVER: (_NORMAL, _NORMAL, _NORMAL, _NORMAL),
    },
    ignored=frozenset(
        {
            _ME.LED,
            _ME.SUSPECTED,
            _ME.SESSION_SUSPECTED,
            _ME.ABSENT,
            _ME.INQUIRY_OVER,
            _ME.RESIGNED,
        }
    ),
)

_NONE, _SUSPICION, _ABSENCE = InquiryState
INQUIRY: Table[InquiryState, MemberEvent] = Table(
    InquiryState,
    {
        _ME.LINK_OPENED: (_NONE, _NONE, _ABSENCE),
        _ME.HEARTBEAT: (_NONE, _NONE, _ABSENCE),
        _ME.LED: (_NONE, _NONE, _ABSENCE),
        _ME.SUSPECTED: (_SUSPICION, _SUSPICION, _ABSENCE),
        _ME.SESSION_SUSPECTED: (None, _SUSPICION, _SUSPICION),
        _ME.ABSENT: (_ABSENCE, _ABSENCE, _ABSENCE),
        _ME.INQUIRY_OVER: (None, _NONE, _NONE),
        _ME.RESIGNED: (_NONE, _NONE, _NONE),
    },
    ignored=frozenset({_ME.LINK_LOST, _ME.NO_ANSWER, _ME.TOOK_OVER}),
)


@dataclass(slots=True)
class Orphan:
    """Workers without an agent; `sent_round` is the newest round number that their launcher knows.

    `kept_until`: certain end of the lease on which their member's key was seen;
    `renewing`: the latest renewal of that lease has no answer yet.
    """

    record: Member
    until: float
    next_probe: float
    sent_round: int
    kept_until: float = 0.0
    renewing: bool = True


@dataclass(slots=True)
class SessionState:
    """State of one session of a member.

    Attributes:
        beat_at: last heartbeat on its link, while linked.
        next_probe: time of the next probe, while answering.
        answers: number of answers of its agent since it was last linked.
        orphan: its workers, while orphaned.
    """

    link: LinkState = LinkState.UNLINKED
    workers: WorkersState = WorkersState.WITH_AGENT
    key: KeyState = KeyState.VALID
    beat_at: float = 0.0
    next_probe: float = 0.0
    answers: int = 0
    orphan: Orphan | None = None

    def take(self, event: SessionEvent) -> None:
        self.link = LINK.after(self.link, event)
        self.workers = WORKERS.after(self.workers, event)
        self.key = KEY.after(self.key, event)
        if self.workers is WorkersState.WITH_AGENT:
            self.orphan = None
        if self.link is LinkState.LINKED or event is SessionEvent.TOOK_OVER:
            self.answers = 0

    @property
    def linked(self) -> bool:
        return self.link is LinkState.LINKED

    @property
    def open(self) -> bool:
        """True if the coordinator has something to do for this session."""
        answering = self.link is LinkState.ANSWERING
        orphaned = self.workers is WorkersState.ORPHANED
        return answering or orphaned or self.key is not KeyState.VALID

    @property
    def known(self) -> bool:
        """True if anything is known about the session."""
        return self.linked or self.open or self.answers > 0


@dataclass(slots=True)
class PeerState:
    """State of one member, and the times of its evidence.

    Attributes:
        symptom: first sign of trouble, while its link is lost.
        inquiry: repeated probes, unless there are none.
        last_beat_at: last heartbeat on any link of it, also after it broke.
        proven: time until which any link of it is known to have carried both ways.
        led: for a former coordinator, the last heartbeat on our own link to it.
        granted: latest time until which we let workers without an agent live.
    """

    sessions: dict[str, SessionState] = field(default_factory=dict)
    contact: ContactState = ContactState.NORMAL
    inquiry_state: InquiryState = InquiryState.NONE
    symptom: float | None = None
    inquiry: RepeatedProbe | None = None
    last_beat_at: float | None = None
    proven: float | None = None
    led: float | None = None
    granted: float | None = None

    def take(self, event: MemberEvent) -> None:
        self.contact = CONTACT.after(self.contact, event)
        self.inquiry_state = INQUIRY.after(self.inquiry_state, event)
        if self.contact in (ContactState.NORMAL, ContactState.SILENT):
            self.symptom = None
        if self.inquiry_state is InquiryState.NONE:
            self.inquiry = None

    @property
    def silent(self) -> bool:
        found = self.contact
        return found is ContactState.SILENT or found is ContactState.LINK_LOST_SILENT

    @property
    def linked(self) -> bool:
        return any(session.linked for session in self.sessions.values())

    @property
    def open(self) -> bool:
        """True if the coordinator has something to do for this member."""
        return self.inquiry is not None or any(session.open for session in self.sessions.values())
