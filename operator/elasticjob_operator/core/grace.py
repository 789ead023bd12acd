"""How long a pod of the job has from its deletion, and all of them from the job's end."""

from __future__ import annotations

from datetime import timedelta

from elasticjob_operator.model.job import ElasticJob

DEFAULT_SECONDS = 30
MARGIN_SECONDS = 20
"""What leaving takes beside the workers' own grace: a checkpoint's end, etcd, the containers'."""


def grace_seconds(job: ElasticJob) -> int:
    """As the template says, else enough for the workers' stop."""
    given = job.spec.template.spec.termination_grace_period_seconds
    if given is not None:
        return given
    return max(DEFAULT_SECONDS, job.spec.recovery.stop_grace_seconds + MARGIN_SECONDS)


def winding_down(job: ElasticJob) -> timedelta:
    """What agents may take, once the job is over, to hear of it, stop the workers and end."""
    spec = job.spec
    return timedelta(seconds=spec.recovery.stop_grace_seconds + spec.rendezvous.confirm_seconds)
