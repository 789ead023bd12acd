"""The names and labels of a job's children, each spelled here alone."""

from __future__ import annotations

from elasticjob_operator.model.job import GROUP, ElasticJob

JOB_LABEL = f"{GROUP}/job-name"
UID_LABEL = f"{GROUP}/job-uid"
INDEX_LABEL = f"{GROUP}/index"


def pod_name(job: str, index: int) -> str:
    """Name of the job's pod with this index."""
    return f"{job}-{index}"


def pod_labels(job: ElasticJob, index: int) -> dict[str, str]:
    """Labels of the job's pod with this index."""
    return {
        JOB_LABEL: job.metadata.name,
        UID_LABEL: job.metadata.uid,
        INDEX_LABEL: str(index),
    }


def selector(job: ElasticJob) -> str:
    """Label selector of all pods of the job."""
    return f"{JOB_LABEL}={job.metadata.name}"
