"""Reported obstacles to a job's pods outside the pods themselves, on a real API server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.template_check import check_pods
from elasticjob_operator.model import parse_manifest
from tests.integration.apiserver import Refused
from tests.integration.etcd_server import Ports, wait_until
from tests.integration.operator.admission import admission_policy, rule
from tests.integration.operator.single_operator import ns, operator
from tests.integration.operator_rig import SECONDS, Namespace

__all__ = ["ns", "operator"]

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def await_refused(ns: Namespace, reason: str, words: str) -> None:
    found = ns.await_condition("PodsReady", reason)
    assert words in found["message"]
    assert any(words in said for said in ns.status()["explanation"])
    ns.await_event(reason, found["message"])
    assert ns.pods() == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("services", "create services "),
        ("secrets", "create secrets "),
        ("count/poddisruptionbudgets.policy", "create poddisruptionbudgets "),
    ],
)
def test_quota_on_pod_resources_is_reported_and_awaited(
    ns: Namespace, what: str, words: str
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {what: "0"}}}
    ns.server.request("POST", ns.path("resourcequotas"), quota)
    counted = {"status": {"hard": {what: "0"}, "used": {what: "0"}}}
    ns.server.patch(ns.path("resourcequotas", "none") + "/status", counted)
    ns.create_job(minNodes=1, maxNodes=2)
    await_refused(ns, "QuotaExceeded", words)
    ns.server.request("DELETE", ns.path("resourcequotas", "none"))
    ns.await_pods("job-0", "job-1")
    ns.await_condition("PodsReady", "PodsStarting")


@pytest.mark.parametrize("bound", [{"max": {"memory": "32Mi"}}, {"min": {"memory": "100Mi"}}])
def test_limit_range_that_refuses_the_agent_alone_has_a_remedy(
    ns: Namespace, bound: dict[str, Any]
) -> None:
    spec = {"limits": [{"type": "Container", **bound}]}
    ns.server.request("POST", ns.path("limitranges"), {"metadata": {"name": "a"}, "spec": spec})
    command = ["python3", "train.py"]
    container: dict[str, Any] = {"name": "trainer", "image": "trainer:1", "command": command}
    if "min" in bound:
        container |= {"resources": {"requests": {"memory": "1Gi"}}}
    ns.create_job(maxNodes=2, template={"spec": {"containers": [container]}})
    await_refused(ns, "AgentResourcesRefused", "memory")
    [remedy] = [said for said in ns.status()["explanation"] if "LimitRange" in said]
    assert "or change sidecar.resources in the operator's chart" in remedy
    assert ns.condition("Stalled")["status"] == "False"
    ns.server.request("DELETE", ns.path("limitranges", "a"))
    ns.await_pods("job-0", "job-1")


def test_quota_that_demands_amounts_of_the_agent_alone_has_a_remedy(ns: Namespace) -> None:
    hard = {"limits.cpu": "10"}
    quota = {"metadata": {"name": "limits"}, "spec": {"hard": hard}}
    ns.server.request("POST", ns.path("resourcequotas"), quota)
    counted = {"status": {"hard": hard, "used": {"limits.cpu": "0"}}}
    ns.server.patch(ns.path("resourcequotas", "limits") + "/status", counted)
    container: dict[str, Any] = {"name": "trainer", "image": "i:1", "command": ["python3", "t.py"]}
    container |= {"resources": {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}}
    ns.create_job(maxNodes=2, template={"spec": {"containers": [container]}})
    words = "must specify limits.cpu for: elasticjob-agent,elasticjob-launcher"
    await_refused(ns, "AgentResourcesRefused", words)
    ns.server.request("DELETE", ns.path("resourcequotas", "limits"))
    ns.await_pods("job-0", "job-1")


def test_end_of_the_namespace_is_reported(ns: Namespace) -> None:
    ns.create_job(maxNodes=2, minNodes=1)
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    ns.server.request("DELETE", f"/api/v1/namespaces/{ns.name}")
    ns.remove_pod("job-0")
    found = ns.await_condition("PodsReady", "NamespaceTerminating")
    assert "because it is being terminated" in found["message"]
    remedy = "The job is deleted with its namespace: to continue, create it in another one."
    assert remedy in ns.status()["explanation"]


def test_preemption_policy_without_a_class_is_refused_as_by_validation(ns: Namespace) -> None:
    container = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    spec = {"containers": [container], "preemptionPolicy": "Never"}
    ns.create_job(maxNodes=2, template={"spec": spec})
    found = ns.await_condition("TemplateInvalid", "TemplateInvalid")
    [problem] = check_pods(parse_manifest(ns.job()))
    assert found["message"] == str(problem)
    assert "spec.template.spec.preemptionPolicy: must be absent" in found["message"]


@contextmanager
def unanswered(
    ns: Namespace, operation: str, plural: str, port: int, seconds: int = 1
) -> Iterator[None]:
    """Register an admission webhook for these objects whose server does not answer."""
    hook: dict[str, Any] = {
        "name": "nobody.answers.test",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/"},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "operations": [operation],
                "resources": [plural],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ns.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": seconds,
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": ns.name},
        "webhooks": [hook],
    }
    ns.server.request("POST", WEBHOOKS, body)
    try:
        yield
    finally:
        ns.server.request("DELETE", f"{WEBHOOKS}/{ns.name}")


@pytest.mark.parametrize("plural", ["pods", "services"])
def test_unreachable_admission_webhook_is_reported(
    ns: Namespace, plural: str, dead_port: int
) -> None:
    with unanswered(ns, "CREATE", plural, dead_port):
        _await_hook(ns, "POST", ns.path(plural), _probe(plural))
        ns.create_job(minNodes=1, maxNodes=2)
        await_refused(ns, "CreationRefused", "failed calling webhook")
    ns.await_pods("job-0", "job-1")
    ns.await_condition("PodsReady", "PodsStarting")


def test_silent_admission_webhook_is_reported(ns: Namespace) -> None:
    """It accepts connections, as behind a dropped route: the API server waits for 12 s."""
    ns.create_job("old", minNodes=1, maxNodes=2)
    ns.await_pods("old-0", "old-1")
    ns.await_status("old", pods=2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with unanswered(ns, "*", "pods", port, seconds=12):
            _await_hook(ns, "POST", ns.path("pods"), _probe("pods"))
            ns.create_job(minNodes=1, maxNodes=2)
            ns.patch_job({"spec": {"runPolicy": {"suspend": True}}}, "old")
            created = ns.await_condition("PodsReady", "CreationRefused")
            deleted = ns.await_condition("Suspended", "DeletionRefused", "old")
            assert "failed calling webhook" in created["message"]
            assert "failed calling webhook" in deleted["message"]


def test_policy_against_pods_is_no_fault_of_the_template(ns: Namespace) -> None:
    """Without a reason of its own the policy's denial has the status of an invalid object."""
    validation = {"expression": "false", "message": "no pods today"}
    with admission_policy(ns, "Validating", rule("", "pods", "CREATE"), validations=[validation]):
        _await_hook(ns, "POST", ns.path("pods"), _probe("pods"), status=422)
        ns.create_job(minNodes=1, maxNodes=2)
        await_refused(ns, "CreationRefused", "no pods today")
        assert ns.condition("Stalled")["status"] == "False"
    ns.await_pods("job-0", "job-1")


