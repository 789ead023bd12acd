"""Settings of `recovery.snapshots` for launcher and training script: variables and folders.

A pod has one more volume for each of `memoryLimit` and `storage.claim`. Both places, cluster and
local machine, set the same variables.
"""

from __future__ import annotations

import json

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests import names
from elasticjob_operator.domain.manifests.resources import quantity
from elasticjob_operator.domain.manifests.template_rules import own_variable
from elasticjob_operator.model.job import ElasticJob, Snapshots

OFF = "off"
"""Value of the launcher's variable for no folder in memory."""
_SETTINGS, _VOLUME = own_variable("SNAPSHOTS"), own_variable("SNAPSHOT_VOLUME")
_JOB = own_variable("JOB")
"""Name of the variable with the owner of snapshots: also of those in a folder of the script."""


def memory_bytes(snapshots: Snapshots) -> int:
    """Return `memoryLimit` in bytes; 0 without a limit."""
    limit = snapshots.memory_limit
    return 0 if limit is None else int(quantity(limit) or 0)


def snapshot_variables(job: ElasticJob, claim_folder: str, memory_folder: str) -> dict[str, str]:
    """Return the variables of the trainer container.

    Args:
        claim_folder: folder in which `storage.claim` is mounted.
        memory_folder: folder in memory whose size is `memoryLimit`; empty for /dev/shm.
    """
    snapshots = job.spec.recovery.snapshots
    owner = {_JOB: f"{job.metadata.namespace}/{job.metadata.name}"}
    if snapshots is None:
        return owner
    settings: Json = {"replicas": snapshots.replicas}
    if snapshots.every_steps is not None:
        settings["everySteps"] = snapshots.every_steps
    if snapshots.interval_seconds is not None:
        settings["intervalSeconds"] = snapshots.interval_seconds
    if snapshots.memory_limit is not None:
        settings["memoryBytes"] = memory_bytes(snapshots)
    if snapshots.storage is not None:
        root = snapshots.storage.path or claim_folder
        settings["storage"] = {
            # Jobs that share the storage do not restore each other's state.
            "folder": f"{root.rstrip('/')}/{job.metadata.name}",
            "everySeconds": snapshots.storage.every_seconds,
            "keep": snapshots.storage.keep,
        }
    found = {**owner, _SETTINGS: json.dumps(settings, separators=(",", ":"))}
    if not snapshots.enabled:
        found[_VOLUME] = OFF
    elif snapshots.memory_limit is not None and memory_folder:
        found[_VOLUME] = memory_folder
    return found


def snapshot_volumes(job: ElasticJob) -> list[tuple[Json, str]]:
    """Return the volumes of a pod for snapshots, each with its path in the trainer container."""
    snapshots = job.spec.recovery.snapshots
    found: list[tuple[Json, str]] = []
    if snapshots is None:
        return found
    if snapshots.enabled and snapshots.memory_limit is not None:
        memory = {"medium": "Memory", "sizeLimit": snapshots.memory_limit}
        volume = {"name": names.SNAPSHOTS_VOLUME, "emptyDir": memory}
        found.append((volume, names.SNAPSHOTS_PATH))
    if snapshots.storage is not None and snapshots.storage.claim is not None:
        claim = {"claimName": snapshots.storage.claim}
        volume = {"name": names.STORAGE_VOLUME, "persistentVolumeClaim": claim}
        found.append((volume, names.STORAGE_PATH))
    return found
