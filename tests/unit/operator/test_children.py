"""Service, budget and Secret of a job, and the ownership of objects."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.core import children
from elasticjob_operator.core.access import Access, access_of, data_of, given_access
from elasticjob_operator.core.names import selector, uid_selector
from tests.unit.operator.builders import job

LABELS = {"elasticjob.dev/job-name": "job", "elasticjob.dev/job-uid": "job-uid"}
FULL = Access(b"k" * 32, b"ca", "job-1", "secret", b"cert", b"key")
PLAIN = Access(b"k", None, None, None)


def test_every_child_goes_with_its_job_and_does_not_hold_it_up() -> None:
    for child in (
        children.service(job()),
        children.budget(job(), 1),
        children.secret(job(), PLAIN),
    ):
        assert child["metadata"]["namespace"] == "default"
        assert child["metadata"]["labels"] == LABELS
        assert child["metadata"]["ownerReferences"] == [
            {
                "apiVersion": "elasticjob.dev/v1alpha1",
                "kind": "ElasticJob",
                "name": "job",
                "uid": "job-uid",
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ]
        assert children.is_owned(job(), child)


def test_the_service_names_pods_that_are_not_ready_too() -> None:
    service = children.service(job())
    assert service["metadata"]["name"] == "job"
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": LABELS,
    }


def test_the_budget_counts_in_whole_pods_and_frees_those_that_do_not_train() -> None:
    assert children.budget(job(), 2)["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": LABELS},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def test_selectors_are_made_of_the_labels() -> None:
    assert selector(job()) == "elasticjob.dev/job-name=job"
    assert uid_selector("u") == "elasticjob.dev/job-uid=u"


@pytest.mark.parametrize("access", [FULL, PLAIN])
def test_a_secret_holds_all_of_the_access(access: Access) -> None:
    assert access_of(children.secret(job(), access)) == access


def test_what_there_is_not_has_no_key() -> None:
    assert set(data_of(PLAIN)) == {"job-key"}
    keys = {"job-key", "ca.crt", "user", "password", "tls.crt", "tls.key"}
    assert set(data_of(FULL)) == keys


@pytest.mark.parametrize(
    "secret",
    [
        {},
        {"data": None},
        {"data": {"job-key": ""}},
        {"data": {"job-key": "%"}},
        {"data": {"user": "dQ=="}},
    ],
)
def test_a_secret_without_a_key_gives_no_access(secret: dict[str, Any]) -> None:
    assert access_of(secret) is None


def test_a_users_own_secret_speaks_as_kubernetes_does() -> None:
    data = {"username": "dQ==", "password": "cAo=", "ca.crt": "Y2E="}
    assert given_access({"data": data}, b"k") == Access(b"k", b"ca", "u", "p")


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"ownerReferences": None},
        {"ownerReferences": [{"uid": "other", "controller": True}]},
        {"ownerReferences": [{"uid": "job-uid", "controller": False}]},
        {"ownerReferences": [{"uid": "job-uid"}]},
        {"labels": LABELS},
    ],
)
def test_a_stranger_is_not_owned_whatever_its_labels(metadata: dict[str, Any]) -> None:
    assert not children.is_owned(job(), {"metadata": metadata})
