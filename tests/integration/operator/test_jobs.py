"""Operator and its jobs' objects, on a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import SECONDS, Namespace, Operator


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory, api_server: ApiServer, newest_etcd: EtcdServer
) -> Iterator[Operator]:
    replica = Operator(tmp_path_factory.mktemp("operator"), api_server, newest_etcd)
    with replica.running():
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def container(**fields: Any) -> dict[str, Any]:
    whole = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"], **fields}
    return {"spec": {"containers": [whole]}}


def test_new_job_gets_pods_and_owned_objects(ns: Namespace) -> None:
    created = ns.create_job(minNodes=2, maxNodes=3)
    ns.await_pods("job-0", "job-1", "job-2")
    ns.await_status(phase="Pending", pods=3, wantedNodes=3)
    assert ns.job()["spec"]["nodes"] == 3
    uid = created["metadata"]["uid"]
    for plural, name in (
        ("pods", "job-0"),
        ("services", "job"),
        ("secrets", "job-elasticjob"),
        ("poddisruptionbudgets", "job"),
    ):
        found = ns.get(plural, name)
        assert found is not None, (plural, name)
        owner = found["metadata"]["ownerReferences"]
        assert [(one["uid"], one["controller"], one["blockOwnerDeletion"]) for one in owner] == [
            (uid, True, False)
        ]
    budget = ns.get("poddisruptionbudgets", "job")
    assert budget is not None
    assert budget["spec"]["minAvailable"] == 1


def test_disruption_budget_follows_ready_pods(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1")
    for name in ("job-0", "job-1"):
        ns.run_pod(name)
    ns.await_status(readyNodes=2)

    def least() -> int:
        found = ns.get("poddisruptionbudgets", "job")
        assert found is not None
        return int(found["spec"]["minAvailable"])

    wait_until(lambda: least() == 1, "minAvailable 1", SECONDS)
    ns.set_pod("job-1", phase="Running", conditions=[{"type": "Ready", "status": "False"}])
    wait_until(lambda: least() == 0, "minAvailable 0", SECONDS)
    ns.patch_job({"spec": {"elasticity": {"disruptionBudget": False}}})
    wait_until(lambda: ns.get("poddisruptionbudgets", "job") is None, "no budget", SECONDS)


def test_scale_creates_and_deletes_pods_and_reports_reason(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=4, nodes=2)
    ns.await_pods("job-0", "job-1")
    ns.scale(4)
    ns.await_pods("job-0", "job-1", "job-2", "job-3")
    ns.await_status(wantedNodes=4, pods=4)
    ns.scale(9)
    ns.await_condition("Resizing", "AboveMaxNodes")
    ns.scale(1)
    ns.await_pods("job-0")
    ns.await_status(wantedNodes=1, pods=1)
    ns.await_event("Resizing", "spec.nodes is 9, above maxNodes; wanted: 4")
    ns.await_event("PodsDeleted", "deleted job-1, job-2, job-3: more than wanted; had not started")


def test_lost_pod_is_replaced_at_lowest_free_index(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=3)
    ns.await_pods("job-0", "job-1", "job-2")
    uid = ns.present("pods", "job-1")["metadata"]["uid"]
    ns.remove_pod("job-1")

    def replaced() -> bool:
        """Return True once pod 1 was replaced: it stays for a while as terminating."""
        found = ns.get("pods", "job-1") or ns.get("pods", "job-3")
        return found is not None and found["metadata"]["uid"] != uid

    wait_until(replaced, "another job-1, or job-3", SECONDS)
    assert len(ns.pods()) == 3
    assert {"job-0", "job-2"} <= set(ns.pods()) <= {"job-0", "job-1", "job-2", "job-3"}


def test_exhausted_quota_is_reported_and_pods_are_created_later(ns: Namespace) -> None:
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    ns.server.request("POST", ns.path("resourcequotas"), quota)
    counted = {"status": {"hard": {"pods": "1"}, "used": {"pods": "0"}}}
    ns.server.patch(ns.path("resourcequotas", "few") + "/status", counted)
    ns.create_job(minNodes=1, maxNodes=3)
    text = "exceeded quota: few"
    assert text in ns.await_condition("PodsReady", "QuotaExceeded")["message"]
    assert ns.pods() == ["job-0"]

    def is_event() -> bool:
        """Return True once there is an event, of either of the two refused pods."""
        return any(reason == "QuotaExceeded" and text in note for reason, note in ns.events())

    wait_until(is_event, "an event", SECONDS)
    ns.server.request("DELETE", ns.path("resourcequotas", "few"))
    ns.await_pods("job-0", "job-1", "job-2")
    ns.await_condition("PodsReady", "PodsStarting")


def test_foreign_pod_is_kept_and_its_index_skipped(ns: Namespace) -> None:
    stranger = {"metadata": {"name": "job-0"}, **container()}
    made = ns.server.request("POST", ns.path("pods"), stranger)
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1", "job-2")
    found = ns.await_condition("NameConflict", "NameConflict")
    assert found["status"] == "True"
    assert "job-0" in found["message"]
    same = ns.get("pods", "job-0")
    assert same is not None
    assert same["metadata"]["uid"] == made["metadata"]["uid"]
    assert "ownerReferences" not in same["metadata"]


def test_foreign_service_stops_job_and_is_reported(ns: Namespace) -> None:
    stranger = {"metadata": {"name": "job"}, "spec": {"clusterIP": "None"}}
    ns.server.request("POST", ns.path("services"), stranger)
    ns.create_job(minNodes=1, maxNodes=2)
    found = ns.await_condition("NameConflict", "NameConflict")
    assert "service job exists and is not this job's" in found["message"]
    assert ns.pods() == []
    ns.server.request("DELETE", ns.path("services", "job"))
    ns.await_pods("job-0", "job-1")
    ns.await_condition("NameConflict", "Resolved")


def test_template_error_is_reported(ns: Namespace) -> None:
    """The CRD accepts a mount of a volume that is not there; the API server refuses its pod."""
    mount = {"name": "data", "mountPath": "/data"}
    ns.create_job(maxNodes=2, template=container(volumeMounts=[mount]))
    found = ns.await_condition("TemplateInvalid", "TemplateInvalid")
    assert 'spec.containers[0].volumeMounts[0].name: Not found: "data"' in found["message"]
    assert ns.pods() == []
    ns.await_event("TemplateInvalid", found["message"])
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_status(phase="Suspended")
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}, "template": container()}})
    ns.await_pods("job-0", "job-1")
    assert ns.condition("TemplateInvalid")["status"] == "False"


def test_warnings_are_condition_and_events_and_the_job_runs(ns: Namespace) -> None:
    probe = {"tcpSocket": {"port": 1}}
    template = container(readinessProbe=probe)
    template["spec"]["hostIPC"] = True
    ns.create_job(minNodes=1, maxNodes=2, template=template)
    ns.await_pods("job-0", "job-1")
    found = ns.await_condition("TemplateWarnings", "HostIPC,ReadinessProbe")
    assert found["status"] == "True"
    kinds = ["HostIPC", "ReadinessProbe"]

    def told() -> list[str]:
        return sorted(reason for reason, _ in ns.events() if reason in kinds)

    wait_until(lambda: told() == kinds, "an event of each kind", SECONDS)
    assert all(said in found["message"] for reason, said in ns.events() if reason in kinds)
    ns.scale(1)
    ns.await_status(wantedNodes=1)
    assert told() == kinds, "a change of size repeats none"


def test_endpoints_not_permitted_by_chart_are_refused(ns: Namespace) -> None:
    ns.create_job(maxNodes=2, rendezvous={"endpoints": ["http://10.0.0.1:2379"]})
    found = ns.await_condition("PodsReady", "EndpointNotAllowed")
    assert "http://10.0.0.1:2379" in found["message"]
    assert ns.pods() == []


def test_suspension_deletes_pods_and_resumption_creates_new_ones(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1")
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods()
    ns.await_status(phase="Suspended", pods=0)
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    ns.await_pods("job-0", "job-1")
    ns.await_status(phase="Pending", pods=2)
    labels = ns.present("pods", "job-0")["metadata"]["labels"]
    assert labels["elasticjob.dev/incarnation"] == "2"


def test_deleted_job_has_its_rendezvous_closed(ns: Namespace, newest_etcd: EtcdServer) -> None:
    uid = ns.create_job(maxNodes=2)["metadata"]["uid"]
    ns.await_pods("job-0", "job-1")
    ns.server.request("DELETE", ns.path("elasticjobs", "job"))
    key = f"/elasticjob/{ns.name}/{uid}/1/state/round"
    wait_until(lambda: "Deleted" in newest_etcd.ctl("get", key), "a closed round", SECONDS)


@pytest.mark.parametrize("backend", ["Etcd", "C10d"])
def test_job_deleted_in_the_foreground_shows_its_deletion_and_no_failure(
    ns: Namespace, backend: str
) -> None:
    ns.create_job(minNodes=1, maxNodes=2, rendezvous={"backend": backend})
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    held = {"metadata": {"finalizers": ["test.dev/kubelet"]}}
    ns.server.patch(ns.path("pods", "job-1"), held)
    ns.server.request("DELETE", ns.path("elasticjobs", "job"), {"propagationPolicy": "Foreground"})
    ns.await_status(phase="Deleting", pods=0)
    ns.await_pods("job-1")
    ns.await_event("Deleting", "the job is being deleted: its pods are being stopped")
    for kind in ("Failed", "Finished", "Stalled", "Ready"):
        assert ns.condition(kind)["status"] == "False"
    assert ns.condition("Reconciling")["status"] == "True"
    status = ns.status()
    assert "completionTime" not in status
    assert status["explanation"] == ["The job is being deleted, and its pods are being stopped."]
    assert "Failed" not in [reason for reason, _ in ns.events()]
    ns.server.patch(ns.path("pods", "job-1"), {"metadata": {"finalizers": None}})
    ns.await_pods()


def test_recreated_job_is_a_different_job(ns: Namespace) -> None:
    ns.create_job(maxNodes=1)
    ns.await_pods("job-0")
    ns.server.request("DELETE", ns.path("elasticjobs", "job"))
    second = ns.create_job(maxNodes=1)
    # There is no garbage collector: the remains of the first job are removed by the test.
    for plural, name in (("services", "job"), ("secrets", "job-elasticjob")):
        ns.server.request("DELETE", ns.path(plural, name))
    ns.server.request("DELETE", ns.path("poddisruptionbudgets", "job"))
    ns.await_pods("job-0", "job-1")
    owner = ns.present("pods", "job-1")["metadata"]["ownerReferences"][0]
    assert owner["uid"] == second["metadata"]["uid"]
    ns.remove_pod("job-0")
    ns.await_status(pods=1)
    assert ns.condition("NameConflict") == {}, "the pods of a deleted job end by themselves"
    assert "NameConflict" not in {reason for reason, _ in ns.events()}
    assert not any("exists and is not this job's" in message for _, message in ns.events())


def test_jobs_of_same_name_in_two_namespaces_are_separate(
    ns: Namespace, api_server: ApiServer
) -> None:
    there = Namespace(api_server, api_server.namespace(f"{ns.name[:50]}-b"))
    ns.create_job(maxNodes=1)
    there.create_job(maxNodes=2)
    ns.await_pods("job-0")
    there.await_pods("job-0", "job-1")
    ns.await_status(pods=1)
    there.await_status(pods=2)


def test_deadline_is_enforced_without_other_events(ns: Namespace) -> None:
    """No other event occurs for a job whose pods are never started."""
    ns.create_job(maxNodes=1, nodes=1, runPolicy={"activeDeadlineSeconds": 2})
    ns.await_status(phase="Failed")
    assert ns.condition("Failed")["reason"] == "DeadlineExceeded"


HELD: dict[str, Any] = {"metadata": {"finalizers": ["test.dev/kubelet"]}}


@pytest.mark.parametrize("backend", ["Etcd", "C10d"])
def test_suspension_is_complete_once_no_pod_is_left(ns: Namespace, backend: str) -> None:
    ns.create_job(maxNodes=2, rendezvous={"backend": backend})
    ns.await_pods("job-0", "job-1")
    ns.server.patch(ns.path("pods", "job-1"), HELD)
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods("job-1")
    left = "waiting for the end of job-1"
    wait_until(lambda: ns.condition("Suspended").get("message") == left, left, SECONDS)
    assert ns.condition("Suspended")["status"] == "False"
    ns.await_status(phase="Suspending", pods=0)
    counts = ns.status()["pods"]
    assert (counts["desired"], counts["terminating"], counts["pending"]) == (0, 1, 0)
    assert ns.condition("Reconciling")["reason"] == "JobSuspending"
    ns.server.patch(ns.path("pods", "job-1"), {"metadata": {"finalizers": None}})
    ns.await_status(phase="Suspended", pods=0)
    assert ns.condition("Suspended")["status"] == "True"
    assert ns.condition("Ready")["reason"] == "Suspended"
    assert ns.status()["pods"]["terminating"] == 0


def test_pod_whose_workers_cannot_be_ended_is_replaced_on_another_machine(ns: Namespace) -> None:
    machine = "rack-of-a-stuck-pod"
    ns.create_node(machine, "True")
    ns.create_job(maxNodes=2)
    ns.await_pods("job-0", "job-1")
    ns.bind_pod("job-1", machine)
    ns.run_pod("job-1")
    given_up = {"exitCode": 5, "reason": "Error", "message": "process 7 waits"}
    agent = {"name": "elasticjob-agent", "image": "a", "imageID": "", "restartCount": 0}
    agent |= {"ready": False, "state": {"terminated": given_up}}
    ns.set_pod("job-1", initContainerStatuses=[agent])
    ns.await_pods("job-0", "job-1", "job-2")  # only the kubelet removes a pod of a machine
    affinity = json.dumps(ns.present("pods", "job-2")["spec"]["affinity"])
    assert f'"operator": "NotIn", "values": ["{machine}"]' in affinity
    wait_until(
        lambda: [each["nodeName"] for each in ns.status().get("avoidedNodes", ())] == [machine],
        "the avoided machine",
        SECONDS,
    )
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods("job-1")
    left = (
        f"waiting for the end of job-1: the workers of job-1 on {machine} cannot be ended before "
        "their disk answers or the machine restarts; a resumption does not wait for this pod"
    )
    wait_until(lambda: ns.condition("Suspended").get("message") == left, left, SECONDS)
    ns.remove_pod("job-1")
    ns.await_status(phase="Suspended")
    ns.delete_node(machine)


def test_pod_of_a_deleted_node_has_no_remedy_that_names_the_node(ns: Namespace) -> None:
    machine = "rack-of-a-deleted-node"
    ns.create_node(machine, "Unknown")
    ns.create_job(maxNodes=1)
    ns.await_pods("job-0")
    ns.bind_pod("job-0", machine)
    ns.run_pod("job-0")
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_condition("Suspended", "NodeUnreachable")
    assert f"kubectl delete node {machine}" in ns.condition("Suspended")["message"]
    ns.delete_node(machine)
    left = (
        f"waiting for the end of job-0: the Node {machine} was deleted: Kubernetes removes its pod "
        "within about a minute; a resumption does not wait for this pod"
    )
    wait_until(lambda: ns.condition("Suspended").get("message") == left, left, SECONDS)
    assert not any("kubectl" in one for one in ns.status()["explanation"])


@pytest.mark.parametrize("backend", ["Etcd", "C10d"])
def test_job_resumed_during_its_suspension_waits_for_its_pods(ns: Namespace, backend: str) -> None:
    ns.create_job(maxNodes=2, rendezvous={"backend": backend})
    ns.await_pods("job-0", "job-1")
    ns.server.patch(ns.path("pods", "job-1"), HELD)
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods("job-1")
    ns.await_status(phase="Suspending")
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    ns.await_condition("Suspended", "JobPending" if backend == "Etcd" else "Suspending")
    assert ns.pods() == ["job-1"]
    ns.server.patch(ns.path("pods", "job-1"), {"metadata": {"finalizers": None}})
    ns.await_pods("job-0", "job-1")
    ns.await_status(phase="Pending", pods=2)
    for name in ("job-0", "job-1"):
        labels = ns.present("pods", name)["metadata"]["labels"]
        assert labels["elasticjob.dev/incarnation"] != "1", name


def test_pods_are_counted_by_state(ns: Namespace) -> None:
    ns.create_job(maxNodes=3)
    ns.await_pods("job-0", "job-1", "job-2")
    ns.run_pod("job-0")
    ns.await_status(readyNodes=1)
    counts = {"desired": 3, "active": 3, "ready": 1, "pending": 2, "terminating": 0, "failed": 0}
    assert ns.status()["pods"] == counts
    assert ns.condition("Reconciling")["status"] == "True"
    path = ns.path("elasticjobs", "job") + "/scale"
    assert ns.server.request("GET", path)["status"]["replicas"] == 3


def test_refused_template_stalls_the_job(ns: Namespace) -> None:
    mounts = [{"name": "absent", "mountPath": "/data"}]
    ns.create_job(maxNodes=2, template=container(volumeMounts=mounts))
    found = ns.await_condition("Stalled", "TemplateInvalid")
    assert found["status"] == "True"
    assert ns.condition("Reconciling")["status"] == "False"
    assert ns.condition("Ready")["status"] == "False"
