"""One agent's side of the protocol: a step function over events, with no I/O.

`Engine.step` takes one event and returns effects; between events nothing happens.
After each event it looks at everything it knows and does the next right thing
(level-triggered), so a lost or repeated event costs time and never correctness.
At most one request to etcd is under way; when its outcome is in doubt the engine
reads again before it decides anew.

This file is the order of things; what they are stands beside it: `own` (our key),
`lease`, `watching`, `leadership` (the coordinator seen from outside), `deciding` (what
the coordinator does), `safety` and `directing`.
"""

from __future__ import annotations

from elasticjob_rendezvous.core import answers, leaving, vouching
from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.directing import Facts, direct
from elasticjob_rendezvous.core.events import (
    Changed,
    Clock,
    Close,
    Config,
    Directive,
    Effect,
    Event,
    Granted,
    Idle,
    KeptAlive,
    LeaseGone,
    Left,
    LinkDown,
    LinkHeard,
    LinkQuiet,
    LinkUp,
    Local,
    LocalChanged,
    PeerDown,
    PeerHeard,
    PeerQuiet,
    PeerUp,
    Probed,
    ReadDone,
    Refused,
    RequestFailed,
    Run,
    Started,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    WatchBroken,
    WatchOpened,
)
from elasticjob_rendezvous.core.inquiries import INQUIRY_SECONDS
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import (
    Bounds,
)
from elasticjob_rendezvous.core.requesting import next_request
from elasticjob_rendezvous.core.tending import tend
from elasticjob_rendezvous.core.view import View


