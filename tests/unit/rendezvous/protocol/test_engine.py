"""Order of one member's actions, and its behaviour when etcd fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator import coordinator
from elasticjob_rendezvous.protocol.directives import (
    Finish,
    Idle,
    Left,
    RefusalKind,
    Refused,
    Run,
    Stop,
)
from elasticjob_rendezvous.protocol.effects import (
    Grant,
    KeepAlive,
    Link,
    Note,
    Probe,
    Read,
    Serve,
    Unlink,
    Unwatch,
    Watch,
    Write,
)
from elasticjob_rendezvous.protocol.events import (
    Changed,
    Clock,
    Close,
    Event,
    Granted,
    KeptAlive,
    LeaseGone,
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    LocalChanged,
    PeerHeartbeat,
    PeerUp,
    Probed,
    RequestFailed,
    Started,
    StoreChanged,
    StoreRefused,
    Tick,
    TxnAmbiguous,
    TxnDone,
    Verdict,
    WatchBroken,
    WatchOpened,
)
from elasticjob_rendezvous.protocol.kv import Delete, KeyValue, Put, Range, Txn, TxnResult
from elasticjob_rendezvous.protocol.liveness.failure_detector import LINK_SILENCE_SECONDS
from elasticjob_rendezvous.protocol.liveness.peer_state import LinkState, MemberEvent, SessionEvent
from elasticjob_rendezvous.protocol.liveness.self_fencing import REGISTER_AGAIN_SECONDS
from elasticjob_rendezvous.protocol.next_request import FAILURE_SECONDS
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import DrainRequest, RendezvousParams
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import (
    KEYS,
    START,
    UTC_MS,
    a_failure,
    a_round,
    identity,
    inquiries,
)
from tests.unit.rendezvous.node import READY, Node

LEASE = 5.0
PATIENCE = 60.0


def alone(**config: Any) -> Node:
    """Return the only member of a job, in its first final round."""
    return Node(SimEtcd(), "a", bounds=RendezvousParams(1, 1), **config).start()


def running(node: Node) -> Node:
    """Report running workers."""
    assert isinstance(node.directive, Run)
    number = node.directive.roster.number
    return node.hear(
        LocalChanged(replace(READY, workers=Workers.RUNNING, round=number, master_port=20001))
    )


def key_of(node: Node) -> str:
    return KEYS.session(identity(node.name), node.engine.session)


# -- the beginning --------------------------------------------------------------------


def test_single_member_reaches_a_final_round() -> None:
    node = alone()
    assert isinstance(node.directive, Run)
    assert node.directive.roster.number == 1
    assert node.directive.roster.world_size == 1


@pytest.mark.parametrize(
    ("local", "kind"),
    [(READY, Write), (replace(READY, workers=Workers.RUNNING, round=1), Read)],
    ids=["new", "workers run"],
)
def test_watch_is_opened_before_any_read_or_write(local: Local, kind: type[Any]) -> None:
    node = Node(SimEtcd(), "a")
    node.held = True
    effects = node.engine.step(Started(), Clock(node.now, 0)) + node.engine.step(
        LocalChanged(local), Clock(node.now, 0)
    )
    (watch,) = [effect for effect in effects if isinstance(effect, Watch)]
    assert watch.revision == 0
    (grant,) = [effect for effect in effects if isinstance(effect, Grant)]
    assert grant.ttl_seconds == LEASE
    effects = node.engine.step(Granted(7, START + LEASE), Clock(node.now, 0))
    assert not [effect for effect in effects if isinstance(effect, Read | Write)]
    effects = node.engine.step(
        WatchOpened(watch.generation, 1, node.etcd.cluster_id), Clock(node.now, 0)
    )
    assert [type(effect) for effect in effects if isinstance(effect, Read | Write)] == [kind]


def test_member_registers_only_when_it_can_start_workers() -> None:
    """The earlier steps, the lease and the watch, are complete by then."""
    node = Node(SimEtcd(), "a").start(replace(READY, ready=False)).later(PATIENCE)
    assert not node.made(Write)
    assert node.made(Grant)
    node.hear(LocalChanged(READY))
    assert node.engine.session
    assert key_of(node) in [kv.key for kv in node.etcd.range(Range(KEYS.members, True)).kvs]


def test_requests_are_sent_one_at_a_time() -> None:
    node = Node(SimEtcd(), "a").start()  # `Node` fails on a second one
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=1)))
    assert node.request is not None
    node.hear(LocalChanged(replace(READY, master_port=2))).hear(Tick())
    node.held = False
    node.hear(Tick())
    member = node.engine.view.member(identity("a"))
    assert member is not None
    assert member.record.master_port == 2


def test_engine_orders_nothing_before_its_first_event() -> None:
    engine = Node(SimEtcd(), "a").engine
    assert engine.directive == Idle("not started")
    assert engine.wake_at is None
    assert (engine.session, engine.local, engine.view.members()) == ("", Local(), {})
    assert engine.config.identity.name == "a"


def test_malformed_record_is_logged_once_for_each_defect() -> None:
    node = alone()

    def warnings(value: bytes) -> list[str]:
        before = len(node.said)
        node.etcd.txn(Txn((), (Put(KEYS.history(3), value),)))
        node.hear(Tick()).hear(Tick())
        notes = [effect for effect in node.said[before:] if isinstance(effect, Note)]
        assert all(note.warning for note in notes)
        return [note.text for note in notes]

    [text] = warnings(b"[]")
    assert text.startswith("record ignored: ")
    assert KEYS.history(3) in text
    assert warnings(b"[]") == []
    assert len(warnings(b"no JSON")) == 1


# -- etcd fails -----------------------------------------------------------------------


def test_terminal_error_before_the_first_answer_refuses_the_member() -> None:
    node = Node(SimEtcd(), "a")
    node.held = True
    node.start().fail(RequestFailed("permission denied", terminal=True))
    assert node.directive == Refused("permission denied")


def test_watch_refused_for_good_before_the_first_answer_refuses_the_member() -> None:
    node = Node(SimEtcd(), "a")
    node.held = True
    node.start()
    node.hear(WatchBroken(node.made(Watch)[-1].generation, "permission denied", terminal=True))
    assert node.directive == Refused("permission denied")


def test_wait_for_the_first_answer_is_bounded() -> None:
    node = Node(SimEtcd(), "a", connect_seconds=10.0)
    node.held = True
    node.start()
    while node.now < START + 9.0:
        node.fail(RequestFailed("connection refused"))
        assert not isinstance(node.directive, Refused)
        wait(node)
    node.now = START + 10.0
    node.fail(RequestFailed("connection refused"))
    assert isinstance(node.directive, Refused)
    assert "no answer for 10 s: connection refused" in node.directive.reason


def wait(node: Node) -> float:
    """Wait until the engine repeats its request; return the seconds."""
    since = node.now
    for _ in range(20):
        if node.request is not None:
            return node.now - since
        assert node.engine.wake_at is not None, "it would never ask again"
        node.now = max(node.now, node.engine.wake_at)
        node.hear(Tick())
    raise AssertionError("it never asks again")


def test_no_error_is_terminal_after_the_first_answer() -> None:
    node = alone()
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=5)))
    node.fail(RequestFailed("permission denied", terminal=True))
    assert not isinstance(node.directive, Refused)


def test_back_off_grows_and_resets() -> None:
    node = alone()
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=5)))
    pauses = []
    for _ in range(8):
        node.fail(RequestFailed("unavailable"))
        pauses.append(wait(node))
    assert pauses == sorted(pauses)
    assert 0 < pauses[0] < 0.2
    assert 0.5 < pauses[-1] <= 2.0
    node.held = False
    node.hear(Tick())
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=6))).fail(RequestFailed("unavailable"))
    assert wait(node) == pytest.approx(pauses[0])


@pytest.mark.parametrize("applied", [False, True])
def test_ambiguous_write_is_resolved_by_reading(applied: bool) -> None:
    node = alone()
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=5)))
    assert isinstance(node.request, Write)
    revision = node.etcd.revision
    if applied:
        node.outcome()
    else:
        node.request = None
    node.hear(TxnAmbiguous())
    wait(node)
    assert isinstance(node.request, Read)
    node.held = False
    node.hear(Tick())
    assert node.etcd.revision == revision + 1
    member = node.engine.view.member(identity("a"))
    assert member is not None
    assert member.record.master_port == 5


def test_broken_watch_is_reopened_and_everything_read_again() -> None:
    node = alone()
    generation = node.made(Watch)[-1].generation
    node.hear(WatchBroken(generation, "compacted"))
    reads = len(node.made(Read))
    node.etcd.txn(Txn((), (Put(KEYS.bounds, encode(RendezvousParams(1, 9))),)))
    node.later(1.0)
    assert node.made(Watch)[-1].generation > generation
    assert len(node.made(Read)) > reads
    assert node.engine.view.bounds is not None
    assert node.engine.view.bounds.record.max_nodes == 9


def test_refused_watch_keeps_the_pending_request() -> None:
    node = alone()
    node.held = True
    node.hear(LocalChanged(replace(READY, master_port=5)))
    assert isinstance(node.request, Write)
    broken = WatchBroken(node.made(Watch)[-1].generation, "permission denied", terminal=True)
    node.hear(broken).later(PATIENCE)  # `Node` fails on a second request
    node.held = False
    node.hear(Tick()).later(1.0)
    assert not isinstance(node.directive, Refused)
    member = node.engine.view.member(identity("a"))
    assert member is not None
    assert member.record.master_port == 5


# -- the lease ------------------------------------------------------------------------


def test_idle_member_sends_little_more_than_lease_renewals() -> None:
    node = running(alone())
    before = len(node.requests)
    node.later(60.0)
    assert len(node.requests) - before == 0
    assert 30 <= len(node.made(KeepAlive)) <= 42


def test_lost_lease_gives_a_new_session_on_a_new_lease() -> None:
    node = running(alone())
    session, lease = node.engine.session, node.engine.lease.id
    node.etcd.revoke(lease)
    node.hear(LeaseGone(lease))
    assert node.engine.session not in ("", session)
    assert node.engine.lease.id != lease
    assert key_of(node) in [kv.key for kv in node.etcd.range(Range(KEYS.members, True)).kvs]
    assert isinstance(node.directive, Run)


def test_fenced_session_does_not_write_again() -> None:
    node = alone()
    fenced = key_of(node)
    node.etcd.txn(Txn((), (Delete(fenced),)))
    node.hear(Tick())
    keys = [kv.key for kv in node.etcd.range(Range(KEYS.members, True)).kvs]
    assert fenced not in keys
    assert keys == [key_of(node)]


def test_member_with_expired_lease_starts_nothing() -> None:
    node = alone()
    assert isinstance(node.directive, Run)
    node.held = True
    node.later(LEASE + 1)
    assert not isinstance(node.directive, Run)


def test_single_member_with_expired_lease_kills_its_workers() -> None:
    node = running(alone())
    node.held = True
    node.later(LEASE - 1)
    assert isinstance(node.directive, Run)
    node.later(4)
    assert isinstance(node.directive, Stop)
    assert node.directive.kill


@pytest.mark.parametrize(("passed", "runs"), [(1.9, True), (2.1, False)])
def test_new_lease_is_no_evidence_before_a_key_is_attached(passed: float, runs: bool) -> None:
    """The lease is still renewed, but the coordinator sees no key and its wait is limited."""
    a, _ = pair()
    a.held = True
    a.hear(LeaseGone(a.engine.lease.id)).answer().hear(Tick())
    lease, forgotten = a.engine.lease.id, a.now
    while a.now < forgotten + passed:
        a.later(0.1).hear(KeptAlive(lease, a.now + LEASE))
    assert a.engine.lease.holds(a.now)
    assert isinstance(a.directive, Run) is runs
    if not runs:
        assert isinstance(a.directive, Stop)
        assert a.directive.kill
        assert a.made(Serve)[-1] == Serve(2)


def test_etcd_outage_for_all_stops_no_workers() -> None:
    node = running(alone())
    node.held = True
    for _ in range(20):
        node.later(1).hear(StoreRefused())
    assert isinstance(node.directive, Run)


@pytest.mark.parametrize("lease_seconds", [2.0, 5.0, 30.0, 120.0])
def test_etcd_outage_stops_no_workers_for_any_lease_duration(lease_seconds: float) -> None:
    """Each attempt to renew the lease shows that etcd is down."""
    bounds = RendezvousParams(1, 1, keep_alive_seconds=lease_seconds)
    node = Node(SimEtcd(), "a", bounds=bounds, keep_alive_seconds=lease_seconds).start()
    running(node).held = True
    attempts, down = len(node.made(KeepAlive)), node.now
    while node.now < down + 3 * lease_seconds:
        node.later(0.25)
        if len(node.made(KeepAlive)) > attempts:
            attempts = len(node.made(KeepAlive))
            node.hear(StoreRefused())
        assert isinstance(node.directive, Run), f"stopped after {node.now - down:g} s"


@pytest.mark.parametrize("renewed", [True, False])
def test_single_member_has_time_to_renew_its_lease_after_an_outage(renewed: bool) -> None:
    """The first answer may be that to another request: it does not prove the others gone."""
    node = running(alone())
    node.held = True
    node.hear(WatchBroken(node.made(Watch)[-1].generation, "etcd is down"))
    for _ in range(int(LEASE) + 1):
        node.later(1).hear(StoreRefused())
    lease = node.engine.lease.id
    node.answer().hear(Tick())
    assert node.engine.self_fencing.store_refused_at is None
    assert isinstance(node.directive, Run)
    if renewed:
        node.later(1).hear(KeptAlive(lease, node.now + LEASE))
    node.later(REGISTER_AGAIN_SECONDS).hear(Tick())
    assert isinstance(node.directive, Run) is renewed


# -- a gang ---------------------------------------------------------------------------


def pair(**bounds: Any) -> tuple[Node, Node]:
    """Return a, which coordinates, and b, which follows; both run round 1."""
    etcd = SimEtcd()
    nodes = [Node(etcd, name, bounds=RendezvousParams(2, 2, **bounds)).start() for name in "ab"]
    settle(*nodes)
    for node in nodes:
        running(node)
    settle(*nodes)
    return nodes[0], nodes[1]


def settle(*nodes: Node) -> None:
    """Exchange events until no node has any left."""
    for _ in range(10):
        for node in nodes:
            node.hear(Tick())


def test_two_members_form_a_round() -> None:
    a, b = pair()
    assert isinstance(a.directive, Run)
    assert isinstance(b.directive, Run)
    assert a.directive.roster == b.directive.roster
    assert [assignment.name for assignment in a.directive.roster.seats] == ["a", "b"]
    assert (a.engine.coordinator.active, b.engine.coordinator.active) == (True, False)


def test_roster_of_a_final_round_needs_no_separate_read() -> None:
    _, b = pair()
    asked = [target.key for read in b.made(Read) for target in read.ranges]
    assert KEYS.roster(1) not in asked


def test_coordinator_key_is_watched_after_a_delay() -> None:
    """A large job's members must not all open this watch at the moment the round forms."""
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(3, 3)).start() for name in "ab")
    settle(a, b)
    leader = (Range(key_of(a)),)
    b.later(0.9)
    assert leader not in [watch.ranges for watch in b.made(Watch)]
    assert not b.made(Link)
    b.later(0.2)
    assert leader in [watch.ranges for watch in b.made(Watch)]
    assert b.made(Link)


