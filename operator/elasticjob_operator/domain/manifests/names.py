"""Names, labels and paths of a job's pods and other objects, each defined once."""

from __future__ import annotations

from elasticjob_operator.model.job import GROUP, ElasticJob
from elasticjob_operator.model.rules import RESERVED_NAMES

JOB_LABEL = f"{GROUP}/job-name"
UID_LABEL = f"{GROUP}/job-uid"
INDEX_LABEL = f"{GROUP}/index"
INCARNATION_LABEL = f"{GROUP}/incarnation"
COMMAND_ANNOTATION = f"{GROUP}/command"
"""Annotation with a note on the launcher that was removed from the trainer's command."""
ROTATE_ANNOTATION = f"{GROUP}/rotate-credentials"
"""Annotation of a job; each new value requests another etcd user once."""
ROTATED_ANNOTATION = f"{GROUP}/credentials-rotated-for"
"""Annotation of a job's Secret: the value of `ROTATE_ANNOTATION` that was handled last."""
CREDENTIALS_SINCE_ANNOTATION = f"{GROUP}/credentials-since"
"""Annotation of a job's Secret: the time since which it names the present etcd user."""

HEALTH_PORT = 17946
"""Port of the agents' status: below the kernel's ephemeral range, and unusual for trainers."""

AGENT_CONTAINER, LAUNCHER_CONTAINER = RESERVED_NAMES

SHARED_VOLUME = "elasticjob"
LOGS_VOLUME = "elasticjob-logs"
CONTROL_VOLUME = "elasticjob-control"
ACCESS_VOLUME = "elasticjob-access"
SHM_VOLUME = "elasticjob-shm"
NO_TOKEN_VOLUME = "elasticjob-no-token"
SNAPSHOTS_VOLUME = "elasticjob-snapshots"
STORAGE_VOLUME = "elasticjob-storage"
RESERVED_VOLUMES = (
    SHARED_VOLUME,
    LOGS_VOLUME,
    CONTROL_VOLUME,
    ACCESS_VOLUME,
    SHM_VOLUME,
    NO_TOKEN_VOLUME,
    SNAPSHOTS_VOLUME,
    STORAGE_VOLUME,
)

SHARED_PATH = "/elasticjob"
"""Directory of the launcher and its socket, in trainer and agent."""
LAUNCHER_PATH = f"{SHARED_PATH}/launcher.pyz"
SOCKET_PATH = f"{SHARED_PATH}/launcher.sock"
LOGS_PATH = "/elasticjob-logs"
"""Directory of the workers' logs, in trainer and agent."""
CONTROL_PATH = "/run/elasticjob"
CONTROL_SOCKET_PATH = f"{CONTROL_PATH}/control.sock"
ACCESS_PATH = "/run/elasticjob-access"
SHM_PATH = "/dev/shm"
SNAPSHOTS_PATH = "/elasticjob-snapshots"
"""Directory in memory for snapshots, in the trainer."""
STORAGE_PATH = "/elasticjob-storage"
"""Directory of the claim for snapshots, in the trainer."""
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Directory of the pod's service account token."""


def pod_name(job: str, index: int) -> str:
    """Return the name of the job's pod with this index."""
    return f"{job}-{index}"


def service_name(job: ElasticJob) -> str:
    """Return the name of the job's headless Service, the DNS subdomain of its pods."""
    return job.metadata.name


def budget_name(job: ElasticJob) -> str:
    """Return the name of the job's PodDisruptionBudget."""
    return job.metadata.name


def network_policy_name(job: ElasticJob) -> str:
    """Return the name of the job's NetworkPolicy."""
    return f"{job.metadata.name}-elasticjob"


def secret_name(job: ElasticJob) -> str:
    """Return the name of the Secret with the job's access to etcd."""
    return f"{job.metadata.name}-elasticjob"


def job_labels(job: ElasticJob) -> dict[str, str]:
    """Return the labels of all objects of the job, which also select its pods."""
    return {JOB_LABEL: job.metadata.name, UID_LABEL: job.metadata.uid}


def pod_labels(job: ElasticJob, index: int, incarnation: int) -> dict[str, str]:
    """Return the labels of the job's pod with this index."""
    return {
        **job_labels(job),
        INDEX_LABEL: str(index),
        INCARNATION_LABEL: str(incarnation),
    }


def selector(job: ElasticJob) -> str:
    """Return the label selector of all pods of the job."""
    return f"{JOB_LABEL}={job.metadata.name}"


def uid_selector(uid: str) -> str:
    """Return the label selector of all objects of the job with this uid."""
    return f"{UID_LABEL}={uid}"
