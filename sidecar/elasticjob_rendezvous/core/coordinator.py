"""What a coordinator remembers from one look at the job to the next. Pure.

The coordinator is the member whose session was created first. What it does is `deciding`'s
matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticjob_rendezvous.core.peers import Peers, Session
from elasticjob_rendezvous.core.records import Round
from elasticjob_rendezvous.core.roster import Roster
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
        leavers: member of the final round -> why it said that it leaves.
        detected_ms: round -> how long it took from the first symptom to open it.
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
