"""What a coordinator remembers from one look at the job to the next. Pure.

The coordinator is the member whose session was created first. What it does is `deciding`'s
matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core import census
from elasticjob_rendezvous.core.acts import Act, Scene, held, write_round
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.counts import counted
from elasticjob_rendezvous.core.kv import Compare, Op, Put, Range, Target, Txn
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
from elasticjob_rendezvous.core.view import View

CROWD = 16
CROWD_SECONDS = 0.25
"""How long the members of a large job may take to come before its first round opens."""
FIRST = Round(1, RoundState.JOINABLE, Cause(CauseKind.START))


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

    def _first_bounds(self, scene: Scene) -> Act | None:
        """Outside Kubernetes the first member writes the bounds, with the first round if it can."""
        put = Put(scene.view.keys.bounds, encode(scene.bounds))
        none = Compare(scene.view.keys.bounds, Target.CREATE, 0)
        if scene.view.round is None and _known(scene.view) == 0:
            return self._open_first(scene, (put,), (none,))
        compares = (none, held(scene.own))
        return Act(
            Txn(compares, (put,), (Range(scene.view.keys.bounds),)), "the bounds are written"
        )

    def _open_first(
        self,
        scene: Scene,
        ops: tuple[Op, ...] = (),
        compares: tuple[Compare, ...] = (),
    ) -> Act | None:
        """Round 1: with the question to its members, if enough are waiting already.

        Whatever is written wakes every member. So a crowd is given a moment to be all there.
        """
        self.timers.since(("state", 1, RoundState.JOINABLE))
        self.timers.since(("stopped", 1))
        count = census.take(scene.view.members(), 0, None, scene.bounds, ())
        choice = census.choose(count, scene.bounds, 0, last_call_over=False)
        if isinstance(choice, census.Freeze) and not count.unstopped:
            frozen = replace(FIRST, state=RoundState.FROZEN, ids=choice.ids)
            note = f"round 1 opens, frozen with {len(choice.ids)} members"
            return write_round(scene, frozen, note, ops, compares)
        self.awaited = max(0, scene.bounds.wanted - len(count.waiting))
        crowd = scene.bounds.min_nodes >= CROWD
        if crowd and not self.timers.over("first round", CROWD_SECONDS):
            return None
        return write_round(scene, FIRST, "round 1 opens", ops, compares)

    def _first_round(self, scene: Scene) -> Act | None:
        known = _known(scene.view)
        if known == 0:
            return self._open_first(scene)
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
        top = max([_known(scene.view), *used])
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


def _known(view: View) -> int:
    """The highest round number that any member has seen."""
    return max(member.record.known for member in view.members().values())
