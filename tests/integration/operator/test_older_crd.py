"""Operator on an API server whose CRD lacks fields of the status that the operator writes, or has
values that the operator does not know."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.apiserver import CRD, ApiServer, Refused
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob
from tests.integration.operator.test_status_writes import quiet
from tests.integration.operator_rig import Namespace, Operator, alone_in

Json = dict[str, Any]
DEFINITION = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/elasticjobs.elasticjob.dev"
WRITES = "elasticjob_status_writes_total"
WANTED: Json = {"wantedNodes": 1}
PAUSED: Json = {"phase": "Paused"}
LACKING = (
    "the CRD of ElasticJob is older than the operator and lacks status.conditions.Resizing, "
    "status.pods.desired, status.wantedNodes: apply crds/elasticjobs.elasticjob.dev.yaml of the "
    "operator's release"
)


def crds() -> tuple[Json, Json, Json]:
    """Return the CRD, a copy of it to change, and the schema of the status in the copy."""
    definition = yaml.safe_load(CRD.read_text())
    changed = copy.deepcopy(definition)
    schema = changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return definition, changed, schema["properties"]["status"]


def define(
    server: ApiServer, namespace: str, definition: Json, status: Json, *, is_stored: bool
) -> None:
    """Replace the CRD; return once the server applies its schema.

    Args:
        status: status that only one of the two schemas lets the server store.
        is_stored: True if it is the new one.
    """
    present = server.request("GET", DEFINITION)
    server.request("PUT", DEFINITION, {**present, "spec": definition["spec"]})
    path = ELASTICJOBS_PATH.format(namespace)
    name = f"probe-{int(is_stored)}"
    server.request("POST", path, elasticjob(name))

    def is_served() -> bool:
        # The server also accepts the values that an object has already: nothing is stored.
        try:
            written = server.patch(f"{path}/{name}/status?dryRun=All", {"status": status})
        except Refused as error:
            if error.status != 422:
                raise
            return not is_stored
        return (status.items() <= written.get("status", {}).items()) == is_stored

    wait_until(is_served, "the changed CRD")
    server.request("DELETE", f"{path}/{name}")


@pytest.fixture
def older_crd(api_server: ApiServer, namespace: str) -> Iterator[None]:
    definition, older, status = crds()
    del status["properties"]["wantedNodes"]
    del status["properties"]["pods"]["properties"]["desired"]
    status["properties"]["phase"]["enum"].remove("Deleting")
    types = status["properties"]["conditions"]["items"]["properties"]["type"]["enum"]
    types.remove("Resizing")
    try:
        define(api_server, namespace, older, WANTED, is_stored=False)
        yield
    finally:
        define(api_server, namespace, definition, WANTED, is_stored=True)


def test_status_with_dropped_fields_is_written_once_and_reported_once(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str, older_crd: None
) -> None:
    options, ns = alone_in(namespace), Namespace(api_server, namespace)
    with Operator(tmp_path, api_server, newest_etcd, options=options).running() as operator:
        ns.create_job(maxNodes=2, nodes=2)
        ns.await_pods("job-0", "job-1")
        ns.await_status(pods=2)
        before = quiet(operator, WRITES)
        for number in range(3):  # each causes a reconcile, and changes nothing in the status
            ns.patch_job({"metadata": {"labels": {"number": str(number)}}})
            quiet(operator, "elasticjob_reconcile_seconds_count")
        assert operator.metric(WRITES) == before
        assert "wantedNodes" not in ns.status()
        ns.scale(1)
        # Events are posted in the order of their causes: this one follows the status of the scale.
        ns.await_event("PodsDeleted", "deleted job-1: more than wanted; had not started")
        [event] = [one for one in ns.all("events") if one["reason"] == "StatusFieldsDropped"]
        assert event.get("series") is None, "a repeated event counts in the series of the first"
        assert event["note"] == LACKING


def test_values_that_the_schema_lacks_are_left_out_and_reported_by_each_operator(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str, older_crd: None
) -> None:
    """An operator has the dropped values in its memory alone, until the CRD is upgraded."""
    options, ns = alone_in(namespace), Namespace(api_server, namespace)
    with Operator(tmp_path, api_server, newest_etcd, options=options).running() as operator:
        ns.create_job(maxNodes=1, nodes=1)
        ns.await_status(pods=1, phase="Pending")
        assert ns.condition("PodsReady")["reason"] == "PodsStarting"
        assert ns.condition("Resizing") == {}
        ns.await_event("StatusFieldsDropped", LACKING)
        operator.stop()
        already = operator.log.read_text().count(LACKING)
        operator.start()
        wait_until(lambda: operator.log.read_text().count(LACKING) > already, "the log line")
        deletion = {"propagationPolicy": "Foreground"}
        ns.server.request("DELETE", ns.path("elasticjobs", "job"), deletion)
        said = ["The job is being deleted, and its pods are being stopped."]
        wait_until(lambda: ns.status()["explanation"] == said, "the explanation")
        wait_until(lambda: "lacks status.phase=Deleting: " in operator.log.read_text(), "the log")
        assert operator.metric("elasticjob_errors_total", kind="Invalid") == 0


@pytest.fixture
def newer_crd(api_server: ApiServer, namespace: str) -> Iterator[None]:
    """CRD of a later release, which a rollback of the operator leaves in the cluster."""
    definition, newer, status = crds()
    status["properties"]["phase"]["enum"].append("Paused")
    status["properties"]["conditions"]["items"]["properties"]["type"]["enum"].append("QuotaLow")
    status["properties"]["launch"]["properties"]["reason"]["enum"].append("Guessed")
    try:
        define(api_server, namespace, newer, PAUSED, is_stored=True)
        yield
    finally:
        define(api_server, namespace, definition, PAUSED, is_stored=False)


def test_status_of_a_later_release_is_replaced_after_a_rollback(
    tmp_path: Path, api_server: ApiServer, newest_etcd: EtcdServer, namespace: str, newer_crd: None
) -> None:
    options, ns = alone_in(namespace), Namespace(api_server, namespace)
    at = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    low = {"type": "QuotaLow", "status": "True", "reason": "Low", **at}
    later = {
        "phase": "Paused",
        "conditions": [low, {**low, "type": "Running", "status": "False"}],
        "launch": {"mode": "PerWorker", "reason": "Guessed"},
    }
    ended = {**later, "conditions": [*later["conditions"], {**low, "type": "Finished"}]}
    for name, status in (("job", later), ("ended", {**ended, "completionTime": at.popitem()[1]})):
        ns.create_job(name, maxNodes=1, nodes=1)
        ns.server.patch(ns.path("elasticjobs", name) + "/status", {"status": status})
    with Operator(tmp_path, api_server, newest_etcd, options=options).running() as operator:
        ns.await_status(pods=1, phase="Pending")
        ns.await_status("ended", phase="Failed")
        ns.await_pods("job-0")
        for name in ("job", "ended"):
            assert ns.condition("QuotaLow", name) == {}
            assert ns.condition("Stalled", name)["reason"] != "InvalidJob"
        assert ns.status()["launch"]["reason"] == "PlainCommand"
        log = operator.log.read_text()
        assert log.count("ignores parts of the status that this release cannot read") == 2
        assert "status.phase: must be one of Pending, " in log
        assert operator.metric("elasticjob_errors_total", kind="Invalid") == 0
