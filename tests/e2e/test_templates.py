"""Real-world pod templates and namespace policies. All jobs are applied at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.cluster.cluster import Cluster
from tests.e2e.conftest import MakeNamespace
from tests.e2e.console import Json, until
from tests.e2e.installation import DENYING, OPERATOR, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import IMAGE, counting, digits, job
from tests.e2e.nodes import Nodes
from tests.e2e.policies import enforced

pytestmark = pytest.mark.timeout(600, func_only=True)

ONE_NODE_IMAGE = "elasticjob/on-one-node:dev"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 4711,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SHORT = 4.0
KNOCK = """
import socket
try:
    socket.create_connection(("elasticjob-etcd.elasticjob-system.svc", 2379), timeout=5)
    print("let in")
except OSError as error:
    print("denied:", error)
"""


KEPT = {"cleanPodPolicy": "None"}
"""Policy for jobs whose logs are read after their end, however late the kubelet reports it."""


def shell(script: str) -> Json:
    return {"command": ["bash", "-c", script]}


def several(ns: JobNamespace) -> None:
    """Apply templates that must work unchanged."""
    short = counting(SHORT)
    scratch = {"name": "scratch", "emptyDir": {}}
    mount = {"volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}]}
    prepare = {
        "name": "prepare",
        "image": IMAGE,
        "command": ["sh", "-c", "echo 42 > /scratch/data"],
    }
    read_data = ["python3", "-c", "print('the data is', open('/scratch/data').read())"]
    said_goodbye = {"preStop": {"exec": {"command": ["sh", "-c", "echo bye > /scratch/bye"]}}}
    ns.apply(
        job("any-user", short, nodes=2, trainer={"securityContext": {"runAsUser": 12345}}),
        job(
            "companions",
            short,
            nodes=2,
            others=({"name": "metrics", "image": IMAGE, "command": ["sleep", "10000"]},),
            pod={"terminationGracePeriodSeconds": 2},
        ),
        job(
            "init",
            {"command": read_data},
            nodes=1,
            trainer={**mount, "lifecycle": said_goodbye},
            pod={"initContainers": [prepare | mount], "volumes": [scratch]},
            runPolicy=KEPT,
        ),
        job(
            "shell",
            shell("echo prepared; export GREETING=hello; exec python3 -c 'import os; "
                  "print(os.environ[\"GREETING\"], os.environ[\"RANK\"])'"),
            nodes=2,
            least=2,
            nprocPerNode=2,
            setup=["sh", "-c", "echo set up"],
            runPolicy=KEPT,
        ),
        job(
            "torchrun",
            {"command": ["torchrun", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d",
                         "train.py"], "args": ["--steps", "20"]},
            nodes=2,
            least=2,
            nprocPerNode=2,
            runPolicy=KEPT,
        ),
        job("refused", shell("pip list | cat; python3 train.py"), nodes=1, nprocPerNode=2),
    )  # fmt: skip


def half(ns: JobNamespace, nodes: Nodes) -> None:
    """Apply a job of two pods on different nodes, one of which lacks the image."""
    nodes.tag_image(nodes.workers[0], IMAGE, ONE_NODE_IMAGE)
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"elasticjob.dev/job-name": "half"}},
    }
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    ns.apply(
        job(
            "half",
            nodes=2,
            elasticity={"pendingTimeoutSeconds": 5},
            pod={"affinity": affinity},
            trainer={"image": ONE_NODE_IMAGE, "imagePullPolicy": "IfNotPresent"},
        )
    )


def denied(ns: JobNamespace) -> None:
    """Apply a job, and a pod outside any job, in a namespace that denies all traffic."""
    deny = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    # Enforcement needs a pod's address: no traffic before it is known.
    settle = {"name": "settle", "image": IMAGE, "command": ["sleep", "4"]}
    knock = {"name": "main", "image": IMAGE, "command": ["python3", "-c", KNOCK]}
    ns.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "deny"},
            "spec": deny,
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "stranger"},
            "spec": {"restartPolicy": "Never", "initContainers": [settle], "containers": [knock]},
        },
        job(
            "denied",
            digits("--steps", 20),
            nodes=2,
            least=2,
            pod={"initContainers": [settle]},
        ),
    )


@dataclass(frozen=True, slots=True)
class Namespaces:
    plain: JobNamespace
    restricted: JobNamespace
    denying: JobNamespace
    quota: JobNamespace


@pytest.fixture(scope="module")
def applied(
    ns: JobNamespace,
    make_namespace: MakeNamespace,
    installation: Installation,
    cluster: Cluster,
    nodes: Nodes,
) -> Iterator[Namespaces]:
    several(ns)
    half(ns, nodes)
    console = ns.console
    restricted = make_namespace("e2e-restricted", "pod-security.kubernetes.io/enforce=restricted")
    restricted.apply(
        job("restricted", counting(SHORT), nodes=2, trainer={"securityContext": RESTRICTED})
    )
    quota = make_namespace("e2e-quota")
    quota.apply(
        {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one"},
         "spec": {"hard": {"pods": "1"}}}
    )  # fmt: skip
    quota.until(
        lambda: (quota.find("resourcequotas", "one") or {}).get("status"), "the quota to count"
    )
    quota.apply(job("limited", nodes=2, elasticity={"pendingTimeoutSeconds": 5}))
    denying = JobNamespace(console, DENYING)
    with enforced(cluster, console, DENYING):
        denied(denying)
        yield Namespaces(ns, restricted, denying, quota)
    for kind in ("ej/denied", "pod/stranger", "networkpolicy/deny"):
        denying.kubectl("delete", kind, "--wait=false", "--ignore-not-found")


def test_any_user_id_can_train(applied: Namespaces) -> None:
    applied.plain.in_phase("any-user", "Succeeded")


def test_endless_sidecar_container_does_not_block_completion(applied: Namespaces) -> None:
    applied.plain.in_phase("companions", "Succeeded")
    applied.plain.without_pods("companions")


def test_init_containers_and_pre_stop_hooks_are_kept(applied: Namespaces) -> None:
    applied.plain.in_phase("init", "Succeeded")
    assert "the data is 42" in applied.plain.log("init-0")
    (pod,) = applied.plain.pods("init").values()
    inits = [container["name"] for container in pod["spec"]["initContainers"]]
    assert inits == ["elasticjob-launcher", "prepare", "elasticjob-agent"]
    (trainer,) = pod["spec"]["containers"]
    assert trainer["lifecycle"]["preStop"]["exec"]["command"][0] == "sh"


def test_preparation_runs_once_per_pod_and_its_command_once_per_worker(
    applied: Namespaces,
) -> None:
    status = applied.plain.in_phase("shell", "Succeeded")
    assert status["launch"]["reason"] == "PreparationSplit"
    logs = [applied.plain.log("shell-0"), applied.plain.log("shell-1")]
    assert [log.count("prepared") for log in logs] == [1, 1]
    assert [log.count("set up") for log in logs] == [1, 1]
    said = "".join(logs)
    assert all(f"hello {rank}" in said for rank in range(4))


def test_nested_torchrun_is_unwrapped(applied: Namespaces) -> None:
    status = applied.plain.in_phase("torchrun", "Succeeded")
    assert status["rendezvous"]["worldSize"] == 4
    told = applied.plain.log("torchrun-0")
    assert "step 20" in told
    assert "world 4" in told


def test_shell_line_that_cannot_be_split_is_refused_with_reason(
    applied: Namespaces,
) -> None:
    condition = applied.plain.told("refused", "TemplateInvalid")
    assert "because of a pipeline" in condition["message"]
    assert "spec.setup" in condition["message"]
    assert applied.plain.pods("refused") == {}


def test_job_runs_in_restricted_namespace(applied: Namespaces) -> None:
    applied.restricted.in_phase("restricted", "Succeeded")


def test_job_runs_in_namespace_with_default_deny_policy(applied: Namespaces) -> None:
    """The chart's networkPolicy.jobNamespaces permits the job's traffic: torch opens any port."""
    assert applied.denying.find("networkpolicies", "elasticjob-jobs") is not None
    denying = applied.denying
    denying.in_phase("denied", "Succeeded")
    denying.until(
        lambda: (denying.find("pods", "stranger") or {})["status"]["phase"] == "Succeeded",
        "the stranger to have tried",
    )
    assert "denied" in denying.log("stranger", "main"), "the policy is in force"


def blocked(ns: JobNamespace, name: str, reason: str) -> Json:
    """Wait until the job's PodsReady condition has this reason; return the condition."""

    def told() -> Json | None:
        condition = ns.condition(name, "PodsReady")
        return condition if condition.get("reason") == reason else None

    found: Json = ns.until(told, f"PodsReady of {name} to say {reason}")
    return found


