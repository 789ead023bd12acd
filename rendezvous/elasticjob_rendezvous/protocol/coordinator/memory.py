"""Memory of a coordinator between two decisions. No I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.clock import Timers
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector, Session
from elasticjob_rendezvous.protocol.records.members import Round
from elasticjob_rendezvous.protocol.records.roster import Roster

FIRST_PENALTY_SECONDS = 15.0
LONGEST_PENALTY_SECONDS = 900.0
FORGIVEN_SECONDS = 600.0
"""Time after the end of a penalty from which the next one is the first again."""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Penalty of a member after `times` failures to confirm, the last one of revision `asked`."""

    asked: int
    times: int
    until: float


@dataclass(slots=True)
class SilentMembers:
    """Penalty of each member; every failure to confirm doubles the next one, up to a maximum."""

    _penalties: dict[str, Penalty] = field(default_factory=dict)

    def silence(self, id: str, asked: int, now: float) -> None:
        """Count the failure to confirm this revision of the round.

        It counts once: the coordinator decides again after each write that etcd refused.
        """
        last = self._penalties.get(id)
        if last is not None and last.asked == asked:
            return
        forgiven = last is None or now >= last.until + FORGIVEN_SECONDS
        times = 0 if last is None or forgiven else last.times
        seconds = min(FIRST_PENALTY_SECONDS * 2.0 ** min(times, 16), LONGEST_PENALTY_SECONDS)
        self._penalties[id] = Penalty(asked, times + 1, now + seconds)

    def ids(self, timers: Timers) -> set[str]:
        """Return the members that do not count now; the timers wake when a penalty ends."""
        return {id for id, last in self._penalties.items() if not timers.passed(last.until)}


@dataclass(slots=True)
class Coordinator:
    """Memory of one coordinatorship. Correctness does not depend on it.

    Attributes:
        timers: first sightings; all restart with a new coordinator.
        peers: links and probes.
        last: newest final round and roster that this member has seen, to restore them if etcd
            loses its data.
        leavers: member of the final round -> its reason for leaving.
        detected_ms: round -> time from the first symptom to its opening.
        awaited: number of members that must still report before anything is due; 0: not known.
        doubted: ended round whose failure is charged after a new read of everything, unless that
            shows another reason; 0: none.
        checked: ended round for which everything was read again.
    """

    peers: FailureDetector = field(default_factory=FailureDetector)
    timers: Timers = field(default_factory=Timers)
    last: tuple[Round, Roster] | None = None
    silenced: SilentMembers = field(default_factory=SilentMembers)
    leavers: dict[str, str] = field(default_factory=dict)
    detected_ms: dict[int, int] = field(default_factory=dict)
    active: bool = False
    awaited: int = 0
    doubted: int = 0
    checked: int = 0

    @property
    def must_read(self) -> bool:
        """True if a decision requires a new read of everything first."""
        return self.doubted != self.checked

    def take_over(self, now: float, proven_gone: Iterable[Session]) -> None:
        """Begin a coordinatorship: all timers restart on this process's clock.

        `proven_gone` are sessions (of former coordinators) whose end this member proved itself.
        """
        self.timers.clear()
        self.timers.begin_step(now)
        self.peers.begin(proven_gone, now)
        self.leavers.clear()
        self.detected_ms.clear()
        self.doubted = self.checked = 0
        self.active = True

    def resign(self) -> None:
        self.active = False
        self.peers.resign()
