"""`recovery.snapshots` in a pod and in a local job: variables, volumes, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticjob.train.snapshots.job import JobSettings, job_settings
from elasticjob_launcher.settings import read_settings
from elasticjob_operator.domain.manifests.snapshots import snapshot_variables
from elasticjob_operator.domain.manifests.template_rules import TemplateRefused
from tests.unit.operator.domain.manifests.test_pod import container, job_of, made

GIB = 2**30
FULL = {
    "everySteps": 2,
    "replicas": 3,
    "memoryLimit": "4Gi",
    "storage": {"claim": "checkpoints", "everySeconds": 60, "keep": 5},
}


def trainer(snapshots: dict[str, Any] | None) -> dict[str, Any]:
    return container(made(recovery={"snapshots": snapshots}), "trainer")


def environment(snapshots: dict[str, Any] | None) -> dict[str, str]:
    return {one["name"]: one["value"] for one in trainer(snapshots)["env"]}


def mounts(snapshots: dict[str, Any] | None) -> dict[str, str]:
    found = trainer(snapshots)["volumeMounts"]
    return {one["name"]: one["mountPath"] for one in found}


def volumes(snapshots: dict[str, Any] | None) -> dict[str, Any]:
    spec = made(recovery={"snapshots": snapshots})["spec"]
    return {one["name"]: {k: v for k, v in one.items() if k != "name"} for one in spec["volumes"]}


def test_job_without_snapshots_has_the_pod_of_before() -> None:
    assert made() == made(recovery={"snapshots": None})
    assert "ELASTICJOB_SNAPSHOTS" not in environment(None)


def test_script_reads_the_settings_of_the_job() -> None:
    assert job_settings(environment(FULL)) == JobSettings(
        every_steps=2,
        replicas=3,
        memory_bytes=4 * GIB,
        storage="/elasticjob-storage/job",
        store_seconds=60,
        keep=5,
        name="default/job",
    )
    path = {"intervalSeconds": 9, "storage": {"path": "/data/"}}
    assert job_settings(environment(path)) == JobSettings(
        every_seconds=9,
        replicas=1,
        storage="/data/job",
        store_seconds=300,
        keep=2,
        name="default/job",
    )
    assert job_settings(environment(None)) == JobSettings(name="default/job")
    assert job_settings({}) == JobSettings()


def test_memory_limit_is_the_size_of_a_volume_of_its_own() -> None:
    assert volumes(FULL)["elasticjob-snapshots"] == {
        "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}
    }
    assert mounts(FULL)["elasticjob-snapshots"] == "/elasticjob-snapshots"
    settings = read_settings(["--", "true"], environment(FULL))
    assert settings.snapshot_volume == "/elasticjob-snapshots"
    losable = made(recovery={"snapshots": FULL})["metadata"]["annotations"]
    [names] = [value for key, value in losable.items() if key.endswith("evict-local-volumes")]
    assert "elasticjob-snapshots" in names.split(",")
    assert "elasticjob-storage" not in names


def test_claim_is_mounted_and_a_path_needs_no_volume() -> None:
    assert volumes(FULL)["elasticjob-storage"] == {
        "persistentVolumeClaim": {"claimName": "checkpoints"}
    }
    assert mounts(FULL)["elasticjob-storage"] == "/elasticjob-storage"
    assert volumes({"storage": {"path": "/data"}}) == volumes(None)


def test_disabled_snapshots_have_no_memory_and_keep_their_storage() -> None:
    off = {**FULL, "enabled": False}
    assert "elasticjob-snapshots" not in volumes(off)
    assert "elasticjob-storage" in volumes(off)
    assert read_settings(["--", "true"], environment(off)).snapshot_volume == "off"


@pytest.mark.parametrize("path", ["/elasticjob-snapshots", "/elasticjob-storage/x"])
def test_mount_at_a_path_of_the_snapshots_is_refused(path: str) -> None:
    mount = {"volumeMounts": [{"name": "data", "mountPath": path}]}
    with pytest.raises(TemplateRefused, match="snapshots are there"):
        made({"volumes": [{"name": "data", "emptyDir": {}}]}, mount)


def test_local_job_has_the_same_settings_in_folders_of_this_machine(tmp_path: Path) -> None:
    a_job = job_of(recovery={"snapshots": FULL})
    found = snapshot_variables(a_job, str(tmp_path / "claims"), "")
    assert "ELASTICJOB_SNAPSHOT_VOLUME" not in found  # /dev/shm, with the limit in the script
    settings = job_settings(found)
    assert settings.storage == str(tmp_path / "claims" / "job")
    assert settings.memory_bytes == 4 * GIB


def test_malformed_settings_are_an_error_that_names_the_variable() -> None:
    with pytest.raises(ValueError, match="ELASTICJOB_SNAPSHOTS must be a JSON object"):
        job_settings({"ELASTICJOB_SNAPSHOTS": "[1"})
    with pytest.raises(ValueError, match="ELASTICJOB_SNAPSHOTS must be a JSON object"):
        job_settings({"ELASTICJOB_SNAPSHOTS": "[1]"})
