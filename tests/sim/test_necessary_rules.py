"""Rules of the protocol that look superfluous, each with a schedule that fails without it.

Each schedule runs with the product as it is, without a violation, and with the one rule removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from elasticjob_rendezvous.protocol import handle_event, upkeep
from elasticjob_rendezvous.protocol.coordinator import frozen
from elasticjob_rendezvous.protocol.effects import Serve, Write
from elasticjob_rendezvous.protocol.engine import Engine
from elasticjob_rendezvous.protocol.events import Changed, LinkHeartbeat, WatchBroken, WatchOpened
from elasticjob_rendezvous.protocol.kv import Put, Txn
from elasticjob_rendezvous.protocol.liveness.leader_link import LeaderLink
from elasticjob_rendezvous.protocol.records.codec import decode
from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.records.members import CauseKind, Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.agent_requests import Request, Sent, Wire
from tests.sim.invariants.checker import Violation
from tests.sim.plan import Plan
from tests.sim.planted_bugs.planting import Writes
from tests.sim.processes.pod import Pod
from tests.sim.world import EngineFactory, World

LEASE_SECONDS = 3.0


def plan(nodes: int, min_nodes: int = 1, increment: int = 1, **fields: Any) -> Plan:
    bounds = RendezvousParams(
        min_nodes,
        nodes,
        increment,
        keep_alive_seconds=LEASE_SECONDS,
        last_call_seconds=1.0,
        stop_grace_seconds=0.5,
        max_restarts=50,
    )
    return Plan(
        profile="needed",
        bounds=bounds,
        arrivals=(),
        operator=False,
        replaces=False,
        hang_share=1.0,
        stubborn=0.0,
        **fields,
    )


def gang(seed: int, nodes: int, new_engine: EngineFactory, **fields: Any) -> World:
    """Return a world whose nodes train in round 1."""
    world = World(seed, plan(nodes, **fields), new_engine)
    for _ in range(nodes):
        world.add_pod()
    world.run(5.0)
    assert [pod.phase for pod in world.pods] == [Workers.RUNNING] * nodes
    return world


def leader(world: World) -> Pod:
    current = world.checker.round
    assert current is not None
    return next(pod for pod in world.pods if pod.id == current.coordinator)


def breaks(invariant: str, world: World, until: float) -> bool:
    """Return True if this invariant is violated before that time."""
    try:
        world.run(until)
    except Violation as found:
        if found.invariant != invariant:
            raise
        return True
    return False


def causes(world: World) -> list[CauseKind]:
    """Return the cause of each round after the first."""
    found: dict[int, CauseKind] = {}
    for _, who, _, detail in world.trace:
        for change in detail if who == "etcd" and isinstance(detail, tuple) else ():
            if change.key == world.keys.round and change.after is not None:
                record = decode(Round, change.key, change.after.value)
                found[record.number] = record.cause.kind
    return [kind for number, kind in found.items() if number > 1]


# -- deadline of workers adopted by a new agent -----------------------------------------


@contextmanager
def no_deadline() -> Iterator[EngineFactory]:
    """Yield an engine whose launcher has no deadline of its own after its agent's death."""
    with patch.object(Pod, "_watch_deadline", lambda pod: None):
        yield Engine


def outlives_its_lease(seed: int, new_engine: EngineFactory) -> bool:
    """Kill an agent and cut its node off; the next agent finds the workers."""
    world = gang(seed, 3, new_engine)
    pod = next(pod for pod in world.pods if pod is not leader(world))
    world.faults.cut_off(pod, 100.0)
    pod.kill_agent()
    world.run(5.1)
    pod.start_agent()
    if breaks("no two rounds write", world, 5.1 + LEASE_SECONDS + 1.0):
        return True
    return pod.phase in (Workers.STARTING, Workers.RUNNING)


# -- round number served without a lease --------------------------------------------------


def two_rounds_run_under_an_older_coordinator(seed: int, new_engine: EngineFactory) -> bool:
    """Do the same with links that do not report the validity of the coordinator's own evidence."""

    def older(leader_link: LeaderLink, event: LinkHeartbeat, now: float) -> None:
        heard(leader_link, replace(event, vouched_seconds=None), now)

    heard = LeaderLink.link_heartbeat
    with patch.object(LeaderLink, "link_heartbeat", older):
        return two_rounds_run(seed, new_engine)


@contextmanager
def the_old_number_is_told() -> Iterator[EngineFactory]:
    def planted(state: EngineState) -> None:
        serves = state.coordinator.active or state.served >= 0
        if state.current is not None and serves and state.current.number != state.served:
            state.served = state.current.number
            state.effects.append(Serve(state.served))

    with patch.object(upkeep, "serve_round", planted):
        yield Engine


def two_rounds_run(seed: int, new_engine: EngineFactory) -> bool:
    """Cut the coordinator's half of the gang off from etcd and from the other half."""
    world = gang(seed, 4, new_engine)
    first = leader(world)
    other = next(pod for pod in world.pods if pod is not first)
    for call in (world.faults._cut_peers, world.faults._cut_etcd):
        call([first, other], 100.0)
    return breaks("no two rounds write", world, 30.0)


# -- broken watch of the coordinator's key --------------------------------------------------


@contextmanager
def leader_watch_goes_on() -> Iterator[EngineFactory]:
    def planted(state: EngineState, event: WatchOpened | Changed | WatchBroken) -> None:
        before, watch = state.doubt, state.watches.leader
        take(state, event)
        if watch is not None and isinstance(event, WatchBroken):
            state.doubt = before if event.generation == watch.generation else state.doubt

    take = handle_event._handle_watch
    with patch.object(handle_event, "_handle_watch", planted):
        yield Engine