class Engine:
    """The protocol of one member. See `events` for its language.

    Attributes:
        directive: what the agent should do now.
        wake_at: when to send `Tick`, if nothing else happens before.
        view, local, session, lease, safety, watches, leadership, coordinator: how it stands
            with this member now (see `membership`); to be read only.
    """

    def __init__(self, config: Config) -> None:
        our = self._our = Membership(config)
        self.directive: Directive = Idle("not started")
        self.config = config
        self.lease = our.lease
        self.safety = our.safety
        self.watches = our.watches
        self.leadership = our.leadership
        self.coordinator = our.coordinator
        self._malformed: dict[str, str] = {}

    @property
    def wake_at(self) -> float | None:
        return self._our.alarm.at

    @property
    def view(self) -> View:
        return self._our.view

    @property
    def local(self) -> Local:
        return self._our.local

    @property
    def session(self) -> str:
        return self._our.session

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        """Take one event in; returns what is to be done, in order."""
        self._our.clock = clock
        if isinstance(event, PeerHeard | PeerUp) and self._is_routine(event):
            self._our.coordinator.peers.up(event, clock.now)
            return []
        self._our.alarm = Alarm()
        self._our.effects = []
        self._take(event)
        self._name_malformed()
        if self._our.rounds.remember(self._our.view):
            self._our.attendance.sealed_at = clock.now
        self._our.coordinator.last = self._our.rounds.last
        self._act()
        self.directive = self._direct()
        return self._our.effects

    def _is_routine(self, event: PeerHeard | PeerUp) -> bool:
        """Whether nothing follows from it; without a lease to vouch for us it is evidence."""
        return self._our.safety.backed(self._our.now) and self._our.coordinator.peers.is_routine(
            event
        )

    def hand_over(self) -> Directive:
        """The directive, as it is taken by the agent: from now on it may be obeyed.

        Workers ordered by a `Run` that was handed over count as starting until the agent
        says otherwise: answering a later `Stop`, it names their round even if it never
        started them.
        """
        if isinstance(self.directive, Run):
            self._our.crew.promise(self.directive.roster.number)
        return self.directive

    # -- taking events in -----------------------------------------------------------

    def _take(self, event: Event) -> None:
        now = self._our.now
        match event:
            case Started():
                # Workers taken over from an earlier agent get one lease's time.
                self._our.started_at = now
                self._our.safety.backed_until = now + self._our.config.keep_alive_seconds
            case Tick():
                pass
            case LocalChanged(local):
                self._our.crew.tell(local)
            case Close(outcome):
                self._our.close = outcome
            case Granted() | KeptAlive() | LeaseGone() | StoreRefused():
                answers.take_lease(self._our, event)
            case ReadDone():
                answers.take_read(self._our, event)
            case TxnDone():
                answers.take_txn(self._our, event)
            case TxnAmbiguous():
                answers.take_doubt(self._our)
            case RequestFailed():
                answers.take_failure(self._our, event)
            case WatchOpened(generation, revision):
                self._our.watches.opened(generation, revision)
            case Changed(generation, revision, events):
                if self._our.watches.holds(generation):
                    self._our.view.apply(revision, events)
            case WatchBroken(generation, _):
                if self._our.watches.broke(generation, now + self._our.backoff.pause_seconds):
                    self._our.doubt = True
                    self._our.backoff.lengthen()
            case _:
                self._take_peer(event)

    def _take_peer(self, event: Event) -> None:
        """News from links and probes."""
        now = self._our.now
        peers = self._our.coordinator.peers
        match event:
            case LinkUp(member):
                self._our.leadership.link_up(event, now)
                peers.led_by(member, now)
            case LinkHeard(member, _, number):
                self._our.leadership.link_heard(event, now)
                peers.led_by(member, now)
                if self._our.view.round and number > self._our.view.round.record.number:
                    self._our.doubt = True
            case LinkQuiet():
                self._suspect_leader(event, now)
            case LinkDown():
                self._suspect_leader(event, now + INQUIRY_SECONDS)
                self._our.effects += self._our.leadership.link_down(event, self._our.view)
            case PeerUp() | PeerHeard():
                peers.up(event, now)
            case PeerQuiet():
                if self._our.coordinator.active:
                    peers.quiet(event, self._our.view, now)
            case PeerDown():
                effects = peers.down(event, self._our.view, now)
                self._our.effects += effects if self._our.coordinator.active else []
            case Probed():
                self._our.leadership.probed(event, now)
                if self._our.coordinator.active:
                    self._our.effects += peers.probed(
                        event, self._our.view, now, self._our.config.orphan_seconds
                    )
                else:
                    peers.inquiries.answered(event.member, event.verdict, now)
            case _:
                raise TypeError(f"not an event of the protocol: {event!r}")

    def _suspect_leader(self, event: LinkQuiet | LinkDown, at: float) -> None:
        leader = self._our.leadership.suspected(event, self._our.view)
        if leader is not None:
            self._our.coordinator.peers.suspect(leader, at)

    def _name_malformed(self) -> None:
        """Say once of each record that it cannot be read, and so counts for nothing."""
        for key, error in self._our.view.malformed.items():
            if self._malformed.get(key) != str(error):
                self._malformed[key] = str(error)
                self._our.note(f"a record is passed over: {error}", warning=True)

    # -- acting ---------------------------------------------------------------------

    def _act(self) -> None:
        """Everything that needs no request, and the next request if none is under way."""
        now = self._our.now
        tend(self._our)
        if self._our.inflight.request is not None or not self._our.alarm.passed(
            self._our.backoff.until, now
        ):
            return
        request = next_request(self._our)
        if request is not None:
            self._our.inflight.send(request, self._our.view, self._our.watches)
            self._our.effects.append(request)

    # -- the next request -----------------------------------------------------------

    # -- directing ------------------------------------------------------------------

    def _direct(self) -> Directive:
        if self._our.refused:
            return Refused(self._our.refused)
        if self._our.left or self._our.leave.gave_up(self._our.now, self._our.alarm):
            return Left()
        own, bounds = self._our.own, self._our.bounds
        at = self._our.view.round.record if self._our.view.round else None
        grace_seconds = (bounds or Bounds(1, 1)).stop_grace_seconds
        late = self._our.crew.is_late(at, grace_seconds, self._our.now, self._our.alarm)
        saving = leaving.is_saving(self._our)
        return direct(
            Facts(own, bounds, vouching.may_go_on(self._our), self._our.rounds.roster, late, saving)
        )
