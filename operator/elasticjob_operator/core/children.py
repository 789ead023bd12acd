"""What a job has besides its pods: a headless Service, a budget, a Secret; and whose they are."""

from __future__ import annotations

from elasticjob_operator.core.access import Access, data_of
from elasticjob_operator.core.json import Json
from elasticjob_operator.core.names import budget_name, job_labels, secret_name, service_name
from elasticjob_operator.model.job import API_VERSION, KIND, ElasticJob


def service(job: ElasticJob) -> Json:
    """The headless Service that gives each pod a name in DNS, from its first moment on.

    It has no port: nobody reaches the pods through it.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(job, service_name(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": job_labels(job),
        },
    }


def budget(job: ElasticJob, min_available: int) -> Json:
    """The PodDisruptionBudget: evictions leave `min_available` pods.

    A pod that is not Ready may always be evicted: it does not train.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(job, budget_name(job)),
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": job_labels(job)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def secret(job: ElasticJob, access: Access) -> Json:
    """The Secret that the job's agents mount."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, secret_name(job)),
        "type": "Opaque",
        "data": data_of(access),
    }


def owner_reference(job: ElasticJob) -> Json:
    """Ties a child to the job: it goes with it, and never holds it up."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned(job: ElasticJob, object: Json) -> bool:
    """Whether an object is a child of this very job, not of an earlier one of its name."""
    owners = (object.get("metadata") or {}).get("ownerReferences") or ()
    return any(
        owner.get("controller") is True and owner.get("uid") == job.metadata.uid for owner in owners
    )


def is_of_predecessor(job: ElasticJob, object: Json) -> bool:
    """Whether an object is a child of an earlier job of this name, and will go as that one did."""
    owners = (object.get("metadata") or {}).get("ownerReferences") or ()
    return any(
        owner.get("controller") is True
        and (owner.get("kind"), owner.get("name")) == (KIND, job.metadata.name)
        and owner.get("uid") != job.metadata.uid
        for owner in owners
    )


def _metadata(job: ElasticJob, name: str) -> Json:
    return {
        "name": name,
        "namespace": job.metadata.namespace,
        "labels": job_labels(job),
        "ownerReferences": [owner_reference(job)],
    }
