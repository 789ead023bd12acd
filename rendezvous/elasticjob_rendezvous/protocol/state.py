"""State of one member between two events: all data of the protocol engine. No I/O.

Parts with rules of their own are objects of other modules (`lease`, `watches`, `worker_group`, …).
All others are fields of `EngineState`, and properties derived from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.config import Config
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.effects import Effect, Note
from elasticjob_rendezvous.protocol.events import Clock
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.lease import Lease
from elasticjob_rendezvous.protocol.liveness.leader_link import LeaderLink, LinkDelay
from elasticjob_rendezvous.protocol.liveness.self_fencing import SelfFencing
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import (
    LeaveNotice,
    Member,
    Outcome,
    Restore,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.replica import Versioned, View
from elasticjob_rendezvous.protocol.requests import Backoff, InFlight
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble
from elasticjob_rendezvous.protocol.watches import Watches
from elasticjob_rendezvous.protocol.worker_group import Local, WorkerGroup, Workers


@dataclass(slots=True)
class RoundMemory:
    """Newest rounds seen.

    `known` is the highest number ever seen, `last` the newest round that was seen final.
    """

    known: int = 0
    last: tuple[Round, Roster] | None = None

    @property
    def roster(self) -> Roster | None:
        """Roster of the newest round that was seen final."""
        return self.last[1] if self.last else None

    def update(self, view: View) -> bool:
        """Record the newest rounds of the view; return True if another round is final than
        before."""
        if view.round is None:
            return False
        current = view.round.record
        self.known = max(self.known, current.number)
        roster = view.rosters.get(current.number)
        if current.state is not RoundState.FINAL or roster is None:
            return False
        before = self.last[0].number if self.last else None
        self.last = (current, roster)
        return before != current.number


PATIENCE_SECONDS = 3.0
"""Maximum time that a leaving member waits for etcd to delete its key; then the lease expires."""
SEEN_SECONDS = 2.0
"""Time that a leaving member keeps its key for a coordinator to read the leave."""


@dataclass(slots=True)
class LeaveState:
    """Times of a leave.

    `since`: when the leave became known here; `restored_since`: when the workers did not have to
    restore any more; `idle_since`: when no worker ran any more.
    """

    since: float | None = None
    restored_since: float | None = None
    idle_since: float | None = None

    def update(self, local: Local, now: float, *, leaving: bool) -> None:
        """Record the start or withdrawal of this member's leave; a drain request may be
        withdrawn."""
        if not leaving:
            self.since = self.restored_since = self.idle_since = None
            return
        self.since = now if self.since is None else self.since
        if local.restore is Restore.PENDING:
            self.restored_since = None
        elif self.restored_since is None:
            self.restored_since = now
        if local.workers is Workers.NONE:
            self.idle_since = now if self.idle_since is None else self.idle_since

    def was_seen(self, now: float, alarm: Alarm) -> bool:
        """Return True if the key is no longer needed to announce the leave.

        Until the round moves on the key stays, for its coordinator to read the reason.
        """
        return self.since is None or alarm.passed(self.since + SEEN_SECONDS, now)

    def gave_up(self, now: float, alarm: Alarm) -> bool:
        """Return True if the member leaves, its workers have stopped, and etcd does not answer."""
        return self.idle_since is not None and alarm.passed(self.idle_since + PATIENCE_SECONDS, now)


class EngineState:
    """State of one member of its job.

    Attributes:
        everything: ranges that a coordinator reads and watches.
        shared: ranges that every other member reads and watches.
        view: replica of the job's keys.
        session: name of the present session; empty without one.
        sessions: number of sessions begun.
        doubt: set when the view may be incomplete: it is read again before any decision.
        checked_at: when etcd last reported anything about this member's key.
        reached: set once etcd reported anything about the job: no error is final from then on, not
            even that of an etcd that lost its data and does not know this member's user.
        answered: keys that were read once, and need not be again.
        closed_at: time when the end of the job was seen; None before.
        left: set when this member has left.
        refused: refusal of this member; None while it may take part.
        close: outcome with which the agent wants the job to end.
        served: round number sent to the members linked to this one; -1 for none.
        sent_notices: leave notices sent on the links.
        store: trouble that makes etcd unusable at present, for messages.
        clock, alarm, effects: of the current step.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self.everything = (Range(config.prefix, prefix=True),)
        self.shared = (Range(self.keys.state, prefix=True),)
        self.view = View(self.keys)
        self.worker_group = WorkerGroup()
        self.leave_state = LeaveState()
        self.rounds = RoundMemory()
        self.lease = Lease()
        self.self_fencing = SelfFencing()
        self.watches = Watches()
        self.inflight = InFlight()
        self.backoff = Backoff(config.jitter)
        self.link_delay = LinkDelay(config.jitter)
        self.leader_link = LeaderLink(config.identity.id, config.jitter)
        self.coordinator = Coordinator()
        self.coordinator.peers.orphan_seconds = config.orphan_seconds
        self.session = ""
        self.sessions = 0
        self.started_at = 0.0
        self.doubt = True
        self.checked_at = 0.0
        self.reached = False
        self.answered: set[str] = set()
        self.closed_at: float | None = None
        self.left = False
        self.refused: Refused | None = None
        self.close: Outcome | None = None
        self.served = -1
        self.sent_notices: tuple[LeaveNotice, ...] = ()
        self.store: StoreTrouble | None = None
        self.clock = Clock(0.0, 0)
        self.alarm = Alarm()
        self.effects: list[Effect] = []

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def local(self) -> Local:
        return self.worker_group.local

    @property
    def own(self) -> MemberKey:
        return MemberKey(
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
        drain_request = self.view.bounds.record.marked(self.config.identity.id)
        return (drain_request.reason or "marked to leave") if drain_request else ""

    @property
    def current(self) -> Round | None:
        """Current round."""
        return self.view.round.record if self.view.round else None

    def round_is(self, state: RoundState) -> bool:
        return self.view.round is not None and self.view.round.record.state is state

    @property
    def bounds(self) -> RendezvousParams | None:
        return self.view.bounds.record if self.view.bounds else self.config.bounds

    @property
    def keep_alive_seconds(self) -> float:
        return (self.bounds or self.config).keep_alive_seconds

    def note(self, text: str, *, warning: bool = False) -> None:
        self.effects.append(Note(text, warning))
