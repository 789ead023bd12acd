"""What the log says when the coordinator changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.effects import Note
from elasticjob_rendezvous.core.events import LinkDown, LocalChanged, Probed, Tick, Verdict
from elasticjob_rendezvous.core.local import Workers
from tests.sim.simetcd import SimEtcd
from tests.unit.rendezvous.builders import identity
from tests.unit.rendezvous.node import READY, Node

RUNS = replace(READY, workers=Workers.RUNNING, round=1)


@pytest.fixture
def pods() -> tuple[Node, Node]:
    """pod-1, which coordinates, and pod-2; both run round 1."""
    etcd = SimEtcd()
    first, second = (Node(etcd, name, bounds=Bounds(2, 2)).start() for name in ("pod-1", "pod-2"))
    for _ in range(10):
        first.hear(Tick())
        second.hear(Tick())
    return first.hear(LocalChanged(RUNS)), second.hear(LocalChanged(RUNS))


def said_of(node: Node, name: str, since: int) -> list[str]:
    """What was logged of `name` since then."""
    notes = [effect for effect in node.said[since:] if isinstance(effect, Note)]
    return [note.text for note in notes if name in note.text]


def test_the_log_names_a_coordinator_that_resigns(pods: tuple[Node, Node]) -> None:
    first, _ = pods
    since = len(first.said)
    first.hear(LocalChanged(replace(RUNS, leaving="drained")))
    assert not first.engine.coordinator.active
    assert len(said_of(first, "pod-1", since)) == 1


@pytest.mark.parametrize("verdict", [Verdict.GONE, Verdict.WORKERS_ALIVE])
def test_the_log_names_a_coordinator_that_is_replaced(
    pods: tuple[Node, Node], verdict: Verdict
) -> None:
    first, second = pods
    dead = (identity("pod-1"), first.engine.session)
    second.hear(LinkDown(*dead, refused=True))
    since = len(second.said)
    second.hear(Probed(*dead, verdict))
    assert second.engine.coordinator.active
    assert any("coordinator pod-1 " in text for text in said_of(second, "pod-1", since))
