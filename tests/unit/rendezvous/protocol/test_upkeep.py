"""Upkeep of a member: watches of its part, and the times at which it must wake up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.events import LinkDown, LocalChanged, Probed, Tick, Verdict
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import identity
from tests.unit.rendezvous.node import READY, Node


@pytest.fixture
def pods() -> tuple[Node, Node]:
    """pod-1, which coordinates, and pod-2, in a final round that has just begun."""
    etcd = SimEtcd()
    first, second = (
        Node(etcd, name, bounds=RendezvousParams(2, 2)).start() for name in ("pod-1", "pod-2")
    )
    for _ in range(10):
        first.hear(Tick())
        second.hear(Tick())
    return first, second


def test_new_coordinator_no_longer_watches_a_single_key(pods: tuple[Node, Node]) -> None:
    first, second = pods
    for node in pods:
        node.hear(LocalChanged(replace(READY, workers=Workers.RUNNING, round=1)))
    for _ in range(20):  # all members do not open this watch at once
        first.later(1.0)
        second.later(1.0)
    assert second.engine.watches.leader is not None
    dead = (identity("pod-1"), first.engine.session)
    second.hear(LinkDown(*dead, refused=True))
    second.hear(Probed(*dead, Verdict.GONE))
    assert second.engine.coordinator.active
    assert second.engine.watches.leader is None


def test_member_without_a_key_wakes_up_at_the_end_of_its_lease() -> None:
    member = Node(SimEtcd(), "pod-1", bounds=RendezvousParams(2, 2))
    member.held = True
    member.start()
    while not member.engine.lease.id:
        member.answer().hear(Tick())
    deadline = member.engine.lease.deadline
    while member.now < deadline:
        wake_at = member.engine.wake_at
        assert wake_at is not None
        assert member.now < wake_at <= deadline
        member.now = wake_at + 0.1  # a late wake-up, so that renewals do not meet the deadline
        member.hear(Tick())
    assert not member.engine.lease.holds(member.now)


def test_coordinator_wakes_up_to_probe_members_without_a_link(pods: tuple[Node, Node]) -> None:
    first, _ = pods
    due = first.engine.coordinator.peers.unlinked_probe_at
    assert due is not None
    assert first.engine.wake_at is not None
    assert first.engine.wake_at <= due
