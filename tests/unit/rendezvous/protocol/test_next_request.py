"""Request that a member sends next: what it must know first, and how often it asks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.effects import Grant, Note, Read, Write
from elasticjob_rendezvous.protocol.events import (
    LeaseGone,
    LocalChanged,
    RequestFailed,
    Tick,
    WatchBroken,
)
from elasticjob_rendezvous.protocol.kv import Delete, Order, Put, Range, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import (
    MemberState,
    Outcome,
    OutcomeKind,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import KEYS, a_failure, a_round, identity
from tests.unit.rendezvous.node import READY, Node

LEASE = 5.0
BUSY = replace(READY, workers=Workers.RUNNING, round=1)


def held(local: Local = READY, **config: Any) -> Node:
    """Return a new member whose first request has no answer yet."""
    node = Node(SimEtcd(), "a", **config)
    node.held = True
    return node.start(local)


def answered(node: Node) -> Node:
    """Answer the request that is under way, and no later one."""
    return node.answer().hear(Tick())


def pair(nodes: int = 2) -> tuple[Node, Node]:
    """Return a, which coordinates, and b, of a job of this many nodes."""
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(nodes, nodes)).start() for name in "ab")
    for _ in range(10):
        a.hear(Tick())
        b.hear(Tick())
    return a, b


def running() -> tuple[Node, Node]:
    """Return a, which coordinates, and b, both with workers of round 1."""
    a, b = pair()
    for node in (a, b, a, b):
        node.hear(LocalChanged(BUSY))
    return a, b


def write(node: Node, key: str, record: object) -> None:
    """Write a record as another client of etcd; deliver the event."""
    node.etcd.txn(Txn((), (Put(key, encode(record)),)))
    node.hear(Tick())


def together(seconds: float, *nodes: Node) -> list[int]:
    """Let this time pass for the nodes, in steps of half a second; return their new reads."""
    before = [len(node.made(Read)) for node in nodes]
    for _ in range(round(2 * seconds)):
        for node in nodes:
            node.later(0.5)
    return [len(node.made(Read)) - count for node, count in zip(nodes, before, strict=True)]


def reads_of(node: Node, *ranges: Range) -> int:
    return [read.ranges for read in node.made(Read)].count(ranges)


def keys_of(node: Node) -> list[str]:
    folder = Range(KEYS.sessions(identity(node.name)), prefix=True)
    return [kv.key for kv in node.etcd.range(folder).kvs]


# -- registration ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "own", "ttl_seconds"),
    [(1.0, 9.0, 2), (2.4, 9.0, 2), (7.6, 2.0, 8), (None, 7.6, 8), (None, 0.5, 2)],
)
def test_lease_has_the_keep_alive_time_of_the_job_in_whole_seconds(
    job: float | None, own: float, ttl_seconds: int
) -> None:
    """Without the job's bounds it has that of the member; etcd grants no shorter lease."""
    bounds = None if job is None else RendezvousParams(1, 1, keep_alive_seconds=job)
    node = held(bounds=bounds, keep_alive_seconds=own)
    assert node.request == Grant(ttl_seconds)


@pytest.mark.parametrize(
    ("local", "kind"),
    [(READY, Write), (replace(READY, round=1), Read), (BUSY, Read)],
    ids=["new", "ran a round", "workers run"],
)
def test_member_with_a_past_reads_before_it_registers(local: Local, kind: type[Any]) -> None:
    assert isinstance(answered(held(local)).request, kind)


def test_member_that_lost_its_session_reads_before_it_registers() -> None:
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    node.held = True
    node.hear(LeaseGone(node.engine.lease.id))
    assert isinstance(node.request, Grant)
    assert isinstance(answered(node).request, Read)
    assert isinstance(answered(node).request, Write)


def test_member_with_workers_of_an_older_round_registers_when_they_have_stopped() -> None:
    _, b = running()
    b.held = True
    write(b, KEYS.round, a_round(2, previous=1))
    while b.request is not None:  # what the news itself asked for
        answered(b)
    b.hear(LeaseGone(b.engine.lease.id))
    for request in (Grant, Read):
        assert isinstance(b.request, request)
        answered(b)
    assert b.request is None
    b.hear(LocalChanged(replace(BUSY, workers=Workers.NONE)))
    assert isinstance(b.request, Write)
    assert answered(b).engine.session