def test_undeletable_pods_are_reported_and_still_counted(ns: Namespace, dead_port: int) -> None:
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    with unanswered(ns, "DELETE", "pods", dead_port):
        _await_hook(ns, "DELETE", ns.path("pods", "job-0"))
        ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})

        def told() -> bool:
            begin = "job-0, job-1 cannot be deleted: Internal error occurred: failed calling"
            found = [text for reason, text in ns.events() if reason == "DeletionRefused"]
            return any(text.startswith(begin) for text in found)

        wait_until(told, f"the refusal, of {ns.events()}", SECONDS)
        status = ns.status()
        assert (status["phase"], status["pods"]["active"]) == ("Suspending", 2)
        found = ns.await_condition("Suspended", "DeletionRefused")
        begin = "waiting for the end of job-0, job-1; the API server refuses to delete job-0 and "
        assert found["message"].startswith(f"{begin}job-1: Internal error occurred: failed calling")
        remedy = "let the webhook, policy or role admit the operator's deletions of pods"
        assert found["message"].endswith(f"; {remedy}")
        assert (found["status"], ns.condition("Ready")["status"]) == ("False", "False")
        said = ns.status()["explanation"]
        assert any(text.startswith("The API server refuses to delete job-0 and") for text in said)
    ns.await_pods()
    ns.await_status(phase="Suspended", pods=0)
    assert "deletionRefusal" not in ns.status()


