"""A change of coordinator: whose workers are looked after, and what the log says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.coordinator import election
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.effects import KeepAlive, Note, Probe, Unlink
from elasticjob_rendezvous.protocol.events import (
    Clock,
    LinkDown,
    LinkHeartbeat,
    LocalChanged,
    Probed,
    Tick,
    Verdict,
)
from elasticjob_rendezvous.protocol.liveness import detector_upkeep
from elasticjob_rendezvous.protocol.liveness.leader_link import HANDOVER_SECONDS
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import KEYS, START, Job, identity
from tests.unit.rendezvous.node import READY, Node

RUNS = replace(READY, workers=Workers.RUNNING, round=1)


def gang_of(size: int) -> list[Node]:
    """pod-1, which coordinates, and others; all run round 1."""
    etcd, names = SimEtcd(), [f"pod-{number}" for number in range(1, size + 1)]
    nodes = [Node(etcd, name, bounds=RendezvousParams(size, size)).start() for name in names]
    for _ in range(10):
        for node in nodes:
            node.hear(Tick())
    for node in nodes:
        node.hear(LocalChanged(RUNS))
    return nodes


@pytest.fixture
def pods() -> tuple[Node, Node]:
    """pod-1, which coordinates, and pod-2; both run round 1."""
    first, second = gang_of(2)
    return first, second


def said_of(node: Node, name: str, since: int) -> list[str]:
    """Return the notes logged about `name` since then."""
    notes = [effect for effect in node.said[since:] if isinstance(effect, Note)]
    return [note.text for note in notes if name in note.text]


def test_log_names_a_coordinator_that_resigns(pods: tuple[Node, Node]) -> None:
    first, _ = pods
    since = len(first.said)
    first.hear(LocalChanged(replace(RUNS, leaving="drained")))
    assert not first.engine.coordinator.active
    assert len(said_of(first, "pod-1", since)) == 1


@pytest.mark.parametrize("verdict", [Verdict.GONE, Verdict.WORKERS_ALIVE])
def test_log_names_a_replaced_coordinator(pods: tuple[Node, Node], verdict: Verdict) -> None:
    first, second = pods
    dead = (identity("pod-1"), first.engine.session)
    second.hear(LinkDown(*dead, refused=True))
    since = len(second.said)
    second.hear(Probed(*dead, verdict))
    assert second.engine.coordinator.active
    assert any("coordinator pod-1" in text for text in said_of(second, "pod-1", since))


# -- what a coordinator does ----------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "silent", "resigns"), [(3, 2, True), (3, 1, False), (2, 1, False), (5, 3, True)]
)
def test_coordinator_that_is_cut_off_resigns(size: int, silent: int, resigns: bool) -> None:
    """More than half of its gang answer nobody; of a single other that says nothing."""
    first, *others = gang_of(size)
    session = first.engine.session
    for other in others[:silent]:
        first.hear(Probed(identity(other.name), other.engine.session, Verdict.UNKNOWN))
    assert first.engine.coordinator.active is not resigns
    assert (first.engine.session != session) is resigns
    key = KEYS.session(identity("pod-1"), first.engine.session)
    assert first.etcd.get(key) is not None
    assert (first.etcd.get(KEYS.session(identity("pod-1"), session)) is None) is resigns


def test_coordinator_wakes_at_its_next_deadline() -> None:
    """Nothing else happens before its last call ends."""
    node = Node(SimEtcd(), "pod-1", bounds=RendezvousParams(1, 2, last_call_seconds=0.7)).start()
    assert node.engine.wake_at == START + 0.7
    assert not isinstance(node.directive, Run)
    assert isinstance(node.later(0.7).directive, Run)


def test_log_names_writes_of_the_coordinator() -> None:
    node = Node(SimEtcd(), "pod-1", bounds=RendezvousParams(1, 1)).start()
    assert any("round 1" in note.text for note in node.made(Note))


# -- workers that a predecessor left behind -------------------------------------------

OLD = identity("old")


def successor(job: Job) -> EngineState:
    """pod-2, which found by a probe that the agent of `old` died while its workers ran."""
    engine_state = EngineState(
        Config(KEYS.prefix, Identity(identity("pod-2"), "pod-2", "host", 7000), "n")
    )
    engine_state.view = job.view()
    engine_state.leader_link.probed(Probed(OLD, "s1", Verdict.WORKERS_ALIVE), 0.0)
    return engine_state


def succeed(job: Job) -> EngineState:
    """Coordinate from now on."""
    engine_state = successor(job)
    election.take_over(engine_state)
    return engine_state


@pytest.mark.parametrize(
    ("session", "kept"),
    [("s1", True), ("s1~", True), ("s2", False), (None, False)],
    ids=["in office", "set aside", "its agent is back", "its key is gone"],
)
def test_orphan_of_the_previous_coordinator_is_kept_by_its_successor(
    session: str | None, kept: bool
) -> None:
    job = Job("pod-2").round(3)
    lease = job.etcd.grant(5, job.now).id
    if session is not None:
        job.member("old", session=session, lease=lease)
    assert (KeepAlive(lease) in succeed(job).effects) is kept


def test_orphan_launcher_is_notified_of_the_first_round_as_soon_as_it_opens() -> None:
    """Etcd lost its data: there is no round yet when they are found."""
    job = Job("pod-2")
    job.member("old", lease=job.etcd.grant(5, job.now).id)
    engine_state = succeed(job)
    peers, me = engine_state.coordinator.peers, identity("pod-2")
    assert detector_upkeep.maintain(peers, engine_state.view, me, 0.1, 1.7)[0] == []
    effects, _ = detector_upkeep.maintain(peers, job.round(1).view(), me, 0.2, 1.7)
    assert [effect.round for effect in effects if isinstance(effect, Probe)] == [1]


def test_evidence_of_the_link_to_the_predecessor_lasts_for_its_successor() -> None:
    engine_state = successor(Job("pod-2").round(3))
    engine_state.leader_link.link = (OLD, "s1")
    engine_state.leader_link.link_heartbeat(LinkHeartbeat(OLD, "s1", 3, sent=10.0), 10.0)
    engine_state.clock = Clock(11.0, 0)
    election.take_over(engine_state)
    assert Unlink() in engine_state.effects
    assert engine_state.leader_link.evidence_until(3) == pytest.approx(11.0 + HANDOVER_SECONDS)
