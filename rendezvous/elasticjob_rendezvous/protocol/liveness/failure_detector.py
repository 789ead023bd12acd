"""Failure detector of the coordinator: links, probes and orphaned workers. No I/O.

A closed link proves nothing: the member's launcher is probed. A refused connection, or a launcher
without workers, proves that a member is gone. If the launcher is silent, the end of the lease
decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Effect, KeepAlive, Note
from elasticjob_rendezvous.protocol.events import (
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.protocol.liveness.peer_state import (
    ContactState,
    KeyState,
    LinkState,
    MemberEvent,
    Orphan,
    PeerState,
    SessionEvent,
    SessionState,
    WorkersState,
)
from elasticjob_rendezvous.protocol.liveness.probes import (
    PROBE_INTERVAL_SECONDS,
    RepeatedProbe,
    newest_number,
    probe,
)
from elasticjob_rendezvous.protocol.records.members import Member, MemberState, RoundState
from elasticjob_rendezvous.protocol.records.roster import RankAssignment
from elasticjob_rendezvous.protocol.replica import Versioned, View

ORPHAN_PROBE_SECONDS = 1.0
ANSWERING_PROBE_SECONDS = (0.02, 0.06, 0.3)
"""Delays of repeated probes. A process that is being killed closes its connections one by one, so
its launcher may not know yet that it is gone: it is probed again at once, then every 0.3 s."""
UNLINKED_PROBE_SECONDS = 1.0
MISSED_SECONDS = 1.0
"""Silence that counts as missed heartbeats: two intervals."""
LINK_SILENCE_SECONDS = 3.0
"""Silence after which a link no longer counts."""
TRUST_SECONDS = LINK_SILENCE_SECONDS + 0.5
"""Maximum time that both sides of a link may rely on its evidence. The other side waits four
seconds from the last message that it received, which is no earlier; the rest is the time
to kill."""
RELAY_SECONDS = 1.0
"""Additional validity, at the far end of another link, of the evidence that a coordinator without
a lease has from its gang: two heartbeat intervals."""
COUNTS_AS_ALIVE_SECONDS = LINK_SILENCE_SECONDS + 1.5
"""Silence after which a member no longer counts as alive; longer than the member may trust the
link."""

Session = tuple[str, str]


@dataclass(slots=True)
class FailureDetector:
    """States of all members, as this process has observed them.

    Judgements of members last for one coordinatorship; links and evidence are kept beyond it.

    Attributes:
        orphan_seconds: maximum life of workers without their agent.
        inquiry_seconds: maximum duration of the inquiry about a silent member that has its key.
        unlinked_probe_at: time to probe the members without a link.
        probed_round: newest final round for which such probes were planned.
        leader: former coordinator of the last heartbeat on our own link.
        states: the state of each member of which anything is known.
    """

    orphan_seconds: float = 30.0
    inquiry_seconds: float = 10.0
    unlinked_probe_at: float | None = None
    probed_round: int = 0
    leader: str = ""
    states: dict[str, PeerState] = field(default_factory=dict)
    _open: dict[str, PeerState] = field(default_factory=dict)
    """Subset of `states` for which there is something to do."""
    _orphans: int = 0
    """Number of orphaned sessions; every heartbeat depends on it."""

    # -- state --------------------------------------------------------------------------

    def state(self, member: str) -> PeerState:
        """Return the state of a member, read-only; a new one if nothing is known of it."""
        return self.states.get(member) or PeerState()

    def session(self, member: str, session: str) -> SessionState:
        """Return the state of a session, read-only; a new one if nothing is known of it."""
        return self.state(member).sessions.get(session) or SessionState()

    def take_session(self, member: str, session: str, event: SessionEvent) -> SessionState:
        """Apply an event to a session; return its state."""
        peer = self.stored(member)
        state = peer.sessions.setdefault(session, SessionState())
        orphaned = state.workers is WorkersState.ORPHANED
        state.take(event)
        self._orphans += (state.workers is WorkersState.ORPHANED) - orphaned
        if not state.known:
            del peer.sessions[session]
        self._index(member, peer)
        return state

    def take(self, member: str, event: MemberEvent) -> PeerState:
        """Apply an event to a member; return its state."""
        peer = self.stored(member)
        peer.take(event)
        self._index(member, peer)
        return peer

    def stored(self, member: str) -> PeerState:
        return self.states.setdefault(member, PeerState())

    def _index(self, member: str, peer: PeerState) -> None:
        if not peer.open:
            self._open.pop(member, None)
        elif member not in self._open:
            self._open[member] = peer

    def open_sessions(self) -> list[tuple[str, str, SessionState]]:
        """Return the sessions for which there is something to do."""
        return [
            (member, session, state)
            for member, peer in self._open.items()
            for session, state in peer.sessions.items()
            if state.open
        ]

    # -- coordinatorship ----------------------------------------------------------------

    def begin(self, proven_gone: Iterable[Session], now: float) -> None:
        """Begin a coordinatorship: drop judgements of members; keep links, proofs and orphans.

        The inquiry about the previous coordinator, which has begun already, stays, too.
        """
        for member, peer in self.states.items():
            self.take(member, MemberEvent.TOOK_OVER)
            for session in list(peer.sessions):
                self.take_session(member, session, SessionEvent.TOOK_OVER)
        for member, session in proven_gone:
            self.take_session(member, session, SessionEvent.GONE)
        self.unlinked_probe_at = now + UNLINKED_PROBE_SECONDS

    def resign(self) -> None:
        """End a coordinatorship: drop the inquiries."""
        for member in list(self._open):
            self.take(member, MemberEvent.RESIGNED)

    # -- links --------------------------------------------------------------------------

    def up(self, event: PeerUp | PeerHeartbeat, now: float) -> None:
        member, opened = event.member, isinstance(event, PeerUp)
        beat = SessionEvent.LINK_OPENED if opened else SessionEvent.HEARTBEAT
        self.take_session(member, event.session, beat).beat_at = now
        peer = self.take(member, MemberEvent.LINK_OPENED if opened else MemberEvent.HEARTBEAT)
        peer.last_beat_at = now
        proven = proven_at(event.sent, now)
        peer.proven = proven if peer.proven is None else max(proven, peer.proven)
        if opened:
            for other in [session for session in peer.sessions if session != event.session]:
                self.take_session(member, other, SessionEvent.OTHER_LINK_OPENED)

    def is_routine(self, event: PeerUp | PeerHeartbeat) -> bool:
        """Return True if a heartbeat changes nothing in the state of its member.

        The member is not suspected then, and the members need no new evaluation: with a thousand
        members and a heartbeat per second from each, evaluations would take all processor time.
        """
        session = self.session(event.member, event.session)
        if isinstance(event, PeerHeartbeat) and not session.linked:
            return False
        peer = self.state(event.member)
        doubted = peer.contact is not ContactState.NORMAL or peer.inquiry is not None
        return not (doubted or self._orphans or session.link is LinkState.ANSWERING)

    def quiet(self, event: PeerQuiet, view: View, now: float) -> None:
        """Probe a member that misses heartbeats, to have its answer before its lease ends."""
        member = view.member(event.member)
        if member is not None and member.record.session == event.session:
            self.suspect(member.record, now)

    def suspect(self, member: Member, at: float) -> None:
        """Probe a member that has a key repeatedly, until a message from it arrives."""
        peer = self.stored(member.id)
        other = peer.inquiry is not None and peer.inquiry.target.session != member.session
        if peer.inquiry is None or other:
            peer.inquiry = RepeatedProbe(member, at, at + self.inquiry_seconds)
        self.take(member.id, MemberEvent.SESSION_SUSPECTED if other else MemberEvent.SUSPECTED)

    def note_leader_heartbeat(self, member: str, now: float) -> None:
        """Note a heartbeat of the coordinator on our link to it."""
        self.take(member, MemberEvent.LED).led = now
        self.leader = member

    def leader_heartbeat_at(self, member: str) -> float | None:
        """Return the time of the last heartbeat of a former coordinator on our link to it."""
        return self.state(member).led

    def last_heartbeat_at(self, member: str) -> float | None:
        """Return the time of a member's last heartbeat on any link, of either side."""
        peer = self.state(member)
        return max((at for at in (peer.last_beat_at, peer.led) if at is not None), default=None)

    def down(self, event: PeerDown, view: View, now: float) -> list[Effect]:
        """Probe a member whose link closed, unless it announced its leave or linked again."""
        self.take_session(event.member, event.session, SessionEvent.LINK_CLOSED)
        member = view.member(event.member)
        if member is None or self.state(event.member).linked:
            return []
        closed = view.round is not None and view.round.record.state is RoundState.CLOSED
        if closed or member.record.state in (MemberState.LEAVING, MemberState.DONE):
            return []
        peer = self.take(event.member, MemberEvent.LINK_LOST)
        peer.symptom = now if peer.symptom is None else peer.symptom
        self.suspect(member.record, now + PROBE_INTERVAL_SECONDS)
        return [probe(member.record, newest_number(view))]

    # -- answers to probes --------------------------------------------------------------

    def answered(self, event: Probed, now: float) -> None:
        """Keep the result of a probe for the inquiry that waits for it."""
        inquiry = self.state(event.member).inquiry
        if inquiry is not None:
            inquiry.answer(event, now)

    def probed(self, event: Probed, view: View, now: float, orphan_seconds: float) -> list[Effect]:
        session = (event.member, event.session)
        self.answered(event, now)
        if event.verdict is Verdict.UNKNOWN:
            self.take_session(*session, SessionEvent.NO_ANSWER)
        if event.verdict is Verdict.GONE:
            self.take_session(*session, SessionEvent.GONE)
        member = view.member(event.member)
        if member is None or member.record.session != event.session:
            return []
        name = member.record.name
        match event.verdict:
            case Verdict.GONE:
                return [Note(f"{name} is gone: a probe found no workers of it")]
            case Verdict.WORKERS_ALIVE if not self.alive(event.member, now):
                return self.adopt(member.record, newest_number(view), now, orphan_seconds)
            case Verdict.AGENT_ALIVE | Verdict.BOTH_ALIVE:
                state = self.take_session(*session, SessionEvent.AGENT_ANSWERED)
                if state.link is LinkState.ANSWERING:
                    pause = ANSWERING_PROBE_SECONDS[
                        min(state.answers, len(ANSWERING_PROBE_SECONDS) - 1)
                    ]
                    state.answers += 1
                    state.next_probe = now + pause
            case Verdict.UNKNOWN if not self.session(*session).linked:
                known = self.silent(event.member)
                self.take(event.member, MemberEvent.NO_ANSWER)
                text = f"{name} does not answer probes: waiting for its lease to expire"
                return [] if known else [Note(text, warning=True)]
        return []

    def adopt(self, member: Member, number: int, now: float, orphan_seconds: float) -> list[Effect]:
        """Keep a member's workers alive until its agent comes back, for a limited time."""
        if self.session(member.id, member.session).orphan is not None:
            return []
        every = ORPHAN_PROBE_SECONDS
        state = self.take_session(member.id, member.session, SessionEvent.WORKERS_ONLY)
        state.orphan = Orphan(member, now + orphan_seconds, now + every, number)
        note = Note(f"{member.name} lost its agent; its workers keep running", warning=True)
        return [KeepAlive(member.lease), note]

    # -- inquiries -----------------------------------------------------------------------

    def maintain_inquiries(self, view: View, now: float, alarm: Alarm) -> list[Effect]:
        """Send the probes that are due, and drop the inquiries that nothing depends on any more."""
        effects: list[Effect] = []
        for member, peer in list(self._open.items()):
            if peer.inquiry is None:
                continue
            if peer.inquiry.is_over(view, now):
                self.take(member, MemberEvent.INQUIRY_OVER)
            elif (due := peer.inquiry.due(view, now, alarm)) is not None:
                effects.append(due)
        return effects

    def inquire(self, assignment: RankAssignment, now: float) -> Verdict | None:
        """Return the last probe result for a member without a key; send the first probe by now."""
        return self._inquire(assignment, now, now)

    def inquire_during_round(
        self, assignment: RankAssignment, now: float, seconds: float
    ) -> Verdict | None:
        """Return the last probe result as `inquire` does, while the round of the member continues.

        The member has `seconds` to register again. Unless it missed heartbeats, the first probe is
        delayed: after an outage of etcd nearly all members register again at once.
        """
        beat_at = self.last_heartbeat_at(assignment.id)
        missed = beat_at is not None and now - beat_at >= MISSED_SECONDS
        at = now if missed else now + PROBE_INTERVAL_SECONDS
        return self._inquire(assignment, at, now + seconds)

    def _inquire(self, assignment: RankAssignment, at: float, until: float) -> Verdict | None:
        """Return the last probe result for a member without a key; send the first probe by `at`."""
        peer = self.stored(assignment.id)
        inquiry = peer.inquiry = peer.inquiry or RepeatedProbe(assignment, at, until)
        inquiry.hurry(at)
        self.take(assignment.id, MemberEvent.ABSENT)
        return inquiry.verdict

    # -- evidence -----------------------------------------------------------------------

    def first_probe_at(self, member: str) -> float | None:
        """Return the time of the first probe of an inquiry; None without one or once sent."""
        inquiry = self.state(member).inquiry
        return None if inquiry is None else inquiry.first_at

    def live_until(self, member: str) -> float | None:
        """Return the deadline of a member's workers, if an answer contained one."""
        inquiry = self.state(member).inquiry
        return None if inquiry is None else inquiry.live_until

    def granted_until(self, member: str) -> float | None:
        """Return the latest time until which we let a member's workers live without an agent."""
        return self.state(member).granted

    def is_gone(self, member: str, session: str) -> bool:
        """Return True if a session is proven to be gone."""
        return self.session(member, session).key is KeyState.GONE

    def silent(self, member: str) -> bool:
        """Return True if a member without a link did not answer a probe since its last message."""
        return self.state(member).silent

    @property
    def orphaned(self) -> bool:
        """True if workers of any member run without their agent."""
        return self._orphans > 0

    def dead_sessions(self) -> frozenset[Session]:
        """Return the sessions that are proven gone, or whose agent will not come back."""
        return frozenset(
            (member, session)
            for member, session, state in self.open_sessions()
            if state.key is not KeyState.VALID
        )

    def evidence(self, others: Collection[str]) -> float | None:
        """Return the latest time for which links to all of `others` are proven to carry both ways.

        None if there is no such time.
        """
        proven = [self.state(id).proven for id in others]
        known = [at for at in proven if at is not None]
        return min(known) if known and len(known) == len(proven) else None

    def alive(self, member: str, now: float) -> bool:
        """Return True if `member` may still trust its link to us."""
        sessions = self.state(member).sessions.values()
        return any(session.linked and _fresh(session.beat_at, now) for session in sessions)

    def cut_off(self, others: Collection[str]) -> bool:
        """Return True if more than half of `others` fell silent without a refusal.

        The silence of a single other member does not show which side is cut off.
        """
        if len(others) < 2:
            return False
        peers = (self.states.get(id) for id in others)
        return sum(peer is not None and peer.silent for peer in peers) * 2 > len(others)

    def symptom(self, members: Collection[str]) -> float | None:
        """Return the time of the first sign of trouble with any of `members`."""
        seen = [self.state(id).symptom for id in members]
        return min((at for at in seen if at is not None), default=None)


def proven_at(sent: float | None, now: float) -> float:
    """Return the time until which a message received now proves that a link carries both ways.

    An agent that does not report receipts may have received our last message half a second ago.
    """
    return now - (TRUST_SECONDS - LINK_SILENCE_SECONDS) if sent is None else sent


def _fresh(beat_at: float, now: float) -> bool:
    return now - beat_at < COUNTS_AS_ALIVE_SECONDS


def gone_keys(
    peers: FailureDetector, members: Mapping[str, Versioned[Member]]
) -> list[Versioned[Member]]:
    """Return the keys of sessions that are proven gone, or whose agent will not come back."""
    over = peers.dead_sessions()
    if not over:
        return []
    return [
        versioned
        for versioned in members.values()
        if (versioned.record.id, versioned.record.session) in over
    ]
