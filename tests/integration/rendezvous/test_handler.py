"""V3 rendezvous behind torch's `RendezvousHandler` API, on a real etcd."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler, create_handler
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from tests.integration.certificates import Certificates
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer

DEADLINE_SECONDS = 60.0
Make = Callable[..., EtcdV3RendezvousHandler]


@pytest.fixture
def make(newest_etcd: EtcdServer, request: pytest.FixtureRequest) -> Iterator[Make]:
    """Yield a function that makes handlers of one run; all are shut down with the test."""
    with ExitStack() as stack:

        def make_handler(name: str, low: int = 2, high: int = 2, **config: Any) -> Any:
            endpoint = config.pop("endpoint", newest_etcd.url)
            handler = create_handler(
                RendezvousParameters(
                    "elasticjob",
                    endpoint,
                    config.pop("run_id", request.node.name),
                    low,
                    high,
                    local_addr="127.0.0.1",
                    node_name=name,
                    keep_alive_seconds=10,
                    **config,
                )
            )
            stack.callback(handler.shutdown)
            return handler

        yield make_handler


def together(*handlers: EtcdV3RendezvousHandler) -> list[RendezvousInfo]:
    """Rendezvous with all handlers at once; return the infos in their order."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        futures = [pool.submit(handler.next_rendezvous) for handler in handlers]
        return [future.result(DEADLINE_SECONDS) for future in futures]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.01)


def test_two_nodes_get_ranks_world_size_and_one_master(make: Make) -> None:
    first, second = make("n-0"), make("n-1")
    a, b = together(first, second)
    assert (a.rank, b.rank, a.world_size, b.world_size) == (0, 1, 2, 2)
    assert a.bootstrap_store_info == b.bootstrap_store_info
    assert a.bootstrap_store_info.master_addr == "127.0.0.1"
    assert a.bootstrap_store_info.master_port > 0
    assert (first.get_backend(), first.use_agent_store) == ("elasticjob", False)
    assert first.get_run_id() == "test_two_nodes_get_ranks_world_size_and_one_master"
    assert (first.num_nodes_waiting(), first.is_closed()) == (0, False)


def test_newcomer_counts_as_waiting_and_next_round_has_new_master(make: Make) -> None:
    first, second = (make(name, 2, 3, last_call_timeout=0.2) for name in ("n-0", "n-1"))
    before, _ = together(first, second)
    newcomer = make("n-2", 2, 3)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(newcomer.next_rendezvous)
        until(lambda: first.num_nodes_waiting() > 0, "the newcomer shows")
        until(lambda: second.num_nodes_waiting() > 0, "the newcomer shows to all")
        a, b = together(first, second)
        c = joining.result(DEADLINE_SECONDS)
    assert sorted([a.rank, b.rank, c.rank]) == [0, 1, 2]
    assert {a.world_size, b.world_size, c.world_size} == {3}
    assert a.round > before.round
    assert a.bootstrap_store_info.master_port != before.bootstrap_store_info.master_port


def test_finished_member_receives_outcome_of_run(make: Make) -> None:
    first, second = make("n-0"), make("n-1")
    together(first, second)
    first.report_done()
    with pytest.raises(TimeoutError):
        first.wait_end(0.3)
    second.report_done()
    outcome = first.wait_end(DEADLINE_SECONDS)
    assert outcome is not None
    assert outcome.kind is OutcomeKind.SUCCEEDED
    assert second.wait_end(DEADLINE_SECONDS) == outcome


def test_return_without_report_is_failure_and_finished_member_sees_new_round(
    make: Make,
) -> None:
    first, second = (make(name, 1, 2, last_call_timeout=5) for name in ("n-0", "n-1"))
    before, _ = together(first, second)
    first.report_done()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(second.next_rendezvous)
        assert first.wait_end(DEADLINE_SECONDS) is None
        first.shutdown()
        after = again.result(DEADLINE_SECONDS)
    assert (after.world_size, after.round > before.round) == (1, True)


def test_closing_ends_present_and_later_members(make: Make) -> None:
    first, second = make("n-0"), make("n-1")
    together(first, second)
    first.set_closed()
    until(second.is_closed, "the other sees it closed")
    with pytest.raises(RendezvousClosedError, match="closed"):
        second.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        make("n-2").next_rendezvous()


def test_too_few_members_time_out(make: Make) -> None:
    with pytest.raises(RendezvousTimeoutError):
        make("n-0", timeout=1.5).next_rendezvous()


def test_shutdown_ends_wait(make: Make) -> None:
    handler = make("n-0")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handler.next_rendezvous)
        until(lambda: handler.is_registered, "it waits")
        assert handler.shutdown()
        with pytest.raises(RendezvousGracefulExitError):
            waiting.result(DEADLINE_SECONDS)


def test_member_with_different_sizes_is_refused_and_others_continue(make: Make) -> None:
    first, second = make("n-0"), make("n-1")
    together(first, second)
    with pytest.raises(RendezvousStateError, match="max_nodes=5"):
        make("n-2", 2, 5).next_rendezvous()
    assert first.num_nodes_waiting() == 0


def test_unreachable_endpoint_is_reported(make: Make) -> None:
    handler = make("n-0", endpoint="127.0.0.1:1", connect_timeout=1)
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        handler.next_rendezvous()


def test_tls_works_when_first_endpoint_is_dead(
    make: Make, start_etcd: StartEtcd, certificates: Certificates
) -> None:
    server = start_etcd(certificates=certificates, client_certificates=True)
    given = {
        "endpoint": f"127.0.0.1:1,127.0.0.1:{server.port}",
        "protocol": "https",
        "cacert": str(certificates.ca_file),
        "cert": str(certificates.client.cert_file),
        "key": str(certificates.client.key_file),
    }
    a, b = together(make("n-0", **given), make("n-1", **given))
    assert {a.rank, b.rank} == {0, 1}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"protocol": "ftp"}, "protocol"),
        ({"endpoint": " , "}, "endpoint"),
        ({"timeout": "soon"}, "timeout"),
        ({"slots": "two"}, "slots"),
    ],
)
def test_invalid_setting_is_reported(make: Make, setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make("n-0", **setting)


def test_shutdown_leaves_no_thread(make: Make) -> None:
    first, second = make("n-0"), make("n-1")
    together(first, second)
    assert first.shutdown()
    assert second.shutdown()
    assert second.shutdown(), "twice is no error"
    assert not [t for t in threading.enumerate() if t.name == "elasticjob-rendezvous"]
