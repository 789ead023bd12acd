"""Objects a job owns besides its pods (Service, PodDisruptionBudget, Secret), and ownership."""

from __future__ import annotations

from elasticjob_operator.core.access import Access, data_of
from elasticjob_operator.core.json import Json
from elasticjob_operator.core.names import budget_name, job_labels, secret_name, service_name
from elasticjob_operator.model.job import API_VERSION, KIND, ElasticJob


def service(job: ElasticJob) -> Json:
    """Return the headless Service that gives each pod a DNS name even before it is Ready.

    It has no port: no traffic goes through it.
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
    """Return the PodDisruptionBudget with this `minAvailable`.

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
    """Return the Secret that the job's agents mount."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, secret_name(job)),
        "type": "Opaque",
        "data": data_of(access),
    }


def owner_reference(job: ElasticJob) -> Json:
    """Return the owner reference: garbage collection deletes the object after the job, and the
    object never blocks the job's deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.metadata.name,
        "uid": job.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def is_owned(job: ElasticJob, object: Json) -> bool:
    """Return True if this job (by uid) controls the object, not an earlier job of its name."""
    owners = (object.get("metadata") or {}).get("ownerReferences") or ()
    return any(
        owner.get("controller") is True and owner.get("uid") == job.metadata.uid for owner in owners
    )


def is_of_predecessor(job: ElasticJob, object: Json) -> bool:
    """Return True if an earlier job of this name controls the object, which garbage collection
    will therefore delete."""
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
