"""ElasticJobs as served by a real API server: defaults, subresources, columns, immutability."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.integration.apiserver import ApiServer, Refused
from tests.integration.kube_helpers import ELASTICJOBS_PATH, Json, elasticjob

TABLE = "application/json;as=Table;g=meta.k8s.io;v=v1"


@pytest.fixture
def path(namespace: str) -> str:
    """Return the path of the ElasticJobs in the test's namespace."""
    return ELASTICJOBS_PATH.format(namespace)


def template(**container: Any) -> Json:
    trainer = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    return {"spec": {"containers": [trainer | container]}}


# --- fields that change only while suspended

CHANGES: dict[str, Json] = {
    "template's image": {"template": template(image="trainer:2")},
    "template's unknown field": {"template": template(ports=[{"containerPort": 80}])},
    "nprocPerNode": {"nprocPerNode": 4},
    "launch": {"launch": "PerNode"},
    "setup": {"setup": ["pip", "install", "x"]},
    "nprocPerNode in quotes": {"nprocPerNode": "4"},
    "nprocPerNode in words": {"nprocPerNode": "gpu"},
    "trainer": {"trainer": "trainer"},
    "rendezvous": {"rendezvous": {"keepAliveSeconds": 7}},
}
STARTED_WITH: dict[str, tuple[str, Json]] = {
    **{
        name: ("recovery", {"recovery": {name: value}})
        for name, value in {
            "hangTimeoutSeconds": 60,
            "snapshots": {
                "enabled": False,
                "everySteps": 5,
                "replicas": 2,
                "memoryLimit": "8Gi",
                "storage": {"claim": "checkpoints", "everySeconds": 60, "keep": 4},
            },
            "stopGraceSeconds": 1,
            "warmStart": "Never",
            "warmStartModules": ["numpy"],
        }.items()
    },
    "priorityClass": (
        "runPolicy.schedulingPolicy.priorityClass",
        {"runPolicy": {"schedulingPolicy": {"priorityClass": "high"}}},
    ),
}


@pytest.mark.parametrize(("field", "change"), STARTED_WITH.values(), ids=STARTED_WITH)
def test_settings_of_running_pods_change_only_during_suspension(
    api_server: ApiServer, path: str, field: str, change: Json
) -> None:
    api_server.request("POST", path, elasticjob())
    message = "suspended .*: running pods keep the value that they started with"
    with pytest.raises(Refused, match=message) as refused:
        api_server.patch(f"{path}/job", {"spec": change})
    assert [cause["field"] for cause in refused.value.body["details"]["causes"]] == [
        f"spec.{field}"
    ]
    api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": True}}})
    api_server.patch(f"{path}/job", {"spec": change})
    api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": False}}})
    removed: Json = {"recovery": None, "runPolicy": {"schedulingPolicy": None}}
    with pytest.raises(Refused, match=message):
        api_server.patch(f"{path}/job", {"spec": removed})


@pytest.mark.parametrize("policy", [None, {}, {"priorityClass": "high"}])
def test_other_policies_change_beside_unchanged_priority_class(
    api_server: ApiServer, path: str, policy: Json | None
) -> None:
    given = {} if policy is None else {"schedulingPolicy": policy}
    api_server.request("POST", path, elasticjob(runPolicy=given))
    change = {"runPolicy": {"ttlSecondsAfterFinished": 5}}
    api_server.patch(f"{path}/job", {"spec": change})
    if not policy:
        other: Json = {"runPolicy": {"schedulingPolicy": {} if policy is None else None}}
        api_server.patch(f"{path}/job", {"spec": other})


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_fields_that_shape_rounds_change_only_during_suspension(
    api_server: ApiServer, path: str, change: Json
) -> None:
    api_server.request("POST", path, elasticjob())
    field = f"spec.{next(iter(change))}"
    with pytest.raises(Refused, match="must change only while the job is suspended") as refused:
        api_server.patch(f"{path}/job", {"spec": change})
    assert refused.value.status == 422
    assert [cause["field"] for cause in refused.value.body["details"]["causes"]] == [field]

    api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": True}}})
    changed = api_server.patch(f"{path}/job", {"spec": change})
    assert changed["metadata"]["generation"] == 3
    api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": False}}})
    with pytest.raises(Refused):
        api_server.patch(f"{path}/job", {"spec": {"nprocPerNode": 2}})


