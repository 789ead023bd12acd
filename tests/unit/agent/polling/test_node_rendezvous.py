"""Pod's rendezvous through a handler: ranks, budget, bootstrap store, and the handler's release."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from elasticjob_agent.core.state import (
    LEFT_CODE,
    Ending,
    ExitCode,
    State,
)
from elasticjob_agent.polling.agreement import RoleInstanceInfo, assign_through_store
from elasticjob_agent.polling.join import Place
from elasticjob_agent.polling.node_rendezvous import NodeJoiner, NodeRendezvous
from elasticjob_agent.settings import LogSettings
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from tests.unit.agent.builders import FACTS, agent_settings
from tests.unit.agent.memory_rendezvous import Gang, MemoryHandler, MemoryStore

SETTINGS = agent_settings(
    LogSettings(), role="trainer", bounds=RendezvousParams(1, 2, max_restarts=4)
)


def state(slots: int = 2, port: int = 0) -> State:
    """Return the state of an agent whose launcher serves a store at `port`, unless it is 0."""
    return State(replace(FACTS, slots=slots), port=port or 4321, served=port > 0)


def joiner(
    handler: MemoryHandler, member: str = "a", role: str = "trainer", slots: int = 2, port: int = 0
) -> NodeJoiner:
    return NodeJoiner(handler, member, role, lambda: state(slots, port))


def at_once(*joins: Callable[[], Place]) -> list[Place]:
    """Return the places of nodes that join together, by group rank."""
    with ThreadPoolExecutor(len(joins)) as threads:
        places = [each.result(60) for each in [threads.submit(join) for join in joins]]
    return sorted(places, key=lambda place: mine(place).group_rank)


def mine(place: Place) -> RankAssignment:
    (found,) = [assignment for assignment in place.roster.seats if assignment.id]
    return found


def test_nodes_of_different_roles_and_sizes_agree_on_ranks() -> None:
    gang = Gang(wanted=2)
    first, second = (
        joiner(gang.handler(), "a", "trainer", slots=2),
        joiner(gang.handler(), "b", "reader", slots=3),
    )
    places = at_once(lambda: first.join_round(False, 0, 0), lambda: second.join_round(False, 0, 0))
    assert {(mine(place).id, mine(place).slots) for place in places} == {("a", 2), ("b", 3)}
    assert {place.roster.world_size for place in places} == {5}
    assert mine(places[0]).base_rank == 0
    assert mine(places[1]).base_rank == mine(places[0]).slots
    assert {mine(place).role_base_rank for place in places} == {0}
    for place in places:
        assert [seat.id for seat in place.roster.seats].count("") == 1
        assert (place.roster.master_address, place.roster.master_port) == ("127.0.0.1", 29001)
        assert not place.roster.master_served


def test_number_of_workers_is_that_counted_before_the_join(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slots = 0
    node = NodeJoiner(Gang().handler(), "a", "trainer", lambda: state(slots=slots))
    slots = 2
    with caplog.at_level(logging.INFO, "elasticjob.agent"):
        assert mine(node.join_round(False, 0, 0)).slots == 2
    assert (
        "[trainer] rendezvous 1: group rank 0 of 1, workers "
        "[local_rank=0,global_rank=0,role_rank=0,world_size=2,role_world_size=2, "
        "local_rank=1,global_rank=1,role_rank=1,world_size=2,role_world_size=2], "
        "master 127.0.0.1:29001"
    ) in caplog.messages


def test_round_is_numbered_above_the_last_one() -> None:
    node = joiner(Gang().handler())
    assert node.join_round(False, 0, 7).roster.number == 8


def test_charge_of_one_node_counts_once_on_all() -> None:
    gang = Gang(wanted=2)
    failed, newcomer = joiner(gang.handler()), joiner(gang.handler(), "b")
    places = at_once(
        lambda: failed.join_round(True, 2, 0), lambda: newcomer.join_round(False, 0, 0)
    )
    assert [place.roster.restarts for place in places] == [3, 3]


def test_identical_nodes_count_alone_and_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    gang = Gang()
    place = joiner(gang.handler(), port=4000).join_round(True, 2, 0)
    assert (place.roster.restarts, place.roster.master_served) == (3, False)
    assert gang.stores[0].keys() == frozenset()


def test_workers_use_the_store_that_rank_0s_launcher_serves() -> None:
    gang = Gang(wanted=2)
    nodes = [joiner(gang.handler(), name, port=4000) for name in ("a", "b")]
    places = at_once(*(lambda node=node: node.join_round(False, 0, 0) for node in nodes))
    assert {place.roster.master_port for place in places} == {4000}
    assert all(place.roster.master_served for place in places)


def test_single_worker_serves_its_store_itself() -> None:
    """Processes that its program starts may meet at an address of their own."""
    place = joiner(Gang().handler(), slots=1, port=4000).join_round(False, 0, 0)
    assert (place.roster.master_port, place.roster.master_served) == (29001, False)


def test_served_store_is_not_used_beside_an_agent_of_torch() -> None:
    gang = Gang(wanted=2)
    ours, torchs = joiner(gang.handler(), port=4000), gang.handler()

    def join_as_torch() -> None:
        info = torchs.next_rendezvous()
        assign_through_store(info.store, RoleInstanceInfo("trainer", info.rank, 1), 2)

    with ThreadPoolExecutor(1) as threads:
        joined = threads.submit(join_as_torch)
        place = ours.join_round(False, 0, 0)
        joined.result(60)
    assert (place.roster.master_port, place.roster.master_served) == (29001, False)


def test_node_offers_its_store_once_per_round() -> None:
    gang = Gang()
    handler = gang.handler()
    node = joiner(handler, port=4000)
    assert node.join_round(False, 0, 0).roster.master_port == 4000
    gang.round = 0
    gang.stores[:] = [MemoryStore()]  # the handler gives round 1 again, after an error in the join
    again = node.join_round(False, 0, 0)
    assert (again.roster.master_port, again.roster.number) == (29001, 1)


def test_no_worker_hosts_the_store_of_a_handler_that_hosts_it() -> None:
    class Hosting(MemoryHandler):
        use_agent_store = True

    place = joiner(Hosting(Gang())).join_round(False, 0, 0)
    assert place.roster.master_served
    assert place.roster.master_port == 29001


def test_roster_of_the_handler_gives_the_ranks() -> None:
    class Knowing(MemoryHandler):
        roster = Roster(
            1, 5, "127.0.0.1", 29001, (RankAssignment("a", "a", "", 2, "trainer", 0, 3, 1, 4),)
        )

    gang = Gang()
    place = joiner(Knowing(gang)).join_round(False, 0, 0)
    assert (mine(place).base_rank, mine(place).role_base_rank) == (3, 1)
    assert gang.stores[0].keys() <= {"elasticjob/restarts"}
    with pytest.raises(ValueError, match="give the handler slots=3"):
        joiner(Knowing(Gang()), slots=3).join_round(False, 0, 0)


def ending(code: ExitCode, launcher_code: int | None = None) -> Ending:
    return Ending(code, int(code) if launcher_code is None else launcher_code, "why")


@pytest.mark.parametrize(
    ("end", "alone", "calls"),
    [
        (ending(ExitCode.OK), False, ["shutdown", "leave", "close"]),
        (ending(ExitCode.FAILED), False, ["shutdown", "leave", "close"]),
        (ending(ExitCode.OK), True, ["leave", "close"]),
        (ending(ExitCode.OK, LEFT_CODE), False, ["leave", "close"]),
        (ending(ExitCode.STOPPED), False, ["leave", "close"]),
        (ending(ExitCode.RENDEZVOUS), False, ["leave", "close"]),
        (ending(ExitCode.INTERNAL), False, ["leave", "close"]),
    ],
)
def test_only_the_end_of_the_job_closes_the_rendezvous(
    end: Ending, alone: bool, calls: list[str]
) -> None:
    class Closable(MemoryHandler):
        def close(self) -> None:
            self.calls.append("close")

    handler = Closable(Gang())

    async def released() -> None:
        rendezvous = NodeRendezvous(SETTINGS, handler, lambda before, after: None)
        entered = rendezvous.enter(state)
        if alone:
            entered._state = replace(entered._state, alone=True)
        await rendezvous.release(end)

    asyncio.run(released())
    assert handler.calls == calls


def test_error_of_the_handlers_release_is_logged_and_the_rest_released(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Failing(MemoryHandler):
        def shutdown(self) -> bool:
            raise OSError("the store is gone")

        def close(self) -> None:
            self.calls.append("close")

    handler = Failing(Gang())
    rendezvous = NodeRendezvous(SETTINGS, handler, lambda before, after: None)
    asyncio.run(rendezvous.release(ending(ExitCode.OK)))
    assert handler.calls == ["close"]
    assert "cannot leave the rendezvous: OSError('the store is gone')" in caplog.text


def test_settings_give_the_terms_and_no_limit_of_the_exit_barrier() -> None:
    async def entered() -> None:
        rendezvous = NodeRendezvous(SETTINGS, Gang().handler(), lambda before, after: None)
        polling = rendezvous.enter(state)
        terms = polling._state.terms
        assert (terms.member, terms.name, terms.run_id) == ("uid-1", "node-1", "digits")
        assert (terms.max_restarts, terms.stop_grace_seconds) == (4, SETTINGS.stop_grace_seconds)
        assert polling._barrier_seconds == math.inf

    asyncio.run(entered())
