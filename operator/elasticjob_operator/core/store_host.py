"""Pod that hosts the store of a c10d job: one at a time, and always with the same name.

Other pods find it by that name. It cannot be created while its predecessor's object exists, so one
place in the job is reserved for it.
"""

from __future__ import annotations

from elasticjob_operator.core.actions import DeletePod
from elasticjob_operator.core.backends import STORE_INDEX, keeps_store
from elasticjob_operator.core.census import Census
from elasticjob_operator.core.names import pod_name
from elasticjob_operator.core.observed import NodeState, Observed, Pod
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_operator.model.job import ElasticJob


def with_store(job: ElasticJob, census: Census, missing: int) -> int:
    """Return the number of pods to create so that the store's pod is, or can later be, among them.

    If all places are taken, it is created in addition, which makes another pod surplus.
    """
    if not keeps_store(job, STORE_INDEX) or _keeper(census) is not None:
        return missing
    return missing - 1 if STORE_INDEX in census.indices else max(missing, 1)


def stale_store(job: ElasticJob, census: Census) -> list[DeletePod]:
    """Return the deletion of a failed store pod, whose name is needed at once."""
    if not keeps_store(job, STORE_INDEX):
        return []
    return [
        DeletePod(pod.name, pod.uid, DeleteReason.REPLACED)
        for pod in census.failed
        if pod.index == STORE_INDEX
    ]


def without_store(job: ElasticJob, observed: Observed, counted: tuple[Pod, ...]) -> str:
    """Return the reason why no store exists at present; empty if there is no obstacle."""
    if not keeps_store(job, STORE_INDEX) or any(pod.index == STORE_INDEX for pod in counted):
        return ""
    name = pod_name(job.metadata.name, STORE_INDEX)
    if STORE_INDEX in observed.foreign:
        reason = "a pod of another owner has its name"
        return f"{name}, which hosts the store, cannot be created: {reason}"
    for pod in observed.pods:
        if pod.index == STORE_INDEX:
            lost = pod.node_state is NodeState.NOT_READY
            where = f"; its machine {pod.node} is not ready" if lost else ""
            new = f"a new {name}, which hosts the store, is created once the old one is gone"
            return f"{new}{where}"
    return ""


def _keeper(census: Census) -> Pod | None:
    return next((pod for pod in census.counted if pod.index == STORE_INDEX), None)
