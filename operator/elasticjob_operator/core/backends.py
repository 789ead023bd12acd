"""What a job's rendezvous backend means for its pods.

Of v3 the operator is a part: it writes bounds, marks and the end. The backends of torch take no
word of an operator's: their agents are told all at the start, and the pods' coming and going does
the rest.
"""

from __future__ import annotations

from elasticjob_operator.core.bounds import bounds_of
from elasticjob_operator.core.names import pod_name, service_name
from elasticjob_operator.core.sizes import wanted_size
from elasticjob_operator.model.enums import Backend
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.bounds import Bounds

STORE_INDEX = 0
"""The pod that keeps the store of a c10d job. A pod's name is unique and free only when its
predecessor is gone for good, so there is never a second store that half of the gang could find."""
STORE_PORT = 29400
"""torch's own for c10d, so that a torchrun beside the job needs no port."""


def is_steered(job: ElasticJob) -> bool:
    """Whether the rendezvous takes the operator's word: bounds, marks, and its end."""
    return job.spec.rendezvous.backend is Backend.ETCD


def keeps_store(job: ElasticJob, index: int) -> bool:
    """Whether the pod with this index keeps the store that the others need."""
    rendezvous = job.spec.rendezvous
    return rendezvous.backend is Backend.C10D and not rendezvous.endpoints and index == STORE_INDEX


def endpoints_of(job: ElasticJob, default: tuple[str, ...]) -> tuple[str, ...]:
    """Where the agents find their rendezvous; `default` is the operator's etcd."""
    rendezvous = job.spec.rendezvous
    if rendezvous.endpoints:
        return tuple(rendezvous.endpoints)
    return (_store_endpoint(job),) if rendezvous.backend is Backend.C10D else default


def told_bounds(job: ElasticJob) -> Bounds:
    """The bounds that agents get with their environment: the same in each pod of the job, or its
    members would not agree. The wanted size is kept by the number of pods; that of the moment
    tells the first round how many to wait for, and nothing after it."""
    return bounds_of(job, job.spec.max_nodes, wanted_size(job.spec).nodes)


def _store_endpoint(job: ElasticJob) -> str:
    host = f"{pod_name(job.metadata.name, STORE_INDEX)}.{service_name(job)}"
    return f"{host}.{job.metadata.namespace}.svc:{STORE_PORT}"
