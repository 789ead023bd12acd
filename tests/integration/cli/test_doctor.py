"""`elasticjob doctor` on a real API server and on this machine, whole and broken."""

from __future__ import annotations

import copy
import json
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.programs import programs
from tests.integration.apiserver import ADMIN, CRD, NOBODY, ApiServer, Refused
from tests.integration.etcd_server import wait_until
from tests.integration.helm_chart import NAMESPACE, render
from tests.integration.local_rig import LocalRig

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "elasticjobs.elasticjob.dev"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """Yield a private server without ElasticJobs."""
    started = ApiServer(tmp_path_factory.mktemp("apiserver"))
    try:
        started.etcd.start()
        started.launch()
        started.wait_ready()
        yield started
    finally:
        started.close()


def define(server: ApiServer, definition: Json | None) -> None:
    """Replace the definition of ElasticJobs on a server, or remove it."""

    def present(wanted: bool) -> bool:
        try:
            found = server.request("GET", f"{DEFINITIONS}/{NAME}")
        except Refused:
            return not wanted
        conditions = {one["type"]: one["status"] for one in found["status"].get("conditions") or ()}
        return wanted and conditions.get("Established") == "True"

    if not present(False):
        server.request("DELETE", f"{DEFINITIONS}/{NAME}")
    wait_until(lambda: present(False), "the definition to go")
    if definition is not None:
        server.request("POST", DEFINITIONS, definition)
        wait_until(lambda: present(True), "the definition to be served")


def examined(rig: LocalRig, server: ApiServer, user: str = ADMIN) -> tuple[int, dict[str, Json]]:
    """Return the exit code and the checks of `doctor` for a user of the cluster."""
    words = ("doctor", "--kubeconfig", server.kubeconfig(user), "-o", "json")
    path = f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}"
    done = rig.call(*words, env={"PATH": path})
    assert done.stderr == ""
    return done.returncode, {one["check"]: one for one in json.loads(done.stdout)["checks"]}


def shipped() -> Json:
    definition: Json = yaml.safe_load(CRD.read_text())
    return definition


def test_missing_definition_and_operator_are_found(server: ApiServer, tmp_path: Path) -> None:
    define(server, None)
    code, found = examined(LocalRig(tmp_path), server)
    assert code == 1
    assert (found["API server"]["grade"], found["CRD"]["grade"]) == ("ok", "fail")
    assert "not installed" in found["CRD"]["found"]
    assert found["operator"]["grade"] == "fail"
    assert all(one["remedy"] for one in found.values() if one["grade"] != "ok")


def test_definition_of_another_release_is_found(server: ApiServer, tmp_path: Path) -> None:
    definition = shipped()
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]["properties"]["stragglers"]
    define(server, definition)
    _, found = examined(LocalRig(tmp_path), server)
    assert found["CRD"]["grade"] == "fail"
    assert "its schema lacks status.stragglers: array" in found["CRD"]["found"]
    (tmp_path / "second").mkdir()
    renamed = shipped()
    renamed["spec"]["versions"][0]["name"] = "v9"
    define(server, renamed)
    _, found = examined(LocalRig(tmp_path / "second"), server)
    assert found["CRD"]["found"] == "v1alpha1 is not served, only: v9"


def test_installed_chart_is_examined(server: ApiServer, tmp_path: Path) -> None:
    define(server, shipped())
    server.namespace(NAMESPACE)
    kinds = ("Deployment", "StatefulSet", "Service", "NetworkPolicy", "ValidatingAdmissionPolicy")
    wanted = (*kinds, "ValidatingAdmissionPolicyBinding")
    manifests = [one for one in render().objects if one["kind"] in wanted]
    subprocess.run(
        [programs("kubernetes") / "kubectl", "apply", "-f", "-", "--kubeconfig",
         server.kubeconfig()],
        input="\n---\n".join(map(json.dumps, manifests)), text=True, check=True,
        capture_output=True,
    )  # fmt: skip
    pod = {
        "metadata": {"name": "op", "labels": {"app.kubernetes.io/part-of": "elasticjob"}},
        "spec": {"containers": [{"name": "c", "image": "nowhere:1"}]},
    }
    server.request("POST", PODS, pod)
    waiting = {"name": "c", "image": "nowhere:1", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ErrImagePull"}}
    server.patch(f"{PODS}/op/status", {"status": {"containerStatuses": [waiting]}})
    code, found = examined(LocalRig(tmp_path), server)
    assert code == 1
    assert found["CRD"] == {
        "check": "CRD",
        "grade": "ok",
        "found": "v1alpha1, the schema is this release's",
        "remedy": "",
    }
    assert f"{NAMESPACE}/elasticjob-operator: 0 of 1" in found["operator"]["found"]
    assert found["leader"]["grade"] == "fail"
    assert "less than a majority" in found["etcd"]["found"]
    assert found["authority"]["grade"] == "fail"
    assert found["admission policies"]["grade"] == "ok"
    assert found["images"]["found"] == f"{NAMESPACE}/op: ErrImagePull: nowhere:1"
    assert found["your permissions"]["grade"] == "ok"
    assert found["network policies"]["grade"] == "warn"


def test_user_without_permissions_gets_warnings(server: ApiServer, tmp_path: Path) -> None:
    define(server, shipped())
    code, found = examined(LocalRig(tmp_path), server, NOBODY)
    assert code == 1, found["your permissions"]
    assert [one["check"] for one in found.values() if one["grade"] == "fail"] == [
        "your permissions"
    ]
    told = {one["check"] for one in found.values() if one["found"].startswith("not permitted: ")}
    assert {"CRD", "operator", "etcd", "services", "DNS", "claims", "images"} <= told


def test_unreachable_cluster_is_one_failed_check(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    config = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    document = {"clusters": [cluster], "contexts": [context], "current-context": "x"}
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **document}))
    path = f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}"
    done = rig.call("doctor", "--kubeconfig", config, env={"PATH": path})
    assert done.returncode == 1
    first, _, _, summary = done.stdout.splitlines()
    assert first.startswith("fail  API server  ")
    assert summary == "0 ok, 0 warn, 1 fail"


def machine(rig: LocalRig, *words: object, before: Callable[[], None] | None = None) -> Json:
    """Return the checks of this machine; `before` runs in the process first."""
    done = subprocess.run(
        rig.command("doctor", "--local", "-o", "json", *words),
        env=rig.env, cwd=rig.job, capture_output=True, text=True, timeout=90, preexec_fn=before,
    )  # fmt: skip
    assert done.stderr == ""
    document = json.loads(done.stdout)
    found: Json = {one["check"]: one for one in document["checks"]}
    assert done.returncode == (0 if document["ok"] else 1)
    return found


def test_etcd_of_local_runs_is_really_used(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    found = machine(rig)
    assert found["etcd"]["grade"] == "ok"
    assert found["etcd"]["found"].endswith("started, wrote and read a key")
    assert found["torch"]["grade"] == "ok"
    rig.nothing_left()


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_broken_machine_has_a_remedy_for_each_fault(tmp_path: Path) -> None:
    rig = LocalRig(tmp_path)
    broken = copy.copy(rig)
    broken.env = {**rig.env, "TMPDIR": str(tmp_path / "gone"), "PATH": "/nowhere"}
    found = machine(broken, "--shm", tmp_path / "no-shm", before=few_files)
    assert found["ulimit nofile"]["grade"] == "fail"
    assert found["shared memory"]["grade"] == "fail"
    assert found["loopback ports"]["grade"] == "fail"  # more than 64 files
    assert all(one["remedy"] for one in found.values() if one["grade"] != "ok")
    rig.nothing_left()
