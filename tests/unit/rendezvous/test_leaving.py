"""What a leaver writes, and in which order, until its key is gone."""

from __future__ import annotations

from dataclasses import replace

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.codec import decode
from elasticjob_rendezvous.core.directives import Left
from elasticjob_rendezvous.core.effects import Write
from elasticjob_rendezvous.core.events import LocalChanged, Tick
from elasticjob_rendezvous.core.kv import Delete, Put
from elasticjob_rendezvous.core.local import Workers
from elasticjob_rendezvous.core.records import Member
from tests.sim.simetcd import SimEtcd
from tests.unit.rendezvous.builders import KEYS
from tests.unit.rendezvous.node import READY, Node
from tests.unit.rendezvous.test_engine import (
    BUSY,
    LEAVES,
    STOPPED,
    key_of,
    pair,
    reopened,
    sessions,
)


def told(node: Node, before: int) -> list[str]:
    """What its writes after the first `before` did to its keys, one word each."""
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


def test_a_member_that_never_ran_goes_without_a_word() -> None:
    node = Node(SimEtcd(), "a", bounds=Bounds(2, 2)).start()
    assert leaves(node, LocalChanged(replace(READY, leaving="drained"))) == ["gone"]


def test_a_member_goes_before_there_is_any_round() -> None:
    node = Node(SimEtcd(), "a", bounds=None).start()
    assert node.engine.view.round is None
    assert leaves(node, LocalChanged(replace(READY, leaving="drained"))) == ["gone"]
    assert node.directive == Left()


def test_a_member_that_is_done_goes_without_a_word() -> None:
    _, b = pair()
    done = replace(BUSY, workers=Workers.NONE, done=True)
    b.hear(LocalChanged(done))
    assert leaves(b, LocalChanged(replace(done, leaving="drained"))) == ["gone"]


def test_a_leaver_says_that_its_workers_ended_though_its_round_is_over() -> None:
    """Else it would be asked for them."""
    _, b = pair()
    assert leaves(b, LocalChanged(LEAVES)) == ["leaving"]
    reopened(b.etcd)
    assert leaves(b, Tick(), LocalChanged(STOPPED)) == ["leaving and stopped", "gone"]


def test_a_coordinator_that_leaves_resigns_before_it_says_so() -> None:
    a, b = pair()
    before = key_of(a)
    assert leaves(a, LocalChanged(LEAVES)) == ["gone", "leaving"]
    assert set(sessions(b)) == {key_of(a), key_of(b)} - {before}


def test_a_leaver_that_coordinates_again_does_not_resign_again() -> None:
    a, b = pair()
    a.hear(LocalChanged(LEAVES))
    session = a.engine.session
    b.hear(LocalChanged(LEAVES))
    a.hear(Tick()).later(1)
    b.hear(Tick()).later(1)
    assert a.engine.session == session
