"""What the coordinator knows of its members beyond etcd: links, probes, orphans. Pure.

A closed link is a question, not an answer: the member's launcher is probed. Only a
refusal, or a launcher without workers, proves that a member is gone; silence proves
nothing and leaves the verdict to the lease.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticjob_rendezvous.core.events import (
    Effect,
    KeepAlive,
    Note,
    PeerDown,
    PeerHeard,
    PeerUp,
    Probe,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.core.records import Member, MemberState, RoundState
from elasticjob_rendezvous.core.view import Versioned, View

ORPHAN_PROBE_SECONDS = 1.0
STRAY_PROBE_SECONDS = 0.3
LINK_SILENCE_SECONDS = 3.0
"""A link over which nothing was heard for this long counts as cut."""

Session = tuple[str, str]


@dataclass(slots=True)
class _Orphan:
    until: float
    next_probe: float


@dataclass(slots=True)
class Peers:
    """Mutable knowledge of one coordinatorship; `linked` outlives it.

    Attributes:
        linked: (member, session) -> when it was last heard.
        gone: sessions proven dead; the coordinator deletes their keys.
        silent: members whose link broke without a refusal -> when.
        strays: members whose agent answered a probe though its link is gone -> when to
            ask again, for it may have been about to die.
        symptoms: when the first sign of trouble with a member was seen.
    """

    linked: dict[Session, float] = field(default_factory=dict)
    gone: set[Session] = field(default_factory=set)
    silent: dict[str, float] = field(default_factory=dict)
    symptoms: dict[str, float] = field(default_factory=dict)
    orphans: dict[Session, _Orphan] = field(default_factory=dict)
    strays: dict[Session, float] = field(default_factory=dict)

    def begin(self, proven_gone: Iterable[Session]) -> None:
        """A new coordinatorship: forget suspicions, keep the links and the proofs."""
        self.gone = set(proven_gone)
        self.silent.clear()
        self.symptoms.clear()
        self.orphans.clear()
        self.strays.clear()

    def up(self, event: PeerUp | PeerHeard, now: float) -> None:
        self.linked[event.member, event.session] = now
        self.silent.pop(event.member, None)
        if isinstance(event, PeerUp):
            self.symptoms.pop(event.member, None)
            self.orphans.pop((event.member, event.session), None)

    def down(self, event: PeerDown, view: View, now: float) -> list[Effect]:
        """A link closed: probe the member unless it said that it leaves, or linked anew."""
        self.linked.pop((event.member, event.session), None)
        member = view.member(event.member)
        if member is None or any(id == event.member for id, _ in self.linked):
            return []
        closed = view.round is not None and view.round.record.state is RoundState.CLOSED
        if closed or member.record.state in (MemberState.LEAVING, MemberState.DONE):
            return []
        self.symptoms.setdefault(event.member, now)
        return [probe(member.record)]

    def probed(self, event: Probed, view: View, now: float, orphan_seconds: float) -> list[Effect]:
        session = (event.member, event.session)
        if event.verdict is Verdict.GONE:
            self.gone.add(session)
            self.orphans.pop(session, None)
        member = view.member(event.member)
        if member is None or member.record.session != event.session:
            return []
        name = member.record.name
        match event.verdict:
            case Verdict.GONE:
                return [Note(f"{name} is gone: nobody answers at its address")]
            case Verdict.WORKERS_ALIVE if session not in self.linked:
                known = self.orphans.get(session)
                until = known.until if known else now + orphan_seconds
                self.orphans[session] = _Orphan(until, now + ORPHAN_PROBE_SECONDS)
                if known:
                    return []
                return [
                    KeepAlive(member.record.lease),
                    Note(f"{name} lost its agent; its workers train on", warning=True),
                ]
            case Verdict.AGENT_ALIVE if session not in self.linked:
                self.strays[session] = now + STRAY_PROBE_SECONDS
            case Verdict.UNKNOWN:
                self.silent[event.member] = now
                return [Note(f"{name} does not answer; its lease decides", warning=True)]
        return []

    def tend(self, view: View, now: float, keep_every: float) -> tuple[list[Effect], float | None]:
        """Keep orphans' leases and look after them; returns effects and when to come back."""
        effects: list[Effect] = []
        wake: float | None = None
        for session, next_probe in list(self.strays.items()):
            member = view.member(session[0])
            if member is None or member.record.session != session[1] or session in self.linked:
                del self.strays[session]
            elif now >= next_probe:
                del self.strays[session]
                effects.append(probe(member.record))
            else:
                wake = min(wake or next_probe, next_probe)
        for session, orphan in list(self.orphans.items()):
            member = view.member(session[0])
            if member is None or member.record.session != session[1] or now >= orphan.until:
                del self.orphans[session]
                continue
            if now >= orphan.next_probe:
                orphan.next_probe = now + min(ORPHAN_PROBE_SECONDS, keep_every)
                effects += [KeepAlive(member.record.lease), probe(member.record)]
            wake = min(wake or orphan.next_probe, orphan.next_probe)
        return effects, wake

    def alive(self, member: str, now: float) -> bool:
        """Whether a link to some session of `member` was heard lately."""
        return any(
            id == member and now - heard < LINK_SILENCE_SECONDS
            for (id, _), heard in self.linked.items()
        )

    def living(self, now: float) -> set[str]:
        """All members heard lately."""
        return {id for (id, _), at in self.linked.items() if now - at < LINK_SILENCE_SECONDS}

    def cut_off(self, others: Collection[str]) -> bool:
        """Whether more than half of `others` fell silent without a refusal.

        With a single other member that says nothing about which side is cut off.
        """
        if len(others) < 2:
            return False
        return sum(id in self.silent for id in others) * 2 > len(others)

    def symptom(self, members: Collection[str]) -> float | None:
        """When the first sign of trouble with any of `members` was seen."""
        seen = [self.symptoms[id] for id in members if id in self.symptoms]
        return min(seen, default=None)


def probe(member: Member) -> Probe:
    return Probe(member.id, member.session, member.address, member.agent_port, member.launcher_port)


def gone_keys(peers: Peers, members: Mapping[str, Versioned[Member]]) -> list[Versioned[Member]]:
    """The keys of sessions that are proven gone."""
    return [
        versioned
        for versioned in members.values()
        if (versioned.record.id, versioned.record.session) in peers.gone
    ]
