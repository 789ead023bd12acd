"""Repeated probes of silent members until one answers. No I/O.

An inquiry begins when a link falls quiet or closes, while the member's lease still has seconds to
run: when the lease ends it is known by then whether anything answers there. At the latest it
begins when a member has no key. Owns the schedule and the last answers; `peers` and `absence`
state what an answer proves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.effects import Effect, Probe
from elasticjob_rendezvous.core.events import Probed, Verdict
from elasticjob_rendezvous.core.records import Member, RoundState
from elasticjob_rendezvous.core.roster import Seat
from elasticjob_rendezvous.core.view import View

INQUIRY_SECONDS = 0.5
"""Interval of the probes: a silence that is judged is no older."""
LONGEST_PROBE_SECONDS = 4.5
"""Maximum probe duration. A timeout says nothing about what happened after the probe was sent."""
_UNANSWERED = (None, Verdict.UNKNOWN)


@dataclass(slots=True)
class _Inquiry:
    """Repeated probe of one member.

    `verdict`: the last result; `answered`: time of the last answer.
    `until`: end of the inquiry if no round waits for the answer.
    `suspicion`: the member had a key at the start, so a message of its agent ends the inquiry.
    `live_until`: deadline of its workers, by the last answer that contained one.
    """

    probe: Probe
    next_probe: float
    until: float
    suspicion: bool
    asked: bool = False
    verdict: Verdict | None = None
    answered: float | None = None
    live_until: float | None = None


@dataclass(slots=True)
class Inquiries:
    """All inquiries of one agent, by member."""

    _open: dict[str, _Inquiry] = field(default_factory=dict)

    def __contains__(self, member: object) -> bool:
        return member in self._open

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def suspect(self, member: Member, at: float, until: float) -> None:
        """Probe a silent `member` that has a key from `at` on, and at most until `until`."""
        known = self._open.get(member.id)
        if known is None or known.probe.session != member.session:
            self._open[member.id] = _Inquiry(probe(member, 0), at, until, suspicion=True)

    def inquire(self, seat: Seat, at: float, until: float) -> Verdict | None:
        """Return the last result for a member without a key; without any, probe it from `at` on."""
        new = _Inquiry(probe(seat, 0), at, until, suspicion=False)
        inquiry = self._open.setdefault(seat.id, new)
        inquiry.suspicion = False
        if not inquiry.asked:
            inquiry.next_probe = min(inquiry.next_probe, at)
        return inquiry.verdict

    def first_at(self, member: str) -> float | None:
        """Return the time of a member's first probe, if that is still to come."""
        inquiry = self._open.get(member)
        return None if inquiry is None or inquiry.asked else inquiry.next_probe

    def live_until(self, member: str) -> float | None:
        """Return the deadline of a member's workers, if an answer contained one."""
        inquiry = self._open.get(member)
        return None if inquiry is None else inquiry.live_until

    def answered(self, event: Probed, now: float) -> None:
        inquiry = self._open.get(event.member)
        if inquiry is None:
            return
        verdict = event.verdict
        if verdict is not Verdict.UNKNOWN:
            inquiry.answered = now
            if event.live_seconds is not None:
                inquiry.live_until = now + event.live_seconds
        elif inquiry.answered is not None and now - inquiry.answered < LONGEST_PROBE_SECONDS:
            return  # the timeout of a probe sent before that answer
        inquiry.verdict = verdict

    def heard(self, member: str) -> None:
        """End the suspicion of a member: its agent sends messages again."""
        inquiry = self._open.get(member)
        if inquiry is not None and inquiry.suspicion:
            del self._open[member]

    def clear(self) -> None:
        self._open.clear()

    def tend(self, view: View, now: float, alarm: Alarm) -> list[Effect]:
        """Send the probes that are due, and drop the inquiries that nothing depends on any more."""
        effects: list[Effect] = []
        number = view.round.record.number if view.round else 0
        for id, inquiry in list(self._open.items()):
            if _is_over(inquiry, view, now):
                del self._open[id]
                continue
            moved_on = inquiry.asked and number > inquiry.probe.round
            if moved_on and inquiry.verdict not in _UNANSWERED:
                inquiry.verdict = None  # its launcher did not know of this round when it answered
            if not _waits(inquiry, view):
                continue
            if moved_on or alarm.passed(inquiry.next_probe, now):
                inquiry.asked = True
                inquiry.next_probe = now + INQUIRY_SECONDS
                inquiry.probe = replace(inquiry.probe, round=number)
                effects.append(inquiry.probe)
                alarm.set(inquiry.next_probe)
        return effects


def _is_over(inquiry: _Inquiry, view: View, now: float) -> bool:
    """Return True if nothing depends on the inquiry any more.

    Without a key it matters as long as a round waits for the member's workers; with the key of
    that session, as long as nothing answers there.
    """
    state = _state(view)
    if state in (None, RoundState.CLOSED):
        return True
    member = view.member(inquiry.probe.member)
    if member is None:
        late = now >= inquiry.until or state is RoundState.FROZEN
        return late and state is not RoundState.JOINABLE
    lives = inquiry.verdict not in _UNANSWERED
    return lives or now >= inquiry.until or member.record.session != inquiry.probe.session


def _waits(inquiry: _Inquiry, view: View) -> bool:
    """Return True if another probe is due: an answer can change only while a round waits for it."""
    return inquiry.verdict in _UNANSWERED or _state(view) is RoundState.JOINABLE


def _state(view: View) -> RoundState | None:
    return view.round.record.state if view.round else None


def probe(whom: Member | Seat, number: int) -> Probe:
    """Return the probe of `whom`, with the newest round's number."""
    ports = (whom.agent_port, whom.launcher_port)
    return Probe(whom.id, whom.session, whom.address, *ports, number)