def nobody_succeeds(seed: int, new_engine: EngineFactory) -> bool:
    """Compact the revisions since the coordinator was read, break the watches of its key, and
    silence its machine.
    """
    world = gang(seed, 3, new_engine)
    for number in range(3):
        world.etcd.txn(Txn((), (Put(f"/another/job/{number}", b"1"),)), "operator")
    world.etcd.compact(world.etcd.revision)
    gone = leader(world)
    for pod in world.pods:
        if pod.agent is not None and pod.agent.engine.watches.leader is not None:
            lines = pod.agent.wire.watches
            lines._break(lines._lines[pod.agent.engine.watches.leader.generation], "broken")
    world.run(8.0)
    world.faults.freeze(gone, 1000.0)
    world.run(30.0)
    current = world.checker.round
    assert current is not None
    return current.coordinator == gone.id


# -- records removed by a seal ----------------------------------------------------------


@contextmanager
def old_failures_stay() -> Iterator[EngineFactory]:
    with patch.object(frozen, "outdated", lambda *_: []):
        yield Engine


def etcd_fills(seed: int, new_engine: EngineFactory) -> bool:
    """Fail the script in every round."""
    world = gang(seed, 2, new_engine)
    for _ in range(14):
        pod = next(pod for pod in world.pods if pod.phase is Workers.RUNNING)
        pod.fail_workers(FailureClass.USER_ERROR, step=world.checker.highest)
        if breaks("old rounds go", world, world.now + 3.0):
            return True
    assert world.checker.highest > 12
    return False


@contextmanager
def leavers_are_remembered() -> Iterator[EngineFactory]:
    class Forgetful(dict[str, str]):
        def clear(self) -> None:
            pass

    class Planted(Engine):
        def __init__(self, config: object) -> None:
            super().__init__(config)  # type: ignore[arg-type]
            self.coordinator.leavers = Forgetful()

    yield Planted


def loss_is_called_a_leave(seed: int, new_engine: EngineFactory) -> bool:
    """Mark a member for removal, withdraw the mark, and lose the member in the next round."""
    world = gang(seed, 3, new_engine)
    pod = next(pod for pod in world.pods if pod is not leader(world))
    pod.leave("drained")
    while world.checker.highest < 2:
        world.run(world.now + 0.001)
    pod.leaving = ""
    pod.changed()
    if breaks("leaves are real", world, 12.0):
        return True
    assert pod.workers_alive
    assert pod.round == 2
    world.faults.crash(pod, 0.0)
    if breaks("leaves are real", world, 20.0):
        return True
    return causes(world)[-1] is CauseKind.LEAVE


# -- round on which an adoption rests -------------------------------------------------------


@contextmanager
def adopts_in_any_round() -> Iterator[EngineFactory]:
    class Planted(Writes):
        def change(self, txn: Txn) -> Txn:
            own = self.view.keys.session(self.config.identity.id, self.session)
            creates = any(each.key == own and each.revision == 0 for each in txn.compares)
            kept = tuple(each for each in txn.compares if each.key != self.view.keys.round)
            return replace(txn, compares=kept) if creates else txn

    yield Planted


def late_adoption_costs_a_round(seed: int, new_engine: EngineFactory) -> bool:
    """Kill an agent while it adopts its member; its successor is already in the following round
    when that first request arrives at etcd.
    """
    world = gang(seed, 3, new_engine)
    pod = next(pod for pod in world.pods if pod is not leader(world))
    pod.fail_workers(FailureClass.USER_ERROR)
    assert pod.agent is not None
    pod.kill_agent()
    world.etcd.revoke(world.checker.sessions_of(pod.id)[0].lease)
    held: list[tuple[Wire, int, Request, Sent]] = []

    def send(wire: Wire, token: int, effect: Request, sent: Sent) -> None:
        creates = isinstance(effect, Write) and any(
            each.revision == 0 and each.key.startswith(world.keys.sessions(pod.id))
            for each in effect.txn.compares
        )
        if wire.agent.pod is pod and creates and not held:
            held.append((wire, token, effect, sent))
        else:
            original(wire, token, effect, sent)

    original = Wire._send
    with patch.object(Wire, "_send", send):
        pod.start_agent()
        while not held and world.now < 20.0:
            world.run(world.now + 0.001)
    assert held
    pod.kill_agent()
    pod.start_agent()
    world.run(world.now + 3.0)
    number = world.checker.highest
    assert pod.workers_alive
    wire, token, effect, sent = held[0]
    wire._serve(token, effect, sent)
    if breaks("losses are real", world, world.now + 12.0):
        return True
    return world.checker.highest > number


RULES = {
    "deadline of found workers": (outlives_its_lease, no_deadline),
    "a higher number without a lease": (
        two_rounds_run_under_an_older_coordinator,
        the_old_number_is_told,
    ),
    "look again after a broken watch": (nobody_succeeds, leader_watch_goes_on),
    "old failures are cleared": (etcd_fills, old_failures_stay),
    "leavers are forgotten at the seal": (loss_is_called_a_leave, leavers_are_remembered),
    "adoption in the round that was read": (late_adoption_costs_a_round, adopts_in_any_round),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_rule_removal_breaks_an_invariant(name: str, seed: int) -> None:
    goes_wrong, without = RULES[name]
    assert not goes_wrong(seed, Engine)
    with without() as planted:
        assert goes_wrong(seed, planted)
