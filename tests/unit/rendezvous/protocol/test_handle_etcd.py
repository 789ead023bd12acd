"""Handling of etcd's responses by one member, including late ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.directives import Refused
from elasticjob_rendezvous.protocol.effects import Link, Note, Probe, Read, Watch, Write
from elasticjob_rendezvous.protocol.events import (
    KeptAlive,
    LeaseGone,
    LinkHeartbeat,
    LocalChanged,
    Probed,
    RequestFailed,
    StoreRefused,
    Tick,
    Verdict,
    WatchBroken,
)
from elasticjob_rendezvous.protocol.kv import Delete, Put, Range, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import KEYS, a_round, identity
from tests.unit.rendezvous.node import READY, Node
from tests.unit.rendezvous.protocol.test_engine import alone, key_of, pair, running, settle, wait


def assert_noted(node: Node, name: str, why: str) -> None:
    """Check that one warning says that the session of `name` ended, and why."""
    (note,) = [note for note in node.made(Note) if note.warning]
    assert f"session of {name} " in note.text
    assert why in note.text


def returned() -> Node:
    """Its agent came back to workers of round 1: it has read, and is about to register."""
    etcd = SimEtcd()
    etcd.txn(Txn((), (Put(KEYS.round, encode(a_round(1, RoundState.FINAL))),)))
    node = Node(etcd, "a", bounds=RendezvousParams(1, 1))
    node.held = True
    node.start(replace(READY, workers=Workers.RUNNING, round=1)).answer().hear(Tick())
    assert isinstance(node.request, Read)
    node.answer().hear(Tick())
    assert isinstance(node.request, Write)
    return node


def test_no_error_is_terminal_after_the_first_read() -> None:
    node = returned()
    node.fail(RequestFailed("permission denied", terminal=True))
    assert not isinstance(node.directive, Refused)


def test_other_etcd_than_the_one_read_is_detected() -> None:
    """Though the watch was opened anew on that one, and no write was ever answered."""
    node = returned()
    view = node.engine.view
    node.fail(RequestFailed("unavailable"))
    node.etcd.wipe()
    node.hear(WatchBroken(node.made(Watch)[-1].generation, "unavailable"))
    wait(node)
    assert isinstance(node.request, Read)
    node.answer().hear(Tick())
    assert node.engine.view is not view
    assert node.engine.view.round is None


def test_waiting_member_rereads_its_key_after_two_leases() -> None:
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(3, 3)).start() for name in "ab")
    settle(a, b)

    def both(seconds: float) -> None:
        for _ in range(round(seconds / 0.5)):
            a.later(0.5)
            b.later(0.5)

    both(6.0)
    b.hear(LinkHeartbeat(identity("a"), a.engine.session, round=2))
    reads = len(b.made(Read))
    both(9.5)
    assert len(b.made(Read)) == reads
    both(0.5)
    assert len(b.made(Read)) == reads + 1


def test_key_of_new_coordinator_is_watched_from_the_revision_read() -> None:
    etcd = SimEtcd()
    a, b, c = (Node(etcd, name, bounds=RendezvousParams(3, 3)).start() for name in "abc")
    settle(a, b, c)
    c.later(1.0)
    gone, watches = key_of(a), len(c.made(Watch))
    c.etcd.txn(Txn((), (Delete(gone),)))
    c.hear(Tick()).later(0.6)
    assert isinstance(c.requests[-1], Read)
    read = c.etcd.revision
    c.later(1.0)
    (watch,) = c.made(Watch)[watches:]
    assert (watch.ranges, watch.revision) == ((Range(key_of(b)),), read + 1)


def test_other_etcd_than_the_one_written_is_detected() -> None:
    node = alone()
    view = node.engine.view
    node.held = True
    node.etcd.wipe()
    node.hear(WatchBroken(node.made(Watch)[-1].generation, "unavailable"))
    wait(node)
    assert isinstance(node.request, Read)
    node.answer().hear(Tick())
    assert node.engine.view is not view


# -- writes ---------------------------------------------------------------------------


def kinds(node: Node, before: int) -> list[type[Any]]:
    return [type(request) for request in node.requests[before:]]


def test_registration_reads_all_required_keys() -> None:
    _, b = pair()
    assert not b.made(Read)


def test_successful_write_is_not_read_again() -> None:
    _, b = pair()
    before = len(b.requests)
    b.hear(LocalChanged(replace(b.engine.local, master_port=5)))
    assert kinds(b, before) == [Write]


def test_refused_write_is_repeated_after_a_read() -> None:
    """Its own key was changed by another hand, which it does not watch."""
    _, b = pair()
    stored = b.etcd.get(key_of(b))
    assert stored is not None
    b.etcd.txn(Txn((), (Put(stored.key, stored.value, stored.lease),)))
    before = len(b.requests)
    b.hear(LocalChanged(replace(b.engine.local, master_port=5)))
    assert kinds(b, before) == [Write, Read, Write]


def test_doubt_during_a_write_triggers_a_read() -> None:
    a, b = pair()
    b.held = True
    b.hear(LocalChanged(replace(b.engine.local, master_port=5)))
    b.hear(LinkHeartbeat(identity("a"), a.engine.session, round=2)).answer().hear(Tick())
    assert isinstance(b.request, Read)


def test_writes_of_the_coordinator_are_logged() -> None:
    notes = [note.text for note in alone().made(Note)]
    assert all(notes)
    assert any("round 1" in note for note in notes)


def test_session_with_key_missing_in_a_refused_write_is_logged() -> None:
    _, b = pair()
    b.etcd.txn(Txn((), (Delete(key_of(b)),)))
    b.hear(LocalChanged(replace(b.engine.local, master_port=5)))
    assert_noted(b, "b", "key")


def test_coordinator_with_malformed_key_is_skipped() -> None:
    etcd = SimEtcd()
    etcd.txn(Txn((), (Put(KEYS.session(identity("z"), "s1"), b"[]"),)))
    node = Node(etcd, "a", bounds=RendezvousParams(1, 1)).start().later(1)
    assert node.engine.coordinator.active


def test_coordinator_found_again_is_not_new() -> None:
    """The link to it begins a second after it was found first, where no round forms."""
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(3, 3)).start() for name in "ab")
    settle(a, b)
    b.later(0.5).hear(WatchBroken(b.made(Watch)[-1].generation, "compacted")).later(0.4)
    assert b.made(Read)
    assert not b.made(Link)
    b.later(0.2)
    assert b.made(Link)


# -- leases ---------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [False, True], ids=["renewed", "gone"])
def test_lease_answer_shows_that_etcd_is_available_again(gone: bool) -> None:
    """Whoever ran on because etcd was down has a moment from then to register again."""
    node = running(alone())
    node.held = True
    lease = node.engine.lease.id
    node.later(1).hear(StoreRefused()).later(1)
    node.hear(LeaseGone(lease) if gone else KeptAlive(lease, node.now + 5.0))
    self_fencing = node.engine.self_fencing
    assert (self_fencing.store_refused_at, self_fencing.key_lost_at) == (None, node.now)


def test_session_that_ended_with_its_lease_is_logged() -> None:
    node = running(alone())
    node.hear(LeaseGone(node.engine.lease.id))
    assert_noted(node, "a", "lease")


@pytest.mark.parametrize(("passed", "permits"), [(0.5, True), (5.5, False)])
def test_member_with_expired_lease_grants_no_time_to_orphans(passed: float, permits: bool) -> None:
    """Another may coordinate by then, and begin a round."""
    a, b = pair()
    orphan = (identity("b"), b.engine.session)
    a.hear(Probed(*orphan, Verdict.WORKERS_ALIVE))
    a.held = True
    a.later(passed)
    probes = len(a.made(Probe))
    a.hear(KeptAlive(b.engine.lease.id, a.now + 5.0))
    permitted = [probe for probe in a.made(Probe)[probes:] if probe.live_until is not None]
    assert bool(permitted) is permits


# -- rosters that cannot be found -----------------------------------------------------


def unknown_roster() -> tuple[Node, Node]:
    """b reads of a final round 5, and asks for its roster, which nobody has written."""
    a, b = pair()
    b.held = True
    b.etcd.txn(Txn((), (Put(KEYS.round, encode(a_round(5, RoundState.FINAL))),)))
    b.hear(Tick())
    while isinstance(b.request, Write):
        b.answer().hear(Tick())
    assert b.request == Read((Range(KEYS.roster(5)),))
    return a, b


def roster_reads(node: Node) -> int:
    return sum(read.ranges == (Range(KEYS.roster(5)),) for read in node.made(Read))


def test_missing_roster_is_not_requested_again() -> None:
    a, b = unknown_roster()
    b.answer().hear(Tick())
    assert b.request is None
    b.hear(LinkHeartbeat(identity("a"), a.engine.session, round=6))
    assert isinstance(b.request, Read), "it looks where things stand"
    b.answer().hear(Tick())
    assert b.request is None
    assert roster_reads(b) == 1


def test_roster_read_does_not_resolve_other_doubts() -> None:
    a, b = unknown_roster()
    b.hear(LinkHeartbeat(identity("a"), a.engine.session, round=6)).answer().hear(Tick())
    assert isinstance(b.request, Read)
    assert any(target.covers(KEYS.bounds) for target in b.request.ranges)


# -- our key --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b"], ids=["coordinator", "follower"])
def test_member_that_reads_its_key_is_gone_has_no_session(name: str) -> None:
    """Even if its watch broke meanwhile, so that nothing more can be asked for the moment."""
    node = pair()["ab".index(name)]
    node.held = True
    node.hear(WatchBroken(node.made(Watch)[0].generation, "unavailable"))
    main = next(watch for watch in reversed(node.made(Watch)) if watch.revision == 0)
    node.hear(WatchBroken(main.generation, "unavailable"))
    wait(node)
    assert isinstance(node.request, Read)
    node.etcd.txn(Txn((), (Delete(key_of(node)),)))
    main = next(watch for watch in reversed(node.made(Watch)) if watch.revision == 0)
    node.hear(WatchBroken(main.generation, "unavailable")).answer().hear(Tick())
    assert node.engine.session == ""
    assert_noted(node, name, "key")
