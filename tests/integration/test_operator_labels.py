"""Pods whose labels a user removes, on a real API server: they keep their role."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.lone_operator import here, operator
from tests.integration.mirrored_rig import running
from tests.integration.operator_rig import SECONDS, Namespace, Operator

__all__ = ["here", "operator"]

UID, INDEX, NAME = (f"elasticjob.dev/{word}" for word in ("job-uid", "index", "job-name"))
QUIET_SECONDS = 2.0
"""Waiting time; a wrong action would follow within milliseconds."""


def label(here: Namespace, name: str, **labels: str | None) -> None:
    here.server.patch(here.path("pods", name), {"metadata": {"labels": labels}})


def said(here: Namespace) -> list[str]:
    return [text for text in here.status().get("explanation") or () if "label" in text]


def await_told(here: Namespace, begin: str) -> None:
    def told() -> bool:
        return any(text.startswith(begin) for text in said(here))

    wait_until(told, f"{begin!r}, is {here.status().get('explanation')}", SECONDS)


def stays(here: Namespace, *names: str) -> None:
    deadline = time.monotonic() + QUIET_SECONDS
    while time.monotonic() < deadline:
        assert here.pods() == list(names)
        time.sleep(0.1)


@pytest.mark.parametrize("key", [UID, INDEX, NAME])
def test_training_pod_with_removed_labels_stays_in_round(
    here: Namespace, newest_etcd: EtcdServer, key: str
) -> None:
    agents = running(here, newest_etcd, 2)
    [before] = [raw for raw in here.all("pods") if raw["metadata"]["name"] == "job-1"]
    label(here, "job-1", **{key: None})
    await_told(here, f"job-1 has lost the label {key}: ")
    stays(here, "job-0", "job-1")
    assert newest_etcd.ctl("get", "--prefix", agents.keys.sessions(agents.members["job-1"]))
    whole = before["metadata"]["labels"][key]
    command = f"kubectl label --overwrite pod job-1 {key}={whole}"
    assert any(command in text for text in said(here))
    [event] = [text for reason, text in here.events() if reason == "LabelsLost"]
    assert command in event
    assert (here.status()["pods"], here.status()["phase"]) == (2, "Running")
    label(here, "job-1", **{key: whole})
    wait_until(lambda: not said(here), "nothing to tell", SECONDS)


def test_unjoined_pod_with_removed_labels_is_not_replaced_repeatedly(
    here: Namespace, operator: Operator
) -> None:
    here.create_job(minNodes=1, maxNodes=2)
    here.await_pods("job-0", "job-1")
    here.await_status(pods=2)
    label(here, "job-0", **{UID: None, INDEX: "7"})
    await_told(here, "job-0 has lost the labels elasticjob.dev/index and elasticjob.dev/job-uid")
    here.await_status(pods=2)
    tried = operator.metric("elasticjob_errors_total", kind="Retry")
    stays(here, "job-0", "job-1")
    assert operator.metric("elasticjob_errors_total", kind="Retry") == tried
    here.scale(1)
    here.await_status(pods=1)
    here.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    here.await_pods()


def test_starting_operator_finds_pods_with_removed_labels(
    here: Namespace, newest_etcd: EtcdServer, operator: Operator
) -> None:
    agents = running(here, newest_etcd, 2)
    operator.kill()
    cleared: dict[str, Any] = {UID: None, INDEX: None, NAME: None}
    label(here, "job-1", **cleared)
    operator.start()
    await_told(here, "job-1 has lost the labels ")
    stays(here, "job-0", "job-1")
    assert newest_etcd.ctl("get", "--prefix", agents.keys.sessions(agents.members["job-1"]))
    here.remove_pod("job-1")
    wait_until(lambda: not said(here), "a look at the pods", SECONDS)
    wait_until(lambda: len(here.pods()) == 2, "a replacement", SECONDS)
