"""Master address in gangs with torch's nodes, whose agents may share a store of theirs."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from elasticjob_rendezvous.api import (
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.dynamic import master_address
from elasticjob_rendezvous.dynamic.core.state import (
    MASTER,
    OUR_LOCAL_IDS,
    NodeDesc,
    RankAssignment,
    State,
    addr_of_ours,
    completed,
    in_rank_order,
    name_of,
)
from elasticjob_rendezvous.dynamic.master_address import (
    ABSENT_SECONDS,
    AWAITED_SECONDS,
    SILENT_SECONDS,
    Masters,
    Sharing,
)
from tests.unit.rendezvous.dynamic.builders import MemoryStore


def ours(name: str) -> NodeDesc:
    return NodeDesc(name, 1, OUR_LOCAL_IDS + 5)


def torch_nodes(name: str) -> NodeDesc:
    return NodeDesc(name, 1, 0)


A, B, C, D = ours("a"), torch_nodes("b"), ours("c"), torch_nodes("d")


@pytest.mark.parametrize(
    ("participants", "last", "expected"),
    [
        ([C, A], name_of(C), [A, C]),
        ([D, B], None, [B, D]),
        ([B, C, D], None, [C, B, D]),
        ([A, B, C, D], name_of(C), [C, A, B, D]),
        ([A, B, C, D], name_of(D), [D, A, B, C]),
        ([B, C, D], name_of(A), [C, B, D]),
        ([A, B, C], name_of(ours("gone")), [A, B, C]),
        ([A, B, C], None, [A, B, C]),
        ([B, C], ("no", "name"), [C, B]),
    ],
    ids=[
        "ours alone: natural order",
        "torch's alone: natural order",
        "ours at first",
        "it stays with ours",
        "it stays with torch's",
        "the master is gone, several of torch's",
        "the master is gone, one of torch's",
        "nobody was master",
        "not a name",
    ],
)
def test_rank_0_selection(participants: list[NodeDesc], last: object, expected: Any) -> None:
    assert in_rank_order(participants, last) == expected


def test_oldest_of_ours_is_first_in_torchs_order_and_in_ours() -> None:
    later, earlier = (
        NodeDesc(addr_of_ours(host, datetime.fromtimestamp(seconds, UTC)), 7, OUR_LOCAL_IDS)
        for host, seconds in (("a", 2_000_000_000), ("z", 999_999_999.5))
    )
    names = ("0", "127.0.0.1", "::1", "[::1]", "-", ".", "a")
    nodes = [later, *map(torch_nodes, names), earlier]
    assert min(map(name_of, nodes)) == name_of(earlier), "torch compares these fields"
    assert in_rank_order(nodes, None)[0] == earlier
    assert (earlier.host, str(later)) == ("z", f"a_7_{OUR_LOCAL_IDS}")


def test_master_is_recorded_only_in_mixed_gangs() -> None:
    mixed = completed(State(participants={B: 0, C: 0}))
    assert mixed.participants == {C: 0, B: 1}
    assert mixed.extra[MASTER] == name_of(C)
    lasting = completed(State(participants={B: 0, C: 0}), lasting_store=True)
    assert lasting.participants == {C: 0, B: 1}
    assert MASTER not in lasting.extra
    alone = completed(State(participants={A: 0, C: 0}))
    assert MASTER not in alone.extra


class Rounds:
    """Stores of all rounds, and a record of emptied ones."""

    def __init__(self) -> None:
        self.stores: dict[int, MemoryStore] = {}
        self.emptied: list[int] = []
        self.fails = False
        self.silent = False

    def store(self, number: int) -> MemoryStore:
        return self.stores.setdefault(number, MemoryStore())

    def empty(self, address: str, port: int) -> None:
        if self.fails:
            raise RendezvousConnectionError("away")
        if self.silent:
            raise RendezvousTimeoutError("no answer")
        self.emptied.append(port)

    def masters(self, node: NodeDesc, lasting: RendezvousStoreInfo | None = None) -> Masters:
        return Masters(node, self.store, Sharing(self.empty, lasting))

    def published(self, number: int) -> RendezvousStoreInfo | None:
        return master_address.published(self.store(number))


@pytest.fixture
def rounds() -> Rounds:
    return Rounds()


@pytest.fixture
def agents_store() -> Iterator[int]:
    """Yield the port of a store that torch's agent hosts."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def assignment(number: int, node: NodeDesc, *roster: NodeDesc) -> RankAssignment:
    ranks = {each: rank for rank, each in enumerate(roster)}
    return RankAssignment(number, ranks[node], ranks)


