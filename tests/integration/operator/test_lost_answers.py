"""Operator when the API server's answers are lost: a real server, behind a proxy."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def terminated_while_it_writes(
    ns: Namespace, etcd: EtcdServer, operator: Operator, proxy: CuttingProxy
) -> Iterator[None]:
    """Send SIGTERM while the answer to the write of a status is held back until the end."""
    agents = running(ns, etcd, 2)
    with proxy.hold(tells_of_round_2):
        agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
        wait_until(lambda: proxy.lost == 1, "the status", SECONDS)
        operator.signal(signal.SIGTERM)
        waits = "stopping after 1 reconcile in progress"
        wait_until(lambda: waits in operator.log.read_text(), "the wait for the reconcile", SECONDS)
        yield


def test_terminated_operator_posts_events_of_written_status(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator, proxy: CuttingProxy
) -> None:
    """The operator's successor finds the status up to date, and has no event to post."""
    with terminated_while_it_writes(ns, newest_etcd, operator, proxy):
        process = operator.process
        assert process is not None
        assert process.poll() is None
        assert lease_holder(ns), "it must not begin beside its successor"
    assert process.wait(SECONDS) == 0
    assert any("round 2 is final" in text for _, text in ns.events())
    assert not lease_holder(ns)


def test_second_sigterm_ends_the_operator_and_its_lease_expires(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator, proxy: CuttingProxy
) -> None:
    with terminated_while_it_writes(ns, newest_etcd, operator, proxy):
        assert operator.stop() == 0
        assert lease_holder(ns), "the API server may still process the request"
    log = operator.log.read_text()
    assert "received SIGTERM, stopping at once" in log
    assert "work was cancelled, the Lease will expire" in log


def lease_holder(ns: Namespace) -> str:
    """Return the holder of the operator's Lease; empty if it is free."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{ns.name}/leases/elasticjob-operator"
    return ns.server.request("GET", path)["spec"].get("holderIdentity") or ""


def tells_of_round_2(line: str, body: bytes) -> bool:
    """Return True for the write of a status that lists round 2: a status may show its number in
    `rendezvous` before, as its records are written one after the other."""
    if not line.startswith("PATCH") or "/status" not in line:
        return False
    rounds = json.loads(body)["status"].get("rounds") or ()
    return any(found["round"] == 2 for found in rounds)
