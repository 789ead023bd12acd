"""Grace periods of pods: after their deletion, and after the job's end."""

from __future__ import annotations

from datetime import timedelta

from elasticjob_operator.model.job import ElasticJob

DEFAULT_SECONDS = 30
MARGIN_SECONDS = 20
"""Time to leave beyond the workers' own grace period, in seconds: the end of a checkpoint, etcd,
the stop of the containers."""


def grace_seconds(job: ElasticJob) -> int:
    """Return the pod's grace period in seconds: the template's, or else enough to stop workers."""
    given = job.spec.template.spec.termination_grace_period_seconds
    if given is not None:
        return given
    return max(DEFAULT_SECONDS, job.spec.recovery.stop_grace_seconds + MARGIN_SECONDS)


def winding_down(job: ElasticJob) -> timedelta:
    """Return the maximum time agents need, once the job has ended, to stop workers and exit."""
    spec = job.spec
    return timedelta(seconds=spec.recovery.stop_grace_seconds + spec.rendezvous.confirm_seconds)