@pytest.mark.parametrize("launch", ["PerNode", "PerWorker", None])
def test_command_for_one_node_gets_others_only_during_suspension(
    api_server: ApiServer, path: str, launch: str | None
) -> None:
    """The command of the running pod was started as that of a single node: it may train alone."""
    api_server.request("POST", path, elasticjob(minNodes=1, maxNodes=1, nodes=1))
    status = {"phase": "Running"}
    if launch:
        shown = {"mode": launch, "reason": "LauncherFound", "message": "swift"}
        status |= {"launch": shown}  # type: ignore[dict-item]
    api_server.patch(f"{path}/job/status", {"status": status})
    api_server.patch(f"{path}/job", {"spec": {"maxNodes": 1, "maxRestarts": 5}})
    grown = {"spec": {"maxNodes": 2}}
    if launch == "PerNode":
        with pytest.raises(Refused, match="must change from 1 only while the job is") as refused:
            api_server.patch(f"{path}/job", grown)
        (cause,) = refused.value.body["details"]["causes"]
        assert cause["field"] == "spec.maxNodes"
        api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": True}}})
        api_server.patch(f"{path}/job", grown)
        api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": False}}})
    for most in (2, 4, 1):  # a command started as one of several ignores their number
        api_server.patch(f"{path}/job", {"spec": {"maxNodes": most}})


@pytest.mark.parametrize("phase", ["Pending", "Succeeded", "Failed"])
def test_command_for_one_node_gets_others_after_the_end(
    api_server: ApiServer, path: str, phase: str
) -> None:
    """The pod of a pending job may start at any time, even if the status does not show it yet."""
    api_server.request("POST", path, elasticjob(minNodes=1, maxNodes=1, nodes=1))
    launch = {"mode": "PerNode", "reason": "LauncherFound", "message": "swift"}
    api_server.patch(f"{path}/job/status", {"status": {"phase": phase, "launch": launch}})
    grown = {"spec": {"maxNodes": 2}}
    if phase == "Pending":
        with pytest.raises(Refused, match="a pod that starts it as that of a single node may"):
            api_server.patch(f"{path}/job", grown)
    else:
        assert api_server.patch(f"{path}/job", grown)["spec"]["maxNodes"] == 2


def test_suspending_or_resuming_write_may_change_template(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob())
    for tag, suspend in (("2", True), ("3", False)):
        change = {"template": template(image=f"trainer:{tag}"), "runPolicy": {"suspend": suspend}}
        changed = api_server.patch(f"{path}/job", {"spec": change})
        container = changed["spec"]["template"]["spec"]["containers"][0]
        assert container["image"] == f"trainer:{tag}"


def test_sizes_and_policies_change_at_any_time(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob())
    change = {
        "minNodes": 2,
        "maxNodes": 6,
        "nodes": 3,
        "maxRestarts": 9,
        "elasticity": {"scaleUp": "AfterCheckpoint"},
        "runPolicy": {"ttlSecondsAfterFinished": 60},
    }
    changed = api_server.patch(f"{path}/job", {"spec": change})["spec"]
    assert changed["elasticity"]["settleSeconds"] == 3, "its neighbours keep their values"
    assert {name: changed[name] for name in ("minNodes", "maxNodes", "nodes")} == {
        "minNodes": 2,
        "maxNodes": 6,
        "nodes": 3,
    }
    with pytest.raises(Refused, match=r"spec\.maxNodes: .*must be at least minNodes"):
        api_server.patch(f"{path}/job", {"spec": {"maxNodes": 1}})


def test_reapplied_manifest_changes_nothing(api_server: ApiServer, path: str) -> None:
    manifest = elasticjob(template=template(ports=[{"containerPort": 80}]))
    first = api_server.request("POST", path, manifest)
    again = api_server.patch(f"{path}/job", manifest)
    assert again["metadata"]["generation"] == 1
    assert again["spec"] == first["spec"]


def test_entry_point_replaces_a_command_only_during_suspension(
    api_server: ApiServer, path: str
) -> None:
    trainer = {"name": "trainer", "image": "trainer:1", "args": ["--lr", "1"]}
    only_args: Json = {"spec": {"containers": [trainer]}}
    given = elasticjob(template=only_args, entrypoint=["python3", "train.py"])
    api_server.request("POST", path, given)
    with pytest.raises(Refused, match=r"spec\.entrypoint: .*only while the job is suspended"):
        api_server.patch(f"{path}/job", {"spec": {"entrypoint": ["python3", "other.py"]}})