def test_policy_against_deletions_is_reported_until_it_admits_them(ns: Namespace) -> None:
    """It protects one of two pods: the other one is deleted."""
    ns.create_job(minNodes=1, maxNodes=2, rendezvous={"backend": "C10d"})
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    with protected(ns, "job-1"):
        ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
        found = ns.await_condition("Suspended", "DeletionRefused")
        assert "the API server refuses to delete job-1: " in found["message"]
        assert "pods are protected here" in found["message"]
        ns.await_pods("job-1")
        ns.await_status(phase="Suspending", pods=1)
        begin = "waiting for the end of job-1; the API server refuses"
        wait_until(
            lambda: ns.condition("Suspended")["message"].startswith(begin), "one pod", SECONDS
        )
        refusal = ns.status()["deletionRefusal"]
        assert (refusal["pods"], refusal["count"]) == (["job-1"], 1)
        ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
        ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
        ns.await_condition("Suspended", "DeletionRefused")
    ns.await_pods()
    ns.await_status(phase="Suspended", pods=0)


def test_refused_writes_of_a_running_and_a_finished_job_are_events(ns: Namespace) -> None:
    """Their jobs go on."""
    ns.create_job(minNodes=1, maxNodes=2, runPolicy={"ttlSecondsAfterFinished": 0})
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    denied = [{"expression": "false", "message": "frozen here", "reason": "Forbidden"}]
    budgets = rule("policy", "poddisruptionbudgets", "UPDATE")
    with admission_policy(ns, "Validating", budgets, validations=denied):
        probe = ns.present("poddisruptionbudgets", "job")
        _await_hook(ns, "PUT", ns.path("poddisruptionbudgets", "job"), probe, status=403)
        ns.run_pod("job-0")
        ns.run_pod("job-1")
        await_refused_write(ns, f"patch poddisruptionbudgets {ns.name}/job")
        ns.await_status(readyNodes=2)
    jobs = rule("elasticjob.dev", "elasticjobs", "DELETE")
    with admission_policy(ns, "Validating", jobs, validations=denied):
        _await_hook(ns, "DELETE", ns.path("elasticjobs", "job"), status=403)
        ended = {"phase": "Succeeded", "completionTime": "2026-01-01T00:00:00Z"}
        ns.server.patch(ns.path("elasticjobs", "job") + "/status", {"status": ended})
        await_refused_write(ns, f"delete elasticjobs {ns.name}/job")
    wait_until(lambda: ns.get("elasticjobs", "job") is None, "the deletion", SECONDS)


def await_refused_write(ns: Namespace, request: str) -> None:
    def told() -> bool:
        begin = f"the API server refuses to {request}: "
        found = [text for reason, text in ns.events() if reason == "WriteRefused"]
        return any(text.startswith(begin) and "frozen here; let the" in text for text in found)

    wait_until(told, f"the refusal to {request}, of {ns.events()}", SECONDS)


@contextmanager
def protected(ns: Namespace, pod: str) -> Iterator[None]:
    """Let a policy refuse the deletion of this pod."""
    validation = {
        "expression": f"oldObject.metadata.name != '{pod}'",
        "message": "pods are protected here",
        "reason": "Forbidden",
    }
    where = rule("", "pods", "DELETE")
    with admission_policy(ns, "Validating", where, validations=[validation]):
        _await_hook(ns, "DELETE", ns.path("pods", pod), status=403)
        yield


def _probe(plural: str) -> dict[str, Any]:
    container = {"name": "c", "image": "i:1"}
    spec = {"containers": [container]} if plural == "pods" else {"clusterIP": "None"}
    return {"metadata": {"name": "probe"}, "spec": spec}


def _await_hook(
    ns: Namespace, method: str, path: str, probe: dict[str, Any] | None = None, status: int = 500
) -> None:
    """Wait until the server has learned of the webhook or policy."""

    def refused() -> bool:
        try:
            ns.server.request(method, f"{path}?dryRun=All", probe)
        except Refused as error:
            return error.status == status
        return False

    wait_until(refused, "the webhook", SECONDS)


@pytest.fixture
def dead_port() -> Iterator[int]:
    ports = Ports(1)
    try:
        yield ports.numbers[0]
    finally:
        ports.close()
