"""Reported obstacles to a job's pods outside the pods themselves, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.integration.apiserver import Refused
from tests.integration.etcd_server import Ports, wait_until
from tests.integration.lone_operator import here, operator
from tests.integration.operator_rig import SECONDS, Namespace

__all__ = ["here", "operator"]

WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


def await_refused(here: Namespace, reason: str, words: str) -> None:
    found = here.await_condition("PodsReady", reason)
    assert words in found["message"]
    assert any(words in said for said in here.status()["explanation"])
    here.await_event(reason, found["message"])
    assert here.pods() == []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("services", "create services "),
        ("secrets", "create secrets "),
        ("count/poddisruptionbudgets.policy", "create poddisruptionbudgets "),
    ],
)
def test_quota_on_pod_resources_is_reported_and_awaited(
    here: Namespace, what: str, words: str
) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {what: "0"}}}
    here.server.request("POST", here.path("resourcequotas"), quota)
    counted = {"status": {"hard": {what: "0"}, "used": {what: "0"}}}
    here.server.patch(here.path("resourcequotas", "none") + "/status", counted)
    here.create_job(minNodes=1, maxNodes=2)
    await_refused(here, "QuotaExceeded", words)
    here.server.request("DELETE", here.path("resourcequotas", "none"))
    here.await_pods("job-0", "job-1")
    here.await_condition("PodsReady", "PodsStarting")


@contextmanager
def unanswered(here: Namespace, operation: str, plural: str, port: int) -> Iterator[None]:
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
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": here.name}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    body = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": here.name},
        "webhooks": [hook],
    }
    here.server.request("POST", WEBHOOKS, body)
    try:
        yield
    finally:
        here.server.request("DELETE", f"{WEBHOOKS}/{here.name}")


@pytest.mark.parametrize("plural", ["pods", "services"])
def test_unreachable_admission_webhook_is_reported(
    here: Namespace, plural: str, dead_port: int
) -> None:
    with unanswered(here, "CREATE", plural, dead_port):
        _await_hook(here, "POST", here.path(plural), _probe(plural))
        here.create_job(minNodes=1, maxNodes=2)
        await_refused(here, "CreationRefused", "failed calling webhook")
    here.await_pods("job-0", "job-1")
    here.await_condition("PodsReady", "PodsStarting")


def test_undeletable_pods_are_reported_and_still_counted(here: Namespace, dead_port: int) -> None:
    here.create_job(minNodes=1, maxNodes=2)
    here.await_pods("job-0", "job-1")
    here.await_status(pods=2)
    with unanswered(here, "DELETE", "pods", dead_port):
        _await_hook(here, "DELETE", here.path("pods", "job-0"))
        here.patch_job({"spec": {"runPolicy": {"suspend": True}}})

        def told() -> bool:
            begin = "job-0, job-1 cannot be deleted: Internal error occurred: failed calling"
            found = [text for reason, text in here.events() if reason == "DeletionRefused"]
            return any(text.startswith(begin) for text in found)

        wait_until(told, f"the refusal, of {here.events()}", SECONDS)
        assert (here.status()["phase"], here.status()["pods"]) == ("Suspended", 2)
    here.await_pods()
    here.await_status(pods=0)


def _probe(plural: str) -> dict[str, Any]:
    container = {"name": "c", "image": "i:1"}
    spec = {"containers": [container]} if plural == "pods" else {"clusterIP": "None"}
    return {"metadata": {"name": "probe"}, "spec": spec}


def _await_hook(
    here: Namespace, method: str, path: str, probe: dict[str, Any] | None = None
) -> None:
    """Wait until the server has learned of the webhook."""

    def refused() -> bool:
        try:
            here.server.request(method, f"{path}?dryRun=All", probe)
        except Refused as error:
            return error.status == 500
        return False

    wait_until(refused, "the webhook", SECONDS)


@pytest.fixture
def dead_port() -> Iterator[int]:
    ports = Ports(1)
    try:
        yield ports.numbers[0]
    finally:
        ports.close()