def test_coordinator_key_is_watched_soon_after_the_round_is_final() -> None:
    a, b = pair()
    assert b.made(Link)
    leader = (Range(key_of(a)),)
    assert leader not in [watch.ranges for watch in b.made(Watch)]
    b.later(0.3)
    assert leader in [watch.ranges for watch in b.made(Watch)]


def test_member_with_expired_lease_continues_while_its_link_is_evidence() -> None:
    _, b = pair()
    b.held = True
    session = b.engine.leader_link.link
    assert session is not None
    for _ in range(20):
        b.later(1).hear(LinkHeartbeat(*session, round=1))
    assert isinstance(b.directive, Run)
    b.hear(LinkHeartbeat(*session, round=2))
    assert isinstance(b.directive, Stop)
    assert b.directive.kill


def test_etcd_without_the_lease_gives_no_more_time_beyond_the_link() -> None:
    """The coordinator counts from the member's last message, and does not see the lost lease."""
    _, b = pair()
    b.held = True
    link = b.engine.leader_link.link
    assert link is not None
    for _ in range(int(LEASE) + 5):
        b.later(1).hear(LinkHeartbeat(*link, round=1))
    b.later(LINK_SILENCE_SECONDS - 0.5).hear(LeaseGone(b.engine.lease.id))
    assert isinstance(b.directive, Run)
    b.later(1)
    assert isinstance(b.directive, Stop)
    assert b.directive.kill


