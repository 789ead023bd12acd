"""Handler on an in-memory backend: results and errors for its callers."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.dynamic import DynamicRendezvousHandler, create_handler, wire
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout
from elasticjob_rendezvous.dynamic.core.state import OUR_LOCAL_IDS, NodeDesc, State, completed
from elasticjob_rendezvous.dynamic.handler import new_node
from elasticjob_rendezvous.dynamic.master_address import Sharing
from elasticjob_rendezvous.dynamic.stores import PrefixedStore
from tests.unit.rendezvous.dynamic.builders import UTC_NOW, MemoryBackend, MemoryStore


class Gang:
    """Handlers that share a backend and a store, joined in threads."""

    def __init__(self, **settings: Any) -> None:
        self.backend = MemoryBackend()
        self.store = MemoryStore()
        self.settings = {"min_nodes": 2, "max_nodes": 2, "last_call_timeout": 1, **settings}
        self.handlers: list[DynamicRendezvousHandler] = []
        self.pool = ThreadPoolExecutor(16)

    def handler(self, name: str = "", **settings: Any) -> DynamicRendezvousHandler:
        chosen = {**self.settings, **settings}
        address = name or f"node-{len(self.handlers)}"
        parameters = RendezvousParameters("memory", "", "run", local_addr=address, **chosen)
        made = create_handler(self.store, self.backend, parameters)
        self.handlers.append(made)
        return made

    def join(self, *handlers: DynamicRendezvousHandler) -> list[Future[RendezvousInfo]]:
        return [self.pool.submit(handler.next_rendezvous) for handler in handlers]

    def joined(self, *handlers: DynamicRendezvousHandler) -> list[RendezvousInfo]:
        return [future.result(60) for future in self.join(*handlers)]

    @property
    def state(self) -> State:
        assert self.backend.stored is not None
        return wire.decode(self.backend.stored[0])

    @state.setter
    def state(self, state: State) -> None:
        index = self.backend.stored[1] + 1 if self.backend.stored else 1
        self.backend.stored = (wire.encode(state), index)


@pytest.fixture
def gang():
    gangs: list[Gang] = []

    def make(**settings: Any) -> Gang:
        gangs.append(Gang(**settings))
        return gangs[-1]

    yield make
    for each in gangs:
        each.backend.fails.clear()
        for handler in each.handlers:
            handler.shutdown()
        each.pool.shutdown()


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)


def test_ranks_store_and_master_of_a_round(gang) -> None:
    g = gang()
    one, two = g.joined(g.handler("node-10"), g.handler("node-2"))
    assert (one.rank, two.rank) == (1, 0)
    assert (one.world_size, one.round) == (2, 0)
    assert one.bootstrap_store_info == two.bootstrap_store_info
    assert one.bootstrap_store_info.master_addr == "node-2"
    assert isinstance(one.store, PrefixedStore)
    one.store.set("key", b"value")
    assert two.store.get("key") == b"value"
    assert g.store.values["torch.rendezvous.run.0/key"] == b"value"


def test_every_round_has_its_own_master_port(gang) -> None:
    g = gang()
    two = [g.handler(), g.handler()]
    first, second = g.joined(*two), g.joined(*two)
    assert [info.round for info in first + second] == [0, 0, 1, 1]
    ports = {info.bootstrap_store_info.master_port for info in first + second}
    assert len(ports) == 2
    assert g.store.values["torch.rendezvous.run.1/MASTER_ADDR"] == b"node-0"


def test_newcomer_waits_and_is_seen_by_the_others(gang) -> None:
    g = gang(max_nodes=3)
    two = [g.handler(), g.handler()]
    g.joined(*two)
    newcomer = g.handler()
    (waiting,) = g.join(newcomer)
    until(lambda: two[0].num_nodes_waiting() == 1, "the newcomer")
    infos = g.joined(*two)
    assert [info.world_size for info in [*infos, waiting.result(60)]] == [3, 3, 3]


def test_surplus_node_stands_by_and_replaces_a_lost_one(gang) -> None:
    g = gang(join_timeout=1)
    two = [g.handler(), g.handler()]
    g.joined(*two)
    spare = g.handler()
    (standing_by,) = g.join(spare)
    until(lambda: bool(g.state.redundancy_list), "the third to stand by")
    assert two[0].num_nodes_waiting() == 0
    began = time.monotonic()
    until(lambda: time.monotonic() > began + 1.5, "the join timeout, which is not for it")
    assert not standing_by.done()
    two[0].leave()
    until(lambda: two[1].num_nodes_waiting() == 1, "the third to step in")
    info = g.joined(two[1])[0]
    assert {info.rank, standing_by.result(60).rank} == {0, 1}


def test_spare_node_ends_gracefully_when_the_rendezvous_closes(gang) -> None:
    g = gang()
    two = [g.handler(), g.handler()]
    g.joined(*two)
    (standing_by,) = g.join(g.handler())
    until(lambda: bool(g.state.redundancy_list), "the third to stand by")
    two[0].set_closed()
    with pytest.raises(RendezvousGracefulExitError):
        standing_by.result(60)


def test_close_applies_to_all_nodes(gang) -> None:
    g = gang()
    two = [g.handler(), g.handler()]
    g.joined(*two)
    assert not two[1].is_closed()
    assert two[0].shutdown()  # it has a place: the end of the job
    until(two[1].is_closed, "the other one to see it")
    for handler in (*two, g.handler()):
        with pytest.raises(RendezvousClosedError, match="'run' is closed"):
            handler.next_rendezvous()


def test_shutdown_without_close_on_shutdown_closes_nothing(gang) -> None:
    g = gang(close_on_shutdown="false")
    two = [g.handler(), g.handler()]
    g.joined(*two)
    assert two[0].shutdown()
    assert not g.state.closed
    until(lambda: two[1].num_nodes_waiting() == 1, "the loss to be seen")


def test_too_few_nodes_time_out_and_are_removed(gang) -> None:
    g = gang(join_timeout=1)
    with pytest.raises(RendezvousTimeoutError, match="1 of 2 nodes"):
        g.handler().next_rendezvous()
    assert g.state.participants == {}
    assert g.state.last_heartbeats == {}


def test_shutdown_cancels_a_join_and_closes_nothing(gang) -> None:
    g = gang()
    handler = g.handler()
    (joining,) = g.join(handler)
    until(lambda: g.backend.stored is not None, "the join")
    assert handler.shutdown()
    with pytest.raises(RendezvousGracefulExitError):
        joining.result(60)
    assert not g.state.closed
    assert g.state.participants == {}
    with pytest.raises(RendezvousGracefulExitError):
        handler.next_rendezvous()


def test_shutdown_in_the_joining_thread_does_not_block(gang) -> None:
    """A signal handler calls it in this way."""
    g = gang()
    handler = g.handler()
    get_state = g.backend.get_state

    def interrupted() -> Any:
        if g.backend.gets == 3:
            assert handler.shutdown()
        return get_state()

    g.backend.get_state = interrupted
    with pytest.raises(RendezvousGracefulExitError):
        handler.next_rendezvous()
    assert not g.state.knows(handler._node)


def test_shutdown_while_the_backend_is_unreachable_cancels_the_join(gang) -> None:
    g = gang()
    g.backend.reconnects = True
    handler = g.handler()
    g.backend.fails = [RendezvousConnectionError("away")] * 1000
    (joining,) = g.join(handler)
    until(lambda: len(g.backend.fails) < 999, "a second try")
    shutting = g.pool.submit(handler.shutdown)
    until(lambda: handler._actor.leaving, "the shutdown to begin")
    with pytest.raises(RendezvousGracefulExitError):
        joining.result(60)
    assert shutting.result(60)


def test_exception_of_a_signal_handler_removes_the_node(gang) -> None:
    g = gang()
    handler = g.handler()
    (joining,) = g.join(handler)
    until(lambda: g.backend.stored is not None, "the join")
    g.backend.fails = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        joining.result(60)
    assert g.state.participants == {}


def test_local_failure_leaves_the_rendezvous_open(gang) -> None:
    g = gang(min_nodes=1, max_nodes=2)
    two = [g.handler(), g.handler()]
    g.joined(*two)
    two[0].leave()
    until(lambda: two[1].num_nodes_waiting() == 1, "the loss to be seen")
    info = g.joined(two[1])[0]
    assert (info.world_size, info.round) == (1, 1)


def test_removed_node_detects_that_it_must_rejoin(gang) -> None:
    g = gang()
    two = [g.handler(), g.handler()]
    g.joined(*two)
    lost = next(node for node in g.state.participants if node.host == "node-0")
    g.state = replace(
        g.state,
        participants={n: r for n, r in g.state.participants.items() if n != lost},
        last_heartbeats={n: t for n, t in g.state.last_heartbeats.items() if n != lost},
    )
    until(lambda: two[0].num_nodes_waiting() == 1, "its own loss")
    assert {info.round for info in g.joined(*two)} == {1}


def test_round_that_lost_a_node_is_not_started(gang) -> None:
    g = gang(min_nodes=1, max_nodes=3)
    handler = g.handler("node-1")
    (joining,) = g.join(handler)
    until(lambda: g.backend.stored is not None and bool(g.state.participants), "the join")
    gone = NodeDesc("node-0", 1, OUR_LOCAL_IDS)
    whole = completed(replace(g.state, participants={gone: 0, **g.state.participants}))
    g.state = replace(whole, participants={n: 1 for n in whole.participants if n != gone})
    info = joining.result(60)
    assert (info.rank, info.world_size, info.round) == (0, 1, 1)


def test_master_that_dies_before_publishing_is_not_waited_for(gang) -> None:
    g = gang(min_nodes=1, max_nodes=2, keep_alive_interval=1)
    dead = NodeDesc("node-0", 1, OUR_LOCAL_IDS)
    g.state = State(participants={dead: 0}, last_heartbeats={dead: UTC_NOW})
    info = g.joined(g.handler("node-1"))[0]  # rank 1 at first; rank 0 never publishes
    assert (info.rank, info.world_size, info.round) == (0, 1, 1)


def test_live_master_that_publishes_nothing_is_named(gang) -> None:
    g = gang(min_nodes=2, max_nodes=2)
    settings = g.handler().settings
    handler = DynamicRendezvousHandler(
        new_node("node-1"), settings, g.backend, g.store, publish_seconds=0.3
    )
    g.handlers[:] = [handler]
    silent = NodeDesc("node-0", 1, OUR_LOCAL_IDS)
    g.state = State(participants={silent: 0}, last_heartbeats={silent: UTC_NOW})
    with pytest.raises(RendezvousTimeoutError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        handler.next_rendezvous()
    assert set(g.state.participants) == {silent}
    assert handler.shutdown()
    assert not g.state.closed  # it never had a round


def test_invalid_master_address_is_refused(gang) -> None:
    g = gang()
    silent = NodeDesc("node-0", 1, OUR_LOCAL_IDS)
    g.state = State(round=1, participants={silent: 0}, last_heartbeats={silent: UTC_NOW})
    g.store.values["torch.rendezvous.run.1/MASTER_ADDR"] = b"node-0"
    g.store.values["torch.rendezvous.run.1/MASTER_PORT"] = b"many"
    handler = g.handler("node-1")
    handler._actor.least_round = 1  # not a new node, which would not use these keys
    with pytest.raises(RendezvousStateError, match="invalid address or port"):
        handler.next_rendezvous()


def test_heartbeats_continue_between_rounds(gang) -> None:
    g = gang(min_nodes=1, max_nodes=1, keep_alive_interval=1)
    g.handler().next_rendezvous()
    first = g.state.last_heartbeats
    until(lambda: g.state.last_heartbeats != first, "a heartbeat")
    g.backend.fails = [RendezvousConnectionError("away"), ZeroDivisionError("a bug")]
    until(lambda: not g.backend.fails, "two heartbeats to fail")
    second = g.state.last_heartbeats
    until(lambda: g.state.last_heartbeats != second, "a heartbeat after the failed ones")


def test_dropped_handler_stops_its_heartbeats(gang) -> None:
    g = gang(min_nodes=1, max_nodes=1, keep_alive_interval=1)
    handler = g.handler()
    handler.next_rendezvous()
    g.handlers.clear()
    there, threads = weakref.ref(handler), threading.active_count()
    del handler
    gc.collect()
    until(lambda: there() is None, "the handler to go")
    until(lambda: threading.active_count() < threads, "its thread to end")


@pytest.mark.parametrize("reconnects", [True, False])
def test_unreachable_backend_is_retried_only_if_it_can_return(gang, reconnects: bool) -> None:
    g = gang(min_nodes=1, max_nodes=1)
    g.backend.reconnects = reconnects
    handler = g.handler()
    g.backend.fails = [RendezvousConnectionError("away"), RendezvousConnectionError("away")]
    if reconnects:
        assert handler.next_rendezvous().rank == 0
    else:
        with pytest.raises(RendezvousConnectionError, match="away"):
            handler.next_rendezvous()


def test_outage_is_logged_at_its_two_ends(gang, caplog) -> None:
    g = gang(min_nodes=1, max_nodes=1)
    g.backend.reconnects = True
    handler = g.handler(heartbeat_timeout=1, keep_alive_interval=600)
    handler.next_rendezvous()
    handler._actor.shared.beat_at = float("-inf")  # a heartbeat is due
    caplog.set_level(logging.INFO)
    caplog.clear()
    g.backend.fails = [RendezvousConnectionError("away")] * 1000
    handler._beat()
    handler._beat()
    g.backend.fails = []
    handler._beat()
    handler._beat()
    logged = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert logged == ["a heartbeat failed: away", "heartbeats succeed again"]


def test_corrupt_state_is_an_error(gang) -> None:
    g = gang()
    g.backend.stored = (b"garbage", 1)
    handler = g.handler()
    for call in (handler.next_rendezvous, handler.is_closed, handler.num_nodes_waiting):
        with pytest.raises(RendezvousStateError, match="corrupt"):
            call()
    assert not handler.shutdown()


def test_round_numbers_continue_when_the_store_lost_its_data(gang) -> None:
    g = gang()
    two = [g.handler(), g.handler()]
    g.joined(*two)
    g.backend.stored = None
    until(lambda: two[0].num_nodes_waiting() == 1, "the loss to be seen")
    assert {info.round for info in g.joined(*two)} == {1}


def test_many_concurrent_nodes_agree(gang) -> None:
    g = gang(min_nodes=12, max_nodes=12)
    infos = g.joined(*(g.handler() for _ in range(12)))
    assert [info.rank for info in infos] == list(range(12))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"join_timeout": "soon"}, "join_timeout"),
        ({"last_call_timeout": 0}, "last_call"),
        ({"heartbeat_timeout": -1}, "heartbeat"),
        ({"close_timeout": "0"}, "close"),
        ({"keep_alive_interval": None}, "keep_alive_interval"),
        ({"keep_alive_max_attempt": 0}, "keep_alive_max_attempt"),
        ({"join_timeout": 10**15}, "'join_timeout' must be at most"),
        ({"last_call_timeout": 10**12}, "'last_call_timeout' must be at most"),
        ({"keep_alive_interval": str(10**12)}, "'keep_alive_interval' must be at most"),
        ({"close_on_shutdown": "maybe"}, "close_on_shutdown"),
        ({"local_addr": "x", "run_id": ""}, "run id"),
    ],
)
def test_invalid_setting_is_named(settings: dict, named: str) -> None:
    chosen = {"run_id": "run", **settings}
    parameters = RendezvousParameters("c10d", "", min_nodes=1, max_nodes=1, **chosen)
    with pytest.raises(ValueError, match=named):
        create_handler(MemoryStore(), MemoryBackend(), parameters)


def test_times_of_centuries_are_no_limit() -> None:
    names = ("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout")
    settings = dict.fromkeys((*names, "keep_alive_interval"), 10**10)
    parameters = RendezvousParameters("c10d", "", "run", 1, 2, "a", **settings)
    with ThreadPoolExecutor(1) as pool:
        handler = create_handler(MemoryStore(), MemoryBackend(), parameters)
        joining = pool.submit(handler.next_rendezvous)
        until(lambda: handler._actor.shared.state.deadline is not None, "the last call")
        assert handler.shutdown()
        with pytest.raises(RendezvousGracefulExitError):
            joining.result()
    parameters = RendezvousParameters("c10d", "", "run", 1, 1, "a", **settings)
    handler = create_handler(MemoryStore(), MemoryBackend(), parameters)
    assert handler.next_rendezvous().world_size == 1
    assert handler.shutdown()


def test_defaults_match_torch() -> None:
    parameters = RendezvousParameters("c10d", "", "run", 1, 4)
    settings = create_handler(MemoryStore(), MemoryBackend(), parameters).settings
    assert settings.timeout.join == timedelta(seconds=600)
    assert settings.keep_alive_interval == timedelta(seconds=5)
    assert settings.keep_alive_max_attempt == 3


class SlowStore:
    """Torch's shared store, which does not answer the first `silent` requests."""

    def __init__(self, silent: int) -> None:
        self.left = silent

    def empty(self, address: str, port: int) -> None:
        self.left -= 1
        if self.left >= 0:
            raise RendezvousTimeoutError(f"the store at {address}:{port} failed to answer")