def publish(masters: Masters, held: RankAssignment) -> RendezvousStoreInfo:
    info = masters.publish(held, 0.0)
    assert info is not None
    return info


HOST = torch_nodes("127.0.0.1")
"""Torch's node, with an address at which a test can listen."""
LASTING = RendezvousStoreInfo("host", 29400)
"""Store of the backend."""


def test_without_torch_nodes_every_round_has_its_own_port(rounds: Rounds) -> None:
    masters = rounds.masters(A)
    ports = {publish(masters, assignment(number, A, A, C)).master_port for number in range(2)}
    assert len(ports) == 2
    masters.close()


def test_with_torch_nodes_the_own_port_stays(rounds: Rounds) -> None:
    masters = rounds.masters(A)
    ports = {publish(masters, assignment(number, A, A, B)).master_port for number in range(3)}
    assert len(ports) == 1
    assert not masters.shared
    assert rounds.emptied == []
    masters.close()


def test_own_rank_0_reuses_the_store_of_the_torch_agent(rounds: Rounds, agents_store: int) -> None:
    master_address.publish(rounds.store(2), HOST.addr, agents_store)
    masters = rounds.masters(A)
    held = assignment(5, A, A, HOST)
    assert publish(masters, held).master_port == agents_store
    assert masters.shared
    assert rounds.emptied == [agents_store]
    assert rounds.published(5) == RendezvousStoreInfo(HOST.addr, agents_store)
    assert publish(masters, assignment(6, A, A, C)).master_port != agents_store, "torch's has gone"
    assert not masters.shared
    masters.close()


def test_store_without_a_host_is_not_used(rounds: Rounds) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    master_address.publish(rounds.store(0), HOST.addr, port)
    masters = rounds.masters(A)
    assert publish(masters, assignment(1, A, A, HOST)).master_port != port
    assert not masters.shared
    masters.close()


def test_store_of_a_torch_node_that_missed_the_round_is_kept(
    rounds: Rounds, agents_store: int
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A)
    assert publish(masters, assignment(1, A, A, B)).master_port == agents_store, "it will be back"


def test_store_that_cannot_be_emptied_is_not_used(rounds: Rounds, agents_store: int) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    rounds.fails = True
    masters = rounds.masters(A)
    assert publish(masters, assignment(1, A, A, HOST)).master_port != agents_store
    assert not masters.shared
    masters.close()


def test_store_hosted_by_a_silent_torch_rank_0_is_found_again(
    rounds: Rounds, agents_store: int
) -> None:
    masters = rounds.masters(A)
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    found = RendezvousStoreInfo(HOST.addr, agents_store)
    assert masters.find(assignment(0, A, HOST, A), 0.0) == found, "it said so"
    assert rounds.emptied == [], "and nothing is in it yet"
    assert masters.find(assignment(1, A, HOST, A), 0.0) == found, "the same host: no need to wait"
    assert masters.shared
    assert rounds.emptied == [agents_store]
    assert rounds.published(1) == found, "torch's new nodes look there"


def test_new_node_waits_before_assuming_a_silent_torch_rank_0(
    rounds: Rounds, agents_store: int
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A)
    held = assignment(3, A, HOST, A)
    assert masters.find(held, SILENT_SECONDS - 0.1) is None
    assert masters.find(held, SILENT_SECONDS) == RendezvousStoreInfo(HOST.addr, agents_store)


