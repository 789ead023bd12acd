"""Failure detector of the coordinator: links, probes and orphaned workers. No I/O.

A closed link is a question, not an answer: the member's launcher is probed. Only a refusal, or a
launcher without workers, proves that a member is gone; silence proves nothing and leaves the
verdict to the lease.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.effects import Effect, KeepAlive, Note, Probe
from elasticjob_rendezvous.core.events import (
    PeerDown,
    PeerHeard,
    PeerQuiet,
    PeerUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.core.inquiries import INQUIRY_SECONDS, Inquiries, probe
from elasticjob_rendezvous.core.records import Member, MemberState, RoundState
from elasticjob_rendezvous.core.roster import Seat
from elasticjob_rendezvous.core.view import Versioned, View

ORPHAN_PROBE_SECONDS = 1.0
STRAY_PROBE_SECONDS = (0.02, 0.06, 0.3)
"""Delays of repeated probes. A process that is being killed closes its connections one by one, so
its launcher may not know yet that it is gone: it is probed again at once, then every 0.3 s."""
ROLL_CALL_SECONDS = 1.0
MISSED_SECONDS = 1.0
"""Silence that counts as missed heartbeats: two intervals."""
LINK_SILENCE_SECONDS = 3.0
"""Silence after which a link is as good as none."""
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
class _Orphan:
    """Workers without an agent; `told` is the newest round number that their launcher knows.

    `kept_until`: certain end of the lease on which their member's key was seen;
    `renewing`: the latest renewal of that lease has no answer yet.
    """

    record: Member
    until: float
    next_probe: float
    told: int
    kept_until: float = 0.0
    renewing: bool = True


@dataclass(slots=True)
class Peers:
    """Mutable knowledge of one coordinatorship; `linked` outlives it.

    Attributes:
        orphan_seconds: maximum life of workers without their agent.
        linked: (member, session) -> its last heartbeat.
        gone: sessions proven dead; the coordinator deletes their keys.
        silent: members whose link broke without a refusal -> when.
        strays: members whose agent answered a probe though its link is gone -> time of the next
            probe, since the agent may have been about to die; `astray` counts these answers.
        last_heard: member -> last heartbeat on any link of it, also after it broke.
        proven: member -> time until which any link of it is known to have carried both ways.
        led: former coordinators -> last heartbeat on our own link to them.
        inquiries: members that fell silent, or have no key while their workers may still run.
        inquiry_seconds: maximum duration of the inquiry about a silent member that has its key.
        granted: member -> latest time until which we let workers without an agent live.
        forsaken: sessions whose agent did not come back in time. Their launchers end the workers,
            so they are lost, though nothing proves yet that the workers have stopped.
        symptoms: member -> first sign of trouble.
    """

    orphan_seconds: float = 30.0
    inquiry_seconds: float = 10.0
    linked: dict[Session, float] = field(default_factory=dict)
    gone: set[Session] = field(default_factory=set)
    silent: dict[str, float] = field(default_factory=dict)
    symptoms: dict[str, float] = field(default_factory=dict)
    orphans: dict[Session, _Orphan] = field(default_factory=dict)
    strays: dict[Session, float] = field(default_factory=dict)
    astray: dict[Session, int] = field(default_factory=dict)
    roll_call_at: float | None = None
    last_heard: dict[str, float] = field(default_factory=dict)
    proven: dict[str, float] = field(default_factory=dict)
    led: dict[str, float] = field(default_factory=dict)
    inquiries: Inquiries = field(default_factory=Inquiries)
    granted: dict[str, float] = field(default_factory=dict)
    forsaken: set[Session] = field(default_factory=set)

    def begin(self, proven_gone: Iterable[Session], now: float) -> None:
        """Begin a coordinatorship: drop judgements of members; keep links, proofs and orphans.

        The inquiry about the previous coordinator, which has begun already, stays, too.
        """
        self.gone = set(proven_gone)
        self.silent.clear()
        self.symptoms.clear()
        self.strays.clear()
        self.astray.clear()
        self.forsaken.clear()
        self.roll_call_at = now + ROLL_CALL_SECONDS

    def up(self, event: PeerUp | PeerHeard, now: float) -> None:
        self.linked[event.member, event.session] = now
        self.astray.pop((event.member, event.session), None)
        self.last_heard[event.member] = now
        proven = proven_at(event.sent, now)
        self.proven[event.member] = max(proven, self.proven.get(event.member, proven))
        self.silent.pop(event.member, None)
        self.inquiries.heard(event.member)
        if isinstance(event, PeerUp):
            self.symptoms.pop(event.member, None)
            for session in [s for s in self.orphans if s[0] == event.member]:
                del self.orphans[session]

    def is_routine(self, event: PeerUp | PeerHeard) -> bool:
        """Return True if a heartbeat only confirms what is already known.

        That is so if nothing stands against the member. A new judgement of members is unnecessary
        then; with a thousand members and a heartbeat per second from each, it would take all the
        time.
        """
        id, session = event.member, (event.member, event.session)
        if isinstance(event, PeerHeard) and session not in self.linked:
            return False
        doubted = id in self.silent or id in self.symptoms or id in self.inquiries
        return not (doubted or self.orphans or session in self.strays)

    def quiet(self, event: PeerQuiet, view: View, now: float) -> None:
        """Probe a member that misses heartbeats, to know by its lease's end whether it answers."""
        member = view.member(event.member)
        if member is not None and member.record.session == event.session:
            self.suspect(member.record, now)

    def suspect(self, member: Member, at: float) -> None:
        """Probe a member that has a key repeatedly, until a message of it arrives."""
        self.inquiries.suspect(member, at, at + self.inquiry_seconds)

    def led_by(self, member: str, now: float) -> None:
        """Note a heartbeat of the coordinator on our link to it."""
        self.led[member] = now
        self.inquiries.heard(member)

    def heard_at(self, member: str) -> float | None:
        """Return the time of a member's last heartbeat on any link, whichever side held it."""
        known = (self.last_heard.get(member), self.led.get(member))
        return max((at for at in known if at is not None), default=None)

    def down(self, event: PeerDown, view: View, now: float) -> list[Effect]:
        """Probe a member whose link closed, unless it announced its leave or linked again."""
        self.linked.pop((event.member, event.session), None)
        member = view.member(event.member)
        if member is None or any(id == event.member for id, _ in self.linked):
            return []
        closed = view.round is not None and view.round.record.state is RoundState.CLOSED
        if closed or member.record.state in (MemberState.LEAVING, MemberState.DONE):
            return []
        self.symptoms.setdefault(event.member, now)
        self.suspect(member.record, now + INQUIRY_SECONDS)
        return [probe(member.record, _number(view))]

    def probed(self, event: Probed, view: View, now: float, orphan_seconds: float) -> list[Effect]:
        session = (event.member, event.session)
        self.inquiries.answered(event, now)
        if event.verdict in (Verdict.GONE, Verdict.UNKNOWN):
            self.orphans.pop(session, None)
        if event.verdict is Verdict.GONE:
            self.gone.add(session)
        member = view.member(event.member)
        if member is None or member.record.session != event.session:
            return []
        name = member.record.name
        match event.verdict:
            case Verdict.GONE:
                return [Note(f"{name} is gone: a probe found no workers of it")]
            case Verdict.WORKERS_ALIVE if not self.alive(event.member, now):
                return self.adopt(member.record, _number(view), now, orphan_seconds)
            case Verdict.AGENT_ALIVE | Verdict.BOTH_ALIVE if session not in self.linked:
                times = self.astray.get(session, 0)
                self.astray[session] = times + 1
                pause = STRAY_PROBE_SECONDS[min(times, len(STRAY_PROBE_SECONDS) - 1)]
                self.strays[session] = now + pause
            case Verdict.UNKNOWN if session not in self.linked:
                if event.member in self.silent:
                    return []
                self.silent[event.member] = now
                return [
                    Note(
                        f"{name} does not answer probes: waiting for its lease to expire",
                        warning=True,
                    )
                ]
        return []

    def adopt(self, member: Member, number: int, now: float, orphan_seconds: float) -> list[Effect]:
        """Look after a member's workers until its agent comes back, for a limited time."""
        session = (member.id, member.session)
        if session in self.orphans:
            return []
        every = ORPHAN_PROBE_SECONDS
        self.orphans[session] = _Orphan(member, now + orphan_seconds, now + every, number)
        note = Note(f"{member.name} lost its agent; its workers keep running", warning=True)
        return [KeepAlive(member.lease), note]

    def kept(self, lease: int, deadline: float, view: View, now: float) -> list[Effect]:
        """Extend the life of workers without an agent to the end of their member's renewed lease.

        No newer round begins while their member's key, which hangs on that lease, is there.
        """
        for (id, _), orphan in self.orphans.items():
            member = view.member(id)
            if orphan.record.lease != lease or member is None or member.record.lease != lease:
                continue
            orphan.renewing = False
            orphan.kept_until = max(orphan.kept_until, deadline)
            return [self._permission(orphan, view, now)]
        return []

    def _permission(self, orphan: _Orphan, view: View, now: float) -> Probe:
        """Return the probe of a launcher whose workers may live as long as their member's lease."""
        asked = probe(orphan.record, _number(view))
        member = view.member(orphan.record.id)
        if member is None or member.record.lease != orphan.record.lease:
            return asked
        until = min(orphan.kept_until, orphan.until)
        if until <= now:
            return asked
        self.granted[orphan.record.id] = max(until, self.granted.get(orphan.record.id, until))
        return replace(asked, live_until=until)

    def tend(
        self, view: View, own: str, now: float, keep_every: float
    ) -> tuple[list[Effect], float | None]:
        """Look after strays and orphans; return effects and the time of the next call."""
        alarm = Alarm()
        effects = self._call_roll(view, own, now, alarm)
        effects += self._tend_strays(view, now, alarm)
        effects += self._tend_orphans(view, now, keep_every, alarm)
        effects += self.inquiries.tend(view, now, alarm)
        return effects, alarm.at

    def inquire(self, seat: Seat, now: float) -> Verdict | None:
        """Return the last result for a member without a key; without any, probe it now."""
        return self.inquiries.inquire(seat, now, now)

    def inquire_meanwhile(self, seat: Seat, now: float, seconds: float) -> Verdict | None:
        """Do the same as `inquire` for a member that has `seconds` to register again.

        Its round stands meanwhile. The first probe waits a moment if no link of the member missed
        heartbeats: after an outage of etcd nearly all members are back at once.
        """
        heard = self.heard_at(seat.id)
        missed = heard is not None and now - heard >= MISSED_SECONDS
        at = now if missed else now + INQUIRY_SECONDS
        return self.inquiries.inquire(seat, at, now + seconds)

    def evidence(self, others: Collection[str]) -> float | None:
        """Return the latest time for which all of `others` are proven to hear us, and we them.

        None if there is no such time.
        """
        heard = [self.proven.get(id) for id in others]
        known = [at for at in heard if at is not None]
        return min(known) if known and len(known) == len(heard) else None

    def _call_roll(self, view: View, own: str, now: float, alarm: Alarm) -> list[Effect]:
        """Probe, once and soon after the takeover, members with workers that did not link."""
        if self.roll_call_at is None or not alarm.passed(self.roll_call_at, now):
            return []
        self.roll_call_at = None
        linked = {id for (id, _), heard in self.linked.items() if _fresh(heard, now)}
        missing = [
            versioned.record
            for id, versioned in view.members().items()
            if id != own
            and versioned.record.state is MemberState.RUNNING
            and (id, versioned.record.session) not in self.orphans
            and id not in linked
        ]
        for member in missing:
            self.suspect(member, now + INQUIRY_SECONDS)
        return [probe(member, _number(view)) for member in missing]

    def _tend_strays(self, view: View, now: float, alarm: Alarm) -> list[Effect]:
        effects: list[Effect] = []
        for session, next_probe in list(self.strays.items()):
            member = view.member(session[0])
            if member is None or member.record.session != session[1] or session in self.linked:
                del self.strays[session]
            elif alarm.passed(next_probe, now):
                del self.strays[session]
                effects.append(probe(member.record, _number(view)))
        return effects

    def _tend_orphans(
        self, view: View, now: float, keep_every: float, alarm: Alarm
    ) -> list[Effect]:
        """Renew an orphan's lease while it has one, and probe its launcher repeatedly.

        A newer round is sent at once: the launcher ends workers that are older.
        """
        effects: list[Effect] = []
        number = _number(view)
        for session, orphan in list(self.orphans.items()):
            member = view.member(session[0])
            came_back = member is not None and member.record.session != session[1]
            if came_back:
                del self.orphans[session]
            elif alarm.passed(orphan.until, now):
                del self.orphans[session]
                self.forsaken.add(session)
            elif number > orphan.told or alarm.passed(orphan.next_probe, now):
                told, orphan.told = orphan.told, number
                orphan.next_probe = now + min(ORPHAN_PROBE_SECONDS, keep_every)
                alarm.set(orphan.next_probe)
                if number > told or orphan.renewing or member is None:
                    effects.append(self._permission(orphan, view, now))
                if member is not None:
                    orphan.renewing = True
                    effects.append(KeepAlive(orphan.record.lease))
        return effects

    def alive(self, member: str, now: float) -> bool:
        """Return True if `member` may still trust its link to us."""
        return any(id == member and _fresh(heard, now) for (id, _), heard in self.linked.items())

    def cut_off(self, others: Collection[str]) -> bool:
        """Return True if more than half of `others` fell silent without a refusal.

        The silence of a single other member does not show which side is cut off.
        """
        if len(others) < 2:
            return False
        return sum(id in self.silent for id in others) * 2 > len(others)

    def symptom(self, members: Collection[str]) -> float | None:
        """Return the time of the first sign of trouble with any of `members`."""
        seen = [self.symptoms[id] for id in members if id in self.symptoms]
        return min(seen, default=None)


def proven_at(sent: float | None, now: float) -> float:
    """Return the time until which a message received now proves that a link carries both ways.

    An agent that does not report what it received may have heard us half a second ago.
    """
    return now - (TRUST_SECONDS - LINK_SILENCE_SECONDS) if sent is None else sent


def _fresh(heard: float, now: float) -> bool:
    return now - heard < COUNTS_AS_ALIVE_SECONDS


def _number(view: View) -> int:
    return view.round.record.number if view.round else 0


def gone_keys(peers: Peers, members: Mapping[str, Versioned[Member]]) -> list[Versioned[Member]]:
    """Return the keys of sessions that are proven gone, or whose agent will not come back."""
    over = peers.gone | peers.forsaken
    if not over:
        return []
    return [
        versioned
        for versioned in members.values()
        if (versioned.record.id, versioned.record.session) in over
    ]