# --- scale


def test_scale_subresource_reads_and_writes_size(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob(maxNodes=8))
    status = {"pods": {"active": 2}, "selector": "elasticjob.dev/job-name=job"}
    api_server.patch(f"{path}/job/status", {"status": status})
    scale = api_server.patch(f"{path}/job/scale", {"spec": {"replicas": 5}})
    assert (scale["kind"], scale["apiVersion"]) == ("Scale", "autoscaling/v1")
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 2, "selector": "elasticjob.dev/job-name=job"}
    job = api_server.request("GET", f"{path}/job")
    assert (job["spec"]["nodes"], job["metadata"]["generation"]) == (5, 2)
    with pytest.raises(Refused, match=r"spec\.(nodes|replicas): .*greater than or equal to 0"):
        api_server.patch(f"{path}/job/scale", {"spec": {"replicas": -1}})


def test_scale_sets_size_of_job_without_one(api_server: ApiServer, path: str) -> None:
    job = api_server.request("POST", path, elasticjob())
    assert "nodes" not in job["spec"], "an absent size is not defaulted: maxNodes may change"
    with pytest.raises(Refused, match=r'field "\.spec\.nodes" does not exist'):
        api_server.request("GET", f"{path}/job/scale")  # an autoscaler's first request
    version = {"resourceVersion": job["metadata"]["resourceVersion"]}
    api_server.patch(f"{path}/job/scale", {"metadata": version, "spec": {"replicas": 4}})
    assert api_server.request("GET", f"{path}/job/scale")["spec"] == {"replicas": 4}


def test_sizes_may_have_an_increment_with_etcd_alone(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob(nodeIncrement=3))
    torch = elasticjob("torch", nodeIncrement=3, rendezvous={"backend": "C10d"})
    with pytest.raises(Refused, match=r"nodeIncrement: .*must be 1 unless"):
        api_server.request("POST", path, torch)


def test_absent_minimum_is_the_maximum(api_server: ApiServer, path: str) -> None:
    without = elasticjob(maxNodes=4)
    del without["spec"]["minNodes"]
    job = api_server.request("POST", path, without)
    assert "minNodes" not in job["spec"], "it follows maxNodes"
    api_server.patch(f"{path}/job", {"spec": {"maxNodes": 2}})
    with pytest.raises(Refused, match=r"spec\.maxNodes: .*must be at least minNodes"):
        api_server.patch(f"{path}/job", {"spec": {"minNodes": 3}})
    fixed = without | {"metadata": {"name": "fixed"}}
    fixed["spec"]["rendezvous"] = {"backend": "C10d"}
    api_server.request("POST", path, fixed)
    api_server.patch(f"{path}/fixed", {"spec": {"minNodes": 4}})
    with pytest.raises(Refused, match="minNodes"):
        api_server.patch(f"{path}/fixed", {"spec": {"minNodes": 2}})
    with pytest.raises(Refused, match="maxNodes"):
        api_server.patch(f"{path}/fixed", {"spec": {"maxNodes": 5}})


def test_scale_may_exceed_maximum(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob(maxNodes=4))
    api_server.patch(f"{path}/job/scale", {"spec": {"replicas": 400}})
    assert api_server.request("GET", f"{path}/job")["spec"]["nodes"] == 400


# --- status


def test_spec_and_status_are_written_separately(api_server: ApiServer, path: str) -> None:
    manifest = elasticjob() | {"status": {"phase": "Succeeded"}}
    assert "status" not in api_server.request("POST", path, manifest)
    both = {"spec": {"maxRestarts": 7}, "status": {"phase": "Running"}}
    by_status = api_server.patch(f"{path}/job/status", both)
    assert by_status["spec"]["maxRestarts"] == 3
    assert by_status["status"] == {"phase": "Running"}
    assert by_status["metadata"]["generation"] == 1, "a status is no new generation"
    by_main = api_server.patch(
        f"{path}/job", {"spec": {"maxRestarts": 7}, "status": {"phase": "Failed"}}
    )
    assert (by_main["spec"]["maxRestarts"], by_main["status"]["phase"]) == (7, "Running")


