"""Effects of a job's rendezvous backend on its pods.

With etcd v3 the operator steers the rendezvous: it writes the bounds, the drain marks and the
outcome. The torch backends (etcd-v2, c10d) accept nothing from an operator: their agents get all
settings at their start, and everything else follows from creating and deleting pods.
"""

from __future__ import annotations

from elasticjob_operator.core.bounds import bounds_of
from elasticjob_operator.core.names import pod_name, service_name
from elasticjob_operator.core.sizes import wanted_size
from elasticjob_operator.model.enums import Backend
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.bounds import Bounds

STORE_INDEX = 0
"""Index of the pod that hosts the store of a c10d job. A pod's name is unique and is free only
once its predecessor's object is gone, so no second store can split the job."""
STORE_PORT = 29400
"""Default c10d port of torch, so that a torchrun outside of the job needs no port."""


def is_steered(job: ElasticJob) -> bool:
    """Return True if the operator steers the rendezvous: bounds, drain marks and outcome."""
    return job.spec.rendezvous.backend is Backend.ETCD


def keeps_store(job: ElasticJob, index: int) -> bool:
    """Return True if the pod with this index hosts the c10d store of the job."""
    rendezvous = job.spec.rendezvous
    return rendezvous.backend is Backend.C10D and not rendezvous.endpoints and index == STORE_INDEX


def endpoints_of(job: ElasticJob, default: tuple[str, ...]) -> tuple[str, ...]:
    """Return the rendezvous endpoints of the agents; `default` is the operator's etcd."""
    rendezvous = job.spec.rendezvous
    if rendezvous.endpoints:
        return tuple(rendezvous.endpoints)
    return (_store_endpoint(job),) if rendezvous.backend is Backend.C10D else default


def told_bounds(job: ElasticJob) -> Bounds:
    """Return the bounds that agents of torch backends get in their environment.

    They must be the same in every pod of the job, or its members would disagree. The number of
    pods enforces the wanted size; the current one only tells the first round how many nodes to
    wait for.
    """
    return bounds_of(job, job.spec.max_nodes, wanted_size(job.spec).nodes)


def _store_endpoint(job: ElasticJob) -> str:
    host = f"{pod_name(job.metadata.name, STORE_INDEX)}.{service_name(job)}"
    return f"{host}.{job.metadata.namespace}.svc:{STORE_PORT}"
