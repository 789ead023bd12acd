"""Objects that a job owns besides its pods: Service, PodDisruptionBudget, NetworkPolicy, Secret.

The Secret holds the credentials of the job's pods, for etcd and for each other.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import (
    HEALTH_PORT,
    UID_LABEL,
    budget_name,
    job_labels,
    network_policy_name,
    secret_name,
    service_name,
)
from elasticjob_operator.model.job import API_VERSION, GROUP, KIND, ElasticJob

JOB_KEY = "job-key"
CA = "ca.crt"
USER = "user"
PASSWORD = "password"
CERT = "tls.crt"
KEY = "tls.key"
AUTHOR_USER = "username"
"""Key of the user name in a Secret written by the job's author; the key of Kubernetes'
basic-auth Secrets."""


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials of the agents of one job.

    Args:
        job_key: key that signs the connections between the agents.
        ca: PEM, the authorities that may sign etcd's certificate; None for plain HTTP.
        user, password: etcd user of this job; None if etcd runs without authentication.
        cert, key: PEM, client certificate and key if etcd requires them.
    """

    job_key: bytes
    ca: bytes | None
    user: str | None
    password: str | None
    cert: bytes | None = None
    key: bytes | None = None


def secret_data(access: Access) -> dict[str, str]:
    """Return the `data` of the job's Secret; absent values have no key in it."""
    given = {
        JOB_KEY: access.job_key,
        CA: access.ca,
        USER: _bytes(access.user),
        PASSWORD: _bytes(access.password),
        CERT: access.cert,
        KEY: access.key,
    }
    return {name: b64encode(value).decode() for name, value in given.items() if value is not None}


def access_in(secret: Json) -> Access | None:
    """Return the access in a job's Secret; None if its job key is absent or malformed."""
    job_key = _value(secret, JOB_KEY)
    return _access(secret, job_key, USER) if job_key else None


def author_access(secret: Json, job_key: bytes) -> Access:
    """Return the access in the Secret that `spec.rendezvous.secretName` names."""
    return _access(secret, job_key, AUTHOR_USER)


def _access(secret: Json, job_key: bytes, user_key: str) -> Access:
    return Access(
        job_key=job_key,
        ca=_value(secret, CA),
        user=credential(_value(secret, user_key)),
        password=credential(_value(secret, PASSWORD)),
        cert=_value(secret, CERT),
        key=_value(secret, KEY),
    )


def _value(secret: Json, name: str) -> bytes | None:
    """Return the decoded value of a key; None if it is absent, empty or not base64."""
    text = (secret.get("data") or {}).get(name)
    try:
        return b64decode(text, validate=True) or None if isinstance(text, str) else None
    except ValueError:
        return None


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def credential(value: bytes | None) -> str | None:
    """Decode a user or password as the agent decodes its files; None if it is absent or empty."""
    return value.decode(errors="replace").strip() if value else None


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


@dataclass(frozen=True, slots=True)
class PolicyPeer:
    """Pods that may request the agents' status: the operator's namespace and its pods' labels."""

    namespace: str
    labels: tuple[tuple[str, str], ...]


def network_policy(job: ElasticJob, operator: PolicyPeer) -> Json:
    """Return the NetworkPolicy that closes the job's pods to all pods but its own.

    The workers' collectives choose their own ports, so the job's pods reach each other on every
    port. Egress is not restricted.
    """
    pods = {"matchLabels": {UID_LABEL: job.metadata.uid}}
    status = {
        "from": [
            {
                "namespaceSelector": {
                    "matchLabels": {"kubernetes.io/metadata.name": operator.namespace}
                },
                "podSelector": {"matchLabels": dict(operator.labels)},
            }
        ],
        "ports": [{"port": HEALTH_PORT, "protocol": "TCP"}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job, network_policy_name(job)),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}, status],
        },
    }


def secret(job: ElasticJob, access: Access, annotations: Mapping[str, str]) -> Json:
    """Return the Secret that the job's agents mount."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(job, secret_name(job)) | {"annotations": dict(annotations)},
        "type": "Opaque",
        "data": secret_data(access),
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


def is_controlled(object: Json) -> bool:
    """Return True if any object controls this one."""
    owners = (object.get("metadata") or {}).get("ownerReferences") or ()
    return any(owner.get("controller") is True for owner in owners)


def has_lost_owner(job: ElasticJob, object: Json) -> bool:
    """Return True if the object has the label of this job, and no object controls it."""
    labels = (object.get("metadata") or {}).get("labels") or {}
    return labels.get(UID_LABEL) == job.metadata.uid and not is_controlled(object)


def controlling_job(object: Json) -> str:
    """Return the uid of the ElasticJob that controls the object; empty if none does."""
    owners = (object.get("metadata") or {}).get("ownerReferences") or ()
    uids = (
        str(owner.get("uid") or "")
        for owner in owners
        if owner.get("controller") is True
        and owner.get("kind") == KIND
        and str(owner.get("apiVersion")).partition("/")[0] == GROUP
    )
    return next(uids, "")


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
