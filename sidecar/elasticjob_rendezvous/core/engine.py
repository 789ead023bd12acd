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

from elasticjob_rendezvous.core import deciding, saving
from elasticjob_rendezvous.core import own as own_key
from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.attendance import Attendance
from elasticjob_rendezvous.core.backoff import Backoff
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.crew import Crew
from elasticjob_rendezvous.core.directing import Facts, direct
from elasticjob_rendezvous.core.events import (
    Changed,
    Clock,
    Close,
    Config,
    Directive,
    Effect,
    Event,
    Grant,
    Granted,
    Idle,
    KeepAlive,
    KeptAlive,
    LeaseGone,
    Left,
    LinkDown,
    LinkHeard,
    LinkQuiet,
    LinkUp,
    Local,
    LocalChanged,
    Note,
    PeerDown,
    PeerHeard,
    PeerQuiet,
    PeerUp,
    Probed,
    Read,
    ReadDone,
    Refused,
    RequestFailed,
    Run,
    Serve,
    Started,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    WatchBroken,
    WatchOpened,
    Workers,
    Write,
)
from elasticjob_rendezvous.core.inflight import InFlight, Ranges, Request
from elasticjob_rendezvous.core.inquiries import INQUIRY_SECONDS
from elasticjob_rendezvous.core.keys import Keys
from elasticjob_rendezvous.core.kv import Range, Txn
from elasticjob_rendezvous.core.leadership import Leadership
from elasticjob_rendezvous.core.lease import Lease
from elasticjob_rendezvous.core.leave import Leave
from elasticjob_rendezvous.core.own import Own
from elasticjob_rendezvous.core.records import (
    Bounds,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.core.rounds import Rounds
from elasticjob_rendezvous.core.safety import Safety
from elasticjob_rendezvous.core.view import Versioned, View
from elasticjob_rendezvous.core.watching import Watches


class Engine:
    """The protocol of one member. See `events` for its language.

    Attributes:
        directive: what the agent should do now.
        wake_at: when to send `Tick`, if nothing else happens before.
        view: what is known of the job's keys.
        session: the name of our present session; empty when there is none.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self._wide = (Range(config.prefix, prefix=True),)
        self._narrow = (Range(self.keys.state, prefix=True),)
        self.view = View(self.keys)
        self.crew = Crew()
        self.directive: Directive = Idle("not started")
        self.session = ""
        self.lease = Lease()
        self.watches = Watches()
        self.leadership = Leadership(config.identity.id, config.jitter)
        self.coordinator = Coordinator()
        self.coordinator.peers.orphan_seconds = config.orphan_seconds
        self.safety = Safety()
        self._clock = Clock(0.0, 0)
        self._alarm = Alarm()
        self._effects: list[Effect] = []
        self.inflight = InFlight()
        self._answered: set[str] = set()
        self._doubt = True
        self._looked_at = 0.0
        self._attendance = Attendance(config.jitter)
        self._backoff = Backoff(config.jitter)
        # this member's life
        self._started_at = 0.0
        self._sessions = 0
        self.leave = Leave()
        self._left = False
        self._refused = ""
        self._close: Outcome | None = None
        self._served = -1
        self.rounds = Rounds()
        self._malformed: dict[str, str] = {}

    @property
    def local(self) -> Local:
        return self.crew.local

    @property
    def wake_at(self) -> float | None:
        return self._alarm.at

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        """Take one event in; returns what is to be done, in order."""
        self._clock = clock
        if isinstance(event, PeerHeard | PeerUp) and self._is_routine(event):
            self.coordinator.peers.up(event, clock.now)
            return []
        self._alarm = Alarm()
        self._effects = []
        self._take(event)
        self._name_malformed()
        if self.rounds.remember(self.view):
            self._attendance.sealed_at = clock.now
        self.coordinator.last = self.rounds.last
        self._act()
        self.directive = self._direct()
        return self._effects

    def _is_routine(self, event: PeerHeard | PeerUp) -> bool:
        """Whether nothing follows from it; without a lease to vouch for us it is evidence."""
        return self.safety.backed(self._clock.now) and self.coordinator.peers.is_routine(event)

    def hand_over(self) -> Directive:
        """The directive, as it is taken by the agent: from now on it may be obeyed.

        Workers ordered by a `Run` that was handed over count as starting until the agent
        says otherwise: answering a later `Stop`, it names their round even if it never
        started them.
        """
        if isinstance(self.directive, Run):
            self.crew.promise(self.directive.roster.number)
        return self.directive

    # -- taking events in -----------------------------------------------------------

    def _take(self, event: Event) -> None:
        now = self._clock.now
        match event:
            case Started():
                # Workers taken over from an earlier agent get one lease's time.
                self._started_at = now
                self.safety.backed_until = now + self.config.keep_alive_seconds
            case Tick():
                pass
            case LocalChanged(local):
                self.crew.tell(local)
            case Close(outcome):
                self._close = outcome
            case Granted() | KeptAlive() | LeaseGone() | StoreRefused():
                self._take_lease(event)
            case ReadDone():
                self._take_read(event)
            case TxnDone():
                self._take_txn(event)
            case TxnAmbiguous():
                self.inflight.request = None
                self._doubt = True
                self._backoff.failed(self._clock.now)
            case RequestFailed(error, terminal):
                self.inflight.request = None
                self._backoff.failed(self._clock.now)
                self._take_failure(error, terminal)
            case WatchOpened(generation, revision):
                self.watches.opened(generation, revision)
            case Changed(generation, revision, events):
                if self.watches.holds(generation):
                    self.view.apply(revision, events)
            case WatchBroken(generation, _):
                if self.watches.broke(generation, now + self._backoff.pause_seconds):
                    self._doubt = True
                    self._backoff.lengthen()
            case _:
                self._take_peer(event)

    def _take_lease(self, event: Granted | KeptAlive | LeaseGone | StoreRefused) -> None:
        now = self._clock.now
        match event:
            case Granted(lease, deadline):
                self.inflight.request = None
                self._calm()
                self.lease.grant(lease, deadline, now)
            case KeptAlive(lease, deadline):
                if lease == self.lease.id:
                    self.lease.keep(deadline)
                    self.safety.store_answers(now)
            case LeaseGone(lease):
                if lease == self.lease.id:
                    self.safety.store_answers(now)
                    self._lose_session("its lease ran out")
                    self.lease.forget()
            case StoreRefused():
                self.safety.store_refused_at = now

    def _take_peer(self, event: Event) -> None:
        """News from links and probes."""
        now = self._clock.now
        peers = self.coordinator.peers
        match event:
            case LinkUp(member):
                self.leadership.link_up(event, now)
                peers.led_by(member, now)
            case LinkHeard(member, _, number):
                self.leadership.link_heard(event, now)
                peers.led_by(member, now)
                if self.view.round and number > self.view.round.record.number:
                    self._doubt = True
            case LinkQuiet():
                self._suspect_leader(event, now)
            case LinkDown():
                self._suspect_leader(event, now + INQUIRY_SECONDS)
                self._effects += self.leadership.link_down(event, self.view)
            case PeerUp() | PeerHeard():
                peers.up(event, now)
            case PeerQuiet():
                if self.coordinator.active:
                    peers.quiet(event, self.view, now)
            case PeerDown():
                effects = peers.down(event, self.view, now)
                self._effects += effects if self.coordinator.active else []
            case Probed():
                self.leadership.probed(event, now)
                if self.coordinator.active:
                    self._effects += peers.probed(event, self.view, now, self.config.orphan_seconds)
                else:
                    peers.inquiries.answered(event.member, event.verdict, now)
            case _:
                raise TypeError(f"not an event of the protocol: {event!r}")

    def _suspect_leader(self, event: LinkQuiet | LinkDown, at: float) -> None:
        leader = self.leadership.suspected(event, self.view)
        if leader is not None:
            self.coordinator.peers.suspect(leader, at)

    def _take_failure(self, error: str, terminal: bool) -> None:
        """Etcd did not serve us: hopeless at the start, a matter of patience later."""
        if self.view.cluster_id:
            return
        if terminal:
            self._refused = error
        elif self._clock.now >= self._started_at + self.config.connect_seconds:
            self._refused = f"no answer for {self.config.connect_seconds:g} s: {error}"

    def _take_read(self, event: ReadDone) -> None:
        read = self.inflight.taken()
        self._calm()
        if self.inflight.tells_of_loss(
            self.view, self.watches, event.cluster_id, event.revision, event.ranges
        ):
            self._rebuild()
        self.view.cluster_id = event.cluster_id
        self.view.absorb(event.revision, event.ranges)
        self._looked_at = self._clock.now
        self._find_leader(event.revision, event.ranges)
        self._answered |= {target.key for target, _ in event.ranges}
        whole = isinstance(read, Read) and any(r.covers(self.keys.bounds) for r in read.ranges)
        if whole and self.inflight.is_up_to_date(self.watches):
            self._doubt = False
        own = self._own()
        seen = any(r.covers(own.key) and not r.limit for r, _ in event.ranges)
        if self.session and seen and own.stored is None:
            self._lose_session("its key is gone")

    def _take_txn(self, event: TxnDone) -> None:
        write = self.inflight.taken()
        note, self.inflight.note = self.inflight.note, ""
        self._calm()
        assert isinstance(write, Write)
        result = event.result
        if self.inflight.tells_of_loss(
            self.view, self.watches, result.cluster_id, result.revision, result.ranges
        ):
            # What was decided rested on data that is lost: start over from a read.
            self._rebuild()
            return
        self.view.cluster_id = result.cluster_id
        self.view.wrote(write.txn, result)
        self._looked_at = self._clock.now
        found = self._find_leader(result.revision, result.ranges)
        if found and self.inflight.is_up_to_date(self.watches):
            self._doubt = False
        if not result.succeeded:
            self._doubt = True
        elif note:
            self._note(note)
        if self.session and self._stored() is None:
            self._lose_session("its key is gone")

    def _find_leader(self, revision: int, ranges: Ranges) -> bool:
        """Learn who coordinates; its key is watched a little later, out of the round's way."""
        before = self.leadership.key
        found = self.leadership.found(revision, ranges, self.view.malformed)
        if self.leadership.key != before:
            self._attendance.found_at = self._clock.now
        return found

    def _is_final(self) -> bool:
        return self.view.round is not None and self.view.round.record.state is RoundState.FINAL

    def _rebuild(self) -> None:
        """Etcd lost its data: what we know of it is void; our memory of the rounds is not."""
        self._note("etcd lost its data: registering anew", warning=True)
        self.view = View(self.keys)
        self._answered.clear()
        self.lease.forget()
        self._effects += self.watches.drop()
        self._forget_session()

    def _lose_session(self, why: str) -> None:
        if not (self._leaving() or self._refused or self._closed()):
            self._note(f"the session of {self.config.identity.name} ended: {why}", warning=True)
        self._forget_session()

    def _forget_session(self) -> None:
        """Links stay: they are the proof that lets workers go on meanwhile."""
        self.safety.lost_its_lease(self._clock.now)
        self.session = ""
        self.leadership.key = ""
        self.coordinator.resign()
        self._doubt = True

    def _name_malformed(self) -> None:
        """Say once of each record that it cannot be read, and so counts for nothing."""
        for key, error in self.view.malformed.items():
            if self._malformed.get(key) != str(error):
                self._malformed[key] = str(error)
                self._note(f"a record is passed over: {error}", warning=True)

    # -- acting ---------------------------------------------------------------------

    def _act(self) -> None:
        """Everything that needs no request, and the next request if none is under way."""
        now = self._clock.now
        self.leave.tell(bool(self._leaving()), self.crew.idle, now)
        self._renew()
        self._tend_roles()
        self._vouch()
        if self.inflight.request is not None or not self._alarm.passed(self._backoff.until, now):
            return
        request = self._next_request()
        if request is not None:
            self.inflight.send(request, self.view, self.watches)
            self._effects.append(request)

    def _renew(self) -> None:
        if not self.lease.id:
            return
        now = self._clock.now
        if self.lease.due(now):
            self._effects.append(KeepAlive(self.lease.id))
        self._alarm.set(self.lease.renew_at)
        if now < self.lease.deadline:
            self._alarm.set(self.lease.deadline)

    def _tend_roles(self) -> None:
        """Become or stop being the coordinator; watch and link accordingly."""
        stored = self._stored()
        registered = stored is not None
        if registered and self.lease.id:
            self.safety.backed_until = self.lease.deadline
        leads = stored is not None and self.leadership.key == stored.key
        if leads and not self.coordinator.active:
            self._take_over()
            self._effects += self.leadership.unlink()
            self._note(f"{self.config.identity.name} coordinates")
        self._tend_watches()
        self.coordinator.peers.inquiry_seconds = 2 * self._keep_alive_seconds()
        if not registered:
            if self.crew.idle:
                self._effects += self.leadership.unlink()  # nothing is left to vouch for
            return
        if self.coordinator.active:
            self._tend_peers()
        else:
            now = self._clock.now
            attend = self._attendance.may_link(self._is_final(), now, self._alarm)
            self._effects += self.leadership.tend(self.view, now, self._doubt, attend)
            self._effects += self.coordinator.peers.inquiries.tend(self.view, now, self._alarm)

    def _take_over(self) -> None:
        """We coordinate from now on, and look after a predecessor that left workers behind."""
        now = self._clock.now
        self.coordinator.take_over(now, self.leadership.proven_gone)
        number = self.view.round.record.number if self.view.round else 0
        for id, session in list(self.leadership.orphaned):
            member = self.view.member(id)
            if member is not None and member.record.session.rstrip("~") == session:
                self._effects += self.coordinator.peers.adopt(
                    member.record, number, now, self.config.orphan_seconds
                )

    def _tend_watches(self) -> None:
        now = self._clock.now
        leads = self.coordinator.active
        opened = self.watches.keep_main(self._wide if leads else self._narrow, now, self._alarm)
        if opened:
            self._doubt = True
            self._effects += opened
        if leads or not self.leadership.key:
            self._effects += self.watches.keep_leader("", 0, now, self._alarm)
        elif not self._doubt and self._attendance.may_watch(self._is_final(), now, self._alarm):
            key, seen_at = self.leadership.key, self.leadership.seen_at
            self._effects += self.watches.keep_leader(key, seen_at, now, self._alarm)

    def _tend_peers(self) -> None:
        every = self.lease.ttl_seconds / 3
        me = self.config.identity.id
        effects, wake = self.coordinator.peers.tend(self.view, me, self._clock.now, every)
        self._effects += effects
        self._alarm.set(wake)

    def _vouch(self) -> None:
        """Tell those who link to us which round we know of, for as long as we can tell.

        Past our lease without the whole gang we must assume that there is a newer one.
        """
        if self.view.round is None or not (self.coordinator.active or self._served >= 0):
            return
        number = self.view.round.record.number
        if not self.safety.backed(self._clock.now) and not self._gang_proves_safe(number):
            number += 1
        if number != self._served:
            self._served = number
            self._effects.append(Serve(number))

    # -- the next request -----------------------------------------------------------

    def _next_request(self) -> Request | None:
        own = self._own()
        if self._refused or self._left:
            return Write(own_key.drop(own, own.stored)) if own.stored else None
        if not self.session:
            return self._enter(own)
        if not self.watches.ready:
            return None
        if self._doubt or self.leadership.look_due(self._clock.now, self._alarm):
            return self._look(own)
        if self._idle_too_long():
            return self._look(own)
        if (missing := self._missing()) is not None:
            return missing
        if own.stored is None:
            self._lose_session("its key is gone")
            return self._enter(self._own())
        if reason := own_key.disagreement(own):
            self._refused = reason
            return Write(own_key.drop(own, own.stored))
        txn = self._own_write(own, own.stored)
        return Write(txn) if txn is not None else self._coordinate(own, own.stored)

    def _enter(self, own: Own) -> Request | None:
        """Create our session; after a look at the round if we bring a past along."""
        local = self.local
        idle = local.workers is Workers.NONE
        if own.leaving and idle:
            self._left = True
            return None
        if self._closed():
            return None
        if not self.lease.holds(self._clock.now):
            self.lease.ttl_seconds = max(2, round(self._keep_alive_seconds()))
            return Grant(self.lease.ttl_seconds)
        if idle and not local.ready:
            return None
        carries = not idle or local.round > 0 or self._sessions > 0
        if self._doubt and carries:
            return self._look(own) if self.watches.ready else None
        at = self.view.round
        if not idle and at is not None and at.record.number > local.round:
            return None  # fenced while it stops: it comes back when nothing runs here
        if not self.watches.ready:
            return None
        self._new_session()
        return Write(own_key.take_up(self._own(), carries))

    def _new_session(self) -> None:
        self._sessions += 1
        self.session = f"{self.config.session_nonce}-{self._sessions}"

    def _look(self, own: Own) -> Read:
        """Read everything that our part needs, at one revision."""
        if self.coordinator.active:
            return Read((Range(self.config.prefix, prefix=True),))
        return Read((*own.look, own.folder))

    def _idle_too_long(self) -> bool:
        """Whether we have waited for so long that our key may have been taken from us."""
        now = self._clock.now
        if self.coordinator.active or not self.crew.idle:
            return False
        return self._alarm.passed(self._looked_at + 2 * self._keep_alive_seconds(), now)

    def _missing(self) -> Read | None:
        """The roster of a final round, or the failures that closed the job."""
        if self.view.round is None or self.coordinator.active:
            return None
        current = self.view.round.record
        number = current.number
        final = current.state is RoundState.FINAL
        roster = Range(self.keys.roster(number))
        if final and number not in self.view.rosters and roster.key not in self._answered:
            return Read((roster,))
        failed = current.outcome is not None and current.outcome.kind is OutcomeKind.FAILED
        if failed and current.charged:
            failures = Range(self.keys.failures(current.charged[-1]), prefix=True)
            return Read((failures,)) if failures.key not in self._answered else None
        return None

    def _own_write(self, own: Own, stored: Versioned[Member]) -> Txn | None:
        if self._closed():
            idle = self.crew.idle
            return own_key.drop(own, stored) if idle else None
        if self._close is not None and (
            txn := own_key.close(own, stored, self._close, self._clock.utc_ms)
        ):
            return txn
        if own.leaving:
            return own_key.report(own, stored) or self._leave(own, stored)
        return own_key.update(own, stored)

    def _leave(self, own: Own, stored: Versioned[Member]) -> Txn | None:
        """Say that we leave while workers still stop; then delete our key."""
        at = self.view.round.record if self.view.round else None
        stopped = self.crew.idle
        seated = at is not None and at.state is RoundState.FINAL and at.number == self.local.round
        said = stored.record.state is MemberState.LEAVING and stored.record.stopped
        silent = self.local.round == 0 or stored.record.state is MemberState.DONE
        if stopped and (silent or (said and (not seated or self._was_seen()))):
            return own_key.drop(own, stored)
        others = len(self.view.members()) > 1
        if self.coordinator.active and others and stored.record.state is not MemberState.LEAVING:
            return self._resign(stored)
        return own_key.say_leaving(own, stored)

    def _was_seen(self) -> bool:
        """Whether nobody need read any more why we leave."""
        roster = self.rounds.roster
        alone = roster is not None and len(roster.seats) == 1
        return alone or self.local.done or self.leave.was_seen(self._clock.now, self._alarm)

    def _resign(self, stored: Versioned[Member]) -> Txn:
        self._new_session()
        self.coordinator.resign()
        self._note(f"{self.config.identity.name} resigns as coordinator")
        return own_key.move(self._own(), stored)

    def _coordinate(self, own: Own, stored: Versioned[Member]) -> Write | None:
        now = self._clock.now
        if not self.coordinator.active:
            leader = self.leadership.to_depose(self.view, now, self._alarm)
            if leader is None:
                return None
            name = leader.record.name
            if (leader.record.id, leader.record.session) in self.leadership.proven_gone:
                self.inflight.note = f"the coordinator {name} is gone: its key is deleted"
                return Write(own_key.depose(own, stored, leader))
            self.inflight.note = f"the coordinator {name} lost its agent: it is set aside"
            return Write(own_key.set_aside(own, stored, leader))
        if self.lease.holds(now):
            act = deciding.decide(
                self.coordinator, self.view, stored, self._clock, self.config.bounds
            )
            if act is not None:
                self.inflight.note = act.note
                return Write(act.txn)
            self._alarm.set(self.coordinator.timers.wake)
        roster = self.rounds.roster
        others = {seat.id for seat in roster.seats} if roster else set()
        if self.coordinator.peers.cut_off(others - {stored.record.id}):
            return Write(self._resign(stored))
        return None

    # -- directing ------------------------------------------------------------------

    def _direct(self) -> Directive:
        if self._refused:
            return Refused(self._refused)
        if self._left or self.leave.gave_up(self._clock.now, self._alarm):
            return Left()
        own, bounds = self._own(), self._bounds()
        at = self.view.round.record if self.view.round else None
        grace_seconds = (bounds or Bounds(1, 1)).stop_grace_seconds
        late = self.crew.is_late(at, grace_seconds, self._clock.now, self._alarm)
        saving = self._is_saving(bounds)
        return direct(Facts(own, bounds, self._safe(), self.rounds.roster, late, saving))

    def _is_saving(self, bounds: Bounds | None) -> bool:
        """We leave, and our workers run on: to be asked for a checkpoint, and to make it."""
        at = self.view.round.record if self.view.round else None
        if at is None or self.leave.since is None or not self.local.saves:
            return False
        if at.state is not RoundState.FINAL or at.number != self.local.round:
            return False
        leave_seconds = (bounds or Bounds(1, 1)).leave_seconds - saving.STOP_MARGIN_SECONDS
        seconds = leave_seconds if at.save is not None else min(saving.ASK_SECONDS, leave_seconds)
        return not self._alarm.passed(self.leave.since + seconds, self._clock.now)

    def _safe(self) -> bool:
        """Whether workers may go on; asks to be called again while that is uncertain."""
        now = self._clock.now
        if self.crew.idle:
            return True
        if self.safety.backed(self._clock.now):
            self._alarm.set(self.safety.backed_until)
            return True
        self._alarm.set(now + 0.25)
        return self._gang_proves_safe(self.local.round)

    def _gang_proves_safe(self, number: int) -> bool:
        """Whether links, or etcd's own absence, prove that no newer round than this runs."""
        roster = self.rounds.roster
        if roster is not None and roster.number != number:
            roster = None
        done = self.view.dones.get(number, {})
        peers, now = self.coordinator.peers, self._clock.now
        return self.safety.may_run(number, roster, done, self.leadership, peers, now)

    # -- small facts ----------------------------------------------------------------

    def _own(self) -> Own:
        return Own(
            config=self.config,
            view=self.view,
            local=self.local,
            session=self.session,
            lease=self.lease.id,
            lease_holds=self.lease.holds(self._clock.now),
            leaving=self._leaving(),
            known=self.rounds.known,
        )

    def _stored(self) -> Versioned[Member] | None:
        """Our present session's key as it stands in etcd, as far as we know."""
        if not self.session:
            return None
        return self.view.sessions.get(self.config.identity.id, {}).get(self.session)

    def _leaving(self) -> str:
        """Why this member leaves: its agent's word or the operator's mark; else empty."""
        if self.local.leaving or self.view.bounds is None:
            return self.local.leaving
        mark = self.view.bounds.record.marked(self.config.identity.id)
        return (mark.reason or "marked to leave") if mark else ""

    def _closed(self) -> bool:
        return self.view.round is not None and self.view.round.record.state is RoundState.CLOSED

    def _bounds(self) -> Bounds | None:
        return self.view.bounds.record if self.view.bounds else self.config.bounds

    def _keep_alive_seconds(self) -> float:
        bounds = self._bounds()
        return bounds.keep_alive_seconds if bounds else self.config.keep_alive_seconds

    def _calm(self) -> None:
        self._backoff.answered()
        self.safety.store_answers(self._clock.now)

    def _note(self, text: str, *, warning: bool = False) -> None:
        self._effects.append(Note(text, warning))
