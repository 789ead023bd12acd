"""The operator and its jobs' objects, on a real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import SECONDS, Namespace, Operator


@pytest.fixture(scope="module")
def operator(
    tmp_path_factory: pytest.TempPathFactory, api_server: ApiServer, newest_etcd: EtcdServer
) -> Iterator[Operator]:
    replica = Operator(tmp_path_factory.mktemp("operator"), api_server, newest_etcd)
    try:
        yield replica.start()
    finally:
        replica.close()


@pytest.fixture
def here(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def test_a_job_gets_its_pods_and_all_they_need(here: Namespace) -> None:
    created = here.create_job(minNodes=2, maxNodes=3)
    here.await_pods("job-0", "job-1", "job-2")
    here.await_status(phase="Pending", nodes=3, wantedNodes=3)
    assert here.job()["spec"]["nodes"] == 3
    uid = created["metadata"]["uid"]
    for plural, name in (
        ("pods", "job-0"),
        ("services", "job"),
        ("secrets", "job-elasticjob"),
        ("poddisruptionbudgets", "job"),
    ):
        found = here.get(plural, name)
        assert found is not None, (plural, name)
        owner = found["metadata"]["ownerReferences"]
        assert [(one["uid"], one["controller"], one["blockOwnerDeletion"]) for one in owner] == [
            (uid, True, False)
        ]
    budget = here.get("poddisruptionbudgets", "job")
    assert budget is not None
    assert budget["spec"]["minAvailable"] == 1
