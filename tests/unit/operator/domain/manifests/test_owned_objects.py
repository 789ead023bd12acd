"""Service, budget and Secret of a job, and the ownership of objects."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.domain.manifests import owned_objects
from elasticjob_operator.domain.manifests.names import selector, uid_selector
from elasticjob_operator.domain.manifests.owned_objects import (
    Access,
    PolicyPeer,
    access_in,
    author_access,
    secret_data,
)
from tests.unit.operator.builders import job

LABELS = {"elasticjob.dev/job-name": "job", "elasticjob.dev/job-uid": "job-uid"}
FULL = Access(b"k" * 32, b"ca", "job-1", "secret", b"cert", b"key")
PLAIN = Access(b"k", None, None, None)
OPERATOR = PolicyPeer("system", (("app", "operator"),))


def test_owned_objects_are_deleted_with_their_job_without_blocking_it() -> None:
    for child in (
        owned_objects.service(job()),
        owned_objects.budget(job(), 1),
        owned_objects.secret(job(), PLAIN, {}),
        owned_objects.network_policy(job(), OPERATOR),
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
        assert owned_objects.is_owned(job(), child)


def test_service_includes_pods_that_are_not_ready() -> None:
    service = owned_objects.service(job())
    assert service["metadata"]["name"] == "job"
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": LABELS,
    }


def test_network_policy_admits_own_pods_and_operator_at_status_port() -> None:
    policy = owned_objects.network_policy(job(), OPERATOR)
    own = {"matchLabels": {"elasticjob.dev/job-uid": "job-uid"}}
    assert policy["metadata"]["name"] == "job-elasticjob"
    assert policy["spec"]["podSelector"] == own
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    peers, status = policy["spec"]["ingress"]
    assert peers == {"from": [{"podSelector": own}]}, "every port, and this namespace only"
    assert status["ports"] == [{"port": 17946, "protocol": "TCP"}]
    assert status["from"] == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "system"}},
            "podSelector": {"matchLabels": {"app": "operator"}},
        }
    ]


def test_budget_counts_whole_pods_and_allows_eviction_of_unhealthy_pods() -> None:
    assert owned_objects.budget(job(), 2)["spec"] == {
        "minAvailable": 2,
        "selector": {"matchLabels": LABELS},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


def test_selectors_use_the_labels() -> None:
    assert selector(job()) == "elasticjob.dev/job-name=job"
    assert uid_selector("u") == "elasticjob.dev/job-uid=u"


@pytest.mark.parametrize("access", [FULL, PLAIN])
def test_secret_holds_all_access_data(access: Access) -> None:
    assert access_in(owned_objects.secret(job(), access, {})) == access


def test_missing_access_data_has_no_key_in_secret() -> None:
    assert set(secret_data(PLAIN)) == {"job-key"}
    keys = {"job-key", "ca.crt", "user", "password", "tls.crt", "tls.key"}
    assert set(secret_data(FULL)) == keys


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
def test_secret_without_key_gives_no_access(secret: dict[str, Any]) -> None:
    assert access_in(secret) is None


def test_secret_of_user_has_kubernetes_keys() -> None:
    data = {"username": "dQ==", "password": "cAo=", "ca.crt": "Y2E="}
    assert author_access({"data": data}, b"k") == Access(b"k", b"ca", "u", "p")


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
def test_foreign_object_is_not_owned_whatever_its_labels(metadata: dict[str, Any]) -> None:
    assert not owned_objects.is_owned(job(), {"metadata": metadata})