def test_single_coordinator_with_expired_lease_gives_no_evidence() -> None:
    a, _ = pair()
    assert a.made(Serve)[-1] == Serve(1)
    a.held = True
    a.later(LEASE + 3)
    assert a.made(Serve)[-1] == Serve(2)
    assert isinstance(a.directive, Stop)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Record each of a coordinator's decisions."""
    decisions: list[None] = []
    decide = coordinator.decide

    def recorded(*arguments: Any) -> Any:
        decisions.append(None)
        return decide(*arguments)

    monkeypatch.setattr(coordinator, "decide", recorded)
    return decisions


def test_heartbeats_trigger_no_coordinator_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = pair()
    looks = counted(monkeypatch)
    member, session = identity("b"), b.engine.session
    a.hear(PeerUp(member, session))
    for _ in range(100):
        a.now += 0.001
        a.hear(PeerHeartbeat(member, session))
    assert not looks
    assert a.engine.coordinator.peers.last_heartbeat_at(member) == a.now


@pytest.mark.parametrize("doubt", ["unlinked", "silent", "link lost", "answering"])
def test_heartbeat_that_resolves_a_suspicion_triggers_a_decision(
    monkeypatch: pytest.MonkeyPatch, doubt: str
) -> None:
    a, b = pair()
    member, session = identity("b"), b.engine.session
    peers = a.engine.coordinator.peers
    if doubt in ("silent", "link lost"):
        a.hear(PeerUp(member, session))
        event = MemberEvent.NO_ANSWER if doubt == "silent" else MemberEvent.LINK_LOST
        peers.take(member, event)
    if doubt == "answering":
        peers.take_session(member, session, SessionEvent.AGENT_ANSWERED)
        assert peers.session(member, session).link is LinkState.ANSWERING
    looks = counted(monkeypatch)
    a.hear(PeerUp(member, session) if doubt == "answering" else PeerHeartbeat(member, session))
    assert looks
    assert not peers.silent(member)


