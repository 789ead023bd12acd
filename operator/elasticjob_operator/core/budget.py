"""Size of a job's PodDisruptionBudget."""

from __future__ import annotations

from elasticjob_operator.model.job import ElasticJob


def min_available(job: ElasticJob, ready: int) -> int | None:
    """Return `minAvailable` of the job's PodDisruptionBudget; None if it is switched off.

    With minNodes or fewer Ready, one pod may still be evicted, and the job waits for its
    replacement. Otherwise a job that cannot get all its nodes would block every drain.
    """
    if not job.spec.elasticity.disruption_budget:
        return None
    least = job.spec.min_nodes
    return least if ready > least else least - 1
