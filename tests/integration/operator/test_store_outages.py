"""Etcd that refuses writes or is away, in a job's status, its events and its explanation."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.records.agent_reports import AgentReport
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from elasticjob_rendezvous.protocol.store_trouble import StoreState, StoreTrouble
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.full_etcd import NO_SPACE, SMALL, empty, fill
from tests.integration.operator.agent_records import running
from tests.integration.operator.fake_agents import FakeAgent, Gang
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in

KIND = "RendezvousUnavailable"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), arguments=[SMALL])
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def ns(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> Iterator[Namespace]:
    replica = Operator(tmp_path, api_server, etcd, options=alone_in(namespace))
    with replica.running():
        yield Namespace(api_server, namespace)


def told(ns: Namespace, reason: str) -> list[str]:
    """Return the messages of the job's events of that reason."""
    return [message for found, message in ns.events() if found == reason]


def explained(ns: Namespace, text: str) -> None:
    def said() -> str:
        return " ".join(ns.status().get("explanation") or ())

    wait_until(lambda: text in said(), f"{text!r} explained", SECONDS)


def test_full_then_unreachable_etcd_is_reported_once_each_with_its_end(
    ns: Namespace, etcd: EtcdServer
) -> None:
    running(ns, etcd, 2)
    ns.await_condition(KIND, "Available")
    assert not ns.condition(KIND)["message"], "nothing is said of an etcd never in trouble"

    fill(etcd)
    found = ns.await_condition(KIND, "EtcdRefusesWrites")
    assert (found["status"], found["message"]) == (
        "True", f"etcd at {etcd.url} refuses writes: {NO_SPACE}"
    )  # fmt: skip
    explained(ns, NO_SPACE)
    explained(ns, "etcdctl alarm disarm")
    assert ns.status()["storeRefusal"] == {"reason": "NoSpace", "message": found["message"]}
    empty(etcd)
    found = ns.await_condition(KIND, "Available")
    assert "storeRefusal" not in ns.status()
    assert found["status"] == "False"
    assert found["message"].startswith("etcd can be used again after ")
    wait_until(lambda: len(told(ns, "RendezvousAvailable")) == 1, "its end as an event", SECONDS)
    assert len(told(ns, "EtcdRefusesWrites")) == 1
    assert NO_SPACE not in " ".join(ns.status()["explanation"])

    etcd.pause()
    try:
        found = ns.await_condition(KIND, "EtcdUnreachable")
        assert f"etcd at {etcd.url} cannot be reached: " in found["message"]
        assert ns.status()["phase"] == "Running"
    finally:
        etcd.resume()
    ns.await_condition(KIND, "Available")
    wait_until(lambda: len(told(ns, "RendezvousAvailable")) == 2, "its end as an event", SECONDS)
    assert len(told(ns, "EtcdUnreachable")) == 1
    ns.await_status(phase="Running")


def suspend_unrecorded(ns: Namespace, reason: str = "EtcdRefusesWrites") -> None:
    """Suspend the job while etcd refuses to record it, or is away."""
    ns.await_condition(KIND, reason)
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_status(phase="Suspended", pods=0)


def test_job_is_suspended_while_etcd_refuses_writes_and_closed_later(
    ns: Namespace, etcd: EtcdServer
) -> None:
    running(ns, etcd, 2)
    fill(etcd)
    try:
        suspend_unrecorded(ns)
        ns.await_pods()
        assert ns.status()["rendezvous"]["state"] == "final"
    finally:
        empty(etcd)
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "closed", "the end", SECONDS)
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    ns.await_pods("job-0", "job-1")


def test_resumption_while_etcd_refuses_writes_waits_for_the_record_of_the_suspension(
    ns: Namespace, etcd: EtcdServer
) -> None:
    running(ns, etcd, 2)
    fill(etcd)
    try:
        suspend_unrecorded(ns)
        ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
        recorded = "the job is resumed once its suspension is recorded"
        wait_until(lambda: ns.condition("Suspended")["message"] == recorded, "the wait", SECONDS)
        assert ns.status()["phase"] == "Suspended"
        assert ns.pods() == []
    finally:
        empty(etcd)
    ns.await_pods("job-0", "job-1")
    ns.await_status(phase="Pending")
    assert "Resumed" in [reason for reason, _ in ns.events()]
    labels = ns.present("pods", "job-0")["metadata"]["labels"]
    assert labels["elasticjob.dev/incarnation"] == "2"
    assert ns.status()["interruptions"]["losses"] == 0


def test_resumption_while_etcd_is_away_waits_for_the_record_of_the_suspension(
    ns: Namespace, etcd: EtcdServer
) -> None:
    """The suspension may or may not have been recorded: the operator cannot read that."""
    running(ns, etcd, 2)
    etcd.kill()
    try:
        suspend_unrecorded(ns, "EtcdUnreachable")
        ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
        readable = "the job is resumed once its etcd can be read"
        wait_until(lambda: ns.condition("Suspended")["message"] == readable, "the wait", SECONDS)
        assert ns.status()["phase"] == "Suspended"
        assert ns.pods() == []
    finally:
        etcd.start()
    ns.await_pods("job-0", "job-1")
    ns.await_status(phase="Pending")
    labels = ns.present("pods", "job-0")["metadata"]["labels"]
    assert labels["elasticjob.dev/incarnation"] == "2"
    assert ns.status()["interruptions"]["losses"] == 0


def test_outage_seen_only_by_agents_is_reported_with_pod_names(
    ns: Namespace, etcd: EtcdServer
) -> None:
    agents = running(ns, etcd, 2)
    secret = ns.get("secrets", "job-elasticjob")
    assert secret is not None
    job_key = base64.b64decode(secret["data"]["job-key"])
    text = "etcdserver: permission denied"
    trouble = StoreTrouble("etcd", StoreState.REFUSING, "etcd:2379", text, 1_000)
    with ExitStack() as stack:
        answering = []
        for name, uid in agents.members.items():
            agent = stack.enter_context(FakeAgent(uid, job_key).answering())
            agent.says = AgentReport("etcd", uid, {})
            ns.set_pod(name, podIP=agent.address, podIPs=[{"ip": agent.address}])
            answering.append(agent)
        wait_until(lambda: all(agent.asked for agent in answering), "a question each", SECONDS)
        answering[1].says = AgentReport("etcd", answering[1].uid, {}, store=trouble)
        found = ns.await_condition(KIND, "EtcdRefusesWrites")
        assert found["message"] == f"etcd at etcd:2379 refuses writes: {text} (reported by job-1)"
        answering[1].says = AgentReport("etcd", answering[1].uid, {})
        ns.await_condition(KIND, "Available")
    agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
    wait_until(lambda: ns.status()["rendezvous"]["round"] == 2, "round 2", SECONDS)


def test_c10d_store_unreachable_for_agents_is_reported(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous={"backend": "C10d"})
    ns.await_pods("job-0", "job-1")
    gang = Gang(ns)
    trouble = StoreTrouble("the c10d store", StoreState.UNREACHABLE, "job-0:29400", "gone", 1_000)
    with gang.of("job-0"), gang.of("job-1") as agent:
        gang.seal(1)
        ns.await_status(phase="Running")
        before = agent.says
        agent.says = AgentReport(
            before.backend, before.member, before.records, before.state, trouble
        )
        found = ns.await_condition(KIND, "StoreUnreachable")
        assert "the c10d store at job-0:29400 cannot be reached: gone" in found["message"]
        agent.says = before
        ns.await_condition(KIND, "Available")