def test_member_without_workers_and_session_closes_its_link() -> None:
    """A former coordinator could otherwise consider its gang complete forever."""
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(2, 2)).start() for name in "ab")
    settle(a, b)
    assert isinstance(b.made(Link | Unlink)[-1], Link)
    b.held = True
    b.hear(LeaseGone(b.engine.lease.id))
    assert isinstance(b.made(Link | Unlink)[-1], Unlink)


def test_member_with_workers_keeps_its_link_without_a_session() -> None:
    _, b = pair()
    b.held = True
    b.hear(LeaseGone(b.engine.lease.id))
    assert isinstance(b.made(Link | Unlink)[-1], Link)


@pytest.mark.parametrize("verdict", [Verdict.GONE, Verdict.WORKERS_ALIVE])
def test_coordinator_with_dead_agent_is_replaced_on_proof(verdict: Verdict) -> None:
    a, b = pair()
    dead = (identity("a"), a.engine.session)
    lease = a.engine.lease.id
    b.hear(LinkDown(*dead, refused=True))
    assert [(probe.member, probe.round) for probe in b.made(Probe)] == [(identity("a"), 1)]
    b.hear(Probed(*dead, verdict))
    assert b.engine.coordinator.active
    if verdict is Verdict.GONE:
        assert key_of(a) not in sessions(b)
        assert KeepAlive(lease) not in b.said
        return
    aside = KEYS.session(identity("a"), a.engine.session + "~")
    assert set(sessions(b)) == {aside, key_of(b)}
    assert KeepAlive(lease) in b.said
    assert b.engine.coordinator.peers.orphaned
    assert b.engine.view.round is not None
    assert b.engine.view.round.record.state is RoundState.FINAL
    [permission] = b.made(Probe)[1:]
    assert permission.session == a.engine.session + "~"
    assert permission.live_until > b.now + b.engine.lease.ttl_seconds / 2, "its lease was kept"
    b.later(1.1)
    assert b.made(Probe)[-1].session == a.engine.session + "~"