def test_invalid_status_is_refused(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob())
    with pytest.raises(Refused, match=r"status\.phase: Unsupported value"):
        api_server.patch(f"{path}/job/status", {"status": {"phase": "Sleeping"}})
    members = [{"pod": f"job-{index}", "state": "running"} for index in range(101)]
    with pytest.raises(Refused, match=r"status\.members: Too many"):
        api_server.patch(f"{path}/job/status", {"status": {"members": members}})


# --- columns of kubectl

STATUS: Json = {
    "phase": "Running",
    "rendezvous": {
        "state": "final",
        "round": 3,
        "nodes": 4,
        "master": "job-0",
        "cause": {"kind": "leave", "members": ["job-2"]},
    },
    "nodes": 4,
    "wantedNodes": 6,
    "restarts": 1,
    "rounds": [
        {"round": 2, "cause": "start", "nodes": 4, "recoveryMs": 100},
        {"round": 3, "cause": "leave", "nodes": 4, "recoveryMs": 935},
    ],
    "interruptions": {"losses": 2, "preemptions": 5},
    "lastFailure": {"round": 2, "pod": "job-1", "class": "OutOfMemory"},
}


def test_status_accepts_large_step_and_duration_values(api_server: ApiServer, path: str) -> None:
    """Steps may count tokens, and a wait for nodes may exceed int32 in milliseconds."""
    api_server.request("POST", path, elasticjob())
    status = {
        "members": [
            {"pod": "job-0", "state": "running", "step": 2**62 - 1, "checkpointStep": 2**40}
        ],
        "rounds": [{"round": 1, "cause": "start", "nodes": 1, "joinMs": 30 * 86_400_000}],
    }
    api_server.patch(f"{path}/job/status", {"status": status})
    found = api_server.request("GET", f"{path}/job")["status"]
    assert found["members"][0]["step"] == 2**62 - 1
    assert found["rounds"][0]["joinMs"] == 30 * 86_400_000


def columns(table: Json, wide: bool) -> list[str]:
    return [
        column["name"] for column in table["columnDefinitions"] if wide or column["priority"] == 0
    ]


def test_kubectl_get_prints_columns(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob(minNodes=2, maxNodes=8))
    api_server.patch(f"{path}/job/status", {"status": STATUS})
    table = api_server.request("GET", path, accept=TABLE)
    narrow = ["Name", "Phase", "Rendezvous", "Round", "Nodes", "Wanted", "Restarts", "Age"]
    assert columns(table, wide=False) == narrow
    wide = ["Min", "Max", "Master", "Cause", "Failure", "Losses", "Preemptions", "Recovery ms"]
    assert columns(table, wide=True) == [*narrow, *wide]
    (row,) = table["rows"]
    shown = dict(zip(columns(table, wide=True), row["cells"], strict=True))
    assert shown.pop("Age").endswith("s")
    assert shown == {
        "Name": "job",
        "Phase": "Running",
        "Rendezvous": "final",
        "Round": 3,
        "Nodes": 4,
        "Wanted": 6,
        "Restarts": 1,
        "Min": 2,
        "Max": 8,
        "Master": "job-0",
        "Cause": "leave",
        "Failure": "OutOfMemory",
        "Losses": 2,
        "Preemptions": 5,
        "Recovery ms": 935,
    }


def test_columns_are_empty_without_status(api_server: ApiServer, path: str) -> None:
    api_server.request("POST", path, elasticjob())
    table = api_server.request("GET", f"{path}/job", accept=TABLE)
    (row,) = table["rows"]
    shown = dict(zip(columns(table, wide=True), row["cells"], strict=True))
    assert (shown["Name"], shown["Min"], shown["Max"]) == ("job", 1, 4)
    assert shown["Phase"] is shown["Rendezvous"] is shown["Nodes"] is None


def test_conditions_are_merged_by_type(api_server: ApiServer, path: str) -> None:
    """A server-side apply merges them by type, and `kubectl wait --for=condition=…` reads them."""
    api_server.request("POST", path, elasticjob())
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    finished: Json = {
        "type": "Finished",
        "status": "True",
        "reason": "AllWorkersSucceeded",
        "lastTransitionTime": now,
    }
    twice = [finished, copy.deepcopy(finished)]
    with pytest.raises(Refused, match=r"status\.conditions\[1\]: Duplicate value"):
        api_server.patch(f"{path}/job/status", {"status": {"conditions": twice}})
    kept = api_server.patch(f"{path}/job/status", {"status": {"conditions": [finished]}})
    assert kept["status"]["conditions"] == [finished]
    for reason, said in ((None, "Required value"), ("", "should be at least 1 chars long")):
        unexplained = [finished | {"reason": reason}]
        with pytest.raises(Refused, match=rf"conditions\[0\]\.reason: .*{said}"):
            api_server.patch(f"{path}/job/status", {"status": {"conditions": unexplained}})


