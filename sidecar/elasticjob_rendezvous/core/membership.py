"""State of one member from one event to the next: the data of the protocol. No I/O.

Each part that has rules of its own is a value that owns them (`lease`, `watches`, `crew`, …). The
rest are single facts, and values derived from them.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.attendance import Attendance
from elasticjob_rendezvous.core.backoff import Backoff
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.config import Config
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.crew import Crew
from elasticjob_rendezvous.core.departure import Departure
from elasticjob_rendezvous.core.directives import Refused
from elasticjob_rendezvous.core.effects import Effect, Note
from elasticjob_rendezvous.core.events import Clock
from elasticjob_rendezvous.core.inflight import InFlight
from elasticjob_rendezvous.core.keys import Keys
from elasticjob_rendezvous.core.kv import Range
from elasticjob_rendezvous.core.leadership import Leadership
from elasticjob_rendezvous.core.lease import Lease
from elasticjob_rendezvous.core.local import Local
from elasticjob_rendezvous.core.own import Own
from elasticjob_rendezvous.core.records import Farewell, Member, Outcome, Round, RoundState
from elasticjob_rendezvous.core.rounds import Rounds
from elasticjob_rendezvous.core.safety import Safety
from elasticjob_rendezvous.core.store_trouble import StoreTrouble
from elasticjob_rendezvous.core.view import Versioned, View
from elasticjob_rendezvous.core.watching import Watches


class Membership:
    """State of one member of its job.

    Attributes:
        everything, shared: ranges that a coordinator reads and watches, and that all other members
            do.
        view: replica of the job's keys.
        session: name of the present session; empty without one.
        sessions: number of sessions begun.
        doubt: set when the view may be incomplete: it is read again before any decision.
        looked_at: when etcd last reported anything about this member's key.
        reached: set once etcd reported anything about the job: no error is final from then on, not
            even that of an etcd that lost its data and does not know this member's user.
        answered: keys that were read once, and need not be again.
        left: set when this member has left.
        refused: refusal of this member; None while it may take part.
        close: outcome with which the agent wants the job to end.
        served: round number sent to the members linked to this one; -1 for none.
        told: leave notices sent on the links.
        store: trouble that makes etcd unusable at present, for messages.
        clock, alarm, effects: of the current step.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self.everything = (Range(config.prefix, prefix=True),)
        self.shared = (Range(self.keys.state, prefix=True),)
        self.view = View(self.keys)
        self.crew = Crew()
        self.departure = Departure()
        self.rounds = Rounds()
        self.lease = Lease()
        self.safety = Safety()
        self.watches = Watches()
        self.inflight = InFlight()
        self.backoff = Backoff(config.jitter)
        self.attendance = Attendance(config.jitter)
        self.leadership = Leadership(config.identity.id, config.jitter)
        self.coordinator = Coordinator()
        self.coordinator.peers.orphan_seconds = config.orphan_seconds
        self.session = ""
        self.sessions = 0
        self.started_at = 0.0
        self.doubt = True
        self.looked_at = 0.0
        self.reached = False
        self.answered: set[str] = set()
        self.left = False
        self.refused: Refused | None = None
        self.close: Outcome | None = None
        self.served = -1
        self.told: tuple[Farewell, ...] = ()
        self.store: StoreTrouble | None = None
        self.clock = Clock(0.0, 0)
        self.alarm = Alarm()
        self.effects: list[Effect] = []

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def local(self) -> Local:
        return self.crew.local

    @property
    def own(self) -> Own:
        return Own(
            config=self.config,
            view=self.view,
            local=self.local,
            session=self.session,
            lease=self.lease.id,
            lease_holds=self.lease.holds(self.now),
            leaving=self.leaving,
            known=self.rounds.known,
        )

    @property
    def stored(self) -> Versioned[Member] | None:
        """Key of the present session as it stands in etcd, as far as known."""
        if not self.session:
            return None
        return self.view.sessions.get(self.config.identity.id, {}).get(self.session)

    @property
    def leaving(self) -> str:
        """Reason for this member's leave, from its agent or a drain request; empty without one."""
        if self.local.leaving or self.view.bounds is None:
            return self.local.leaving
        mark = self.view.bounds.record.marked(self.config.identity.id)
        return (mark.reason or "marked to leave") if mark else ""

    @property
    def current(self) -> Round | None:
        """Current round."""
        return self.view.round.record if self.view.round else None

    def round_is(self, state: RoundState) -> bool:
        return self.view.round is not None and self.view.round.record.state is state

    @property
    def bounds(self) -> Bounds | None:
        return self.view.bounds.record if self.view.bounds else self.config.bounds

    @property
    def keep_alive_seconds(self) -> float:
        return (self.bounds or self.config).keep_alive_seconds

    def note(self, text: str, *, warning: bool = False) -> None:
        self.effects.append(Note(text, warning))