def test_other_member_takes_over_when_the_coordinator_goes() -> None:
    a, b = pair()
    a.etcd.txn(Txn((), (Delete(key_of(a)),)))
    b.hear(Tick()).later(1)
    assert b.engine.coordinator.active


def test_successor_probes_silent_coordinator_before_taking_over() -> None:
    """The successor has probed since beats were missing, and does not outwait the lease."""
    a, b = pair()
    silent = (identity("a"), a.engine.session)
    b.hear(LinkUp(*silent)).hear(LinkHeartbeat(*silent, 1)).later(1.5)
    asked = len(b.made(Probe))
    b.hear(LinkQuiet(*silent))
    assert [probe.member for probe in b.made(Probe)[asked:]] == [identity("a")]
    b.later(1.6)
    assert len(b.made(Probe)) > asked + 1, "until one is answered"
    b.hear(LinkDown(*silent, refused=False)).hear(Probed(*silent, Verdict.UNKNOWN))
    assert not b.engine.coordinator.active, "silence proves nothing"
    a.etcd.txn(Txn((), (Delete(key_of(a)),)))
    b.hear(Tick()).later(0.1)
    assert b.engine.coordinator.active
    assert b.engine.view.round is not None
    assert b.engine.view.round.record.cause.kind is CauseKind.LOSS


def test_heartbeat_of_the_coordinator_ends_the_suspicion() -> None:
    a, b = pair()
    alive = (identity("a"), a.engine.session)
    b.hear(LinkUp(*alive)).hear(LinkQuiet(*alive))
    assert inquiries(b.engine.coordinator.peers)
    b.hear(LinkHeartbeat(*alive, 1))
    assert not inquiries(b.engine.coordinator.peers)


# -- directives handed over -------------------------------------------------------------


def reopened(etcd: SimEtcd, cause: CauseKind = CauseKind.JOIN) -> None:
    """Open round 2, as the coordinator."""
    again = a_round(2, previous=1, cause=Cause(cause))
    etcd.txn(Txn((), (Put(KEYS.round, encode(again)),)))


def said_to_have_run(node: Node) -> int:
    member = node.engine.view.member(identity(node.name))
    assert member is not None
    return member.record.round


