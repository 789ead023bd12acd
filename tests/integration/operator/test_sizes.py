"""Size of a job whose manifest leaves it open, on a real API server.

The operator alone owns spec.nodes until another field manager sets it.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.cluster.programs import programs
from tests.integration.apiserver import Refused
from tests.integration.etcd_server import wait_until
from tests.integration.kube_helpers import Json, elasticjob
from tests.integration.operator.admission import admission_policy, rule
from tests.integration.operator.single_operator import ns, operator
from tests.integration.operator_rig import SECONDS, Namespace, Operator

__all__ = ["ns", "operator"]

MOST = 3
IDLE = {"suspend": True}


def kubectl(ns: Namespace, *arguments: str, body: Json | None = None) -> str:
    program = str(programs("kubernetes") / "kubectl")
    where = ("--kubeconfig", str(ns.server.kubeconfig()), "--namespace", ns.name)
    done = subprocess.run(
        [program, *arguments, *where],
        input=None if body is None else json.dumps(body),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def manifest(**spec: Any) -> Json:
    return elasticjob(**({"maxNodes": MOST} | spec))


def names(count: int) -> tuple[str, ...]:
    return tuple(f"job-{index}" for index in range(count))


def started(ns: Namespace, *how: str, **spec: Any) -> None:
    """Apply the manifest with kubectl, and wait for its pods."""
    kubectl(ns, "apply", *how, "-f", "-", body=manifest(**spec))
    ns.await_pods(*names(spec.get("nodes", MOST)))


def size(ns: Namespace) -> tuple[int | None, int]:
    """Return spec.nodes and the wanted size once the operator has seen this generation."""
    job = ns.job()
    status = job.get("status") or {"observedGeneration": -1}
    seen = status["observedGeneration"] == job["metadata"]["generation"]
    return job["spec"].get("nodes"), status["wantedNodes"] if seen else -1


def await_size(ns: Namespace, nodes: int, wanted: int) -> None:
    wait_until(lambda: size(ns) == (nodes, wanted), f"nodes {nodes}, wanted {wanted}", SECONDS)
    ns.await_pods(*names(wanted))


def set_most(ns: Namespace, most: int) -> None:
    ns.patch_job({"spec": {"maxNodes": most}})


def by_kubectl_scale(ns: Namespace) -> None:
    kubectl(ns, "scale", "elasticjob/job", "--replicas=2")


def by_autoscaler(ns: Namespace) -> None:
    """Read and replace the scale, as the HorizontalPodAutoscaler does."""
    path = ns.path("elasticjobs", "job") + "/scale"
    scale = ns.server.request("GET", path)
    assert scale["spec"] == {"replicas": MOST}
    scale["spec"]["replicas"] = 2
    ns.server.request("PUT", f"{path}?fieldManager=kube-controller-manager", scale)


def by_another_applier(ns: Namespace) -> None:
    apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=gitops")
    kubectl(ns, *apply, "-f", "-", body=manifest(nodes=2))


def by_merge_patch(ns: Namespace) -> None:
    ns.patch_job({"spec": {"nodes": 2}})


SETTERS = [by_kubectl_scale, by_autoscaler, by_another_applier, by_merge_patch]


@pytest.mark.parametrize("apply", [(), ("--server-side",)], ids=["client side", "server side"])
def test_open_size_follows_maximum_also_after_the_manifest_is_applied_again(
    ns: Namespace, apply: tuple[str, ...]
) -> None:
    started(ns, *apply)
    await_size(ns, MOST, MOST)
    set_most(ns, 4)
    await_size(ns, 4, 4)
    set_most(ns, 2)
    await_size(ns, 2, 2)
    more = ("--force-conflicts",) if apply else ()
    kubectl(ns, "apply", *apply, *more, "-f", "-", body=manifest())
    await_size(ns, MOST, MOST)
    ns.await_event("NodesSet", "spec.nodes follows maxNodes: 4")


@pytest.mark.parametrize("setter", SETTERS, ids=lambda setter: setter.__name__)
def test_size_set_by_somebody_else_stays(ns: Namespace, setter: Any) -> None:
    started(ns)
    await_size(ns, MOST, MOST)
    setter(ns)
    await_size(ns, 2, 2)
    set_most(ns, 4)
    await_size(ns, 2, 2)
    kubectl(ns, "apply", "-f", "-", body=manifest())
    await_size(ns, 2, 2)


def test_size_in_the_manifest_does_not_follow(ns: Namespace) -> None:
    started(ns, nodes=2)
    set_most(ns, 4)
    await_size(ns, 2, 2)


def test_same_value_applied_by_another_manager_no_longer_follows(ns: Namespace) -> None:
    started(ns)
    await_size(ns, MOST, MOST)
    apply = ("apply", "--server-side", "--force-conflicts", "--field-manager=gitops")
    kubectl(ns, *apply, "-f", "-", body=manifest(nodes=MOST))
    set_most(ns, 4)
    await_size(ns, MOST, MOST)


def test_removed_size_follows_again(ns: Namespace) -> None:
    started(ns)
    kubectl(ns, "scale", "elasticjob/job", "--replicas=1")
    await_size(ns, 1, 1)
    ns.patch_job({"spec": {"nodes": None}})
    await_size(ns, MOST, MOST)
    set_most(ns, 4)
    await_size(ns, 4, 4)


def test_suspended_job_can_be_scaled_and_follows(ns: Namespace) -> None:
    ns.server.request(
        "POST", ns.path("elasticjobs"), manifest(runPolicy={"suspend": True}, maxNodes=MOST)
    )
    await_nodes(ns, MOST)
    set_most(ns, 4)
    await_nodes(ns, 4)
    kubectl(ns, "scale", "elasticjob/job", "--replicas=1")
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    await_size(ns, 1, 1)


@contextmanager
def refused_nodes(ns: Namespace) -> Iterator[None]:
    """Let a policy refuse each change of spec.nodes."""
    validation = {
        "expression": "object.spec.?nodes == oldObject.spec.?nodes",
        "message": "sizes belong to the team",
    }

    def refused() -> bool:
        try:
            change = {"spec": {"nodes": time.time_ns() % 1000 + 2}}
            ns.server.patch(f"{ns.path('elasticjobs', 'probe')}?dryRun=All", change)
        except Refused as error:
            return error.status == 422
        return False

    where = rule("elasticjob.dev", "elasticjobs", "UPDATE")
    with admission_policy(ns, "Validating", where, validations=[validation]):
        ns.server.request(
            "POST", ns.path("elasticjobs"), elasticjob("probe", runPolicy=IDLE, nodes=1)
        )
        wait_until(refused, "the policy", SECONDS)
        ns.server.request("DELETE", ns.path("elasticjobs", "probe"))
        yield


@pytest.mark.parametrize("suspended", [False, True])
def test_refused_write_of_the_size_delays_nothing_and_is_reported(
    ns: Namespace, operator: Operator, suspended: bool
) -> None:
    with refused_nodes(ns):
        ns.create_job(maxNodes=MOST, runPolicy={"suspend": suspended})
        found = ns.await_condition("NodesRefused", "NodesRefused")
        assert found["status"] == "True"
        assert "cannot write spec.nodes: 3, so it is absent" in found["message"]
        assert "sizes belong to the team" in found["message"]
        ns.await_event("NodesRefused", found["message"])
        ns.await_pods(*(() if suspended else names(MOST)))
        ns.await_status(phase="Suspended" if suspended else "Pending")
        assert any("sizes belong to the team" in text for text in ns.status()["explanation"])
        assert operator.metric("elasticjob_errors_total", kind="Invalid") == 0
        ns.patch_job({"spec": {"runPolicy": {"suspend": not suspended}}})
        ns.await_pods(*(names(MOST) if suspended else ()))
    # A change of the job is followed by another attempt.
    wait_until(lambda: is_written(ns), "spec.nodes", SECONDS)
    wait_until(lambda: ns.condition("NodesRefused") == {}, "the end of the condition", SECONDS)


def is_written(ns: Namespace) -> bool:
    """Change the job; return True if spec.nodes is set."""
    ns.patch_job({"spec": {"maxRestarts": time.time_ns() % 1000}})
    return ns.job()["spec"].get("nodes") == MOST


def await_nodes(ns: Namespace, nodes: int) -> None:
    wait_until(lambda: ns.job()["spec"].get("nodes") == nodes, f"nodes {nodes}", SECONDS)


def test_job_without_minimum_has_one_size(ns: Namespace) -> None:
    without = manifest()
    del without["spec"]["minNodes"]
    kubectl(ns, "apply", "-f", "-", body=without)
    await_size(ns, MOST, MOST)
    kubectl(ns, "scale", "elasticjob/job", "--replicas=1")
    await_size(ns, 1, MOST)
    assert ns.condition("Resizing")["reason"] == "BelowMinNodes"
