"""Jobs on torch's own backends: their agents alone know the rendezvous, and the test plays them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.members import CauseKind, Outcome, OutcomeKind
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.fake_agents import Gang
from tests.integration.operator_rig import SECONDS, Namespace, Operator

V2 = "http://etcd-v2:2379"
C10D = {"backend": "C10d"}


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory, api_server: ApiServer, newest_etcd: EtcdServer
) -> Iterator[Operator]:
    folder = tmp_path_factory.mktemp("operator")
    options = {"ELASTICJOB_ALLOWED_ENDPOINTS": V2}
    replica = Operator(folder, api_server, newest_etcd, options=options)
    with replica.running():
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def told(ns: Namespace, name: str) -> dict[str, str]:
    """Return the literal environment of a pod's agent."""
    raw = ns.get("pods", name)
    assert raw is not None
    [agent] = [one for one in raw["spec"]["initContainers"] if one["name"] == "elasticjob-agent"]
    return {one["name"]: one.get("value", "") for one in agent["env"]}


def uid(ns: Namespace, name: str) -> str:
    raw = ns.get("pods", name)
    return "" if raw is None else str(raw["metadata"]["uid"])


def ended(ns: Namespace, name: str, code: int) -> None:
    """Report the end of the pod's trainer with this code."""
    end = {"exitCode": code, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": _now()}
    status = {
        "name": "trainer", "image": "trainer:1", "imageID": "", "ready": False, "restartCount": 0,
        "state": {"terminated": end},
    }  # fmt: skip
    phase = "Succeeded" if code == 0 else "Failed"
    conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": _now()}]
    ns.set_pod(name, phase=phase, containerStatuses=[status], conditions=conditions)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def test_c10d_pods_find_store_by_name(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    keeper, other = told(ns, "job-0"), told(ns, "job-1")
    assert keeper["ELASTICJOB_ENDPOINTS"] == f"job-0.job.{ns.name}.svc:29400"
    assert other["ELASTICJOB_ENDPOINTS"] == keeper["ELASTICJOB_ENDPOINTS"]
    assert (keeper["ELASTICJOB_STORE_HOST"], other["ELASTICJOB_STORE_HOST"]) == ("true", "false")
    assert keeper["ELASTICJOB_BOUNDS"] == other["ELASTICJOB_BOUNDS"]
    ns.await_status(phase="Pending", pods=2)


def test_status_shows_agent_reports(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    gang = Gang(ns)
    with gang.of("job-0"), gang.of("job-1"):
        gang.seal(1)
        ns.await_status(phase="Running", readyNodes=2)
        wait_until(lambda: len(ns.status()["members"]) == 2, "both members", SECONDS)
        found = ns.status()
        assert {one["pod"]: one["rank"] for one in found["members"]} == {"job-0": 0, "job-1": 1}
        shown = found["rendezvous"]
        assert (shown["state"], shown["round"], shown["nodes"]) == ("final", 1, 2)
        assert (shown["worldSize"], shown["master"]) == (2, "job-0")
        gang.seal(2, CauseKind.FAILURE)
        wait_until(lambda: ns.status()["rendezvous"]["round"] == 2, "round 2", SECONDS)
        assert [one["round"] for one in ns.status()["rounds"]] == [1, 2]
        gang.end(Outcome(OutcomeKind.SUCCEEDED))
        ns.await_status(phase="Succeeded")
        ns.await_condition("Finished", "AllWorkersSucceeded")


def test_agent_refuses_requests_not_signed_by_operator(ns: Namespace, operator: Operator) -> None:
    """An unsigned request would let any client read the job's members and tracebacks."""
    ns.create_job(minNodes=1, maxNodes=1, rendezvous=C10D)
    ns.await_pods("job-0")
    gang = Gang(ns)
    with gang.of("job-0") as agent:
        agent.job_key = b"another"
        gang.seal(1)
        wait_until(lambda: agent.asked > 2, "some questions", SECONDS)
        ns.await_status(readyNodes=1)
        assert ns.status()["phase"] == "Pending"
        wait_until(lambda: ns.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)


def test_store_pod_is_replaced_under_its_own_name(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=3, rendezvous=C10D)
    ns.await_pods("job-0", "job-1", "job-2")
    held = {"metadata": {"finalizers": ["test.dev/kubelet"]}}
    ns.server.patch(ns.path("pods", "job-0"), held)
    before = uid(ns, "job-0")
    ns.server.request("DELETE", ns.path("pods", "job-0"))
    found = ns.await_condition("PodsReady", "StoreMissing")
    assert (
        "a new job-0, which hosts the store, is created once the old one is gone"
        in found["message"]
    )
    missing = ns.status()["missingStore"]
    assert (missing["pod"], missing["reason"]) == ("job-0", "Terminating")
    begin = "The store of the rendezvous has been missing since "
    assert any(text.startswith(begin) for text in ns.status()["explanation"])
    ns.remove_pod("job-2")
    wait_until(lambda: "job-3" in ns.pods() or "job-2" in ns.pods(), "another pod", SECONDS)
    assert len(ns.pods()) == 3, "the place of the store's pod is kept"
    assert uid(ns, "job-0") == before
    ns.server.patch(ns.path("pods", "job-0"), {"metadata": {"finalizers": None}})
    wait_until(lambda: uid(ns, "job-0") not in ("", before), "a new job-0", SECONDS)
    assert told(ns, "job-0")["ELASTICJOB_STORE_HOST"] == "true"


def test_store_pod_is_created_after_the_end_of_a_foreign_pod_of_its_name(ns: Namespace) -> None:
    """The operator does not watch the foreign pod, which lacks the label."""
    container = {"name": "other", "image": "other:1"}
    foreign = {"metadata": {"name": "job-0"}, "spec": {"containers": [container]}}
    ns.server.request("POST", ns.path("pods"), foreign)
    ns.create_job(minNodes=2, maxNodes=2, rendezvous=C10D)
    ns.await_condition("PodsReady", "StoreMissing")
    before = uid(ns, "job-0")
    ns.remove_pod("job-0")
    wait_until(lambda: uid(ns, "job-0") not in ("", before), "a new job-0", SECONDS)
    assert told(ns, "job-0")["ELASTICJOB_STORE_HOST"] == "true"


def test_store_pod_that_finds_no_machine_is_explained(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    message = "0/2 nodes are available: 2 Insufficient cpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    ns.set_pod("job-0", conditions=[{**condition, "message": message}])
    wait_until(lambda: "missingStore" in ns.status(), "the missing store", SECONDS)
    missing = ns.status()["missingStore"]
    assert (missing["reason"], missing["message"]) == ("Unschedulable", message)
    [text] = [one for one in ns.status()["explanation"] if "store of the rendezvous has" in one]
    assert text.endswith(f"its pod job-0 is Pending: {message}")
    ns.patch_job({"metadata": {"labels": {"changed": "1"}}})
    ns.run_pod("job-0")
    wait_until(lambda: "missingStore" not in ns.status(), "the store", SECONDS)


def test_scale_down_spares_store_pod(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=3, rendezvous=C10D)
    ns.await_pods("job-0", "job-1", "job-2")
    for name in ("job-1", "job-2"):
        ns.run_pod(name)
    ns.await_status(readyNodes=2)
    ns.scale(1)
    ns.await_pods("job-0")


def test_pod_exit_codes_determine_outcome_without_last_report(ns: Namespace) -> None:
    """The agents' last report was not received."""
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    gang = Gang(ns)
    with gang.of("job-0"), gang.of("job-1"):
        gang.seal(1)
        ns.await_status(phase="Running")
    ended(ns, "job-0", 0)
    ended(ns, "job-1", 0)
    ns.await_status(phase="Succeeded")
    assert ns.status()["rendezvous"]["state"] == "closed"


def test_failed_agents_end_job_and_are_not_replaced(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    pods = {uid(ns, name) for name in ("job-0", "job-1")}
    gang = Gang(ns)
    with gang.of("job-0"), gang.of("job-1"):
        gang.seal(1)
        ns.await_status(phase="Running")
        ended(ns, "job-1", 1)
        ns.await_status(readyNodes=1)
        ended(ns, "job-0", 1)
    ns.await_status(phase="Failed")
    assert ns.condition("Failed")["reason"] == "WorkersFailed"
    assert {uid(ns, name) for name in ns.pods()} == pods


def test_resumed_job_has_new_incarnation(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=1, rendezvous=C10D)
    ns.await_pods("job-0")
    first = told(ns, "job-0")["ELASTICJOB_PREFIX"]
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_status(phase="Suspended", pods=0)
    ns.await_pods()
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    ns.await_pods("job-0")
    ns.await_status(phase="Pending", pods=1)
    assert told(ns, "job-0")["ELASTICJOB_PREFIX"] != first


def test_etcd_v2_endpoints_must_be_permitted_by_chart(ns: Namespace) -> None:
    ns.create_job(maxNodes=1, rendezvous={"backend": "EtcdV2"})
    found = ns.await_condition("PodsReady", "BackendUnavailable")
    assert "spec.rendezvous.endpoints must name an etcd with the v2 API" in found["message"]
    away: dict[str, Any] = {"backend": "EtcdV2", "endpoints": ["http://elsewhere:2379"]}
    ns.create_job("away", maxNodes=1, rendezvous=away)
    ns.await_condition("PodsReady", "EndpointNotAllowed", "away")
    unknown = {"backend": "EtcdV2", "endpoints": [V2], "secretName": "none"}
    ns.create_job("secret", maxNodes=1, rendezvous=unknown)
    found = ns.await_condition("PodsReady", "SecretUnusable", "secret")
    assert "there must be a Secret none" in found["message"]
    assert ns.pods() == []
    ns.create_job("good", maxNodes=1, rendezvous={"backend": "EtcdV2", "endpoints": [V2]})
    ns.await_pods("good-0")
    agent = told(ns, "good-0")
    assert (agent["ELASTICJOB_BACKEND"], agent["ELASTICJOB_ENDPOINTS"]) == ("etcd-v2", V2)
    assert "ELASTICJOB_STORE_HOST" not in agent


def test_starting_operator_keeps_status_until_agents_are_polled(
    ns: Namespace, operator: Operator
) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous=C10D)
    ns.await_pods("job-0", "job-1")
    gang = Gang(ns)
    with ExitStack() as stack:
        for name in ("job-0", "job-1"):
            stack.enter_context(gang.of(name))
        gang.seal(7)
        ns.await_status(phase="Running")
        wait_until(lambda: len(ns.status()["members"]) == 2, "both members", SECONDS)
        version = ns.job()["metadata"]["resourceVersion"]
        operator.stop()
        operator.start()
        questions = [agent.asked for agent in gang.agents.values()]
        wait_until(
            lambda: all(
                agent.asked > before + 1
                for agent, before in zip(gang.agents.values(), questions, strict=True)
            ),
            "questions",
            SECONDS,
        )
        assert ns.job()["metadata"]["resourceVersion"] == version, "the status was true all along"
        gang.seal(8, CauseKind.JOIN)
        wait_until(lambda: ns.status()["rendezvous"]["round"] == 8, "round 8", SECONDS)
        assert [one["round"] for one in ns.status()["rounds"]] == [7, 8]
