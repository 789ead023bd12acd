"""Operator when the API server's answers are lost: a real server, behind a proxy."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.agent_records import running
from tests.integration.operator.dropping_proxy import CuttingProxy
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in


@pytest.fixture
def proxy(api_server: ApiServer) -> Iterator[CuttingProxy]:
    with CuttingProxy(api_server).running() as found:
        yield found


@pytest.fixture
def operator(
    tmp_path: Path,
    api_server: ApiServer,
    newest_etcd: EtcdServer,
    namespace: str,
    proxy: CuttingProxy,
) -> Iterator[Operator]:
    options = {
        **alone_in(namespace),
        "KUBECONFIG": str(api_server.kubeconfig(url=proxy.url)),
    }
    with Operator(tmp_path, api_server, newest_etcd, options=options).running() as replica:
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def test_round_event_is_posted_once_despite_lost_status_answer(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator, proxy: CuttingProxy
) -> None:
    agents = running(ns, newest_etcd, 2)

    proxy.lose(tells_of_round_2)
    agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
    wait_until(lambda: proxy.lost == 1, "the lost answer", SECONDS)
    agents.seal(3, Cause(CauseKind.JOIN, ("job-1",)))

    def told(number: int) -> int:
        return sum(f"round {number} is final" in text for _, text in ns.events())

    wait_until(lambda: told(3) == 1, f"round 3, of {ns.events()}", SECONDS)
    assert [told(number) for number in (1, 2, 3)] == [1, 1, 1]
    assert ns.status()["rendezvous"]["round"] == 3
    assert operator.metric("elasticjob_rounds_total", cause="leave") == 1


def test_terminated_operator_posts_events_of_written_status(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator, proxy: CuttingProxy
) -> None:
    """The operator's successor finds the status up to date, and has no event to post."""
    agents = running(ns, newest_etcd, 2)
    with proxy.hold(tells_of_round_2):
        agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
        wait_until(lambda: proxy.lost == 1, "the status", SECONDS)
        operator.signal(signal.SIGTERM)
        process = operator.process
        assert process is not None
        with suppress(TimeoutError):  # long enough for one that does not wait
            wait_until(lambda: process.poll() is not None, "its end", 1.0)
    assert process.wait(SECONDS) == 0
    assert any("round 2 is final" in text for _, text in ns.events())


def tells_of_round_2(line: str, body: bytes) -> bool:
    dense = body.replace(b" ", b"")
    return line.startswith("PATCH") and "/status" in line and b'"round":2' in dense
