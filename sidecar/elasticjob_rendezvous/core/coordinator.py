"""What a coordinator remembers from one look at the job to the next. Pure.

The coordinator is the member whose session was created first. What it does is `deciding`'s
matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.acts import Act, Scene, write_round
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.counts import counted
from elasticjob_rendezvous.core.kv import Put
from elasticjob_rendezvous.core.peers import Peers, Session
from elasticjob_rendezvous.core.records import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Roster,
    Round,
    RoundState,
)
from elasticjob_rendezvous.core.silenced import Silenced
from elasticjob_rendezvous.core.timers import Timers


@dataclass(slots=True)
class Coordinator:
    """The memory of one coordinatorship. Nothing in it is needed for correctness.

    Attributes:
        timers: first sightings; all begin anew with a new coordinator.
        peers: links and probes.
        last: the newest final round and roster this member has seen, to restore
            them if etcd loses its data.
        detected_ms: round -> how long it took to see that it was due.
        awaited: how many members must still speak before there is anything to do; 0: not known.
    """

    peers: Peers = field(default_factory=Peers)
    timers: Timers = field(default_factory=Timers)
    last: tuple[Round, Roster] | None = None
    silenced: Silenced = field(default_factory=Silenced)
    leavers: dict[str, str] = field(default_factory=dict)
    detected_ms: dict[int, int] = field(default_factory=dict)
    active: bool = False
    awaited: int = 0

    def take_over(self, now: float, proven_gone: Iterable[Session]) -> None:
        """Begin a coordinatorship: all timers restart on our own clock.

        `proven_gone` are sessions (of former coordinators) whose end we proved ourselves.
        """
        self.timers.clear()
        self.timers.begin_step(now)
        self.peers.begin(proven_gone, now)
        self.leavers.clear()
        self.detected_ms.clear()
        self.active = True

    def resign(self) -> None:
        self.active = False
        self.peers.inquiries.clear()

    # -- joinable -------------------------------------------------------------------

    def _first_round(self, scene: Scene) -> Act | None:
        known = scene.view.known()
        if not self.timers.over("data lost", scene.bounds.keep_alive_seconds):
            return None  # let the others register again: they may know a higher number
        if self.last and self.last[0].number == known:
            round_, roster = self.last
            sealed = encode(roster)
            ops = (Put(scene.view.keys.roster(known), sealed), Put(scene.view.keys.seats, sealed))
            judged = replace(round_, pending=())  # the failures to judge are lost
            return write_round(scene, judged, f"round {known} restored", ops)
        cause = Cause(CauseKind.DATA_LOST, (), "etcd lost its data")
        again = Round(known + 1, RoundState.JOINABLE, cause, previous=known)
        return write_round(scene, again, f"round {known + 1} opens: data lost")

    def _overtaken(self, scene: Scene) -> Act | None:
        """After a loss of etcd's data somebody may know this number, or higher ones."""
        current = scene.current
        if current.state is RoundState.CLOSED:
            return None
        members = [versioned.record for versioned in scene.view.members().values()]
        used = [member.round for member in members if self._used_before(scene, member)]
        top = max([scene.view.known(), *used])
        if top <= current.number and not used:
            return None
        number = max(top, current.number) + 1
        cause = Cause(CauseKind.DATA_LOST, (), f"members know of round {top}")
        ended = current.state is RoundState.FINAL
        again = replace(
            current,
            number=number,
            state=RoundState.JOINABLE,
            ids=(),
            cause=cause,
            previous=number - 1,
            counts=counted(current.counts, cause.kind) if ended else current.counts,
        )
        return write_round(scene, again, f"round {number} opens: {cause.detail}")

    def _used_before(self, scene: Scene, member: Member) -> bool:
        """Whether `member` ran a round of this number that is not the one we know."""
        current = scene.current
        if member.round < current.number:
            return False
        if current.state in (RoundState.JOINABLE, RoundState.FROZEN):
            return True
        roster = scene.view.rosters.get(current.number)
        ran = member.state in (MemberState.RUNNING, MemberState.STOPPING)
        return ran and roster is not None and roster.seat(member.id) is None

    # -- frozen ---------------------------------------------------------------------

    # -- final ----------------------------------------------------------------------
