"""One agent's side of the protocol: a step function over events, with no I/O.

`Engine.step` takes one event and returns effects; between events nothing happens.
After each event it looks at everything it knows and does the next right thing
(level-triggered), so a lost or repeated event costs time and never correctness.
At most one request to etcd is under way; when its outcome is in doubt the engine
reads again before it decides anew.

Owns: this member's session, its place in the round, and the directive to its agent.
The coordinator's part is in `coordinator`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticjob_rendezvous.core import verdicts
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.coordinator import Coordinator
from elasticjob_rendezvous.core.events import (
    Changed,
    Clock,
    Close,
    Config,
    Directive,
    Effect,
    Event,
    Finish,
    Grant,
    Granted,
    Idle,
    KeepAlive,
    KeptAlive,
    LeaseGone,
    Left,
    Link,
    LinkDown,
    LinkHeard,
    LinkUp,
    Local,
    LocalChanged,
    Note,
    PeerDown,
    PeerHeard,
    PeerUp,
    Probed,
    Read,
    ReadDone,
    Refused,
    RequestFailed,
    Run,
    Serve,
    Started,
    Stop,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    Unlink,
    Unwatch,
    Verdict,
    Watch,
    WatchBroken,
    WatchOpened,
    Workers,
    Write,
)
from elasticjob_rendezvous.core.keys import Keys
from elasticjob_rendezvous.core.kv import (
    Compare,
    Delete,
    KeyValue,
    Op,
    Order,
    Put,
    Range,
    Target,
    Txn,
)
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, probe
from elasticjob_rendezvous.core.records import (
    URGENT,
    Bounds,
    Cause,
    CauseKind,
    Done,
    Failure,
    Member,
    MemberState,
    Outcome,
    OutcomeKind,
    Roster,
    Round,
    RoundState,
)
from elasticjob_rendezvous.core.view import Versioned, View

SUCCESSION_SECONDS = 0.25
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 2.0
LEAVE_PATIENCE_SECONDS = 3.0
REGISTER_AGAIN_SECONDS = 2.0
"""How long a linked gang's members may take to register again one by one after an
outage: less than the keep-alive time a new coordinator grants them."""


@dataclass(slots=True)
class _Watching:
    generation: int
    ranges: tuple[Range, ...]
    open: bool = False


class Engine:
    """The protocol of one member. See `events` for its language.

    Attributes:
        directive: what the agent should do now.
        wake_at: when to send `Tick`, if nothing else happens before.
        view: what is known of the job's keys.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.keys = Keys(config.prefix)
        self.view = View(self.keys)
        self.local = Local()
        self.directive: Directive = Idle("not started")
        self.wake_at: float | None = None
        self.coordinator = Coordinator(self.keys)
        self._clock = Clock(0.0, 0)
        self._effects: list[Effect] = []
        # the request under way
        self._busy: Grant | Read | Write | None = None
        self._doubt = True
        self._started_at = 0.0
        self._retry_at = 0.0
        self._backoff = FIRST_BACKOFF_SECONDS
        # the session
        self._sessions = 0
        self._session = ""
        self._lease = 0
        self._lease_deadline = 0.0
        self._lease_ttl = 0
        self._renew_at = 0.0
        self._leaving_since: float | None = None
        self._left = False
        self._refused = ""
        self._close: Outcome | None = None
        # who coordinates
        self._coordinator_key = ""
        self._look_at: float | None = None
        self._link: tuple[str, str] | None = None
        self._link_heard: tuple[float, int] | None = None
        self._suspected: set[tuple[str, str]] = set()
        self._suspects_gone: dict[tuple[str, str], float] = {}
        # the watches: what our part needs, and the coordinator's key
        self._generation = 0
        self._watch: _Watching | None = None
        self._leader_watch: _Watching | None = None
        self._watch_at = 0.0
        self._asked_under = 0
        self._asked_revision = 0
        self._leader_seen_at = 0
        # memory that outlives etcd
        self._last: tuple[Round, Roster] | None = None
        self._roster_asked = 0
        self._known = 0
        self._store_refused_at: float | None = None
        self._served = -1
        self._proven_safe_at: float | None = None
        self._pending_note = ""

    @property
    def session(self) -> str:
        """The name of our present session; empty when there is none."""
        return self._session

    # -- events ---------------------------------------------------------------------

    def step(self, event: Event, clock: Clock) -> list[Effect]:
        """Take one event in; returns what is to be done, in order."""
        self._clock = clock
        self._effects = []
        self.wake_at = None
        self._take(event)
        self._remember()
        self._act()
        self.directive = self._direct()
        return self._effects

    def _take(self, event: Event) -> None:
        match event:
            case Started():
                # Workers taken over from an earlier agent get one lease's time.
                self._started_at = self._clock.now
                self._lease_deadline = self._clock.now + self.config.keep_alive_seconds
            case Tick():
                pass
            case LocalChanged(local):
                self.local = local
            case Granted(lease, deadline):
                self._busy = None
                self._lease, self._lease_deadline = lease, deadline
                self._renew_at = self._clock.now + self._renew_every()
                self._calm()
            case KeptAlive(lease, deadline):
                if lease == self._lease:
                    self._lease_deadline = max(self._lease_deadline, deadline)
                    self._store_refused_at = None
            case LeaseGone(lease):
                if lease == self._lease:
                    self._lose_session("its lease ran out")
                    self._lease = 0
                    self._proven_safe_at = self._clock.now
            case ReadDone():
                self._take_read(event)
            case TxnDone():
                self._take_txn(event)
            case TxnAmbiguous():
                self._busy = None
                self._doubt = True
                self._back_off()
            case RequestFailed(error, terminal):
                self._busy = None
                self._back_off()
                self._take_failure(error, terminal)
            case StoreRefused():
                self._store_refused_at = self._clock.now
            case WatchOpened(generation, _):
                if self._watch is not None and generation == self._watch.generation:
                    self._watch.open = True
            case Changed(generation, revision, events):
                if self._is_watching(generation):
                    self.view.apply(revision, events)
            case WatchBroken(generation, _):
                self._take_broken_watch(generation)
            case _:
                self._take_peer(event)

    def _take_failure(self, error: str, terminal: bool) -> None:
        """Etcd did not serve us: hopeless at the start, a matter of patience later."""
        if self.view.cluster_id:
            return
        if terminal:
            self._refused = error
        elif self._clock.now >= self._started_at + self.config.connect_seconds:
            self._refused = f"no answer for {self.config.connect_seconds:g} s: {error}"

    def _is_watching(self, generation: int) -> bool:
        return any(
            watching is not None and watching.generation == generation
            for watching in (self._watch, self._leader_watch)
        )

    def _take_broken_watch(self, generation: int) -> None:
        if self._watch is not None and self._watch.generation == generation:
            self._watch = None
        elif self._leader_watch is not None and self._leader_watch.generation == generation:
            self._leader_watch = None
        else:
            return
        self._doubt = True
        self._watch_at = self._clock.now + self._backoff * (0.5 + self.config.jitter / 2)

    def _take_peer(self, event: Event) -> None:
        """News from links and probes."""
        now = self._clock.now
        peers = self.coordinator.peers
        match event:
            case LinkUp(member, session):
                self._link_heard = (now, 0)
                self._suspected.discard((member, session))
                self._suspects_gone.pop((member, session), None)
            case LinkHeard(member, session, number):
                if (member, session) == self._link:
                    self._link_heard = (now, number)
                    if self.view.round and number > self.view.round.record.number:
                        self._doubt = True
            case LinkDown(member, session, _):
                if (member, session) == self._link:
                    self._link_heard = None
                    self._suspect_coordinator(member, session)
            case PeerUp() | PeerHeard():
                peers.up(event, now)
            case PeerDown():
                effects = peers.down(event, self.view, now)
                if self.coordinator.active:
                    self._effects += effects
            case Probed(member, session, verdict):
                if self.coordinator.active:
                    self._effects += peers.probed(event, self.view, now, self.config.orphan_seconds)
                elif verdict is Verdict.GONE:
                    self._suspects_gone[member, session] = now
                else:
                    self._suspected.discard((member, session))
            case Close(outcome):
                self._close = outcome
            case _:
                raise TypeError(f"not an event of the protocol: {event!r}")

    def _take_read(self, event: ReadDone) -> None:
        self._busy = None
        self._calm()
        if self._data_lost(event.cluster_id, event.revision):
            self._rebuild()
        self.view.cluster_id = event.cluster_id
        self.view.absorb(event.revision, event.ranges)
        self._find_leader(event.revision, event.ranges)
        if self._asked_under_watch():
            self._doubt = False
        if self._session and self._own() is None and self._covers_own(event):
            self._lose_session("its key is gone")

    def _covers_own(self, event: ReadDone) -> bool:
        own = self._own_key()
        return any(target.covers(own) and not target.limit for target, _ in event.ranges)

    def _take_txn(self, event: TxnDone) -> None:
        write, self._busy = self._busy, None
        note, self._pending_note = self._pending_note, ""
        self._calm()
        assert isinstance(write, Write)
        result = event.result
        if self._data_lost(result.cluster_id, result.revision):
            # What was decided rested on data that is lost: start over from a read.
            self._rebuild()
            return
        self.view.cluster_id = result.cluster_id
        self.view.wrote(write.txn, result)
        if self._find_leader(result.revision, result.ranges) and self._asked_under_watch():
            self._doubt = False
        if result.succeeded and note:
            self._note(note)
        if not result.succeeded:
            self._doubt = True
        if self._session and self._own() is None:
            self._lose_session("its key is gone")

    def _data_lost(self, cluster_id: int, revision: int) -> bool:
        """Whether an answer comes from another past than ours: etcd was set up anew."""
        if not self.view.cluster_id:
            return False
        return cluster_id != self.view.cluster_id or revision < self._asked_revision

    def _asked_under_watch(self) -> bool:
        """Whether what was just read has been kept up to date since it was asked for."""
        return self._watch is not None and self._watch.generation == self._asked_under

    def _find_leader(
        self, revision: int, ranges: tuple[tuple[Range, tuple[KeyValue, ...]], ...]
    ) -> bool:
        """Take from a read who coordinates, if it asked for that."""
        for target, found in ranges:
            if target.limit == 1:
                self._coordinator_key = found[0].key if found else ""
                self._leader_seen_at = revision
                return True
        return False

    def _rebuild(self) -> None:
        """Etcd lost its data: what we know of it is void; our memory of the rounds is not."""
        self._note("etcd lost its data: registering anew", warning=True)
        self.view = View(self.keys)
        self._lease = 0
        self._session = ""
        self._coordinator_key = ""
        self._unwatch()
        self._doubt = True
        self.coordinator.resign()

    def _lose_session(self, why: str) -> None:
        if self._session and not (self._leaving() or self._refused or self._closed()):
            self._note(f"the session of {self.config.identity.name} ended: {why}", warning=True)
        self._session = ""
        self._coordinator_key = ""
        self._doubt = True
        self.coordinator.resign()

    def _remember(self) -> None:
        """Keep what must survive a loss of etcd's data."""
        if self.view.round is None:
            return
        round_ = self.view.round.record
        self._known = max(self._known, round_.number)
        if round_.state is RoundState.FINAL and (roster := self.view.rosters.get(round_.number)):
            self._last = (round_, roster)
            self.coordinator.last = self._last

    # -- acting ---------------------------------------------------------------------

    def _act(self) -> None:
        """The next request, if none is under way, and everything that needs none."""
        now = self._clock.now
        self._renew()
        self._tend_roles()
        if self._busy is not None:
            return
        if now < self._retry_at:
            self._wake(self._retry_at)
            return
        request = self._next_request()
        if request is not None:
            self._busy = request
            self._asked_revision = self.view.revision
            self._asked_under = self._watch.generation if self._watching() and self._watch else 0
            self._effects.append(request)

    def _next_request(self) -> Grant | Read | Write | None:
        if self._leaving() and self._leaving_since is None:
            self._leaving_since = self._clock.now
        if self._refused or self._left:
            return self._drop_own()
        if not self._session:
            return self._enter()
        if not self._watching():
            return None
        if self._look_due() or self._doubt:
            return self._look()
        if (missing := self._missing()) is not None:
            return missing
        own = self._own()
        if own is None:
            self._lose_session("its key is gone")
            return self._enter()
        if self._disagrees():
            return self._drop_own()
        for choice in (self._bounds_write, self._own_write, self._coordinate):
            if (request := choice(own)) is not None:
                return request
        return None

    # -- the session ----------------------------------------------------------------

    def _enter(self) -> Grant | Read | Write | None:
        """Create our session: with a read before it if workers are to be taken along."""
        local = self.local
        if self._leaving() and local.workers is Workers.NONE:
            self._left = True
            return None
        if not local.ready and local.workers is Workers.NONE:
            return None
        if self._closed():
            return None
        if local.workers is not Workers.NONE and not self._doubt and self._round_after(local.round):
            # Fenced while it stops: it comes back when nothing runs here any more.
            return None
        carries = local.workers is not Workers.NONE or local.round > 0 or self._sessions > 0
        if self._doubt and carries:
            return self._look() if self._watching() else None
        if not self._lease or self._clock.now >= self._lease_deadline:
            self._lease_ttl = self._keep_alive_ttl()
            return Grant(self._lease_ttl)
        if not self._watching():
            return None
        self._sessions += 1
        self._session = f"{self.config.session_nonce}-{self._sessions}"
        return self._take_up(carries)

    def _take_up(self, carries: bool) -> Write:
        """One Txn: our old keys go, our new key comes, and we read where things stand."""
        own_folder = Range(self.keys.sessions(self.config.identity.id), prefix=True)
        compares = [Compare(self._own_key(), Target.CREATE, 0)]
        ops: list[Op] = [Put(self._own_key(), encode(self._own_record()), self._lease)]
        if carries:
            number = self.view.round.modified if self.view.round else 0
            compares.append(Compare(self.keys.round, Target.MOD, number))
            for old in self.view.sessions.get(self.config.identity.id, {}).values():
                compares.append(Compare(old.key, Target.MOD, old.modified))
                ops.append(Delete(old.key))
        look = (*self._look_ranges(), own_folder)
        return Write(Txn(tuple(compares), (*ops, *look), look))

    def _look_ranges(self) -> tuple[Range, ...]:
        lowest = Range(self.keys.members, prefix=True, order=Order.CREATE, limit=1)
        return (Range(self.keys.round), Range(self.keys.bounds), lowest)

    def _own_key(self) -> str:
        return self.keys.session(self.config.identity.id, self._session)

    def _own(self) -> Versioned[Member] | None:
        return self.view.sessions.get(self.config.identity.id, {}).get(self._session)

    def _own_record(self) -> Member:
        """What our key should say, but for `confirmed`."""
        identity, local = self.config.identity, self.local
        return Member(
            id=identity.id,
            session=self._session,
            name=identity.name,
            address=identity.address,
            agent_port=identity.agent_port,
            launcher_port=identity.launcher_port,
            slots=identity.slots,
            role=identity.role,
            node=identity.node,
            state=self._own_state(),
            round=local.round,
            master_port=local.master_port,
            lease=self._lease,
            known=self._known,
            reason=self._leaving(),
            start_ms=local.start_ms if local.workers is Workers.RUNNING else 0,
        )

    def _own_state(self) -> MemberState:
        local = self.local
        if self._leaving():
            return MemberState.LEAVING
        match local.workers:
            case Workers.STARTING | Workers.RUNNING:
                return MemberState.RUNNING
            case Workers.STOPPING:
                return MemberState.STOPPING
            case Workers.NONE:
                if local.done and not self._round_after(local.round):
                    return MemberState.DONE
                return MemberState.WAITING

    def _drop_own(self) -> Write | None:
        """Delete our key, on its own terms, when we are not to take part any more."""
        own = self._own()
        if not self._session or own is None:
            return None
        return Write(
            Txn(
                (Compare(own.key, Target.MOD, own.modified),),
                (Delete(own.key),),
                (Range(self.keys.sessions(self.config.identity.id), prefix=True),),
            )
        )

    def _renew(self) -> None:
        if not self._lease:
            return
        now = self._clock.now
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every()
            self._effects.append(KeepAlive(self._lease))
        self._wake(self._renew_at)
        if now < self._lease_deadline:
            self._wake(self._lease_deadline)
        elif self.local.workers is not Workers.NONE:
            self._wake(now + 0.5)

    def _keep_alive_ttl(self) -> int:
        bounds = self._bounds()
        seconds = bounds.keep_alive_seconds if bounds else self.config.keep_alive_seconds
        return max(2, round(seconds))

    def _renew_every(self) -> float:
        """A third of the lease; more often once an answer is overdue."""
        ttl = self._lease_ttl or self._keep_alive_ttl()
        overdue = self._lease_deadline - self._clock.now < ttl / 2
        return ttl / (6 if overdue else 3)

    def _bounds(self) -> Bounds | None:
        return self.view.bounds.record if self.view.bounds else self.config.bounds

    # -- reading --------------------------------------------------------------------

    def _look(self) -> Read:
        """Read everything this member needs at one revision."""
        self._look_at = None
        if self.coordinator.active:
            return Read((Range(self.config.prefix, prefix=True),))
        own = Range(self.keys.sessions(self.config.identity.id), prefix=True)
        return Read((*self._look_ranges(), own))

    def _missing(self) -> Read | None:
        """A roster or failures that the current round makes us want."""
        if self.view.round is None or self.coordinator.active:
            return None
        round_ = self.view.round.record
        number = round_.number
        sealed = round_.state is RoundState.FINAL and number not in self.view.rosters
        if sealed and self._roster_asked != number:
            self._roster_asked = number
            return Read((Range(self.keys.roster(number)),))
        failed = round_.outcome and round_.outcome.kind is OutcomeKind.FAILED
        if round_.state is RoundState.CLOSED and failed and round_.charged:
            last = round_.charged[-1]
            if last not in self.view.failures:
                self.view.failures[last] = {}
                return Read((Range(self.keys.failures(last), prefix=True),))
        return None

    def _tend_roles(self) -> None:
        """Become or stop being the coordinator; watch and link accordingly."""
        self._tend_watch()
        if not self._session or self._own() is None:
            return
        own_key = self._own_key()
        if self._coordinator_key == own_key and not self.coordinator.active:
            self.coordinator.take_over(self._clock.now)
            self._doubt = True
            self._drop_link()
            self._note(f"{self.config.identity.name} coordinates")
            self._tend_watch()
        if self.coordinator.active:
            self._tend_peers()
        else:
            self._tend_link()

    def _watching(self) -> bool:
        """Whether what we read now will be kept up to date."""
        return self._watch is not None and self._watch.open

    def _tend_watch(self) -> None:
        """Watch what our part needs: all of the job as coordinator, else two keys."""
        if self.coordinator.active:
            wanted: tuple[Range, ...] = (Range(self.config.prefix, prefix=True),)
        else:
            wanted = (Range(self.keys.round), Range(self.keys.bounds))
        self._watch = self._keep_watching(self._watch, wanted, 0)
        if self.coordinator.active or not self._coordinator_key:
            self._close_watch(self._leader_watch)
            self._leader_watch = None
        elif not self._doubt:
            leader = (Range(self._coordinator_key),)
            start = self._leader_seen_at + 1
            self._leader_watch = self._keep_watching(self._leader_watch, leader, start)

    def _keep_watching(
        self, current: _Watching | None, ranges: tuple[Range, ...], revision: int
    ) -> _Watching | None:
        if current is not None and current.ranges == ranges:
            return current
        if self._clock.now < self._watch_at:
            self._wake(self._watch_at)
            return current
        self._close_watch(current)
        self._doubt = self._doubt or revision == 0
        self._generation += 1
        self._effects.append(Watch(self._generation, ranges, revision))
        return _Watching(self._generation, ranges)

    def _close_watch(self, current: _Watching | None) -> None:
        if current is not None:
            self._effects.append(Unwatch(current.generation))

    def _unwatch(self) -> None:
        self._close_watch(self._watch)
        self._close_watch(self._leader_watch)
        self._watch = self._leader_watch = None

    def _tend_peers(self) -> None:
        ttl = self._lease_ttl or self._keep_alive_ttl()
        effects, wake = self.coordinator.peers.tend(self.view, self._clock.now, ttl / 3)
        self._effects += effects
        if wake is not None:
            self._wake(wake)
        if self.view.round is not None:
            number = self.view.round.record.number + (0 if self._safe_to_run() else 1)
            if number != self._served:
                self._served = number
                self._effects.append(Serve(number))

    # -- who coordinates ------------------------------------------------------------

    def _coordinator(self) -> Versioned[Member] | None:
        for sessions in self.view.sessions.values():
            for session in sessions.values():
                if session.key == self._coordinator_key:
                    return session
        return None

    def _tend_link(self) -> None:
        """Hold a link to the coordinator's agent."""
        leader = self._coordinator()
        if leader is None:
            if self._coordinator_key and not self._doubt:
                self._lost_coordinator()
            return
        target = (leader.record.id, leader.record.session)
        if target != self._link:
            self._link = target
            self._link_heard = None
            record = leader.record
            self._effects.append(Link(*target, record.address, record.agent_port))

    def _lost_coordinator(self) -> None:
        """Its key is gone: the named successor looks at once, others a little later."""
        self._coordinator_key = ""
        self._drop_link()
        named = self.view.round.record.successor if self.view.round else ""
        delay = 0.0
        if named != self.config.identity.id:
            delay = SUCCESSION_SECONDS * (1 + self.config.jitter)
        self._look_at = self._clock.now + delay

    def _suspect_coordinator(self, member: str, session: str) -> None:
        """Our link to it broke: probe it, the named successor at once."""
        leader = self._coordinator()
        if leader is None or (leader.record.id, leader.record.session) != (member, session):
            return
        if (member, session) not in self._suspected:
            self._suspected.add((member, session))
            self._effects.append(probe(leader.record))

    def _look_due(self) -> bool:
        if self._look_at is None:
            return False
        if self._clock.now >= self._look_at:
            return True
        self._wake(self._look_at)
        return False

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link = None
            self._link_heard = None
            self._effects.append(Unlink())

    # -- writing --------------------------------------------------------------------

    def _disagrees(self) -> bool:
        """Outside Kubernetes all members must bring the same bounds."""
        mine, there = self.config.bounds, self.view.bounds
        if mine is None or there is None:
            return False
        for name in ("min_nodes", "max_nodes", "increment"):
            ours, theirs = getattr(mine, name), getattr(there.record, name)
            if ours != theirs:
                self._refused = (
                    f"this member was started with {name}={ours}, but the job has {theirs}: "
                    "all members must be given the same sizes"
                )
                return True
        return False

    def _bounds_write(self, own: Versioned[Member]) -> Write | None:
        if self.view.bounds is not None or self.config.bounds is None:
            return None
        return Write(
            Txn(
                (
                    Compare(self.keys.bounds, Target.CREATE, 0),
                    Compare(own.key, Target.CREATE, own.created),
                ),
                (Put(self.keys.bounds, encode(self.config.bounds)),),
                (Range(self.keys.bounds),),
            )
        )

    def _own_write(self, own: Versioned[Member]) -> Write | None:
        """Bring our key up to what is true here."""
        if (close := self._closing_write(own)) is not None:
            return close
        local = self.local
        if self._leaving():
            return self._leave(own)
        if self._closed():
            return self._drop_own() if local.workers is Workers.NONE else None
        record = self._own_record()
        confirmed = self._confirmation(own.record)
        record = replace(record, confirmed=confirmed)
        ops: list[Op] = []
        if local.failure is not None and self._unreported(local.failure):
            failure = local.failure
            ops.append(Put(self.keys.failure(failure.round, failure.member), encode(failure)))
        if record.state is MemberState.DONE and own.record.state is not MemberState.DONE:
            done = Done(local.round, record.id, record.name)
            ops.append(Put(self.keys.done(local.round, record.id), encode(done)))
        if not ops and local.workers in (Workers.STARTING, Workers.STOPPING):
            return None  # nothing that others must know before it runs or has stopped
        if not ops and not self._differs(own.record, record):
            return None
        put = Put(own.key, encode(record), self._lease)
        compares = [Compare(own.key, Target.MOD, own.modified)]
        if confirmed and confirmed != own.record.confirmed:
            compares.append(Compare(self.keys.round, Target.MOD, confirmed))
        return Write(
            Txn(
                tuple(compares),
                (put, *ops),
                (
                    Range(self.keys.round),
                    Range(self.keys.sessions(record.id), prefix=True),
                ),
            )
        )

    def _differs(self, stored: Member, wanted: Member) -> bool:
        """Whether a write is worth its request: `known` alone is not."""
        return replace(wanted, known=stored.known) != stored

    def _unreported(self, failure: Failure) -> bool:
        """Whether to report it still: a mere consequence is no news in a newer round."""
        if failure.member in self.view.failures.get(failure.round, {}):
            return False
        number = self.view.round.record.number if self.view.round else failure.round
        if number == failure.round:
            return True
        return number == failure.round + 1 and verdicts.speaks_for_itself((failure,))

    def _confirmation(self, own: Member) -> int:
        """The frozen revision to confirm, or what was confirmed before."""
        current = self.view.round
        if current is None or self._own_state() is not MemberState.WAITING:
            return 0
        frozen = current.record.state is RoundState.FROZEN
        asked = frozen and self.config.identity.id in current.record.ids
        if asked and self.local.ready and self._lease_holds():
            return current.modified
        return own.confirmed

    def _leave(self, own: Versioned[Member]) -> Write | None:
        """Say that we leave while workers still stop; then delete our key."""
        if self.local.workers is Workers.NONE:
            return self._drop_own()
        if own.record.state is MemberState.LEAVING:
            return None
        if not self.coordinator.active:
            put = Put(own.key, encode(self._own_record()), self._lease)
            return Write(Txn((Compare(own.key, Target.MOD, own.modified),), (put,), ()))
        return self._resign(own)

    def _resign(self, own: Versioned[Member]) -> Write:
        """Give the coordination away: our key anew is the youngest."""
        self._sessions += 1
        self._session = f"{self.config.session_nonce}-{self._sessions}"
        self.coordinator.resign()
        self._note(f"{self.config.identity.name} resigns as coordinator")
        look = self._look_ranges()
        return Write(
            Txn(
                (Compare(own.key, Target.MOD, own.modified),),
                (
                    Delete(own.key),
                    Put(self._own_key(), encode(self._own_record()), self._lease),
                    *look,
                ),
                (Range(self.keys.sessions(own.record.id), prefix=True),),
            )
        )

    def _closing_write(self, own: Versioned[Member]) -> Write | None:
        current = self.view.round
        if self._close is None or current is None:
            return None
        if current.record.state is RoundState.CLOSED:
            return None
        closed = replace(
            current.record,
            state=RoundState.CLOSED,
            ids=(),
            outcome=self._close,
            since_ms=self._clock.utc_ms,
        )
        return Write(
            Txn(
                (
                    Compare(self.keys.round, Target.MOD, current.modified),
                    Compare(own.key, Target.CREATE, own.created),
                ),
                (Put(self.keys.round, encode(closed)),),
                (Range(self.keys.round),),
            )
        )

    def _coordinate(self, own: Versioned[Member]) -> Write | None:
        if not self.coordinator.active:
            return self._depose(own)
        if self._lease_holds() and (act := self.coordinator.decide(self.view, own, self._clock)):
            self._pending_note = act.note
            return Write(act.txn)
        if self.coordinator.timers.wake is not None:
            self._wake(self.coordinator.timers.wake)
        if self._last:
            others = [seat.id for seat in self._last[1].seats if seat.id != own.record.id]
            if self.coordinator.peers.cut_off(others):
                return self._resign(own)
        return None

    def _depose(self, own: Versioned[Member]) -> Write | None:
        """Delete the key of a coordinator that is proven gone."""
        leader = self._coordinator()
        if leader is None:
            return None
        proven = self._suspects_gone.get((leader.record.id, leader.record.session))
        if proven is None:
            return None
        named = self.view.round.record.successor if self.view.round else ""
        if named != self.config.identity.id:
            due = proven + SUCCESSION_SECONDS * (1 + self.config.jitter)
            if self._clock.now < due:
                self._wake(due)
                return None
        self._note(f"the coordinator {leader.record.name} is gone: nobody answers there")
        look = self._look_ranges()
        return Write(
            Txn(
                (
                    Compare(leader.key, Target.MOD, leader.modified),
                    Compare(own.key, Target.CREATE, own.created),
                ),
                (Delete(leader.key), *look),
                look,
            )
        )

    # -- directing ------------------------------------------------------------------

    def _direct(self) -> Directive:
        if self._refused:
            return Refused(self._refused)
        if self._left or self._gave_up_leaving():
            return Left()
        current = self.view.round.record if self.view.round else None
        if current is not None and current.state is RoundState.CLOSED:
            return self._finish(current)
        local = self.local
        if local.workers is not Workers.NONE:
            return self._direct_running(current)
        if self._leaving():
            return Idle("leaving")
        if current is None or not self._session:
            return Idle("registering")
        if self._may_start(current):
            roster = self.view.rosters[current.number]
            bounds = self._bounds()
            restarts = bounds.max_restarts if bounds else 0
            return Run(roster, self.config.identity.id, restarts)
        return Idle(f"round {current.number} is {current.state}")

    def _direct_running(self, current: Round | None) -> Directive:
        local = self.local
        grace = self._grace()
        if leaving := self._leaving():
            return Stop(local.round, False, Cause(CauseKind.LEAVE, (), leaving), grace)
        if not self._safe_to_run():
            detail = "cut off from etcd for longer than the lease"
            return Stop(local.round, True, Cause(CauseKind.LOSS, (), detail), 0.0)
        if self._round_after(local.round):
            assert current is not None
            kill = current.cause.kind in URGENT
            return Stop(local.round, kill, current.cause, 0.0 if kill else grace)
        if local.failure is not None:
            cause = Cause(CauseKind.FAILURE, (local.failure.name,), local.failure.message)
            return Stop(local.round, True, cause, 0.0)
        roster = self.view.rosters.get(local.round)
        if roster is None and self._last and self._last[1].number == local.round:
            roster = self._last[1]
        if roster is None:
            return Idle("workers run; their roster is being read")
        bounds = self._bounds()
        return Run(roster, self.config.identity.id, bounds.max_restarts if bounds else 0)

    def _may_start(self, current: Round) -> bool:
        if current.state is not RoundState.FINAL or not self.local.ready:
            return False
        own = self._own()
        if own is None or own.record.state is not MemberState.WAITING:
            return False
        roster = self.view.rosters.get(current.number)
        seated = roster is not None and roster.seat(self.config.identity.id) is not None
        return seated and self.local.round < current.number and self._lease_holds()

    def _finish(self, current: Round) -> Finish:
        outcome = current.outcome or Outcome(OutcomeKind.STOPPED)
        failures: dict[str, Failure] = {}
        if outcome.kind is OutcomeKind.FAILED and current.charged:
            failures = self.view.failures.get(current.charged[-1], {})
        grace = 0.0 if outcome.kind is OutcomeKind.FAILED else self._grace()
        return Finish(outcome, verdicts.culprit(failures.values()), grace)

    def _gave_up_leaving(self) -> bool:
        """We leave, our workers have stopped, and etcd does not answer: the lease will do."""
        if self._leaving_since is None or self.local.workers is not Workers.NONE:
            return False
        due = self._leaving_since + LEAVE_PATIENCE_SECONDS
        if self._clock.now >= due:
            return True
        self._wake(due)
        return False

    # -- small facts ----------------------------------------------------------------

    def _leaving(self) -> str:
        """Why this member leaves: its agent's word or the operator's mark; else empty."""
        if self.local.leaving or self.view.bounds is None:
            return self.local.leaving
        mark = self.view.bounds.record.marked(self.config.identity.id)
        return (mark.reason or "marked to leave") if mark else ""

    def _closed(self) -> bool:
        return self.view.round is not None and self.view.round.record.state is RoundState.CLOSED

    def _round_after(self, number: int) -> bool:
        return self.view.round is not None and self.view.round.record.number > number

    def _lease_holds(self) -> bool:
        return bool(self._lease) and self._clock.now < self._lease_deadline

    def _safe_to_run(self) -> bool:
        """Whether workers may go on.

        Past its lease a member needs the link of a coordinator that knows of no newer
        round, and a coordinator the links of the whole gang; a member without either
        needs the proof that etcd itself is down, which no partition gives. The proof
        holds a little longer, so that a gang can register again one by one.
        """
        if self._lease_holds():
            return True
        now = self._clock.now
        if self._link_proves(now) or self._gang_proves(now):
            self._proven_safe_at = now
            return True
        if self._link_tells_newer():
            return False
        proven = self._proven_safe_at
        return proven is not None and now - proven < REGISTER_AGAIN_SECONDS

    def _link_proves(self, now: float) -> bool:
        if self._link is None or self._link_heard is None:
            return False
        heard, number = self._link_heard
        return now - heard < LINK_SILENCE_SECONDS and number <= self.local.round

    def _link_tells_newer(self) -> bool:
        return self._link_heard is not None and self._link_heard[1] > self.local.round

    def _gang_proves(self, now: float) -> bool:
        refused = self._store_refused_at
        etcd_is_down = refused is not None and now - refused < LINK_SILENCE_SECONDS
        if self._last is None or self._last[1].number != self.local.round:
            return etcd_is_down
        others = {seat.id for seat in self._last[1].seats} - {self.config.identity.id}
        if not others:
            return etcd_is_down
        done = set(self.view.dones.get(self.local.round, {}))
        return others - done <= self.coordinator.peers.living(now)

    def _grace(self) -> float:
        bounds = self._bounds()
        return bounds.stop_grace_seconds if bounds else 10.0

    def _back_off(self) -> None:
        self._retry_at = self._clock.now + self._backoff * (0.5 + self.config.jitter / 2)
        self._backoff = min(self._backoff * 2, LAST_BACKOFF_SECONDS)

    def _calm(self) -> None:
        self._backoff = FIRST_BACKOFF_SECONDS
        self._retry_at = 0.0
        self._store_refused_at = None

    def _wake(self, at: float) -> None:
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def _note(self, text: str, *, warning: bool = False) -> None:
        self._effects.append(Note(text, warning))