def followers() -> tuple[Node, Node]:
    """Return two nodes in the final round 1, neither of which has started workers."""
    etcd = SimEtcd()
    nodes = [Node(etcd, name, bounds=RendezvousParams(2, 2)).start() for name in "ab"]
    settle(*nodes)
    return nodes[0], nodes[1]


def test_start_that_was_not_executed_is_forgotten() -> None:
    _, b = followers()
    assert isinstance(b.directive, Run)
    reopened(b.etcd)
    b.hear(Tick())
    assert not isinstance(b.directive, Run | Stop)
    assert said_to_have_run(b) == 1


def test_ordered_workers_count_as_running_until_the_agent_answers() -> None:
    """The next round could otherwise start beside workers that are just being started."""
    _, b = followers()
    assert isinstance(b.engine.hand_over(), Run)
    reopened(b.etcd)
    b.hear(Tick())
    assert isinstance(b.directive, Stop)
    assert b.directive.round == 1
    assert said_to_have_run(b) == 0
    b.hear(LocalChanged(READY))  # reported before the directive arrived
    assert isinstance(b.directive, Stop)
    b.hear(LocalChanged(replace(READY, round=1)))
    assert said_to_have_run(b) == 1
    assert not isinstance(b.directive, Stop)


def test_workers_that_outlast_their_round_are_killed_after_the_grace() -> None:
    _, b = pair()
    reopened(b.etcd)
    b.hear(Tick())
    assert isinstance(b.directive, Stop)
    assert not b.directive.kill
    for _ in range(9):
        b.later(1)
    assert not b.directive.kill
    b.later(1.1)
    assert isinstance(b.directive, Stop)
    assert b.directive.kill


def test_grace_period_is_that_of_the_job() -> None:
    _, b = pair(stop_grace_seconds=3.0)
    reopened(b.etcd)
    b.hear(Tick())
    assert isinstance(b.directive, Stop)
    assert (b.directive.grace_seconds, b.directive.kill) == (3.0, False)
    b.later(2.9)
    assert not b.directive.kill
    b.later(0.2)
    assert isinstance(b.directive, Stop)
    assert b.directive.kill


def test_workers_found_running_after_their_round_are_killed_at_once() -> None:
    """The workers' agent was away; the other members have waited long enough."""
    a, _ = pair()
    reopened(a.etcd)
    again = Node(a.etcd, "b", bounds=RendezvousParams(2, 2), orphan_seconds=30.0)
    again.start(replace(READY, workers=Workers.RUNNING, round=1))
    assert isinstance(again.directive, Stop)
    assert again.directive.kill


# -- leaving and closing --------------------------------------------------------------


def test_idle_leaving_member_deletes_its_key_and_ends() -> None:
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    node.hear(LocalChanged(replace(READY, leaving="drained")))
    assert node.directive == Left()
    assert node.etcd.range(Range(KEYS.members, True)).kvs == ()


BUSY = replace(READY, workers=Workers.RUNNING, round=1)
LEAVES = replace(BUSY, leaving="drained")
STOPPED = replace(LEAVES, workers=Workers.NONE)


def test_leaving_member_reports_it_first_and_stops_its_workers_with_grace() -> None:
    _, b = pair()
    b.hear(LocalChanged(LEAVES))
    order = b.directive
    assert isinstance(order, Stop)
    assert not order.kill
    member = b.engine.view.member(identity("b"))
    assert member is not None
    assert (member.record.state, member.record.reason) == (MemberState.LEAVING, "drained")


def test_stopped_leaving_member_keeps_its_key_until_the_next_round() -> None:
    """The coordinator of that time can then read the reason."""
    a, b = pair()
    b.hear(LocalChanged(LEAVES)).hear(LocalChanged(STOPPED))
    assert b.directive != Left()
    assert len(sessions(b)) == 2
    member = b.engine.view.member(identity("b"))
    assert member is not None
    assert (member.record.state, member.record.stopped) == (MemberState.LEAVING, True)
    a.hear(Tick()).later(0.3)  # leaves that are close share a round
    b.hear(Tick())
    assert b.directive == Left()
    assert sessions(b) == [key_of(a)]
    assert a.engine.view.round is not None
    assert a.engine.view.round.record.cause.kind is CauseKind.LEAVE


def test_key_of_stopped_leaving_member_is_kept_for_a_bounded_time() -> None:
    _, b = pair()
    b.hear(LocalChanged(LEAVES)).later(1.5).hear(LocalChanged(STOPPED))
    b.later(0.4)
    assert len(sessions(b)) == 2
    b.later(0.1)
    assert b.directive == Left()
    assert len(sessions(b)) == 1


def test_leaving_member_slower_than_the_bound_ends_at_once() -> None:
    _, b = pair()
    b.hear(LocalChanged(LEAVES)).later(2.1).hear(LocalChanged(STOPPED))
    assert b.directive == Left()


