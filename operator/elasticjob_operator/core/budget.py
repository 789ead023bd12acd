"""How many pods a disruption must leave in peace."""

from __future__ import annotations

from elasticjob_operator.model.job import ElasticJob


def min_available(job: ElasticJob, ready: int) -> int | None:
    """`minAvailable` of the job's PodDisruptionBudget; None when it wants none.

    With no more than minNodes ready, one may still go: the job waits for its replacement. Without
    that a job that cannot get all its nodes would block every drain.
    """
    if not job.spec.elasticity.disruption_budget:
        return None
    least = job.spec.min_nodes
    return least if ready > least else least - 1
