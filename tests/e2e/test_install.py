"""Chart operations with jobs present: upgrade, uninstall, install again. The last tests."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import MakeNamespace
from tests.e2e.console import Console, until
from tests.e2e.installation import SYSTEM, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import counting, job

pytestmark = pytest.mark.timeout(600, func_only=True)

CRD = "elasticjobs.elasticjob.dev"


@pytest.fixture(scope="module")
def ns(make_namespace: MakeNamespace, installation: Installation) -> JobNamespace:
    """Return a namespace with a job that trains throughout and one to be deleted meanwhile."""
    found = make_namespace("e2e-install")
    for name in ("lasting", "deleted"):
        found.apply(job(name, counting(), nodes=2))
    for name in ("lasting", "deleted"):
        found.running(name, 2)
    return found


def trains_on(ns: JobNamespace, before: dict[str, str]) -> None:
    ns.advances("lasting", ns.latest("lasting") + 10)
    assert {step.pod: step.pid for step in ns.steps("lasting", tail=5)} == before


def test_upgrade_does_not_disturb_jobs(ns: JobNamespace, installation: Installation) -> None:
    before = ns.running("lasting", 2)
    workers = {step.pod: step.pid for step in ns.steps("lasting", tail=5)}
    operators = {pod["metadata"]["uid"] for pod in installation.operators()}
    installation.upgrade(operator__logLevel="debug", etcd__snapshotCount=20000)
    installation.ready()
    assert {pod["metadata"]["uid"] for pod in installation.operators()}.isdisjoint(operators)
    trains_on(ns, workers)
    after = ns.running("lasting", 2)
    assert after["rendezvous"]["round"] == before["rendezvous"]["round"]
    ns.kill_worker("lasting-0")
    ns.running("lasting", 2, after=after["rendezvous"]["round"])


def test_uninstall_keeps_jobs_training_and_leaves_no_stuck_object(
    ns: JobNamespace, installation: Installation, console: Console
) -> None:
    workers = {step.pod: step.pid for step in ns.steps("lasting", tail=5)}
    installation.uninstall()
    assert not installation.installed
    assert console.api.find("customresourcedefinitions", CRD) is not None, "kept, and so are jobs"
    assert ns.job("lasting")["status"]["phase"] == "Running"
    trains_on(ns, workers)

    ns.delete("deleted")
    ns.without_pods("deleted")
    kinds = "all,configmaps,leases,networkpolicies,secrets"
    kept = {"Secret/elasticjob-etcd", "Secret/elasticjob-etcd-authority"}

    def is_clean() -> bool:
        left = console.json("-n", SYSTEM, "get", kinds)["items"]
        names = {f"{found['kind']}/{found['metadata']['name']}" for found in left}
        own = {name for name in names if "elasticjob" in name and not name.startswith("Lease/")}
        return own <= kept

    until(is_clean, "the Secrets of the data that was kept, at most", 60.0)


def test_reinstalled_operator_adopts_running_jobs(
    ns: JobNamespace, installation: Installation
) -> None:
    installation.install()
    installation.ready()
    ns.apply(job("after", counting(2), nodes=2))
    ns.in_phase("after", "Succeeded")
    status = ns.running("lasting", 2)
    ns.kill_worker("lasting-1")
    ns.running("lasting", 2, after=status["rendezvous"]["round"])
    ns.finish("lasting")
    ns.in_phase("lasting", "Succeeded")


def test_namespace_with_jobs_is_deletable_without_operator(
    make_namespace: MakeNamespace, installation: Installation, console: Console
) -> None:
    ns = make_namespace("e2e-stuck")
    ns.apply(job("left", counting(), nodes=2))
    ns.running("left", 2)
    installation.uninstall()
    console.kubectl("delete", "namespace", "e2e-stuck", "--timeout=90s", seconds=100)
    until(lambda: console.api.find("namespaces", "e2e-stuck") is None, "the namespace to be gone")
    console.kubectl("create", "namespace", "e2e-stuck")  # for the fixture's own clean-up