def test_done_or_single_leaving_member_ends_at_once() -> None:
    _, b = pair()
    b.hear(LocalChanged(LEAVES)).hear(LocalChanged(replace(STOPPED, done=True)))
    assert b.directive == Left()
    node = running(alone())
    node.hear(LocalChanged(LEAVES)).hear(LocalChanged(STOPPED))
    assert node.directive == Left()
    assert sessions(node) == []


def test_single_coordinator_does_not_resign() -> None:
    node = running(alone())
    session = node.engine.session
    node.hear(LocalChanged(LEAVES))
    assert node.engine.session == session
    assert node.engine.coordinator.active
    member = node.engine.view.member(identity("a"))
    assert member is not None
    assert member.record.state is MemberState.LEAVING


def sessions(node: Node) -> list[str]:
    return [kv.key for kv in node.etcd.range(Range(KEYS.members, True)).kvs]


def test_leaving_coordinator_resigns_first() -> None:
    a, b = pair()
    session = a.engine.session
    a.hear(LocalChanged(replace(READY, workers=Workers.RUNNING, round=1, leaving="drained")))
    assert a.engine.session != session
    assert not a.engine.coordinator.active
    b.hear(Tick()).later(1)
    assert b.engine.coordinator.active


def test_drain_request_makes_the_member_leave() -> None:
    node = Node(SimEtcd(), "a", bounds=None)
    bounds = RendezvousParams(2, 2)
    node.etcd.txn(Txn((), (Put(KEYS.bounds, encode(bounds)),)))
    node.start()
    marked = replace(bounds, marks=(DrainRequest(identity("a"), "scaled down"),))
    node.etcd.txn(Txn((), (Put(KEYS.bounds, encode(marked)),)))
    node.hear(Tick())
    assert node.directive == Left()


def test_wait_of_leaving_member_for_silent_etcd_is_bounded() -> None:
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    node.held = True
    node.hear(LocalChanged(replace(READY, leaving="drained")))
    node.later(2.9)
    assert node.directive != Left()
    node.later(0.2)
    assert node.directive == Left()


def test_close_ends_all_members() -> None:
    a, b = pair()
    outcome = Outcome(OutcomeKind.STOPPED, "by hand")
    b.hear(Close(outcome))
    settle(a, b)
    for node in (a, b):
        assert isinstance(node.directive, Finish)
        assert node.directive.outcome == outcome
        assert node.engine.view.round is not None
        assert node.engine.view.round.record.since_ms == UTC_MS
        assert key_of(node) in sessions(node), "its workers have not stopped"
        node.hear(LocalChanged(replace(READY, workers=Workers.NONE, round=1)))
    assert a.etcd.range(Range(KEYS.members, True)).kvs == ()


def failed_job() -> Node:
    """Return a member whose job has failed by another one, while etcd answers no request."""
    a, b = pair()
    b.held = True
    outcome = Outcome(OutcomeKind.FAILED, "a: boom", identity("a"))
    closed = a_round(1, RoundState.CLOSED, outcome=outcome, charged=(1,))
    failure = Put(KEYS.failure(1, identity("a")), encode(a_failure("a", message="boom")))
    a.etcd.txn(Txn((), (failure, Put(KEYS.round, encode(closed)))))
    return b.hear(Tick())


def test_end_of_a_failed_job_has_its_failure_once_that_is_read() -> None:
    node = failed_job()
    assert isinstance(node.directive, Finish)
    assert (node.directive.failure, node.directive.reads_failure) == (None, True)
    node.held = False
    node.hear(Tick())
    assert isinstance(node.directive, Finish)
    assert node.directive.failure is not None
    assert (node.directive.failure.message, node.directive.reads_failure) == ("boom", False)


def test_wait_for_the_failure_that_ended_the_job_is_bounded() -> None:
    node = failed_job().later(FAILURE_SECONDS - 0.1)
    assert isinstance(node.directive, Finish)
    assert node.directive.reads_failure
    node.later(0.2)
    assert isinstance(node.directive, Finish)
    assert (node.directive.failure, node.directive.reads_failure) == (None, False)


def test_member_without_a_session_does_not_wait_for_the_failure() -> None:
    """Without one nothing is read: it may never have taken part."""
    node = failed_job()
    node.hear(LeaseGone(node.engine.lease.id))
    assert isinstance(node.directive, Finish)
    assert not node.directive.reads_failure


