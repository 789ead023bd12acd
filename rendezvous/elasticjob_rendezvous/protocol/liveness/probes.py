"""Repeated probes of silent members until one answers. No I/O.

Probes begin when heartbeats are missing or a link closes, seconds before the member's lease ends,
so that their result is known by then. At the latest they begin when a member has no key.
`RepeatedProbe` owns the schedule and the last answers; `failure_detector` and `member_loss`
interpret them.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Probe
from elasticjob_rendezvous.protocol.events import Probed, Verdict
from elasticjob_rendezvous.protocol.records.members import Member, RoundState
from elasticjob_rendezvous.protocol.records.roster import RankAssignment
from elasticjob_rendezvous.protocol.replica import View

PROBE_INTERVAL_SECONDS = 0.5
"""Interval of the probes, and delay of the first one: the maximum age of a reported silence."""
LONGEST_PROBE_SECONDS = 4.5
"""Maximum probe duration. A timeout proves nothing about the time after the probe was sent."""
_UNANSWERED = (None, Verdict.UNKNOWN)


@dataclass(slots=True)
class RepeatedProbe:
    """Repeated probe of one member.

    Attributes:
        target: target of the probes.
        until: end of the inquiry if no round waits for the answer.
        sent_round: newest round number in a probe.
        verdict: the last result.
        answered: time of the last answer.
        live_until: deadline of its workers, by the last answer that contained one.
    """

    target: Member | RankAssignment
    next_probe: float
    until: float
    sent: bool = False
    sent_round: int = 0
    verdict: Verdict | None = None
    answered: float | None = None
    live_until: float | None = None

    @property
    def first_at(self) -> float | None:
        """Time of the first probe, if that is still to come."""
        return None if self.sent else self.next_probe

    def hurry(self, at: float) -> None:
        """Send the first probe no later than `at`."""
        if not self.sent:
            self.next_probe = min(self.next_probe, at)

    def answer(self, event: Probed, now: float) -> None:
        """Keep the result of a probe."""
        if event.verdict is not Verdict.UNKNOWN:
            self.answered = now
            if event.live_seconds is not None:
                self.live_until = now + event.live_seconds
        elif self.answered is not None and now - self.answered < LONGEST_PROBE_SECONDS:
            return  # the timeout of a probe sent before that answer
        self.verdict = event.verdict

    def due(self, view: View, now: float, alarm: Alarm) -> Probe | None:
        """Return the probe that is due; else request a wake-up for the next one."""
        number = newest_number(view)
        moved_on = self.sent and number > self.sent_round
        if moved_on and self.verdict not in _UNANSWERED:
            self.verdict = None  # its launcher did not know of this round when it answered
        if not self._waits(view) or not (moved_on or alarm.passed(self.next_probe, now)):
            return None
        self.sent = True
        self.sent_round = number
        self.next_probe = now + PROBE_INTERVAL_SECONDS
        alarm.set(self.next_probe)
        return probe(self.target, number)

    def is_over(self, view: View, now: float) -> bool:
        """Return True if nothing depends on the inquiry any more.

        Without a key it matters as long as a round waits for the member's workers; with the key of
        that session, as long as nothing answers there.
        """
        state = _state(view)
        if state in (None, RoundState.CLOSED):
            return True
        member = view.member(self.target.id)
        if member is None:
            late = now >= self.until or state is RoundState.FROZEN
            return late and state is not RoundState.JOINABLE
        lives = self.verdict not in _UNANSWERED
        return lives or now >= self.until or member.record.session != self.target.session

    def _waits(self, view: View) -> bool:
        """Return True if another probe is due.

        An answer can change only while a round waits for it.
        """
        return self.verdict in _UNANSWERED or _state(view) is RoundState.JOINABLE


def _state(view: View) -> RoundState | None:
    return view.round.record.state if view.round else None


def newest_number(view: View) -> int:
    """Return the newest round's number; 0 without a round."""
    return view.round.record.number if view.round else 0


def probe(target: Member | RankAssignment, number: int) -> Probe:
    """Return the probe of `target`, with the newest round's number."""
    ports = (target.agent_port, target.launcher_port)
    return Probe(target.id, target.session, target.address, *ports, number)
