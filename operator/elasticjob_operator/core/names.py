"""The names, labels and paths of a job's children, each spelled here alone."""

from __future__ import annotations

from elasticjob_operator.model.job import GROUP, ElasticJob
from elasticjob_operator.model.rules import RESERVED_NAMES

JOB_LABEL = f"{GROUP}/job-name"
UID_LABEL = f"{GROUP}/job-uid"
INDEX_LABEL = f"{GROUP}/index"
INCARNATION_LABEL = f"{GROUP}/incarnation"
COMMAND_ANNOTATION = f"{GROUP}/command"
"""What was taken out of the trainer's command, for people."""

AGENT_CONTAINER, LAUNCHER_CONTAINER = RESERVED_NAMES

SHARED_VOLUME = "elasticjob"
LOGS_VOLUME = "elasticjob-logs"
CONTROL_VOLUME = "elasticjob-control"
ACCESS_VOLUME = "elasticjob-access"
SHM_VOLUME = "elasticjob-shm"
NO_TOKEN_VOLUME = "elasticjob-no-token"
RESERVED_VOLUMES = (
    SHARED_VOLUME,
    LOGS_VOLUME,
    CONTROL_VOLUME,
    ACCESS_VOLUME,
    SHM_VOLUME,
    NO_TOKEN_VOLUME,
)

SHARED_PATH = "/elasticjob"
"""Where the launcher and its socket are, in the trainer and in the agent."""
LAUNCHER_PATH = f"{SHARED_PATH}/launcher.pyz"
SOCKET_PATH = f"{SHARED_PATH}/launcher.sock"
LOGS_PATH = "/elasticjob-logs"
"""Where the workers' logs are, in both."""
CONTROL_PATH = "/run/elasticjob"
CONTROL_SOCKET_PATH = f"{CONTROL_PATH}/control.sock"
ACCESS_PATH = "/run/elasticjob-access"
SHM_PATH = "/dev/shm"
TOKEN_PATH = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where Kubernetes puts the token of the pod's service account."""


def pod_name(job: str, index: int) -> str:
    """Name of the job's pod with this index."""
    return f"{job}-{index}"


def service_name(job: ElasticJob) -> str:
    """Name of the job's headless Service: the domain of its pods' names."""
    return job.metadata.name


def budget_name(job: ElasticJob) -> str:
    """Name of the job's PodDisruptionBudget."""
    return job.metadata.name


def secret_name(job: ElasticJob) -> str:
    """Name of the Secret with the job's access to etcd."""
    return f"{job.metadata.name}-elasticjob"


def job_labels(job: ElasticJob) -> dict[str, str]:
    """Labels of everything that belongs to the job, and what its pods are selected by."""
    return {JOB_LABEL: job.metadata.name, UID_LABEL: job.metadata.uid}


def pod_labels(job: ElasticJob, index: int, incarnation: int) -> dict[str, str]:
    """Labels of the job's pod with this index."""
    return {
        **job_labels(job),
        INDEX_LABEL: str(index),
        INCARNATION_LABEL: str(incarnation),
    }


def selector(job: ElasticJob) -> str:
    """Label selector of all pods of the job."""
    return f"{JOB_LABEL}={job.metadata.name}"


def uid_selector(uid: str) -> str:
    """Label selector of all that belongs to the job with this uid."""
    return f"{UID_LABEL}={uid}"