def test_member_with_workers_of_the_current_round_registers_at_once() -> None:
    _, b = running()
    b.held = True
    b.hear(LeaseGone(b.engine.lease.id))
    for request in (Grant, Read, Write):
        assert isinstance(b.request, request)
        answered(b)
    assert b.engine.session
    assert keys_of(b) == [KEYS.session(identity("b"), b.engine.session)], "it replaces the old key"


def test_session_whose_key_was_deleted_ends_with_a_warning() -> None:
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    lost = node.engine.session
    node.etcd.txn(Txn((), (Delete(KEYS.session(identity("a"), lost)),)))
    node.hear(Tick())
    assert node.engine.session not in ("", lost)
    assert Note("the session of a ended: its key is gone", warning=True) in node.said


def test_refused_member_deletes_its_key_after_a_failed_request_too() -> None:
    etcd = SimEtcd()
    Node(etcd, "a", bounds=RendezvousParams(2, 2)).start()
    stranger = Node(etcd, "b", bounds=RendezvousParams(2, 3))
    stranger.held = True
    stranger.start()
    while not isinstance(stranger.directive, Refused):
        answered(stranger)
    assert isinstance(stranger.request, Write)
    stranger.fail(RequestFailed("unavailable"))
    stranger.held = False
    stranger.later(1.0)
    keys = [kv.key for kv in etcd.range(Range(KEYS.members, prefix=True)).kvs]
    assert [key for key in keys if identity("b") in key] == []
    assert len(keys) == 1


# -- reads ----------------------------------------------------------------------------


def test_member_in_doubt_reads_what_its_part_needs() -> None:
    """The coordinator needs everything, the others the state, the coordinator and their key."""
    a, b = pair()
    for node in (a, b):
        node.held = True
        node.hear(WatchBroken(node.engine.watches.reading_under, "compacted")).later(1.0)
    assert a.request == Read((Range(KEYS.prefix, prefix=True),))
    assert b.request == Read(
        (
            Range(KEYS.state, prefix=True),
            Range(KEYS.members, prefix=True, order=Order.CREATE, limit=1),
            Range(KEYS.sessions(identity("b")), prefix=True),
        )
    )


def test_waiting_member_without_news_reads_again_after_two_leases() -> None:
    """Nothing else shows that its key was deleted: it watches the keys of the state alone."""
    nodes = pair(nodes=3)
    assert together(2 * LEASE - 0.5, *nodes) == [0, 0]
    assert together(1.0, *nodes) == [0, 1]
    assert together(2 * LEASE - 1.5, *nodes) == [0, 0]
    assert together(1.0, *nodes) == [0, 1]


def test_member_with_workers_does_not_read_again() -> None:
    nodes = running()
    together(1.0, *nodes)
    assert together(4 * LEASE, *nodes) == [0, 0]


@pytest.mark.parametrize("state", [RoundState.FINAL, RoundState.FROZEN])
def test_unknown_roster_of_a_final_round_is_read_once(state: RoundState) -> None:
    a, b = running()
    write(b, KEYS.round, a_round(7, state, previous=6))
    b.later(1.0)
    assert reads_of(b, Range(KEYS.roster(7))) == (state is RoundState.FINAL)
    a.hear(Tick()).later(1.0)
    assert reads_of(a, Range(KEYS.roster(7))) == 0, "it read everything"


@pytest.mark.parametrize(
    ("kind", "charged", "reads"),
    [
        (OutcomeKind.FAILED, (1, 2, 3), 1),
        (OutcomeKind.FAILED, (), 0),
        (OutcomeKind.STOPPED, (1, 2, 3), 0),
    ],
)
def test_failures_that_closed_the_job_are_read_once(
    kind: OutcomeKind, charged: tuple[int, ...], reads: int
) -> None:
    a, b = running()
    outcome = Outcome(kind, "by hand")
    write(b, KEYS.round, a_round(3, RoundState.CLOSED, outcome=outcome, charged=charged))
    b.later(1.0)
    assert reads_of(b, Range(KEYS.failures(3), prefix=True)) == reads
    a.hear(Tick()).later(1.0)
    assert reads_of(a, Range(KEYS.failures(3), prefix=True)) == 0, "it read everything"


# -- writes ---------------------------------------------------------------------------


def test_leaving_member_reports_its_failure_first() -> None:
    _, b = running()
    b.hear(LocalChanged(replace(BUSY, failure=a_failure("b"), leaving="drained")))
    assert b.engine.view.failures_of(1) == {identity("b"): a_failure("b")}
    member = b.engine.view.member(identity("b"))
    assert member is not None
    assert (member.record.state, member.record.reason) == (MemberState.LEAVING, "drained")