def beside_torch(g: Gang, store: SlowStore) -> DynamicRendezvousHandler:
    """Return a handler of ours whose first round has one of torch's nodes."""
    theirs = NodeDesc("theirs", 1, 0)
    g.state = State(participants={theirs: 0}, last_heartbeats={theirs: UTC_NOW})
    made = DynamicRendezvousHandler(
        new_node("ours"),
        RendezvousSettings("run", 2, 2, RendezvousTimeout(), timedelta(seconds=5), 3),
        g.backend,
        g.store,
        sharing=Sharing(store.empty, RendezvousStoreInfo("host", 29400)),
    )
    g.handlers.append(made)
    return made


def test_rank_0_waits_for_the_store_of_torchs_nodes(gang) -> None:
    g = gang()
    (info,) = g.joined(beside_torch(g, SlowStore(silent=3)))
    assert info.rank == 0
    assert info.bootstrap_store_info == RendezvousStoreInfo("host", 29400)


@pytest.mark.parametrize(
    ("call", "printed"),
    [("time.sleep(0.2); print('ended')", "ended\n"), ("time.sleep(1000)", "")],
    ids=["short", "endless"],
)
def test_process_ends_after_a_heartbeat_in_progress(call: str, printed: str) -> None:
    """A thread that returns from torch's store while the interpreter ends aborts the process."""
    code = f"""
import threading, time
from elasticjob_rendezvous.dynamic.handler import Heartbeats
class Owner: pass
def beat(owner):
    begun.set()
    {call}
    return 60.0
begun, owner = threading.Event(), Owner()
heartbeats = Heartbeats(owner, beat, 0.0)
begun.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=240
    )
    assert (done.stdout, done.stderr) == (printed, "")
