"""News of links and probes: what is known, asked and written after each of them."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_rendezvous.protocol.directives import Stop
from elasticjob_rendezvous.protocol.effects import KeepAlive, Probe, Read, Watch, Write
from elasticjob_rendezvous.protocol.events import (
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    PeerDown,
    PeerQuiet,
    PeerUp,
    Probed,
    Verdict,
    WatchBroken,
)
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.liveness.probes import PROBE_INTERVAL_SECONDS
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import identity
from tests.unit.rendezvous.node import Node
from tests.unit.rendezvous.protocol.test_engine import BUSY, key_of, pair, sessions, settle

A, B = identity("a"), identity("b")


def asked(node: Node) -> list[str]:
    return [probe.member for probe in node.made(Probe)]


# -- the beginning --------------------------------------------------------------------


def test_workers_of_an_earlier_agent_get_a_lease_time() -> None:
    node = Node(SimEtcd(), "a", bounds=None, keep_alive_seconds=6.0)
    node.held = True
    node.start(BUSY).later(5.9)
    assert not isinstance(node.directive, Stop)
    node.later(0.1)
    assert isinstance(node.directive, Stop)
    assert node.directive.kill


def test_object_that_is_no_event_is_refused() -> None:
    nothing: Any = object()
    with pytest.raises(TypeError, match="event"):
        Node(SimEtcd(), "a").hear(nothing)


def test_broken_watch_of_coordinator_key_triggers_a_read() -> None:
    """The key may have gone since."""
    a, b = pair()
    b.later(0.3)
    watch = b.made(Watch)[-1]
    assert watch.ranges == (Range(key_of(a)),)
    reads = len(b.made(Read))
    b.hear(WatchBroken(watch.generation, "unavailable")).later(1)
    assert len(b.made(Read)) == reads + 1
    assert b.made(Watch)[-1].ranges == watch.ranges
    assert b.made(Watch)[-1].generation > watch.generation


# -- our link to the coordinator ------------------------------------------------------


def test_heartbeat_on_coordinator_link_is_recorded() -> None:
    a, b = pair()
    peers, link = b.engine.coordinator.peers, (A, a.engine.session)
    assert peers.last_heartbeat_at(A) is None
    b.hear(LinkUp(*link))
    assert peers.last_heartbeat_at(A) == b.now
    b.now += 0.2
    b.hear(LinkHeartbeat(*link, round=1))
    assert peers.last_heartbeat_at(A) == b.now


@pytest.mark.parametrize(("round", "reads"), [(0, 0), (1, 0), (2, 1)])
def test_newer_number_on_coordinator_link_triggers_a_read(round: int, reads: int) -> None:
    """A waiting member reads where things stand; nothing else is asked for on a link's word."""
    etcd = SimEtcd()
    a, b = (Node(etcd, name, bounds=RendezvousParams(3, 3)).start() for name in "ab")
    settle(a, b)
    b.later(1.1)
    b.held = True
    before = len(b.made(Read | Write))
    b.hear(LinkHeartbeat(A, a.engine.session, round=round))
    assert len(b.made(Read | Write)) - before == reads


def test_coordinator_with_closed_link_is_probed_at_once_and_again() -> None:
    a, b = pair()
    link = (A, a.engine.session)
    b.hear(LinkUp(*link)).hear(LinkDown(*link, refused=False))
    assert asked(b) == [A]
    b.later(PROBE_INTERVAL_SECONDS - 0.1)
    assert asked(b) == [A]
    b.later(0.1)
    assert asked(b) == [A, A]


def test_answer_received_by_a_follower_ends_its_probes() -> None:
    a, b = pair()
    link = (A, a.engine.session)
    b.hear(LinkUp(*link)).hear(LinkQuiet(*link))
    assert asked(b) == [A]
    b.hear(Probed(*link, Verdict.BOTH_ALIVE, live_seconds=2.0)).later(PROBE_INTERVAL_SECONDS)
    assert asked(b) == [A]


# -- links to us ----------------------------------------------------------------------


def test_coordinator_probes_member_with_missed_heartbeats_until_it_answers() -> None:
    a, b = pair()
    link = (B, b.engine.session)
    a.hear(PeerUp(*link))
    assert not asked(a)
    a.hear(PeerQuiet(*link))
    assert asked(a) == [B]
    a.later(PROBE_INTERVAL_SECONDS)
    assert asked(a) == [B, B]
    a.hear(Probed(*link, Verdict.BOTH_ALIVE)).later(PROBE_INTERVAL_SECONDS)
    assert asked(a) == [B, B]


def test_coordinator_probes_member_with_closed_link() -> None:
    a, b = pair()
    link = (B, b.engine.session)
    a.hear(PeerUp(*link)).hear(PeerDown(*link))
    assert asked(a) == [B]
    peers = a.engine.coordinator.peers
    assert (peers.state(B).linked, peers.symptom([B])) == (False, a.now)


def test_other_members_probe_no_member_linked_to_them() -> None:
    a, b = pair()
    link = (A, a.engine.session)
    b.hear(PeerUp(*link)).hear(PeerQuiet(*link)).hear(PeerDown(*link))
    assert not asked(b)
    assert not b.engine.coordinator.peers.state(A).linked


# -- answers to probes ----------------------------------------------------------------


def test_member_proven_gone_loses_its_key() -> None:
    a, b = pair()
    a.hear(Probed(B, b.engine.session, Verdict.GONE))
    assert sessions(a) == [key_of(a)]


def test_member_without_answer_keeps_its_key() -> None:
    a, b = pair()
    a.now += 0.5
    a.hear(Probed(B, b.engine.session, Verdict.UNKNOWN))
    assert sessions(a) == [key_of(a), key_of(b)]
    assert a.engine.coordinator.peers.silent(B)


def test_leases_of_orphans_are_kept_as_long_as_launchers_keep_them() -> None:
    etcd, bounds = SimEtcd(), RendezvousParams(2, 2)
    a, b = (Node(etcd, name, bounds=bounds, orphan_seconds=9.0).start() for name in "ab")
    settle(a, b)
    a.hear(Probed(B, b.engine.session, Verdict.WORKERS_ALIVE))
    assert KeepAlive(b.engine.lease.id) in a.said
    orphan = a.engine.coordinator.peers.session(B, b.engine.session).orphan
    assert orphan is not None
    assert orphan.until == a.now + 9.0
