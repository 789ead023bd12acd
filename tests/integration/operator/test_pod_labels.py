"""Pods whose labels a user removes, on a real API server: they keep their role."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.admission import admission_policy, patching, rule
from tests.integration.operator.agent_records import running
from tests.integration.operator.single_operator import ns, operator
from tests.integration.operator_rig import SECONDS, Namespace, Operator

__all__ = ["ns", "operator"]

UID, INDEX, NAME = (f"elasticjob.dev/{word}" for word in ("job-uid", "index", "job-name"))
QUIET_SECONDS = 2.0
"""Waiting time; a wrong action would follow within milliseconds."""


def label(ns: Namespace, name: str, **labels: str | None) -> None:
    ns.server.patch(ns.path("pods", name), {"metadata": {"labels": labels}})


def said(ns: Namespace) -> list[str]:
    return [text for text in ns.status().get("explanation") or () if "label" in text]


def await_told(ns: Namespace, begin: str) -> None:
    def told() -> bool:
        return any(text.startswith(begin) for text in said(ns))

    wait_until(told, f"{begin!r}, is {ns.status().get('explanation')}", SECONDS)


def stays(ns: Namespace, *names: str) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        assert ns.pods() == list(names)
        time.sleep(0.1)


@pytest.mark.parametrize("key", [UID, INDEX, NAME])
def test_training_pod_with_removed_labels_stays_in_round(
    ns: Namespace, newest_etcd: EtcdServer, key: str
) -> None:
    agents = running(ns, newest_etcd, 2)
    [before] = [raw for raw in ns.all("pods") if raw["metadata"]["name"] == "job-1"]
    label(ns, "job-1", **{key: None})
    await_told(ns, f"job-1 has lost the label {key}: ")
    stays(ns, "job-0", "job-1")
    assert newest_etcd.ctl("get", "--prefix", agents.keys.sessions(agents.members["job-1"]))
    whole = before["metadata"]["labels"][key]
    command = f"kubectl label --overwrite pod job-1 {key}={whole}"
    assert any(command in text for text in said(ns))

    def events() -> list[str]:
        return [text for reason, text in ns.events() if reason == "LabelsLost"]

    wait_until(lambda: events() != [], "the event", SECONDS)
    [event] = events()
    assert command in event
    assert (ns.status()["pods"]["active"], ns.status()["phase"]) == (2, "Running")
    label(ns, "job-1", **{key: whole})
    wait_until(lambda: not said(ns), "nothing to tell", SECONDS)


def test_unjoined_pod_with_removed_labels_is_not_replaced_repeatedly(
    ns: Namespace, operator: Operator
) -> None:
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    label(ns, "job-0", **{UID: None, INDEX: "7"})
    await_told(ns, "job-0 has lost the labels elasticjob.dev/index and elasticjob.dev/job-uid")
    ns.await_status(pods=2)
    tried = operator.metric("elasticjob_errors_total", kind="Retry")
    stays(ns, "job-0", "job-1")
    assert operator.metric("elasticjob_errors_total", kind="Retry") == tried
    ns.scale(1)
    ns.await_status(pods=1)
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods()


def test_starting_operator_finds_pods_with_removed_labels(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator
) -> None:
    agents = running(ns, newest_etcd, 2)
    operator.kill()
    cleared: dict[str, Any] = {UID: None, INDEX: None, NAME: None}
    label(ns, "job-1", **cleared)
    operator.start()
    await_told(ns, "job-1 has lost the labels ")
    stays(ns, "job-0", "job-1")
    assert newest_etcd.ctl("get", "--prefix", agents.keys.sessions(agents.members["job-1"]))
    ns.remove_pod("job-1")
    wait_until(lambda: not said(ns), "a look at the pods", SECONDS)
    wait_until(lambda: len(ns.pods()) == 2, "a replacement", SECONDS)


def test_pods_that_lose_their_labels_at_creation_are_known_at_once(
    ns: Namespace, operator: Operator
) -> None:
    patch = patching('JSONPatch{op: "remove", path: "/metadata/labels"}')
    with admission_policy(ns, "Mutating", rule("", "pods", "CREATE"), **patch):
        wait_until(lambda: not keeps_labels(ns), "the policy", SECONDS)
        ns.create_job(minNodes=1, maxNodes=5)
        ns.await_status(pods=5)
        stays(ns, *(f"job-{index}" for index in range(5)))
        assert operator.metric("elasticjob_errors_total", kind="Retry") == 0
        ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
        ns.await_pods()


def keeps_labels(ns: Namespace) -> bool:
    """Return True if the API server keeps the labels of a new pod."""
    spec = {"containers": [{"name": "c", "image": "i:1"}]}
    probe = {"metadata": {"name": "probe", "labels": {"key": "value"}}, "spec": spec}
    made = ns.server.request("POST", f"{ns.path('pods')}?dryRun=All", probe)
    return "labels" in made["metadata"]
