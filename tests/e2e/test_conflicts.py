"""Errors in a manifest or its environment, detected before anything is started."""

from __future__ import annotations

import pytest

from tests.e2e.corner import Corner
from tests.e2e.manifests import IMAGE, job

pytestmark = pytest.mark.timeout(180, func_only=True)


def test_template_typo_is_found_by_dry_run(corner: Corner) -> None:
    corner.apply(job("typo", nodes=2, trainer={"imagePulPolicy": "Never"}))
    condition = corner.told("typo", "TemplateInvalid")
    assert "imagePulPolicy" in condition["message"]
    assert corner.pods("typo") == {}
    status = corner.status("typo")
    assert (status["phase"], status["pods"]) == ("Pending", 0)
    corner.until(lambda: "TemplateInvalid" in corner.reasons("typo"), "the event", 20)

    # The template may change while the job is suspended.
    corner.patch("typo", {"runPolicy": {"suspend": True}})
    corner.in_phase("typo", "Suspended")
    corner.apply(job("typo", nodes=2, runPolicy={"suspend": False}))
    corner.running("typo", 2)
    assert corner.condition("typo", "TemplateInvalid")["status"] == "False"
    corner.delete("typo")


def test_foreign_pod_with_same_name_is_not_touched(corner: Corner) -> None:
    labels = {"elasticjob.dev/job-name": "taken"}
    sleeper = {"name": "main", "image": IMAGE, "command": ["sleep", "10000"]}
    stranger = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "taken-0", "labels": labels},
        "spec": {"containers": [sleeper], "terminationGracePeriodSeconds": 0},
    }
    corner.apply(stranger)
    before = corner.find("pod", "taken-0")
    assert before is not None
    corner.apply(job("taken", nodes=2))
    condition = corner.told("taken", "NameConflict")
    assert "taken-0" in condition["message"]
    status = corner.running("taken", 2)
    assert [member["pod"] for member in status["members"]] == ["taken-1", "taken-2"]

    corner.delete("taken")
    corner.until(lambda: len(corner.pods("taken")) == 1, "the job's own pods to be gone")
    after = corner.find("pod", "taken-0")
    assert after is not None
    for untouched in ("uid", "labels", "ownerReferences", "annotations"):
        assert after["metadata"].get(untouched) == before["metadata"].get(untouched)
    assert after["status"]["phase"] in ("Pending", "Running")
    corner.kubectl("delete", "pod", "taken-0")


def test_taken_service_name_is_reported(corner: Corner) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "occupied"},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "somebody-elses"}},
    }
    corner.apply(service)
    before = corner.find("service", "occupied")
    corner.apply(job("occupied", nodes=1))
    condition = corner.told("occupied", "NameConflict")
    assert "occupied" in condition["message"]
    corner.delete("occupied")
    after = corner.find("service", "occupied")
    assert after is not None
    assert before is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["spec"] == before["spec"]
