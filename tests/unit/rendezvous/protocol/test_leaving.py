"""Order and content of the writes of a leaving member until its key is gone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.directives import Left, Run, Stop
from elasticjob_rendezvous.protocol.effects import Write
from elasticjob_rendezvous.protocol.events import LocalChanged, Tick
from elasticjob_rendezvous.protocol.kv import Delete, Put, Txn
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Restore,
    RoundState,
    Save,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import KEYS, a_round, identity
from tests.unit.rendezvous.node import READY, Node
from tests.unit.rendezvous.protocol.test_engine import (
    BUSY,
    LEAVES,
    STOPPED,
    key_of,
    pair,
    reopened,
    running,
    sessions,
    settle,
)


def told(node: Node, before: int) -> list[str]:
    """Return the effect on its keys of each write after the first `before`, as one word."""
    said = []
    for write in node.made(Write)[before:]:
        for op in write.txn.success:
            if isinstance(op, Delete):
                said.append("gone")
            elif isinstance(op, Put) and op.key.startswith(KEYS.members):
                member = decode(Member, op.key, op.value)
                said.append(f"{member.state}{' and stopped' * member.stopped}")
    return said


def leaves(node: Node, *steps: LocalChanged | Tick) -> list[str]:
    before = len(node.made(Write))
    for step in steps:
        node.hear(step)
    return told(node, before)


def test_member_that_never_ran_leaves_without_a_record() -> None:
    node = Node(SimEtcd(), "a", bounds=RendezvousParams(2, 2)).start()
    assert leaves(node, LocalChanged(replace(READY, leaving="drained"))) == ["gone"]


def test_member_leaves_before_the_first_round() -> None:
    node = Node(SimEtcd(), "a", bounds=None).start()
    assert node.engine.view.round is None
    assert leaves(node, LocalChanged(replace(READY, leaving="drained"))) == ["gone"]
    assert node.directive == Left()


def test_done_member_leaves_without_a_record() -> None:
    _, b = pair()
    done = replace(BUSY, workers=Workers.NONE, done=True)
    b.hear(LocalChanged(done))
    assert leaves(b, LocalChanged(replace(done, leaving="drained"))) == ["gone"]


def test_leaving_member_records_stopped_workers_after_its_round_ended() -> None:
    """Else it would be asked for them."""
    _, b = pair()
    assert leaves(b, LocalChanged(LEAVES)) == ["leaving"]
    reopened(b.etcd)
    assert leaves(b, Tick(), LocalChanged(STOPPED)) == ["leaving and stopped", "gone"]


def test_leaving_coordinator_resigns_before_it_records_the_leave() -> None:
    a, b = pair()
    before = key_of(a)
    assert leaves(a, LocalChanged(LEAVES)) == ["gone", "leaving"]
    assert set(sessions(b)) == {key_of(a), key_of(b)} - {before}


def test_leaving_member_that_coordinates_again_does_not_resign_again() -> None:
    a, b = pair()
    a.hear(LocalChanged(LEAVES))
    session = a.engine.session
    b.hear(LocalChanged(LEAVES))
    a.hear(Tick()).later(1)
    b.hear(Tick()).later(1)
    assert a.engine.session == session


# -- saving first ---------------------------------------------------------------------


SAVES = replace(LEAVES, saves=True)


def saving_pair(**bounds: Any) -> Node:
    """The younger of two members; both run round 1, and its workers can save."""
    etcd = SimEtcd()
    nodes = [Node(etcd, name, bounds=RendezvousParams(2, 2, **bounds)).start() for name in "ab"]
    settle(*nodes)
    for node in nodes:
        running(node)
    settle(*nodes)
    return nodes[1].hear(LocalChanged(replace(BUSY, saves=True)))


def asked_to_save(node: Node) -> Node:
    at = node.engine.view.round
    assert at is not None
    save = Save(Cause(CauseKind.LEAVE, ("b",)), 25.0)
    node.etcd.txn(Txn((), (Put(KEYS.round, encode(replace(at.record, save=save))),)))
    return node.hear(Tick())


@pytest.mark.parametrize("way", [{"saves": True}, {"keeps": True}], ids=["saves", "keeps"])
@pytest.mark.parametrize(
    ("asked", "leave_seconds", "seconds"),
    [(False, 30.0, 2.0), (False, 6.0, 1.0), (True, 9.0, 4.0), (True, 7.5, 2.5)],
    ids=["to be asked", "to be asked in a hurry", "to save", "to save in a hurry"],
)
def test_workers_of_leaving_member_run_until_saved(
    asked: bool, leave_seconds: float, seconds: float, way: dict[str, Any]
) -> None:
    b = saving_pair(leave_seconds=leave_seconds).hear(LocalChanged(replace(LEAVES, **way)))
    assert isinstance(b.directive, Run)
    if asked:
        asked_to_save(b)
    b.later(seconds - 0.1)
    assert isinstance(b.directive, Run)
    b.later(0.1)
    assert isinstance(b.directive, Stop)
    assert not b.directive.kill


RESTORES = replace(LEAVES, restore=Restore.PENDING)


def test_workers_of_leaving_member_run_until_restored_and_asked() -> None:
    b = saving_pair().hear(LocalChanged(RESTORES)).later(2.1)
    assert isinstance(b.directive, Run)
    b.hear(LocalChanged(replace(LEAVES, restore=Restore.DONE, keeps=True))).later(1.9)
    assert isinstance(b.directive, Run)
    b.later(0.1)
    assert isinstance(b.directive, Stop), "there was no request"


@pytest.mark.parametrize("way", [{"saves": True}, {"keeps": True}], ids=["saves", "keeps"])
def test_leaving_member_whose_workers_could_save_before_they_restored_reports_the_restore(
    way: dict[str, Any],
) -> None:
    b = saving_pair().hear(LocalChanged(replace(RESTORES, **way)))
    b.hear(LocalChanged(replace(LEAVES, restore=Restore.DONE, **way)))
    stored = b.engine.view.member(identity("b"))
    assert stored is not None
    assert stored.record.restore is Restore.DONE


def test_workers_of_leaving_member_that_hold_their_state_stop_once_restored() -> None:
    b = saving_pair().hear(LocalChanged(RESTORES)).later(2.1)
    assert isinstance(b.directive, Run)
    b.hear(LocalChanged(replace(LEAVES, restore=Restore.DONE)))
    assert isinstance(b.directive, Stop)


def test_workers_of_leaving_member_that_do_not_restore_in_time_stop() -> None:
    b = saving_pair(leave_seconds=8.5).hear(LocalChanged(RESTORES)).later(3.4)
    assert isinstance(b.directive, Run)
    b.later(0.1)
    assert isinstance(b.directive, Stop)


def test_workers_of_leaving_member_without_time_to_save_stop_at_once() -> None:
    b = saving_pair(leave_seconds=5.0).hear(LocalChanged(SAVES))
    assert isinstance(b.directive, Stop)


def test_workers_of_leaving_member_that_cannot_save_stop_at_once() -> None:
    b = saving_pair().hear(LocalChanged(LEAVES))
    assert isinstance(b.directive, Stop)


@pytest.mark.parametrize(
    ("number", "state"), [(1, RoundState.FROZEN), (1, RoundState.JOINABLE), (2, RoundState.FINAL)]
)
def test_workers_of_leaving_member_stop_once_their_round_ended(
    number: int, state: RoundState
) -> None:
    b = saving_pair().hear(LocalChanged(SAVES))
    b.etcd.txn(Txn((), (Put(KEYS.round, encode(a_round(number, state))),)))
    assert isinstance(b.hear(Tick()).directive, Stop)


def test_workers_of_leaving_member_have_the_default_grace_without_parameters() -> None:
    """The record of the bounds was damaged, and this member had none."""
    etcd = SimEtcd()
    etcd.txn(Txn((), (Put(KEYS.bounds, encode(RendezvousParams(1, 1))),)))
    node = running(Node(etcd, "a", bounds=None).start())
    node.hear(LocalChanged(replace(BUSY, saves=True)))
    etcd.txn(Txn((), (Put(KEYS.bounds, b"[]"),)))
    node.hear(LocalChanged(SAVES)).later(1.9)
    assert isinstance(node.directive, Run)
    node.later(0.1)
    assert isinstance(node.directive, Stop)
