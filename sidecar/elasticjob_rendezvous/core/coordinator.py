"""Memory of a coordinator between two decisions. No I/O.

The coordinator is the member whose session was created first. `deciding` makes its decisions.
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
    """Memory of one coordinatorship. Correctness does not depend on it.

    Attributes:
        timers: first sightings; all restart with a new coordinator.
        peers: links and probes.
        last: newest final round and roster that this member has seen, to restore them if etcd
            loses its data.
        leavers: member of the final round -> its reason for leaving.
        detected_ms: round -> time from the first symptom to its opening.
        awaited: number of members that must still report before anything is due; 0: not known.
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
        """Begin a coordinatorship: all timers restart on this process's clock.

        `proven_gone` are sessions (of former coordinators) whose end this member proved itself.
        """
        self.timers.clear()
        self.timers.begin_step(now)
        self.peers.begin(proven_gone, now)
        self.leavers.clear()
        self.detected_ms.clear()
        self.active = True

    def resign(self) -> None:
        self.active = False
        self.peers.resign()
