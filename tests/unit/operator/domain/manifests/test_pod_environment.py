"""Agreement of a pod's environment with the processes that read it; neither imports the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticjob.train.snapshots.ranks import replication
from elasticjob_agent.polling.backends import job_handler
from elasticjob_agent.settings import (
    AgentSettings,
    EtcdAccess,
    LogSettings,
    WarmStart,
    from_environment,
)
from elasticjob_launcher import devices
from elasticjob_launcher.settings import (
    NESTED,
    OWN_VARIABLES,
    SettingsError,
    read_settings,
    worker_environment,
)
from elasticjob_launcher.worker_count import Count, count_workers, usable_cpus
from elasticjob_operator.domain.manifests import names, pod, trainer_command
from elasticjob_operator.domain.manifests.owned_objects import Access, secret_data
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.manifests.template_rules import (
    USERS_VARIABLES,
    TemplateRefused,
    check_template,
)
from elasticjob_rendezvous.etcd.endpoints import LoginFiles, Tls
from tests.unit.operator.builders import job

ACCESS = Access(b"k" * 32, b"ca", "job-uid", "secret", b"cert", b"key")
SETTINGS = PodSettings("sidecar:1", endpoints=("https://etcd:2379",), server_name="etcd-name")
FIELDS = {"metadata.uid": "pod-uid", "status.podIP": "10.1.2.3", "spec.nodeName": "node-a"}


def container(name: str, **fields: Any) -> dict[str, Any]:
    made = pod.pod(job(recovery={"stopGraceSeconds": 7}, **fields), 3, 2, SETTINGS, ACCESS)["spec"]
    [found] = [one for one in made["containers"] + made["initContainers"] if one["name"] == name]
    return dict(found)


def told(container: dict[str, Any]) -> dict[str, str]:
    """Return the container's environment, as the kubelet would make it."""
    return {
        one["name"]: one["value"]
        if "value" in one
        else FIELDS[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in container["env"]
    }


def test_agent_reads_all_its_variables(tmp_path: Path) -> None:
    for name in secret_data(ACCESS):
        (tmp_path / name).write_bytes(b"k" * 32 if name == "job-key" else name.encode())
    variables = {
        name: value.replace(names.ACCESS_PATH, str(tmp_path))
        for name, value in told(container("elasticjob-agent", nprocPerNode=2)).items()
    }
    found = from_environment({**variables, "ELASTICJOB_TERMINATION_LOG": "/end"})
    ca, cert, key = (str(tmp_path / name) for name in ("ca.crt", "tls.crt", "tls.key"))
    assert found == AgentSettings(
        prefix="/elasticjob/default/job-uid/2/",
        run_id="job-uid",
        member="pod-uid",
        name="job-3",
        address="10.1.2.3",
        bind_address="10.1.2.3",
        node="node-a",
        slots=2,
        nnodes="1:4",
        nproc="2",
        etcd=EtcdAccess(
            ("https://etcd:2379",),
            Tls(ca, cert, key, "etcd-name"),
            "user",
            "password",
            LoginFiles(str(tmp_path / "user"), str(tmp_path / "password")),
        ),
        job_key=b"k" * 32,
        socket=names.SOCKET_PATH,
        control=Path(names.CONTROL_SOCKET_PATH),
        logs=LogSettings(
            Path(names.LOGS_PATH) / "job-uid",
            keep_rounds=10,
            shared=True,
            total_bytes=found.logs.total_bytes,
        ),
        stop_grace_seconds=7.0,
        health_port=17946,
        termination_log=Path("/end"),
        warm_start=WarmStart(),
        rendezvous_id="job-uid-2",
    )


def test_agent_of_other_backend_reads_endpoints_and_parameters(tmp_path: Path) -> None:
    (tmp_path / "job-key").write_bytes(b"k")
    made = container("elasticjob-agent", rendezvous={"backend": "C10d"}, minNodes=2, maxNodes=5)
    variables = {
        name: value.replace(names.ACCESS_PATH, str(tmp_path)) for name, value in told(made).items()
    }
    absent = {name for name in variables if name.startswith("ELASTICJOB_ETCD_")}
    found = from_environment({n: v for n, v in variables.items() if n not in absent})
    assert found.backend == "c10d"
    assert found.bounds is not None
    assert (found.bounds.min_nodes, found.bounds.max_nodes) == (2, 5)
    assert found.etcd.endpoints == ("job-0.job.default.svc:29400",)
    assert not found.hosts_store, "the pod with index 0 does, and this is another"
    assert job_handler(found) is not None
    assert str(found.logs.total_bytes) == variables["ELASTICJOB_TOTAL_LOG_BYTES"]
    assert found.slots is None, "the launcher counts"


def test_users_may_name_the_topology_domain_for_the_script() -> None:
    name = "ELASTICJOB_TOPOLOGY_DOMAIN"
    check_template({"containers": [{"name": "t", "env": [{"name": name}]}]}, "t")
    assert name == replication.TOPOLOGY
    assert worker_environment({name: "rack-1"}) == {name: "rack-1"}


def test_users_may_allow_a_launcher_inside_of_a_worker() -> None:
    check_template({"containers": [{"name": "t", "env": [{"name": NESTED}]}]}, "t")
    assert worker_environment({NESTED: "allow"}) == {NESTED: "allow"}
    variable: dict[str, Any] = {"name": NESTED}
    spec = {"containers": [{"name": "t", "env": [variable]}]}
    for variable["value"] in ("", "refuse", "allow", "$(NESTED)"):
        check_template(spec, "t")
    variable["value"] = "no"
    with pytest.raises(TemplateRefused) as caught:
        check_template(spec, "t")
    assert str(caught.value).endswith("env[0].value: must be refuse or allow; got 'no'")


@pytest.mark.parametrize("name", sorted(USERS_VARIABLES - {"ELASTICJOB_TOPOLOGY_DOMAIN"}))
def test_launcher_reads_variables_that_users_may_set(name: str) -> None:
    check_template({"containers": [{"name": "t", "env": [{"name": name}]}]}, "t")
    with pytest.raises(SettingsError, match=name):
        read_settings(["--", "train"], {name: "no such value"})


def test_launcher_reads_all_its_variables() -> None:
    trainer = container("trainer", nprocPerNode="cpu")
    variables = told(trainer)
    assert set(variables) - {"ELASTICJOB_JOB"} <= set(OWN_VARIABLES), "no worker inherits them"
    assert worker_environment(variables) == {"ELASTICJOB_JOB": "default/job"}
    separator = trainer["command"].index("--")
    found = read_settings(trainer["command"][separator:], variables)
    assert found.argv == ("python3", "train.py")
    assert (found.socket_path, found.stop_grace_seconds) == (names.SOCKET_PATH, 7.0)
    assert (found.probe_port, found.probe_address) == (0, "")
    assert count_workers(found.nproc, found.argv, {}) == Count(usable_cpus())


def test_launcher_understands_the_word_for_an_absent_number() -> None:
    assert devices.ACCELERATORS == trainer_command.ACCELERATORS