def test_quota_is_reported_and_other_pods_train(applied: Namespaces) -> None:
    quota = applied.quota
    quota.running("limited", 1)
    condition = blocked(quota, "limited", "QuotaExceeded")
    assert "pods=1" in condition["message"]
    quota.advances("limited", quota.latest("limited") + 5)
    quota.kubectl("patch", "quota", "one", "--type=merge", "-p", '{"spec":{"hard":{"pods":"9"}}}')
    quota.running("limited", 2)
    quota.told("limited", "PodsReady")
    quota.delete("limited", "--wait=false")


def test_image_unavailable_on_one_node_is_reported_and_other_pods_train(
    applied: Namespaces,
) -> None:
    ns = applied.plain
    ns.running("half", 1)

    condition = blocked(ns, "half", "ImageUnavailable")
    assert ONE_NODE_IMAGE in condition["message"]
    assert "half-" in condition["message"]
    ns.advances("half", ns.latest("half") + 5)
    ns.delete("half", "--wait=false")


def test_operator_has_not_restarted(installation: Installation) -> None:
    until(lambda: installation.operators(), "the operator")
    printed = installation.console.kubectl("-n", "elasticjob-system", "logs", OPERATOR)
    # Messages of failed workers have theirs within a line.
    assert not [line for line in printed.splitlines() if line.startswith("Traceback")]