def test_resource_has_short_name_and_category(api_server: ApiServer) -> None:
    served = api_server.request("GET", "/apis/elasticjob.dev/v1alpha1")["resources"]
    (kind,) = (found for found in served if found["name"] == "elasticjobs")
    assert (kind["kind"], kind["shortNames"], kind["singularName"]) == (
        "ElasticJob",
        ["ej"],
        "elasticjob",
    )
    assert set(kind["categories"]) == {"all", "elasticjob"}
    assert {found["name"] for found in served} == {
        "elasticjobs",
        "elasticjobs/scale",
        "elasticjobs/status",
    }


TOLD_ONCE: dict[str, Json] = {
    "minNodes": {"minNodes": 2},
    "maxNodes": {"maxNodes": 5},
    "maxRestarts": {"maxRestarts": 1},
    "elasticity.scaleUp": {"elasticity": {"scaleUp": "AfterCheckpoint"}},
    "elasticity.scaleUpMaxWaitSeconds": {"elasticity": {"scaleUpMaxWaitSeconds": 9}},
    "elasticity.settleSeconds": {"elasticity": {"settleSeconds": 9}},
}


@pytest.mark.parametrize(("field", "change"), TOLD_ONCE.items(), ids=TOLD_ONCE)
def test_agent_start_parameters_change_together(
    api_server: ApiServer, path: str, field: str, change: Json
) -> None:
    api_server.request("POST", path, elasticjob(rendezvous={"backend": "C10d"}))
    with pytest.raises(Refused, match=r"unless rendezvous\.backend is Etcd") as refused:
        api_server.patch(f"{path}/job", {"spec": change})
    assert [cause["field"] for cause in refused.value.body["details"]["causes"]] == [
        f"spec.{field}"
    ]
    api_server.patch(f"{path}/job/scale", {"spec": {"replicas": 3}})
    api_server.patch(f"{path}/job", {"spec": {"runPolicy": {"suspend": True}}})
    api_server.patch(f"{path}/job", {"spec": change})
    api_server.request("POST", path, elasticjob("free"))
    api_server.patch(f"{path}/free", {"spec": change})


@pytest.mark.parametrize("phase", ["Running", "Restarting", "Suspending"])
@pytest.mark.parametrize(
    "change",
    [{"backend": "C10d"}, {"endpoints": ["etcd:2379"]}],
    ids=["backend", "endpoints"],
)
def test_store_of_a_job_that_may_save_changes_only_after_its_suspension(
    api_server: ApiServer, path: str, phase: str, change: Json
) -> None:
    """The suspending write and those during the suspension would take it from saving pods."""
    api_server.request("POST", path, elasticjob())
    api_server.patch(f"{path}/job/status", {"status": {"phase": phase}})
    moved = {"spec": {"rendezvous": change, "runPolicy": {"suspend": True}}}
    other = {"spec": {"rendezvous": {"keepAliveSeconds": 9}, "runPolicy": {"suspend": True}}}
    for begun in (False, True):
        if begun:
            api_server.patch(f"{path}/job", other)
        with pytest.raises(Refused, match="until the suspension is complete") as refused:
            api_server.patch(f"{path}/job", moved)
        causes = refused.value.body["details"]["causes"]
        assert [cause["field"] for cause in causes] == ["spec.rendezvous"]
    api_server.patch(f"{path}/job/status", {"status": {"phase": "Suspended"}})
    moved["spec"]["runPolicy"] = {"suspend": False}
    api_server.patch(f"{path}/job", moved)


@pytest.mark.parametrize("phase", [None, "Pending"])
def test_store_of_a_job_that_never_trained_changes_in_the_suspending_write(
    api_server: ApiServer, path: str, phase: str | None
) -> None:
    api_server.request("POST", path, elasticjob())
    if phase is not None:
        api_server.patch(f"{path}/job/status", {"status": {"phase": phase}})
    change = {"rendezvous": {"backend": "C10d"}, "runPolicy": {"suspend": True}}
    api_server.patch(f"{path}/job", {"spec": change})
