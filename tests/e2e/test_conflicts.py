"""Errors in a manifest or its environment, detected before anything is started."""

from __future__ import annotations

import pytest

from tests.e2e.console import CommandFailed
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import IMAGE, job

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_template_typo_is_refused_by_apply(ns: JobNamespace) -> None:
    with pytest.raises(CommandFailed, match="imagePulPolicy"):
        ns.apply(job("typo", nodes=2, trainer={"imagePulPolicy": "Never"}))
    assert ns.find("elasticjobs", "typo") is None


def test_template_error_is_found_by_first_pod(ns: JobNamespace) -> None:
    mount = {"name": "data", "mountPath": "/data"}
    ns.apply(job("typo", nodes=2, trainer={"volumeMounts": [mount]}))
    condition = ns.told("typo", "TemplateInvalid")
    assert "volumeMounts[0].name" in condition["message"]
    assert ns.pods("typo") == {}
    status = ns.status("typo")
    assert (status["phase"], status["pods"]["active"]) == ("Pending", 0)
    ns.until(lambda: "TemplateInvalid" in ns.reasons("typo"), "the event")

    # The template may change while the job is suspended.
    ns.patch("typo", {"runPolicy": {"suspend": True}})
    ns.in_phase("typo", "Suspended")
    ns.apply(job("typo", nodes=2, runPolicy={"suspend": False}))
    ns.running("typo", 2)
    assert ns.condition("typo", "TemplateInvalid")["status"] == "False"
    ns.delete("typo")


def test_foreign_pod_with_same_name_is_not_touched(ns: JobNamespace) -> None:
    labels = {"elasticjob.dev/job-name": "taken"}
    sleeper = {"name": "main", "image": IMAGE, "command": ["sleep", "10000"]}
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "taken-0", "labels": labels},
        "spec": {"containers": [sleeper], "terminationGracePeriodSeconds": 0},
    }
    ns.apply(stranger)
    before = ns.find("pods", "taken-0")
    assert before is not None
    ns.apply(job("taken", nodes=2))
    condition = ns.told("taken", "NameConflict")
    assert "taken-0" in condition["message"]
    status = ns.running("taken", 2)
    assert [member["pod"] for member in status["members"]] == ["taken-1", "taken-2"]

    ns.delete("taken")
    ns.until(lambda: len(ns.pods("taken")) == 1, "the job's own pods to be gone")
    after = ns.find("pods", "taken-0")
    assert after is not None
    for untouched in ("uid", "labels", "ownerReferences", "annotations"):
        assert after["metadata"].get(untouched) == before["metadata"].get(untouched)
    assert after["status"]["phase"] in ("Pending", "Running")
    ns.kubectl("delete", "pod", "taken-0")


def test_taken_service_name_is_reported(ns: JobNamespace) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "occupied"},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "somebody-elses"}},
    }
    ns.apply(service)
    before = ns.find("services", "occupied")
    ns.apply(job("occupied", nodes=1))
    condition = ns.told("occupied", "NameConflict")
    assert "occupied" in condition["message"]
    ns.delete("occupied")
    after = ns.find("services", "occupied")
    assert after is not None
    assert before is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