def test_member_that_failed_the_job_knows_its_failure() -> None:
    a, b = pair()
    b.hear(LocalChanged(replace(BUSY, failure=a_failure("b", message="boom"))))
    b.held = True
    outcome = Outcome(OutcomeKind.FAILED, "b: boom", identity("b"))
    closed = a_round(1, RoundState.CLOSED, outcome=outcome, charged=(1,))
    a.etcd.txn(Txn((), (Put(KEYS.round, encode(closed)),)))
    b.hear(Tick())
    assert isinstance(b.directive, Finish)
    assert b.directive.failure is not None
    assert (b.directive.failure.message, b.directive.reads_failure) == ("boom", False)


def test_member_with_other_sizes_is_refused_and_leaves_no_key() -> None:
    a = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    stranger = Node(a.etcd, "b", bounds=RendezvousParams(2, 3)).start()
    settle(a, stranger)
    assert isinstance(stranger.directive, Refused)
    assert stranger.directive.kind is RefusalKind.BOUNDS
    assert "max_nodes=3, but the job has 2" in stranger.directive.reason
    assert len(a.etcd.range(Range(KEYS.members, True)).kvs) == 1


# -- data loss ------------------------------------------------------------------------


def test_round_is_restored_without_stop_after_etcd_lost_its_data() -> None:
    node = running(alone())
    old = node.made(Watch)
    node.etcd.wipe()
    directives = []
    for _ in range(100):
        node.later(0.25)
        directives.append(node.directive)
    assert not [directive for directive in directives if isinstance(directive, Stop | Finish)]
    assert isinstance(node.directive, Run)
    assert node.directive.roster.number == 1
    assert Unwatch(old[-1].generation) in node.said
    assert node.engine.view.round is not None
    assert node.engine.view.round.record.state is RoundState.FINAL


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("of", ["request", "watch"])
def test_no_error_is_terminal_after_etcd_lost_its_data(of: str, terminal: bool) -> None:
    """The new etcd lacks the job's user, for example, until the operator has made it again."""
    node = running(alone(connect_seconds=10.0)).later(60.0)
    node.held = True
    node.hear(LocalChanged(replace(node.engine.local, master_port=5)))
    node.etcd.wipe()
    node.answer().hear(Tick())
    assert "etcd lost its data" in str(node.said)
    for _ in range(3):
        if of == "watch":
            generation = node.made(Watch)[-1].generation
            node.hear(WatchBroken(generation, "authentication failed", terminal))
        else:
            wait(node)
            node.fail(RequestFailed("authentication failed", terminal))
        node.later(0.2)
        assert isinstance(node.directive, Run)
    node.held = False
    node.hear(Tick()).later(10.0)
    assert isinstance(node.directive, Run)
    assert key_of(node) in [kv.key for kv in node.etcd.range(Range(KEYS.members, True)).kvs]


def test_data_loss_before_the_first_read_is_detected_by_the_watch() -> None:
    """The watch waits for a revision of the lost past and would be silent forever."""
    etcd = SimEtcd()
    for _ in range(50):
        etcd.txn(Txn((), (Put("/another", b""),)))
    node = Node(etcd, "a", bounds=RendezvousParams(1, 1))
    node.held = True
    node.start().answer().hear(Tick())
    (watch,) = node.made(Watch)
    etcd.wipe()
    node.fail(TxnDone(TxnResult(True, 3, etcd.cluster_id)))
    assert Unwatch(watch.generation) in node.said
    assert node.made(Watch)[-1].generation > watch.generation
    assert not node.engine.session
    node.held = False
    node.later(1)
    assert isinstance(node.directive, Run)


def test_event_of_a_replaced_watch_is_ignored() -> None:
    node = alone()
    generation = node.made(Watch)[-1].generation
    stale: Event = Changed(
        generation + 7, 10_000, (KeyValue(KEYS.round, encode(a_round(99)), 1, 10_000),)
    )
    node.hear(stale)
    assert node.engine.view.round is not None
    assert node.engine.view.round.record.number == 1


def test_orphans_are_waited_for_as_long_as_launchers_keep_them() -> None:
    assert alone(orphan_seconds=120.0).engine.coordinator.peers.orphan_seconds == 120.0


def test_member_waiting_for_unavailable_etcd_reports_it_and_workers_continue() -> None:
    full = StoreTrouble("etcd", StoreState.REFUSING, "etcd:2379", "etcdserver: no", 1)
    working = running(alone())
    assert isinstance(working.hear(StoreChanged(full)).directive, Run)
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    calm = node.directive
    assert node.hear(StoreChanged(full)).directive == Idle(
        "etcd refuses writes: no round can form until it accepts them"
    )
    away = replace(full, state=StoreState.UNREACHABLE)
    assert node.hear(StoreChanged(away)).directive == Idle(
        "etcd cannot be reached: no round can form until it answers"
    )
    assert node.hear(StoreChanged(None)).directive == calm
