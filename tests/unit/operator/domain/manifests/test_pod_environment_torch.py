"""Agreement between pods and agents of jobs on torch's backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_agent.settings import EtcdAccess, from_environment
from elasticjob_operator.domain.manifests import names, pod
from elasticjob_operator.domain.manifests.owned_objects import Access, secret_data
from elasticjob_operator.domain.plan.backends import agent_params
from elasticjob_rendezvous.etcd.endpoints import Tls
from tests.unit.operator.builders import job
from tests.unit.operator.domain.manifests.test_pod_environment import (
    ACCESS,
    SETTINGS,
    container,
    told,
)


@pytest.mark.parametrize(("index", "hosts"), [(0, True), (3, False)])
def test_c10d_agent_reads_the_parameters_of_etcd_v3(
    tmp_path: Path, index: int, hosts: bool
) -> None:
    (tmp_path / "job-key").write_bytes(b"k" * 32)
    of = job(rendezvous={"backend": "C10d", "lastCallSeconds": 7}, minNodes=2, maxRestarts=5)
    made = pod.pod(of, index, 2, SETTINGS, Access(b"k" * 32, None, None, None))["spec"]
    [agent] = [one for one in made["initContainers"] if one["name"] == "elasticjob-agent"]
    variables = {
        name: value.replace(names.ACCESS_PATH, str(tmp_path)) for name, value in told(agent).items()
    }
    found = from_environment({**variables, "ELASTICJOB_TERMINATION_LOG": "/end"})
    assert found.backend == "c10d"
    assert found.hosts_store is hosts
    assert found.etcd == EtcdAccess(("job-0.job.default.svc:29400",))
    assert found.bounds == agent_params(of)
    assert (found.bounds.min_nodes, found.bounds.max_restarts) == (2, 5)
    assert found.bounds.last_call_seconds == 7.0


def test_etcd_v2_agent_reads_endpoints_and_credentials(tmp_path: Path) -> None:
    for name in secret_data(ACCESS):
        (tmp_path / name).write_bytes(b"k" * 32 if name == "job-key" else name.encode())
    rendezvous = {"backend": "EtcdV2", "endpoints": ["https://old:4001"]}
    variables = {
        name: value.replace(names.ACCESS_PATH, str(tmp_path))
        for name, value in told(container("elasticjob-agent", rendezvous=rendezvous)).items()
    }
    found = from_environment(variables)
    assert found.backend == "etcd-v2"
    assert found.etcd.endpoints == ("https://old:4001",)
    assert (found.etcd.user, found.etcd.password) == ("user", "password")
    assert found.etcd.tls == Tls(*(str(tmp_path / n) for n in ("ca.crt", "tls.crt", "tls.key")))
