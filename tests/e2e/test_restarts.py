"""Deaths of operators and etcd during an undisturbed training."""

from __future__ import annotations

import pytest

from tests.e2e.console import Json, until
from tests.e2e.installation import ETCD_POD, SYSTEM, Installation, is_ready
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.nodes import Nodes
from tests.e2e.steady import NAME, pids, recovers, restarts_of, survive

pytestmark = pytest.mark.timeout(600, func_only=True)


def test_killed_operator_does_not_disturb_training(
    steady_job: JobNamespace, nodes: Nodes, installation: Installation
) -> None:
    (operator,) = installation.operators()
    survive(
        steady_job,
        lambda: nodes.kill_container(operator, "operator"),
        lambda: until(
            lambda: restarts_of(installation.operators()[0], "operator") > 0,
            "the operator to be back",
        ),
    )
    installation.ready()
    recovers(steady_job)


def test_new_operator_reports_events_of_its_absence(
    steady_job: JobNamespace, installation: Installation
) -> None:
    """The agents alone restart workers; the status catches up with the next operator."""
    before = steady_job.running(NAME, 2)
    scale = ("-n", SYSTEM, "scale", "deployment/elasticjob-operator")
    installation.console.kubectl(*scale, "--replicas=0")
    until(lambda: not installation.operators(), "the operator to be gone")
    old = pids(steady_job)
    steady_job.kill_worker(f"{NAME}-0")
    steady_job.until(lambda: set(pids(steady_job).values()).isdisjoint(old.values()), "new workers")
    stale = steady_job.status(NAME)
    assert stale["rendezvous"]["round"] == before["rendezvous"]["round"], "nobody writes it"
    installation.console.kubectl(*scale, "--replicas=1")
    installation.ready()
    after = steady_job.running(NAME, 2, after=before["rendezvous"]["round"])
    assert after["restarts"] == before["restarts"] + 1
    assert after["rounds"][-1]["cause"] == "failure"
    steady_job.patch(NAME, {"maxRestarts": after["restarts"] + 3})


def test_killed_etcd_does_not_disturb_training(
    steady_job: JobNamespace, nodes: Nodes, installation: Installation
) -> None:
    def etcd() -> Json:
        return installation.console.api.find("pods", ETCD_POD, SYSTEM) or {}

    killed = restarts_of(etcd(), "etcd")
    survive(
        steady_job,
        lambda: nodes.kill_container(etcd(), "etcd"),
        lambda: until(
            lambda: restarts_of(etcd(), "etcd") > killed and is_ready(etcd()), "etcd to be back"
        ),
    )
    recovers(steady_job)


def test_deleted_etcd_pod_does_not_disturb_training(
    steady_job: JobNamespace, installation: Installation
) -> None:
    survive(
        steady_job,
        lambda: installation.console.kubectl("-n", SYSTEM, "delete", "pod", ETCD_POD),
        lambda: installation.ready(),
    )
    recovers(steady_job)


def test_etcd_that_lost_its_volume_does_not_disturb_training(
    steady_job: JobNamespace, installation: Installation
) -> None:
    """The new etcd begins with authentication: the operator restores root and the job's user."""
    console, scale = installation.console, ("-n", SYSTEM, "scale", "statefulset/elasticjob-etcd")

    def lose_volume() -> None:
        console.kubectl(*scale, "--replicas=0")
        until(lambda: console.api.find("pods", ETCD_POD, SYSTEM) is None, "etcd to be gone")
        console.kubectl("-n", SYSTEM, "delete", "pvc", f"data-{ETCD_POD}")
        console.kubectl(*scale, "--replicas=1")

    survive(steady_job, lose_volume, installation.ready)
    log = console.kubectl("-n", SYSTEM, "logs", ETCD_POD, "-c", "install-data")
    assert "begins with authentication enabled" in log
    answer = installation.anonymous_read()
    assert "user name is empty" in answer or "permission denied" in answer
    recovers(steady_job)


def test_standby_replica_takes_over_from_killed_active_replica(
    steady_job: JobNamespace, nodes: Nodes, installation: Installation
) -> None:
    console = installation.console
    scale = ("-n", SYSTEM, "scale", "deployment/elasticjob-operator")
    console.kubectl(*scale, "--replicas=2")
    try:
        installation.ready(operators=2)
        names = {pod["metadata"]["name"] for pod in installation.operators()}
        until(lambda: _name_in(installation.leader(), names), "one of them to lead")
        active = installation.leader()
        told = {name: name in active for name in names}
        until(lambda: {name: _leads(installation, name) for name in names} == told, f"{told}")

        steady_job.kubectl("scale", f"ej/{NAME}", "--replicas=3")
        steady_job.running(NAME, 3)
        leader = next(p for p in installation.operators() if p["metadata"]["name"] in active)
        pod = leader["metadata"]["name"]
        console.kubectl("-n", SYSTEM, "delete", "pod", pod, "--grace-period=0", "--force")
        until(lambda: installation.leader() not in ("", active), "the other to lead", 60)
        steady_job.kubectl("scale", f"ej/{NAME}", "--replicas=2")
        steady_job.running(NAME, 2)
    finally:
        console.kubectl(*scale, "--replicas=1")
        until(lambda: len(installation.operators()) == 1, "one operator again")
        installation.ready()


def _name_in(holder: str, names: set[str]) -> bool:
    return any(name in holder for name in names)


def _leads(installation: Installation, pod: str) -> bool:
    """Return True if the pod's own metrics report it as the leader."""
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{pod}:8080/proxy/metrics"
    return "elasticjob_leader 1.0" in installation.console.api.text("GET", path)