def test_backend_store_serves_all_rounds(rounds: Rounds) -> None:
    for number, node in enumerate((A, C, A)):
        masters = rounds.masters(node, LASTING)
        assert publish(masters, assignment(number, node, node, B)) == LASTING
        assert masters.shared
    assert rounds.emptied == [29400] * 3
    alone = rounds.masters(A, LASTING)
    assert publish(alone, assignment(3, A, A, C)) != LASTING, (
        "without torch's nodes it is not needed"
    )
    assert not alone.shared
    alone.close()


def test_store_of_the_torch_agent_precedes_the_backend_store(
    rounds: Rounds, agents_store: int
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A, LASTING)
    assert publish(masters, assignment(1, A, A, HOST)).master_port == agents_store


def test_without_torch_nodes_the_own_port_is_used(rounds: Rounds, agents_store: int) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = Masters(A, rounds.store, None)
    assert publish(masters, assignment(1, A, A, HOST)).master_port != agents_store
    masters.close()


def test_own_rank_0_is_never_assumed_silent(rounds: Rounds, agents_store: int) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A)
    assert masters.find(assignment(1, A, C, A, HOST), 60.0) is None


@pytest.mark.parametrize(
    ("other", "limit_seconds"),
    [(HOST, AWAITED_SECONDS), (B, ABSENT_SECONDS)],
    ids=["its agent is in the round", "its agent is absent"],
)
def test_store_of_torchs_agents_is_awaited_for_a_limited_time(
    rounds: Rounds, agents_store: int, other: NodeDesc, limit_seconds: float
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A)
    held = assignment(1, A, A, other)
    rounds.silent = True
    assert masters.publish(held, limit_seconds - 0.1) is None
    assert rounds.published(1) is None
    assert masters.silent
    info = masters.publish(held, limit_seconds)
    assert info is not None
    assert info.master_port != agents_store
    assert not masters.silent
    masters.close()


def test_store_of_torchs_agents_that_answers_late_is_kept(
    rounds: Rounds, agents_store: int
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A, LASTING)
    held = assignment(1, A, A, HOST)
    rounds.silent = True
    assert masters.publish(held, 0.0) is None
    rounds.silent = False
    assert publish(masters, held).master_port == agents_store
    assert masters.shared


@pytest.mark.parametrize("error", [TimeoutError, OSError, UnicodeError, ConnectionRefusedError])
def test_unreachable_store_of_torchs_agents_is_replaced_at_once(
    rounds: Rounds, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def connect(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(socket, "create_connection", connect)
    master_address.publish(rounds.store(0), B.addr, 29500)
    assert publish(rounds.masters(A, LASTING), assignment(1, A, A, B)) == LASTING


def test_backend_store_is_awaited_for_a_limited_time(rounds: Rounds) -> None:
    masters = rounds.masters(A, LASTING)
    held = assignment(0, A, A, B)
    rounds.silent = True
    assert masters.publish(held, AWAITED_SECONDS - 0.1) is None
    rounds.silent = False
    assert publish(masters, held) == LASTING
    rounds.silent = True
    assert masters.publish(held, AWAITED_SECONDS) not in (None, LASTING)
    masters.close()


def test_silent_store_of_a_silent_torch_rank_0_is_awaited(
    rounds: Rounds, agents_store: int
) -> None:
    master_address.publish(rounds.store(0), HOST.addr, agents_store)
    masters = rounds.masters(A)
    held = assignment(1, A, HOST, A)
    rounds.silent = True
    assert masters.find(held, SILENT_SECONDS) is None
    rounds.silent = False
    assert masters.find(held, SILENT_SECONDS) == RendezvousStoreInfo(HOST.addr, agents_store)


@pytest.mark.parametrize("port", ["0", "65536", "-1", "many"])
def test_invalid_port_is_an_error(rounds: Rounds, port: str) -> None:
    rounds.store(0).set("MASTER_ADDR", b"a")
    rounds.store(0).set("MASTER_PORT", port.encode())
    with pytest.raises(RendezvousStateError, match=port):
        rounds.published(0)
