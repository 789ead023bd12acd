"""Pods whose labels a user removed: their owner, and the messages about them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.manifests.names import (
    INCARNATION_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    UID_LABEL,
)
from elasticjob_operator.domain.manifests.owned_objects import Access, owner_reference
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.manifests.pod import pod as manifest_of
from elasticjob_operator.domain.observed.pod_identity import (
    has_lost_owner,
    incarnation_of,
    index_of,
    is_own,
)
from elasticjob_operator.domain.observed.pod_state import lost_labels, used_fields
from elasticjob_operator.domain.status.events import labels_lost, owner_lost
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.status import RendezvousStatus, Status
from elasticjob_operator.model.types import Phase, RendezvousState
from tests.unit.operator.builders import job, pod, running

SETTINGS = PodSettings("sidecar:1", endpoints=("http://etcd:2379",))


def made(**labels: str | None) -> dict[str, Any]:
    """Return a pod as created, with these labels changed, or removed if None."""
    raw = manifest_of(job(), 1, 3, SETTINGS, Access(b"k" * 32, None, None, None))
    raw["metadata"]["labels"] |= labels
    return raw


def test_new_pod_has_all_labels() -> None:
    assert lost_labels(job(), made()) == ()
    assert incarnation_of(made()) == 3


@pytest.mark.parametrize(
    ("key", "value"),
    [(UID_LABEL, "job-uid"), (JOB_LABEL, "job"), (INDEX_LABEL, "1"), (INCARNATION_LABEL, "3")],
)
@pytest.mark.parametrize("now", [None, "another"])
def test_each_own_label_is_required(key: str, value: str, now: str | None) -> None:
    raw = made(**{key: now})
    for known in (raw, used_fields(raw)):
        assert lost_labels(job(), known) == (f"{key}={value}",)
        assert incarnation_of(known) == 3, "its agent's is what counts"


def test_all_labels_may_be_removed_at_once() -> None:
    raw = made()
    del raw["metadata"]["labels"]
    assert len(lost_labels(job(), raw)) == 4


@pytest.mark.parametrize(
    ("name", "index"),
    [("job-0", 0), ("job-12", 12), ("job-012", None), ("other-1", None), ("job", None),
     ("job-1/status", None), ("../secrets/job-1", None), ("--all", None)],
)  # fmt: skip
def test_only_pod_names_of_the_job_have_an_index(name: str, index: int | None) -> None:
    assert index_of(job(), name) == index


def _told(*keys: str, count: int = 1) -> tuple[str, ...]:
    rendezvous = RendezvousStatus(state=RendezvousState.FINAL, round=1, nodes=count)
    status = Status(phase=Phase.RUNNING, rendezvous=rendezvous, wanted_nodes=count)
    pods = [replace(one, lost_labels=tuple(f"{key}=x" for key in keys)) for one in running(count)]
    whole: ElasticJob = job(status, maxNodes=count)
    return explanation(whole, pods)


def test_lost_labels_are_explained_with_the_remedy() -> None:
    said = _told(UID_LABEL)
    assert said[1:] == (
        "job-0 has lost the label elasticjob.dev/job-uid: the job goes on, but the operator sees "
        "its state late, and the job's Service and PodDisruptionBudget may not select this pod.",
        "`kubectl label --overwrite pod job-0 elasticjob.dev/job-uid=x` restores it.",
    )
    many = _told(UID_LABEL, JOB_LABEL, count=16)
    assert many[1].startswith(
        "job-0, job-1, job-2, job-3, job-4 and 11 more have lost the labels "
        "elasticjob.dev/job-name and elasticjob.dev/job-uid: "
    )
    assert len(many) == 7, "five of the pods are enough to see how"


def test_lost_labels_of_terminating_pod_are_not_reported() -> None:
    lost = replace(pod(0).terminating().get(), lost_labels=("a=b",))
    rendezvous = RendezvousStatus(round=1, nodes=1)
    status = Status(phase=Phase.RUNNING, rendezvous=rendezvous, wanted_nodes=1)
    assert not any("label" in said for said in explanation(job(status), [lost]))


def test_lost_labels_give_an_event() -> None:
    said = labels_lost(replace(pod(2).get(), lost_labels=("elasticjob.dev/job-name=job",)))
    assert said.reason == "LabelsLost"
    assert said.message.endswith(
        "`kubectl label --overwrite pod job-2 elasticjob.dev/job-name=job` restores it"
    )


def test_pod_without_owner_is_the_jobs_by_its_name_and_keys() -> None:
    raw = made()
    assert is_own(job(), raw)
    assert not has_lost_owner(job(), raw)
    raw["metadata"] |= {"ownerReferences": [], "labels": {}}
    for known in (raw, used_fields({**raw, "metadata": {**raw["metadata"], "uid": "u"}})):
        assert is_own(job(), known)
        assert has_lost_owner(job(), known)
    renamed = {**raw, "metadata": {**raw["metadata"], "name": "other-1"}}
    plain = {**raw, "spec": {"containers": raw["spec"]["containers"]}}
    adopted = {**raw, "metadata": {**raw["metadata"], "ownerReferences": [{"controller": True}]}}
    assert has_lost_owner(job(), adopted), "another controller may take it over"
    for foreign in (renamed, plain):
        assert not is_own(job(), foreign)
    successor = job()
    metadata = successor.metadata.model_copy(update={"uid": "another"})
    assert not is_own(successor.model_copy(update={"metadata": metadata}), raw)


def test_removed_owner_is_explained_with_the_command_that_restores_it() -> None:
    pods = tuple(replace(pod, lost_owner=pod.index == 1) for pod in running(2))
    status = Status(phase=Phase.RUNNING, rendezvous=RendezvousStatus(state=RendezvousState.FINAL))
    texts = explanation(job(status), pods)
    [fact] = [
        text for text in texts if "metadata.ownerReferences" in text and "kubectl" not in text
    ]
    assert fact.startswith("job-1 has lost the job's entry in metadata.ownerReferences: ")
    [command] = [text for text in texts if text.startswith("`kubectl patch pod job-1 ")]
    assert json.loads(command.split("'")[1]) == {
        "metadata": {"ownerReferences": [owner_reference(job())]}
    }
    assert owner_lost(pods[1]).message == fact.removesuffix(".")
