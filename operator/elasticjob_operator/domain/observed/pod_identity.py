"""Identity of a pod: its job, its index in the job, and its incarnation.

They are read from immutable fields, the pod's name and its agent's environment: a user, or another
controller, may change labels and owner references of a pod that trains. Without its owner
references such a pod still belongs to the job: otherwise each reconcile would create its
successor. A pod that has lost them already at its creation is not used: see `KubeCluster`.
"""

from __future__ import annotations

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import AGENT_CONTAINER, INCARNATION_LABEL, pod_name
from elasticjob_operator.domain.manifests.owned_objects import is_owned
from elasticjob_operator.domain.manifests.template_rules import own_variable
from elasticjob_operator.domain.observed.etcd_records import is_incarnation, job_of
from elasticjob_operator.model.job import ElasticJob

PREFIX_VARIABLE = own_variable("PREFIX")


def index_in(name: str) -> int | None:
    """Return the index at the end of a pod's name, or None."""
    number = name.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None


def index_of(job: ElasticJob, name: str) -> int | None:
    """Return the index of the job's pod with this name; None if no pod of the job is so named."""
    index = index_in(name)
    named = index is not None and name == pod_name(job.metadata.name, index)
    return index if named else None


def _agent(raw: Json) -> Json | None:
    """Return the container of the job's agents; None without one."""
    containers = (raw.get("spec") or {}).get("initContainers") or ()
    return next((each for each in containers if each["name"] == AGENT_CONTAINER), None)


def agent_prefix(raw: Json) -> str | None:
    """Return the prefix of the agent's keys, which is immutable; None if the pod has no agent."""
    for variable in (_agent(raw) or {}).get("env") or ():
        if variable["name"] == PREFIX_VARIABLE:
            return variable.get("value") or ""
    return None


def incarnation_of(raw: Json) -> int:
    """Return the incarnation that a pod's agent joins; 0 if unknown."""
    if (prefix := agent_prefix(raw)) is not None:
        found = job_of(prefix)
        return found[2] if found else 0
    text = (raw["metadata"].get("labels") or {}).get(INCARNATION_LABEL, "")
    return int(text) if is_incarnation(text) else 0


def has_agent(raw: Json) -> bool:
    """Return True if the pod has the container of the job's agents."""
    return _agent(raw) is not None


def has_lost_owner(job: ElasticJob, raw: Json) -> bool:
    """Return True if the pod is this job's, and it is controlled by no object, or by another one
    that took it over."""
    if is_owned(job, raw) or index_of(job, raw["metadata"]["name"]) is None:
        return False
    found = job_of(agent_prefix(raw) or "")
    return found is not None and found[:2] == (job.metadata.namespace, job.metadata.uid)


def is_own(job: ElasticJob, raw: Json) -> bool:
    """Return True if the job controls the pod, or did so before its owner references were
    changed."""
    return is_owned(job, raw) or has_lost_owner(job, raw)
